"""What a run found, added up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.fuzz.check import Outcome


@dataclass
class Report:
    programs: int = 0
    equal: int = 0
    unfit: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    statements: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, o: Outcome) -> None:
        self.programs += 1
        if o.unfit:
            self.unfit[o.unfit.split(":")[0]] += 1
        self.equal += o.equal
        self.refused += o.refused
        if o.failure:
            self.failures[o.failure.kind] += 1

    def text(self, seconds: float) -> str:
        lines = [
            f"{self.programs} programs in {seconds:.0f} s ({self.programs / max(seconds, 1e-9):.2f} a second), {self.equal} runs equal to eager"
        ]
        lines.append(f"thrown away: {sum(self.unfit.values())}  {dict(self.unfit.most_common())}")
        lines.append(f"refused by autopar: {sum(self.refused.values())}")
        lines += [f"  {n:5d}  {what}" for what, n in self.refused.most_common()]
        lines.append(f"failed: {sum(self.failures.values())}")
        lines += [f"  {n:5d}  {what}" for what, n in self.failures.most_common()]
        return "\n".join(lines)
