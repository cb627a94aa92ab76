"""What of a model and its optimizer is in a checkpoint: tensors under names that do not depend on the mesh, and the options of parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from autopar.errors import CheckpointError


def kind_of(t: torch.Tensor) -> list[Any]:
    return [list(t.shape), str(t.dtype).removeprefix("torch.")]


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, a tied one once, under its first name."""
    out: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, t in model.state_dict(keep_vars=True).items():
        if isinstance(t, torch.Tensor) and id(t) not in seen:
            seen.add(id(t))
            out["model." + name] = t.detach()
    return out


def of_stages(model: nn.Module) -> bool:
    """Whether this rank has a part of the model's tensors alone, those of its stages of a pipeline."""
    return bool(getattr(model, "lies_on_stages", False))


def all_of(model: nn.Module) -> nn.Module:
    """The model that has all names, also of what lies on other stages."""
    whole = model.__dict__.get("_wrapped")
    return whole if isinstance(whole, nn.Module) else model


def merged(manifests: list[dict[str, Any]], order: list[str]) -> dict[str, Any]:
    """That of all stages. order: of parameters in the model."""
    place = {n: i for i, n in enumerate(order)}
    groups = [dict(g) for g in manifests[0]["groups"]]
    for i, g in enumerate(groups):
        g["params"] = sorted({n for m in manifests for n in m["groups"][i]["params"]}, key=lambda n: place.get(n, -1))
    return {
        **manifests[0],
        "groups": groups,
        "numbers": {n: v for m in manifests for n, v in m["numbers"].items()},
        "tensors": {n: v for m in manifests for n, v in m["tensors"].items()},
    }


def _names(model: nn.Module) -> dict[int, str]:
    return {id(p): n for n, p in all_of(model).named_parameters()}


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer keeps of our parameters, as "key.parameter"; no key has a dot."""
    names = _names(model)
    return {f"{key}.{names[id(p)]}": v for p, state in optimizer.state.items() if id(p) in names for key, v in state.items()}


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    return {f"optimizer.{n}": _summed(v) for n, v in _state(model, optimizer).items() if isinstance(v, torch.Tensor)}


def _summed(t: torch.Tensor) -> torch.Tensor:
    """State that is a sum over ranks is added up: sums of products of gradients, for one."""
    if isinstance(t, DTensor) and any(p.is_partial() for p in t.placements):
        return t.redistribute(placements=[Replicate() if p.is_partial() else p for p in t.placements])
    return t


def optimizer_numbers(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The part of the state that is no tensor, such as a count of steps."""
    numbers = {n: v for n, v in _state(model, optimizer).items() if not isinstance(v, torch.Tensor)}
    for n, v in numbers.items():
        if not isinstance(v, (int, float, str, type(None))):
            raise CheckpointError(f"the optimizer's state {n!r} is a {type(v).__name__}; only tensors and numbers can be saved")
    return numbers


def groups_of(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Parameter groups with names for parameters; options that JSON cannot hold are left to the program that builds the optimizer."""
    names = _names(model)
    out = []
    for g in optimizer.param_groups:
        options = {k: float(v) if isinstance(v, torch.Tensor) and v.numel() == 1 else v for k, v in g.items() if k != "params"}
        options = {k: v for k, v in options.items() if isinstance(v, (int, float, str, bool, list, tuple, type(None)))}
        out.append({"params": [names.get(id(p), "") for p in g["params"]], **options})
    return out


def load_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    for g, saved in zip(optimizer.param_groups, groups, strict=True):
        for k, v in saved.items():
            if k != "params" and isinstance(g.get(k), torch.Tensor):
                g[k].fill_(v)
            elif k != "params" and k in g:
                g[k] = tuple(v) if isinstance(g[k], tuple) else v


def make_state(model: nn.Module, optimizer: Optimizer, manifest: dict[str, Any]) -> None:
    """State of the saved names, for DCP to read into: like the parameter where it has its shape, else a plain tensor (a count of steps)."""
    params = dict(model.named_parameters())
    saved = {tuple(n.split(".", 2)[1:]): kind for n, kind in manifest["tensors"].items() if n.startswith("optimizer.")}
    scalars = {key for (key, name), (shape, _) in saved.items() if not shape and name in params and params[name].dim()}
    group_of = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    optimizer.state.clear()
    saved = {(key, name): kind for (key, name), kind in saved.items() if name in params}  # without those of other stages
    for (key, name), (shape, dtype) in saved.items():
        p, kind = params[name], getattr(torch, dtype)
        if list(p.shape) == shape and key not in scalars:
            optimizer.state[p][key] = torch.zeros_like(p, dtype=kind, requires_grad=False)
        else:
            on_device = any(group_of[id(p)].get(option) for option in ("capturable", "fused"))
            optimizer.state[p][key] = torch.zeros(shape, dtype=kind, device=p.device if on_device else "cpu")
    for n, v in manifest["numbers"].items():
        key, name = n.split(".", 1)
        if name not in params:
            continue
        optimizer.state[params[name]][key] = v
