"""Habits of training loops (`tests/dist/habits`), each against plain PyTorch on one device.

    python -m tests.dist.test_habits [--habits generate,deep_copy] [--processes 2] [--layout planned] [--backend aot_eager] [--large 64]

prints a line for each: equal, refused (the error tells what to do), or failed.
"""

from __future__ import annotations

import argparse
import traceback
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime import sharded_output
from tests.dist.habits import BOUNDS, load, plain
from tests.dist.launch import run
from tests.wide import wide


def whole(x: Any) -> Any:
    """What a habit saw, without what tensors are on a mesh."""
    if isinstance(x, DTensor):
        x = x.full_tensor()
    if isinstance(x, torch.Tensor):
        return sharded_output.whole(x).detach().clone()
    if isinstance(x, (list, tuple)):
        return [whole(y) for y in x]
    return x


def differs(name: str, want: Any, got: Any, bound: float) -> str:
    if isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        return next((d for i, (a, b) in enumerate(zip(want, got, strict=True)) if (d := differs(f"{name}[{i}]", a, b, bound))), "")
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        if want.shape != got.shape or want.dtype != got.dtype:
            return f"{name}: {tuple(got.shape)} {got.dtype}, not {tuple(want.shape)} {want.dtype}"
        error = float((want.double() - got.double()).abs().max()) if want.numel() else 0.0
        largest = float(want.double().abs().max()) if want.numel() else 0.0
        return "" if error <= bound * largest + 1e-7 else f"{name}: off by {error:.2g} of {largest:.2g}"
    if isinstance(want, float) and isinstance(got, (float, torch.Tensor)):
        return "" if abs(want - float(got)) <= bound * abs(want) + 1e-7 else f"{name}: {got}, not {want}"
    return "" if type(want) is type(got) and want == got else f"{name}: {got!r}, not {want!r}"


def one(name: str, prepared: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return {k: whole(v) for k, v in load()[name](prepared).items()}


def outcome(name: str, layout: str | None, mesh: Any, backend: str) -> str:
    want = one(name, plain)

    def prepared(model: nn.Module, **kw: Any) -> nn.Module:
        return autopar.compile(model, mesh, layout=layout, backend=backend, options={"seconds": 5}, **kw)

    try:
        got = one(name, prepared)
    except autopar.AutoparError as e:
        return f"refused: {e}"
    except Exception:
        return f"failed: {traceback.format_exc(limit=-6)[-1800:]}"
    if set(got) != set(want):
        return f"failed: {sorted(set(got) ^ set(want))}"
    return next((f"failed: {d}" for k in want if (d := differs(k, want[k], got[k], BOUNDS[name]))), "equal")


def every(names: list[str], layout: str | None, sizes: tuple[int, ...], backend: str, large: int | None = None) -> dict[str, str]:
    """large: elements from which outputs stay where they are."""
    sharded_output.LARGE = large or sharded_output.LARGE
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])
    return {n: outcome(n, layout, mesh, backend) for n in names}


PART = 4  # the habits are dealt out, so that workers share them
# Besides, each is run in one of these; in all of them by the command above.
OTHERS = [(2, None), (2, "tp"), (4, "fsdp"), (4, None), (4, "tp")]


@pytest.mark.parametrize("part", range(PART))
def test_habits(part: int) -> None:
    check([n for n in load() if not is_variation(n)][part::PART], 2, "fsdp")


@wide
@pytest.mark.parametrize("half", range(2))
def test_variations(half: int) -> None:
    check([n for n in load() if is_variation(n)][half::2], 2, "fsdp")


@wide
@pytest.mark.parametrize("half", range(2))
@pytest.mark.parametrize("which", range(len(OTHERS)), ids=[f"{n}-{layout or 'planned'}" for n, layout in OTHERS])
def test_habits_elsewhere(which: int, half: int) -> None:
    check(list(load())[which :: len(OTHERS)][half::2], *OTHERS[which])


MORE = ("customs", "tricks")  # files whose habits are variations: one of each is in make test
ONE_OF_EACH = ("frozen_then_thawed_by_layer", "low_rank_merged")
# Of the other files, habits left to the wide part: most go the same ways through autopar as one that stays (losses of one number, optimizers by element).
LIKE_OTHERS = frozenset(
    f"optimizer_{n}" for n in ("adam", "adamw", "adagrad", "adadelta", "adamax", "nadam", "radam", "rmsprop", "rprop", "asgd")
) | {
    "mean_square_error", "binary_cross_entropy", "losses_added_by_hand", "lasso_of_norms", "samples_weighed", "masked_mean", "triplets", "clipped_ratio", "losses_kept",
    "clipped_by_norm_and_value", "plateau", "average_by_hand", "initialised_after", "weights_loaded_in_part", "two_adversaries", "a_plain_head_on_top", "sampled_by_hand",
    "shifted_labels_with_padding", "criterion_module", "penalties_through_weights", "hard_negatives", "policy_gradient", "accuracy_and_numpy", "norms_of_gradients",
    "gradients_changed_by_hand", "schedule", "optimizer_made_first", "soft_update_of_a_target", "a_plain_tensor_copied_in", "weights_as_one_vector", "greedy_by_hand",
    "evaluation_between", "a_batch_smaller_than_the_mesh", "optimizer_on_shards", "state_on_the_cpu", "teacher_and_student", "two_lengths_in_flight",
    "best_of_validation", "one_loss_after_another", "lengths_of_training_and_evaluation", "anomaly_and_finite_checks",
}  # fmt: skip


def is_variation(name: str) -> bool:
    return name in LIKE_OTHERS or (load()[name].__module__.rpartition(".")[2] in MORE and name not in ONE_OF_EACH)


@wide
@pytest.mark.parametrize("part", range(2))
def test_outputs_of_which_ranks_have_samples(part: int) -> None:
    """As if all outputs were large."""
    check([n for n in load() if load()[n].__module__.endswith(".outputs")][part::2], 2, "tp", 40)


def check(names: list[str], processes: int, layout: str | None, large: int | None = None) -> None:
    wrong: dict[str, str] = {}
    for found in run(every, processes, names, layout, (processes,), "aot_eager", large):
        wrong |= {n: said for n, said in found.items() if said != "equal"}
    assert not wrong, "\n".join(f"{n}: {said}" for n, said in wrong.items())


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--habits", default="")
    a.add_argument("--processes", type=int, default=2)
    a.add_argument("--layout", default="planned")
    a.add_argument("--backend", default="aot_eager")
    a.add_argument("--large", type=int, help="elements from which an output is not whole on every rank")
    o = a.parse_args()
    names = o.habits.split(",") if o.habits else list(load())
    for name in names:
        try:
            found = run(
                every, o.processes, [name], None if o.layout == "planned" else o.layout, (o.processes,), o.backend, o.large, timeout=300
            )
            said = next((r[name] for r in found if r[name] != "equal"), "equal")
        except Exception as e:
            said = f"failed: {type(e).__name__}: {str(e)[-1500:]}"
        print(f"{name:36} {said}", flush=True)


if __name__ == "__main__":
    main()
