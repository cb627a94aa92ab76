"""How many kernels a step launches on a GPU: of `autopar.compile`'s code, and of torch.compile's for the same program, on one device. Counted, without a GPU.

    python -m benchmarks.launches --models llama,gpt2 --layers 4 --width 512 --sequence 128 --out benchmarks/results/launches.json

Both are Inductor's code for CUDA (`benchmarks.cuda_code` has how it is had), of forward and backward, and what is counted is what its text calls, as often as it is called: Triton kernels, and
calls of libraries and of operators by name (products, attention), each as one, though some launch more. torch.compile's is made as it makes it: the captured joint graph, decomposed, cut by
torch's min-cut partitioner, each half compiled whole. Of optimizers the operators are counted that a step of AdamW calls, and they are no kernels of Inductor's: a fused or a foreach operator
launches one kernel, or a few where tensors are many.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.cuda_code import codes, module_of
from benchmarks.record import write

LIBRARIES = ("extern_kernels", "torch.ops")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="llama", help="of tests.models.ZOO, comma-separated")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--width", type=int, default=0, help="hidden_size, with a vocabulary of 32,000; else the test's own size")
    parser.add_argument("--capability", type=int, default=90, choices=(80, 90, 100))
    parser.add_argument("--layout", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="where to write the result (JSON)")
    return parser.parse_args()


def launched(code: str) -> dict[str, int]:
    """What a module that Inductor wrote launches in one call: {"triton": kernels, "library": calls of libraries and operators}."""
    functions = {f.name: f for f in ast.walk(ast.parse(code)) if isinstance(f, ast.FunctionDef)}

    def of(name: str) -> Counter[str]:
        found: Counter[str] = Counter()
        for n in ast.walk(functions[name]):
            if not isinstance(n, ast.Call):
                continue
            said = ast.unparse(n.func)
            if said.endswith(".run") and said.startswith("triton_"):
                found["triton"] += 1
            elif said.startswith(LIBRARIES):
                found["library"] += 1
            elif said.removeprefix("self.") in functions and said.removeprefix("self.") != name:
                found += of(said.removeprefix("self."))
        return found

    total = of("call")
    return {"triton": total["triton"], "library": total["library"]}


def theirs(made: Any) -> None:
    """torch.compile's halves of the program that `made` was compiled for. While `codes_for_cuda` is open."""
    from torch import fx
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    from autopar import _torch
    from autopar.runtime.dump import Dump
    from autopar.runtime.pipeline import joint

    (step,) = made._programs.steps()
    sharded = joint(step.captured, step.graph, step.plan, step.groups, step.settings, True, False, Dump(""))
    values = [n.meta["val"] for n in sharded.gm.graph.nodes if n.op == "placeholder"]
    gm = _torch.decompose_late(sharded.gm, values, sharded.fake_mode)
    graph, env, count = fx.Graph(), dict[fx.Node, fx.Node](), Counter[str]()
    roles = iter(sharded.inputs)
    for n in gm.graph.nodes:
        if n.op == "placeholder":
            kind = "tangents" if next(roles).kind == "tangent" else "primals"
            count[kind] += 1
            env[n] = graph.placeholder(f"{kind}_{count[kind]}")
            env[n].meta = dict(n.meta)
        else:
            env[n] = graph.node_copy(n, env.__getitem__)
    (last,) = graph.find_nodes(op="output")
    results = list(zip(sharded.outputs, last.args[0], strict=True))
    forward, backward = ([n for r, n in results if (r.kind in ("grad", "input_grad")) == late] for late in (False, True))
    last.args = ([*forward, *backward],)
    with sharded.fake_mode:
        halves = min_cut_rematerialization_partition(fx.GraphModule(gm, graph), None, num_fwd_outputs=len(forward))
    for is_backward, half in enumerate(halves):
        try:
            _torch.compile_inner(half, sharded.fake_mode, bool(is_backward))
        except Exception as e:
            if not _torch.is_taken(e):
                raise


def optimizer_calls(name: str, a: argparse.Namespace, compiled: bool, **how: bool) -> int:
    """Operators that a step of AdamW calls, of the parameters as they are stored."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    import autopar

    class Calls(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
            Calls.number += not views and not func._schema.name.endswith(("detach", "alias"))
            return func(*args, **(kwargs or {}))

    model, inputs, arguments = module_of(name, a)
    if compiled:
        model = autopar.compile(model, {"dp": 1}, backend="aot_eager", cluster="h100:1x1", loss_head="plain", **arguments)
        model.prepare(**inputs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **how)
    for _ in range(2):  # the first step makes the state
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        Calls.number = 0
        with Calls():
            optimizer.step()
    return Calls.number


def main() -> None:
    a = parse()
    import torch.distributed as dist

    from autopar import _torch

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows: list[dict[str, Any]] = []
    for name in a.models.split(","):
        with _torch.codes_for_cuda(a.capability) as found:
            made = codes(name, a)
            ours = [launched(code) for code in found]
            found.clear()
            theirs(made)
            others = [launched(code) for code in found]
        row: dict[str, Any] = {"model": name, "layers": a.layers}
        for who, (forward, backward) in (("autopar", ours), ("torch.compile", others)):
            row[who] = {"forward": forward, "backward": backward}
            print(f"{name:10} {who:14} forward {forward}  backward {backward}", flush=True)
        row["optimizer"] = {
            "AdamW, fused, compiled model": optimizer_calls(name, a, True, fused=True),
            "AdamW, foreach, compiled model": optimizer_calls(name, a, True, foreach=True),
            "AdamW, fused": optimizer_calls(name, a, False, fused=True),
            "AdamW, foreach": optimizer_calls(name, a, False, foreach=True),
            "AdamW, a loop": optimizer_calls(name, a, False, foreach=False),
        }
        print(f"{name:10} operators of an optimizer's step: {row['optimizer']}", flush=True)
        rows.append(row)
    setting = {k: getattr(a, k) for k in ("layers", "batch", "sequence", "width", "dtype", "capability")}
    write(a.out, "python -m benchmarks.launches", {**setting, "rows": rows})


if __name__ == "__main__":
    main()
