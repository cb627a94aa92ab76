"""Errors for people: each says what is wrong, where, and what to do about it."""

from __future__ import annotations


class AutoparError(ValueError):
    """Something the user can mend.

    what: one sentence saying what is wrong; where: file and line, parameter or op name;
    fix: what to do about it.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        lines = [what]
        if where:
            lines.append(f"  where: {where}")
        if fix:
            lines.append(f"  what to do: {fix}")
        super().__init__("\n".join(lines))


class CaptureError(AutoparError):
    """The model could not be captured as one graph."""


class InputError(AutoparError):
    """An input has a wrong structure, shape, dtype or differs between ranks."""


class MeshError(AutoparError):
    """The mesh does not fit the world, or the plan does not fit the mesh."""


class LayoutError(AutoparError):
    """A hand layout asks for something the model or mesh cannot do."""


class CheckpointError(AutoparError):
    """A checkpoint is of another model, incomplete or damaged."""


class OptimizerError(AutoparError):
    """The optimizer in use is not the one the plan was made for."""


class LostRankError(AutoparError):
    """Another rank ended, or does not answer, so that what ranks do together cannot go on.

    phase: what was going on; collective: which one failed, "" where it is not known; ended, silent: the ranks that are known to be gone, and those
    that did not answer.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        fix: str = "",
        phase: str = "",
        collective: str = "",
        ended: tuple[int, ...] = (),
        silent: tuple[int, ...] = (),
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.phase, self.collective, self.ended, self.silent = phase, collective, ended, silent
