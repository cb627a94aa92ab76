"""Every family of transformers that has routed experts, small and random: capture makes them one operator, and with experts split over two simulated ranks the loss and every
gradient equal one device's.

    python -m tests.spmd.test_expert_families [--models qwen3_next,zaya] [--seconds 600]     a line for each, and what came

Families are found, not listed: those whose file of models has a class under transformers' registry of experts (`use_experts_implementation`), or one that is named as such
classes are. Of the second, which go round the registry, nothing is promised but that they are equal to one device, or refused with an error that says what to do. What has no
head of its own with a loss (`tests/sweep/small.py`), or whose tiny configuration eager refuses, is left out by name.
"""

from __future__ import annotations

import argparse
import copy
import math
import re
import time
from functools import cache
from pathlib import Path

import pytest
import torch

from autopar.capture.experts import has_experts
from autopar.errors import AutoparError
from autopar.graph.mesh import Mesh
from autopar.planner.layout import Layout
from autopar.planner.propagate import propagate
from autopar.rules.experts import BACKWARD, FORWARD
from tests.spmd.simulate import fake_world, one_device, prepare, simulated
from tests.sweep.small import classes, inputs, model
from tests.wide import cases

RANKS = {"ep": 2}
HEADS = ("causal", "vision_text", "seq2seq")
REGISTERED, NAMED = re.compile(r"@use_experts_implementation"), re.compile(r"class \w*(Experts|SparseMoe|MoeBlock|TopKRouter|MoE)\w*\(")
NOW = ("qwen2_moe", "aria_text", "deepseek_v4")


class Unfit(Exception):
    """Eager itself does not take the tiny model."""


@cache
def families() -> dict[str, tuple[str, str, bool]]:
    """Model type -> its head, the folder of its models, whether they are under the registry."""
    import transformers
    from transformers import CONFIG_MAPPING

    found: dict[str, tuple[str, str, bool]] = {}
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text, folder = file.read_text(encoding="utf-8"), file.parent.name
        if not (REGISTERED.search(text) or NAMED.search(text)):
            continue
        for head in HEADS:
            for kind, name in classes(head).items():
                if f"class {name}(" in text and kind in CONFIG_MAPPING and kind not in found:
                    found[kind] = (head, folder, bool(REGISTERED.search(text)))
    return found


def tiny(kind: str) -> torch.nn.Module:
    return model(families()[kind][0], kind, torch.float64).train()


def operators(kind: str, axes: dict[str, int] = RANKS) -> int:
    """How many routed experts became the operator; everything is as on one device."""
    head, _, _ = families()[kind]
    torch.manual_seed(0)
    try:
        made = tiny(kind)
        for p in made.parameters():
            if p.dim() > 1:  # so that routers tell tokens apart
                torch.nn.init.normal_(p, std=0.2)
        given = inputs(head, kind, torch.float64)[1]
        loss = one_device(made, given, (3, 0))
        loss.backward()  # type: ignore[no-untyped-call]
    except Exception as e:
        raise Unfit(f"{type(e).__name__}: {e}") from e
    p = prepare(_without_grads(made), given)
    count = [sum(op.target == t for op in p.graph.ops) for t in (FORWARD, BACKWARD)]
    assert count[0] == count[1]
    mesh, trainable = Mesh.of(axes), frozenset(n for n, q in made.named_parameters() if q.requires_grad)
    plan = propagate(p.graph, Layout.of("fsdp+ep" if count[0] else "fsdp", mesh), axes, trainable)
    with fake_world(mesh.size):
        outputs, grads, _ = simulated(p, axes, plan).run(dict(p.model.named_parameters()), dict(p.model.named_buffers()), p.tensors, (3, 0))
    assert math.isclose(float(outputs[0]), float(loss.detach()), rel_tol=5e-6), (float(outputs[0]), float(loss.detach()))
    whole = math.sqrt(sum(float(q.grad.norm()) ** 2 for q in made.parameters() if q.grad is not None))
    for n, q in made.named_parameters():
        if q.grad is not None:
            assert float((grads[n] - q.grad).norm()) <= 2e-5 * float(q.grad.norm()) + 1e-6 * whole, n
    return count[0]


def _without_grads(made: torch.nn.Module) -> torch.nn.Module:
    made = copy.deepcopy(made)
    made.zero_grad()
    return made


def test_families_are_found() -> None:
    assert set(NOW) | {"mixtral", "deepseek_v3", "gpt_oss", "llama4_text", "qwen3_vl_moe"} <= families().keys()


@pytest.mark.parametrize("kind", cases(sorted(families()), NOW))
def test_experts_of_every_family(kind: str) -> None:
    registered = families()[kind][2]
    try:
        assert operators(kind) > 0 or not registered or not has_experts(tiny(kind)), "its experts are not the operator"
    except Unfit as e:
        pytest.skip(f"eager refuses it: {e}")
    except AutoparError as e:
        assert not registered and e.fix, e


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--models", default="")
    a.add_argument("--seconds", type=float, default=math.inf)
    o = a.parse_args()
    began = time.monotonic()
    for kind in o.models.split(",") if o.models else sorted(families()):
        start = time.process_time()
        try:
            n = operators(kind)
            said = f"equal, {n} of its layers are the operator" if n else "equal, none of its layers is the operator"
        except Unfit as e:
            said = f"eager refuses: {e}"
        except Exception as e:
            said = f"{type(e).__name__}: {e}"
        print(f"{kind:24} {families()[kind][1]:20} {time.process_time() - start:5.1f} s  {' '.join(said.split())[:220]}", flush=True)
        if time.monotonic() - began > o.seconds:
            break


if __name__ == "__main__":
    main()
