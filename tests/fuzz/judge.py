"""Whether a step did what eager does, and how near that has to be.

What rounding may do is measured, not guessed: the program is run in float32 and float64, and its error in float32 says how it amplifies rounding. A
program that amplifies it so much that nothing could be told is thrown away (`Unfit`).
"""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass
from typing import Any

import torch

from tests.fuzz.program import dtype_of, load
from tests.fuzz.run import Result, eager


class Unfit(Exception):
    """Eager refuses the program, or it cannot be compared."""


@dataclass(frozen=True)
class Failure:
    """kind: what is the same while a program is made smaller."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def failure_of(e: BaseException) -> Failure:
    """kind: the exception, and where in autopar it came from."""
    frames = traceback.extract_tb(e.__traceback__)
    ours = [
        f
        for f in frames
        if any(f"/{p}/" in f.filename for p in ("autopar", "passes", "solver", "kernels")) and "/site-packages/" not in f.filename
    ]
    where = f"{ours[-1].filename.rsplit('/', 1)[-1]}:{ours[-1].name}" if ours else "outside"
    text = "".join(traceback.format_exception(e)[-18:])
    return Failure(f"{type(e).__name__} in {where}", text[-3000:])


@dataclass
class Reference:
    """own: as the program is; other: in the other precision, which says how it rounds."""

    own: Result
    other: Result
    dtype: torch.dtype
    rough: bool
    narrows: bool = False  # a program in double precision that goes through single on the way

    @staticmethod
    def of(source: str) -> Reference:
        dtype, rough = dtype_of(source), load(source).rough or ".half(" in source
        try:
            own = eager(source)
            other = eager(source, "float32" if dtype == torch.float64 else "float64")
        except Exception as e:
            raise Unfit(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}") from e
        found = Reference(own, other, dtype, rough, ".float()" in source)
        found.require_fit()
        return found

    def require_fit(self) -> None:
        for name, a, b in self.pairs(self.other):
            if a is None or b is None:
                if a is not b:
                    raise Unfit("other gradients in another precision")
                continue
            if a.shape != b.shape:
                raise Unfit("other shapes in another precision")
            if a.is_floating_point():
                if not bool(a.isfinite().all()):
                    raise Unfit(f"not finite: {name}")
                if _far(a, b) > (0.05 if self.rough else 1e-3) * self.scale(name):
                    raise Unfit(f"ill-conditioned: {name}")
            elif not torch.equal(a, b.to(a.dtype)) and not self.rough:
                raise Unfit(f"a comparison decided by rounding: {name}")

    def pairs(self, got: Result) -> list[tuple[str, torch.Tensor | None, torch.Tensor | None]]:
        out: list[tuple[str, Any, Any]] = []
        for i, (a, b) in enumerate(zip(self.own.leaves, got.leaves, strict=True)):
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                out.append((f"output {i}", a, b))
        out += [(f"gradient of {n}", g, got.grads.get(n)) for n, g in self.own.grads.items()]
        out += [(f"gradient of input {i}", a, b) for i, (a, b) in enumerate(zip(self.own.input_grads, got.input_grads, strict=True))]
        out += [(f"buffer {n}", b, got.buffers.get(n)) for n, b in self.own.buffers.items()]
        if got.inputs is not None and self.own.inputs is not None:
            out += [(f"input {i} afterwards", a, b) for i, (a, b) in enumerate(zip(self.own.inputs, got.inputs, strict=True))]
        return out

    def scale(self, name: str) -> float:
        """The largest number of its kind."""
        if name.startswith("gradient"):
            every = [g for g in [*self.own.grads.values(), *self.own.input_grads] if g is not None]
        else:
            every = [t for t in [*self.own.leaves, *self.own.buffers.values()] if isinstance(t, torch.Tensor)]
        return max([1e-3, *(float(t.double().abs().max()) for t in every if t.is_floating_point() and t.numel())])

    def tolerance(self, name: str, own: torch.Tensor, other: torch.Tensor | None) -> float:
        scale = self.scale(name)
        if self.rough:
            return (0.15 if name.startswith("gradient") else 0.06) * scale
        error = _far(own, other) if other is not None and other.shape == own.shape else 0.0
        if self.dtype == torch.float64 and not self.narrows:
            # A value that is float32 inside a float64 program rounds as that.
            coarse = 2e-5 if own.dtype != torch.float64 else 0.0
            return (1e-11 + coarse) * scale + 300 * error * 2.0**-29
        return 20 * error + 1e-5 * scale

    def compare(self, got: Result) -> Failure | None:
        if len(got.leaves) != len(self.own.leaves):
            return Failure("structure", f"{len(got.leaves)} leaves, not {len(self.own.leaves)}")
        if got.spec is not None and got.spec != self.own.spec:
            return Failure("structure", f"{got.spec}\n  not {self.own.spec}")
        for i, (a, b) in enumerate(zip(self.own.leaves, got.leaves, strict=True)):
            if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor) or (not isinstance(a, torch.Tensor) and a != b):
                return Failure("structure", f"output {i} is {b!r:.80}, not {a!r:.80}")
        if got.requires is not None and got.requires != self.own.requires:
            return Failure("requires_grad", f"{got.requires}, not {self.own.requires}")
        if set(got.grads) != set(self.own.grads):
            return Failure("names", f"{sorted(got.grads)}, not {sorted(self.own.grads)}")
        other = {n: b for n, _, b in self.pairs(self.other)}
        for name, want, have in self.pairs(got):
            kind = " ".join(w for w in name.split() if not w.isdigit()).split(" of ")[0]
            if name.startswith("gradient of input"):
                kind = "input gradient"
            elif name.startswith("buffer"):
                kind = "buffer"
            if (want is None) != (have is None):
                return Failure(f"{kind} None", f"{name} is {'None' if have is None else 'not None'}, unlike eager's")
            if want is None or have is None:
                continue
            if want.shape != have.shape:
                return Failure(f"{kind} shape", f"{name}: {tuple(have.shape)}, not {tuple(want.shape)}")
            if want.dtype != have.dtype:
                return Failure(f"{kind} dtype", f"{name}: {have.dtype}, not {want.dtype}")
            if want.is_floating_point():
                bound = self.tolerance(name, want, other.get(name))
                error = _far(want, have)
                if not error <= bound:
                    return Failure(f"{kind} value", f"{name}: error {error:.3g}, allowed {bound:.3g}, largest {self.scale(name):.3g}")
            elif not torch.equal(want, have) and not self.rough:
                return Failure(f"{kind} value", f"{name}: other integers")
        return None


def _far(a: torch.Tensor, b: torch.Tensor) -> float:
    if not a.numel():
        return 0.0
    d = (a.double() - b.double()).abs()
    worst = float(d.max())
    return math.inf if math.isnan(worst) else worst
