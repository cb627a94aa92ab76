"""What a model's programs compile to, kept in a folder: the first run writes it, later ones load it (`artifacts=` of `autopar.compile`).

    folder/plans/*.json     the plans, as in the folder of kept plans (`autopar.planner.kept_plans`)
    folder/dp2.rank0.zip    what Inductor made for a mesh (`autopar.runtime.bundle`): of a pipeline a file for every stage, by the number of its first rank

A program is captured by every process all the same, which costs seconds, and says what it is: from nothing else could one tell that a model's code is what it
was. What depends on the captured program, on its plan, or on any of `Facts` is stale where that has changed: it is said once, by name, not used, and made anew.
That is a diagnosis and saves time; that no wrong code runs is ensured below, by Inductor, which finds a graph's code by a hash of the graph and of its own settings.

One process of a node puts into Inductor's folder what is needed, before it compiles (`autopar.runtime.compile_cache`); the first of all writes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from autopar import _torch, kernels, passes
from autopar.distributed.agreement import Facts, agreed
from autopar.distributed.groups import Groups
from autopar.errors import AutoparError
from autopar.planner import kept_plans
from autopar.runtime.bundle import Bundle, DamagedError
from autopar.runtime.config import Config
from autopar.runtime.facts import of_compiled
from autopar.text.log import log

T = TypeVar("T")
FORM = 1
MOST = 64  # programs of a bundle; those that were added first go


def folder_of(said: str | os.PathLike[str] | None, backend: str) -> Path | None:
    """`artifacts=`, checked."""
    if said is None:
        return None
    if not isinstance(said, (str, os.PathLike)) or not os.fspath(said):
        raise AutoparError(f"artifacts={said!r} is no path", fix="name a folder, which need not exist yet")
    path = Path(said).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise AutoparError(f"artifacts= names a file, {path}", fix="name a folder, which need not exist yet")
    if backend != "inductor":
        raise AutoparError(
            f"backend={backend!r} compiles nothing that could be kept", where="artifacts=", fix='leave it out, or use backend="inductor"'
        )
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)  # for this user alone, so that it will be trusted
    except OSError as e:
        raise AutoparError(f"artifacts= names {path}, which cannot be made: {e.strerror}", fix="name another folder") from e
    return path


def machine_facts(device: torch.device) -> dict[str, str]:
    """What compiled code depends on besides the program, by a name for people."""
    return {
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}",
        "triton": _version("triton"),
        "python": f"{platform.python_implementation()} {platform.python_version()} ({sys.implementation.cache_tag})",
        "autopar": f"{_version('autopar')}, code {_code()[:16]}",
        "the device": device.type
        if device.type != "cuda"
        else f"{torch.cuda.get_device_name(device)}, {torch.cuda.get_device_capability(device)}",
        "the processor": _processor(),
    }


class CompiledAhead:
    """Of one model on one mesh; opened when the first program is there."""

    def __init__(self, model: nn.Module, config: Config, groups: Groups) -> None:
        self.model, self.config, self.groups = model, config, groups
        self.artifacts: Artifacts | None = None

    def program(self, kind: str, text: str, plan: str) -> Kept:
        """See `Artifacts.program`. Collective: what cannot be trusted on one rank is refused on all."""

        def here() -> tuple[Kept, Facts]:
            if self.artifacts is None:
                groups, folder = self.groups, self.config.artifacts
                assert folder is not None
                first = groups.compiling[0]
                name = f"{'.'.join(f'{n}{s}' for n, s in groups.axes.items())}.rank{groups.ranks.index(first)}"
                writes = groups.alone or not dist.is_initialized() or dist.get_rank() == first
                self.artifacts = Artifacts(folder, name, of_compiled(self.model, self.config), groups.device, writes, tells=writes)
            return self.artifacts.program(kind, text, plan), {}

        return agreed(self.groups, here)


class Artifacts:
    """Of one model. name: of this process's file; facts: beside those of the machine, texts; writes: whether this process does; tells: whether it says what is stale."""

    def __init__(self, folder: Path, name: str, facts: Mapping[str, str], device: torch.device, writes: bool, tells: bool) -> None:
        self.writes, self.tells = writes, tells
        self.facts = {**machine_facts(device), **{n: _sum(t) for n, t in facts.items()}}
        self.programs: dict[str, dict[str, Any]] = {}
        self.told = False
        self.seen: Counter[str] = Counter()
        path = folder / f"{name}.zip"
        try:
            self.bundle = Bundle(path)
        except DamagedError:
            self._tell(f"{path} is damaged")
            path.unlink(missing_ok=True)
            self.bundle = Bundle(path)
        found = self.bundle.entries
        differs = [
            f"{n} ({was} there, {now} here)" if (was := found.get("facts", {}).get(n, "nothing")) and len(now) < 64 else n
            for n, now in self.facts.items()
            if found.get("facts", {}).get(n) != now
        ]
        if found and found.get("form") != FORM:
            self._tell(f"{path} has another form")
        elif found and differs:
            self._tell(f"{path} was made with other {', '.join(differs)}")
        elif found:
            self.programs = dict(found["programs"])
        if not found and (others := sorted(p.stem for p in folder.glob("*.zip"))):
            self._tell(f"{folder} has other meshes, or ranks, alone: {', '.join(others[:4])}; not {name}")
        if not self.programs:
            self.bundle.entries = {}

    def program(self, kind: str, text: str, plan: str) -> Kept:
        """kind: of a call, with its sizes; text: what the model computes in it; plan: as text. A call of one kind may have several programs, one after the other."""
        self.seen[kind] += 1
        key = f"{kind} #{self.seen[kind]}"
        now = {"the program": _sum(text), "the plan": _sum(plan)}
        found = self.programs.get(key)
        if found is not None:
            differs = [n for n, said in now.items() if found.get(n) != said]
            if differs:
                self._tell(f"{self.bundle.path} has a step of other {' and '.join(differs)}")
                del self.programs[key]
        elif self.programs:
            log.info("%s has nothing for a call of this kind, which is added: %s", self.bundle.path, kind)
        return Kept(self, key, now)

    def _tell(self, what: str) -> None:
        if self.tells and not self.told:
            warnings.warn(f"what was compiled ahead is not used, and made anew: {what}", stacklevel=2)
        self.told = True

    def write(self, content: Mapping[str, bytes]) -> None:
        """content: new members."""
        while len(self.programs) > MOST:
            del self.programs[next(iter(self.programs))]
        needed = {n for p in self.programs.values() for n in (*p["graphs"], *p["libraries"])}
        try:
            self.bundle.write({"form": FORM, "facts": self.facts, "programs": self.programs}, content, needed - set(content))
        except (OSError, DamagedError) as e:
            self._tell(f"{self.bundle.path} cannot be written ({e})")
            self.writes = False


