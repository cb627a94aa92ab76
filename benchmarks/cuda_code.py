"""What Inductor would run on a GPU of our rewritten step: its code and the Triton kernels in it, compiled for one without having one.

    python -m benchmarks.cuda_code --models llama,gemma3 [--layout fsdp] [--capability 90] [--dtype bfloat16] [--width 64] [--keep folder]

A kernel that the compiler refuses, or that uses a stack (for spilled registers, or the sine of large numbers), is named; the exit code is 1 where one is refused. Needs triton beside torch (`pip install triton`): torch's CPU build will do.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.record import write


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="llama", help="of tests.models.ZOO, comma-separated")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--layout", default="", help="a hand layout; planned for an H100 where none is given")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--width", type=int, default=0, help="hidden_size of a Llama, with a vocabulary of 32,000; else the test's own size"
    )
    parser.add_argument("--capability", type=int, default=90, choices=(80, 90, 100))
    parser.add_argument("--keep", type=Path, help="a folder for code and kernels")
    parser.add_argument("--out", type=Path, help="where to write the result (JSON)")
    return parser.parse_args()


def module_of(name: str, a: argparse.Namespace) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The model without dropout, a call's arguments and autopar.compile's."""
    import torch

    from tests.models import ZOO, without_dropout

    torch.manual_seed(0)
    sizes = {}
    if a.width:
        sizes = {
            "hidden_size": a.width, "intermediate_size": 4 * a.width, "num_attention_heads": max(1, a.width // 64),
            "num_key_value_heads": max(1, a.width // 256), "vocab_size": 32000, "max_position_embeddings": a.sequence,
        }  # fmt: skip
    model = without_dropout(ZOO[name].build(a.layers, **sizes).to(getattr(torch, a.dtype)).train())
    inputs = {k: v.to(getattr(torch, a.dtype)) if v.is_floating_point() else v for k, v in ZOO[name].inputs(a.batch, a.sequence).items()}
    return model, inputs, ZOO[name].compile


def codes(name: str, a: argparse.Namespace) -> Any:
    """The model, compiled, whose code of forward and backward is then in the list that `codes_for_cuda` gave."""
    import torch

    import autopar
    from autopar import _torch

    model, inputs, how = module_of(name, a)
    made = autopar.compile(model, {"dp": 1}, layout=a.layout or None, backend="inductor", cluster="h100:1x1", loss_head="plain", **how)
    made._builder.device = torch.device("cuda", 0)  # captured on the CPU, rewritten for a GPU
    theirs, found = _torch.compile_inner, []

    def generated(gm: Any, mode: Any, is_backward: bool) -> tuple[Any, None]:
        try:
            theirs(gm, mode, is_backward)
        except Exception as e:
            if not _torch.is_taken(e):
                raise
        found.append(is_backward)
        return (lambda flat: None), None

    with mock.patch.object(_torch, "compile_inner", generated):
        step = made.prepare(**inputs)
        step.backward_of(True, False)
    assert found == [False, True], found
    return made


def main() -> int:
    a = parse()
    import torch.distributed as dist

    from autopar import _torch

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows: list[dict[str, Any]] = []
    with _torch.codes_for_cuda(a.capability) as found, tempfile.TemporaryDirectory() as temporary:
        for name in a.models.split(","):
            found.clear()
            codes(name, a)
            for half, code in zip(("forward", "backward"), found, strict=True):
                folder = (a.keep or Path(temporary)) / f"{name}_{half}"
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "code.py").write_text(code)
                calls = code.count(".run(")
                libraries = code.count("extern_kernels.") + code.count("torch.ops.")
                for k in _torch.kernels_of(code, folder):
                    rows.append({"model": name, "half": half, **vars(k)})
                mine = [r for r in rows if (r["model"], r["half"]) == (name, half)]
                bad = [r for r in mine if r["error"] or r["stack"]]
                print(
                    f"{name:14} {half:9} {len(mine):3} Triton kernels, {calls} launches of them in the code, {libraries} calls of libraries; {len(bad)} refused or with a stack",
                    flush=True,
                )
                for r in bad:
                    said = r["error"] or f"{r['stack']} bytes of stack"
                    print(f"    {r['name']}: {said}", flush=True)
    write(a.out, "python -m benchmarks.cuda_code", {"capability": a.capability, "kernels": rows})
    return int(any(r["error"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
