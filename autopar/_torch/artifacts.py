"""What Inductor leaves on disk for one graph, taken along and put back.

torch's cache artifacts (`torch.compiler.save_cache_artifacts`) have the graph's code, and Triton's kernels as the GPU loads them. Libraries that a C++ compiler made are
not in them, nor what was tried to learn the processor's vector instructions, and making them is most of the time on a CPU: they are taken along as files. Torch names
each by a hash of its text and of the compiler's command line.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

LIBRARY = re.compile(r"[a-z0-9]{2}/[a-z0-9]{20,100}(\.[a-z]{1,16})?\.so")


@dataclass
class Compiled:
    """Of one graph. graph: torch's cache artifacts, b"" where Inductor keeps nothing of it; libraries: content by path within Inductor's folder."""

    graph: bytes = b""
    libraries: dict[str, bytes] = field(default_factory=dict)


@contextlib.contextmanager
def taken_along(no_headers: bool = False) -> Iterator[Compiled]:
    """What is compiled in here, or found in the cache, is in what this yields, once it is left.

    no_headers: C++ headers are not precompiled, which torch does before it looks whether there is anything to compile.
    """
    from torch._inductor import codecache
    from torch.compiler._cache import CacheArtifactManager

    files, manager, made = vars(codecache), CacheArtifactManager, Compiled()
    their_write, their_headers = files["write"], files.get("_precompile_header")
    sources: dict[str, None] = {}

    def write(*args: Any, **kwargs: Any) -> tuple[str, str]:
        key, path = their_write(*args, **kwargs)
        if path.endswith(".cpp"):
            sources[path] = None
        return key, path

    files["write"] = write
    if no_headers and their_headers is not None:
        files["_precompile_header"] = lambda *_, **__: ""
    try:
        with manager.with_fresh_cache():
            yield made
            new = [a for some in manager._new_cache_artifacts.values() for a in some]
            said = manager.serialize()
    finally:
        files["write"] = their_write
        if their_headers is not None:
            files["_precompile_header"] = their_headers
    for a in new:  # the program's own `save_cache_artifacts` has them as well
        if a not in manager._seen_artifacts:
            manager._seen_artifacts.add(a)
            manager._new_cache_artifacts[a.type()].append(a)
    made.graph = b"" if said is None else said[0]
    folder = _folder()
    for path in sources:
        library = Path(path).with_suffix(".so")
        name = os.path.relpath(library, folder).replace(os.sep, "/")
        if LIBRARY.fullmatch(name) and library.is_file():
            made.libraries[name] = library.read_bytes()


def put_back(graphs: Iterable[bytes], libraries: Mapping[str, bytes]) -> None:
    """What `taken_along` had, into Inductor's folder. It is code, and will be run: the caller knows where it is from. What is there already stays."""
    for graph in graphs:
        torch.compiler.load_cache_artifacts(graph)
    folder = _folder()
    for name, content in libraries.items():
        assert LIBRARY.fullmatch(name), name
        path = folder / name
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
        with os.fdopen(handle, "wb") as f:
            f.write(content)
        os.replace(aside, path)


def _folder() -> Path:
    from torch._inductor.runtime.runtime_utils import cache_dir

    return Path(cache_dir())
