"""The error of what was to be faster than another plan, and is not."""

from __future__ import annotations

from autopar.errors import AutoparError
from autopar.text.times import format_time


class NoneFasterError(AutoparError):
    """There is a plan of the same step already, and none of this mesh, form or number of micro-batches was found that is faster. bound_s: none takes less; other_form_s: nor does one of
    the program's other form; 0 where nothing is known.

    A kind of its own, because only who has that plan asks so: nobody who calls autopar sees it.
    """

    def __init__(self, bound_s: float, other_form_s: float = 0.0) -> None:
        self.bound_s, self.other_form_s = bound_s, other_form_s
        super().__init__(
            f"No plan was found that is faster; none takes less than {format_time(bound_s)}", fix="take the plan that there is"
        )


def said(bound_s: float, enough_s: float) -> str:
    """Of what is not faster. enough_s: what it would have had to take less than."""
    least = f"no less than {format_time(bound_s)}"
    return least if bound_s >= enough_s else f"none faster was found, {least}"
