"""Types of what stands in a plan's file: bounded, strict, nothing that could steer a terminal."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import ConfigDict, Field, StringConstraints

# Names reach terminals and reports, so no control characters: a file must not steer a terminal.
Text = Annotated[str, StringConstraints(strict=True, max_length=1000, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$")]
Size = Annotated[int, Field(strict=True, ge=0, le=1 << 62)]
Positive = Annotated[int, Field(strict=True, ge=1, le=1 << 62)]
Whole = Annotated[int, Field(strict=True, ge=-(1 << 63), lt=1 << 63)]
Number = Annotated[float, Field(strict=True)]
AtLeastOne = Annotated[float, Field(strict=True, ge=1.0)]
Flag = Annotated[bool, Field(strict=True)]
Value = Text | Whole | Number

T = TypeVar("T")
# One error is enough, and a hostile file could have millions.
Short = Annotated[list[T], Field(max_length=64, fail_fast=True)]
Table = Annotated[list[T], Field(max_length=100_000, fail_fast=True)]
Rows = Annotated[list[T], Field(max_length=1_000_000, fail_fast=True)]


STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