class Kept:
    """Of one program: what its graphs compile to, forward, backward and its variants."""

    def __init__(self, of: Artifacts, key: str, now: Mapping[str, str]) -> None:
        self.of, self.key, self.now = of, key, now
        self.is_back = key not in of.programs  # nothing to put back

    def run(self, work: Callable[[], T], writes: bool) -> T:
        """`work` compiles a graph, or finds it. writes: whether what it leaves is written, where it is not there."""
        had = self.key in self.of.programs
        if not self.is_back:
            self.put_back()
        with _torch.taken_along(no_headers=had) as made:
            result = work()
        if not writes or not self.of.writes:
            return result
        entry = self.of.programs.setdefault(self.key, {**self.now, "graphs": [], "libraries": []})
        new: dict[str, bytes] = {}
        if made.graph and (name := f"graphs/{hashlib.sha256(made.graph).hexdigest()}") not in entry["graphs"]:
            entry["graphs"].append(name)
            new[name] = made.graph
        for path, data in made.libraries.items():
            if (name := f"libraries/{path}") not in entry["libraries"]:
                entry["libraries"].append(name)
                new[name] = data
        if new:
            self.of.write(new)
        return result

    def put_back(self) -> None:
        """Into Inductor's folder."""
        self.is_back = True
        entry = self.of.programs[self.key]
        try:
            content = self.of.bundle.read((*entry["graphs"], *entry["libraries"]))
        except DamagedError as e:
            self.of._tell(str(e))
            self.of.programs, self.of.bundle.entries = {}, {}
            return
        graphs = [content[n] for n in entry["graphs"]]
        _torch.put_back(graphs, {n.removeprefix("libraries/"): content[n] for n in entry["libraries"]})
        log.info("%d graphs compiled ahead: %s", len(graphs), self.of.bundle.path)


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


@cache
def _code() -> str:
    found = hashlib.sha256(kept_plans.code().encode())
    for home in (*passes.__path__, *kernels.__path__):
        for path in sorted(Path(home).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


@cache
def _processor() -> str:
    """Its model and instructions: torch compiles for the very processor (-march=native), and libraries are named by that flag, not by what it stands for."""
    lines = {platform.machine(): None}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.partition(":")[0].strip() in ("model name", "flags", "Features", "CPU part"):
                lines[line] = None
    except OSError:
        lines[platform.processor()] = None
    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {_sum(chr(10).join(lines))[:16]}"
