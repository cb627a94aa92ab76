"""The pages of README and docs/, read as what a reader takes of them: links, headings, code, commands, names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


@dataclass(frozen=True)
class Block:
    """A block of code. language: as the fence says; "" for an indented one."""

    language: str
    text: str
    line: int


@dataclass(frozen=True)
class Page:
    path: Path
    blocks: tuple[Block, ...]
    prose: str  # all but the blocks

    @staticmethod
    def of(path: Path) -> Page:
        blocks: list[Block] = []
        prose: list[str] = []
        fence: str | None = None
        code: list[str] = []
        begin = 0
        for i, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], 1):
            if fence is not None:
                if line.strip() == "```":
                    blocks.append(Block(fence, "\n".join(code) + "\n", begin))
                    fence, code = None, []
                else:
                    code.append(line)
                continue
            indented = line.startswith("    ") and (bool(code) or not prose or not prose[-1].strip())
            if indented or (code and not line.strip()):
                begin = begin if code else i
                code.append(line[4:])
                continue
            if code:
                blocks.append(Block("", "\n".join(code).rstrip() + "\n", begin))
                prose += [""] * len(code)
                code = []
            if line.startswith("```"):
                fence, begin = line[3:].strip(), i + 1
            else:
                prose.append(line)
        return Page(path, tuple(blocks), "\n".join(prose))

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    def links(self) -> list[str]:
        """Targets of links and images."""
        return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", self.prose))

    def spans(self) -> list[str]:
        """What stands between backticks."""
        return re.findall(r"`([^`\n]+)`", self.prose)

    def anchors(self) -> set[str]:
        """What a link may name behind #: a heading's words, as GitHub and the site write them."""
        heads = re.findall(r"^#{1,6} +(.+)$", self.prose, re.M)
        return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in heads}

    def python(self) -> list[Block]:
        return [b for b in self.blocks if b.language == "python"]

    def commands(self) -> list[str]:
        """Lines of blocks that a shell would run: what is known to begin a command, with continued lines joined."""
        out = []
        for b in self.blocks:
            if b.language not in ("", "bash", "sh"):
                continue
            for line in b.text.replace("\\\n", " ").splitlines():
                if found := re.match(r"(?:\$ )?((?:[A-Z_]+=\S+ )*(?:autopar|python|torchrun|make|pip install) .*)", line):
                    out.append(found[1])
        return out


def pages() -> tuple[Page, ...]:
    return tuple(map(Page.of, PAGES))


def page(name: str) -> Page:
    return Page.of(ROOT / name)
