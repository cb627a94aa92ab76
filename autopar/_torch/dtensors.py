"""What torch's DTensor gets wrong or refuses, and ordinary loops do with parameters and gradients, which are DTensors."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.utils._pytree

from autopar._torch.distributed import wrapped
from autopar._torch.parameters import move_parameter
from autopar._torch.stepping import current, trying
from autopar.errors import AutoparError

_aten = torch.ops.aten


def dtensors_beside_tensors() -> None:
    """From here on DTensors work beside plain tensors, as numbers, under `.data =`, and in two writes in place that optimizers make.

    In a program whose ranks all compute the same, a plain tensor is the same on each, and so taken for replicated; torch refuses the two together. `.item()`,
    `float()` and the like of a DTensor are its whole value; torch gives the part that is here (`p.grad.norm().item()` was the norm of a shard). `p.data = t` puts
    t's values in; torch changes what the DTensor says of itself, and not its shard.
    """
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher
    dispatcher._allow_implicit_replication = True
    handlers = {
        _aten._local_scalar_dense.default: _whole,
        _aten._is_any_true.default: _whole,
        _aten._is_all_true.default: _whole,
        _aten.index_put_.default: _put,
        _aten.pow_.Scalar: _power,
        _aten.copy_.default: _copy,
        _aten.detach.default: _detach,
    }
    for call, handler in handlers.items():
        dispatcher._custom_op_handlers.setdefault(call, handler)
    dispatcher._custom_op_handlers.update(dict.fromkeys((*_WRONG, *_REFUSED), _on_whole))
    if "data" not in vars(DTensor):
        propagate = dispatcher._propagate_op_sharding_dispatch_slow_path
        dispatcher._propagate_op_sharding_dispatch_slow_path = functools.partial(_of_one_mesh, propagate)
        ours = {
            "data": property(_data, _set_data),
            "numpy": _numpy,
            "tolist": _tolist,
            "storage": _storage,
            "data_ptr": _data_ptr,
            "reshape": _reshape,
        }
        for name, attribute in ours.items():
            setattr(DTensor, name, attribute)


# What DTensor silently gets wrong: means over parts in which other numbers of targets are ignored, and products with a part of the kernels.
_WRONG = (
    _aten.nll_loss_forward.default,
    _aten.nll_loss_backward.default,
    _aten.nll_loss2d_forward.default,
    _aten.nll_loss2d_backward.default,
    _aten.convolution.default,
    _aten.convolution_backward.default,
)


# What it refuses, and loops do to look at weights and gradients.
_REFUSED = (
    _aten.masked_select.default,
    _aten.index.Tensor,
    _aten.unbind.int,
    _aten.nonzero.default,
    _aten._unique2.default,
    _aten.bincount.default,
    _aten.histc.default,
    _aten.allclose.default,
    _aten.searchsorted.Tensor,
    _aten.bucketize.Tensor,
)


def _on_whole(call: Any, args: Any, kwargs: Any) -> Any:
    """`call` on whole operands, on every rank; what it gives is replicated."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = next(t.device_mesh for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, DTensor))
    args, kwargs = torch.utils._pytree.tree_map(lambda t: t.full_tensor() if isinstance(t, DTensor) else t, (args, kwargs))
    same = (Replicate(),) * mesh.ndim

    def replicated(t: Any) -> Any:
        return DTensor.from_local(t, mesh, same, run_check=False) if isinstance(t, torch.Tensor) else t

    return torch.utils._pytree.tree_map(replicated, call(*args, **kwargs))


def _detach(call: Any, args: Any, kwargs: Any) -> Any:
    """autograd detaches every gradient that it hands over. torch's way around a DTensor costs twice as much."""
    return wrapped(args[0]._local_tensor.detach(), args[0]._spec)


def _whole(call: Any, args: Any, kwargs: Any) -> Any:
    return call(args[0].full_tensor())


def _put(call: Any, args: Any, kwargs: Any) -> Any:
    """`x[mask] = value`: on every shard by itself where the mask lies as x does, else on the whole."""
    from torch.distributed.tensor import DTensor

    x, indices, value = args[0], args[1], args[2]
    alone = isinstance(x, DTensor) and len(indices) == 1 and isinstance(indices[0], DTensor) and value.numel() == 1
    if alone and indices[0].dtype == torch.bool and indices[0].shape == x.shape and not any(p.is_partial() for p in x.placements):
        mask = indices[0].redistribute(x.device_mesh, x.placements).to_local()
        call(x._local_tensor, [mask], _plain(value), *args[3:], **kwargs)
        return x
    whole = _plain(x)
    call(whole, [None if i is None else _plain(i) for i in indices], _plain(value), *args[3:], **kwargs)
    if isinstance(x, DTensor):
        _write(x, whole)
    return x


def _copy(call: Any, args: Any, kwargs: Any) -> Any:
    """From plain tensors, and from a DTensor of another mesh, too: a model's weights that lie otherwise."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    x, source = args[0], args[1]
    if not isinstance(x, DTensor):
        call(x, source.full_tensor(), *args[2:], **kwargs)
        return x
    if isinstance(source, DTensor) and source.device_mesh != x.device_mesh:
        source = source.full_tensor()
    if source.shape != x.shape:
        source = source.expand(x.shape)
    if not isinstance(source, DTensor):
        source = distribute_tensor(source, x.device_mesh, x.placements, src_data_rank=None)
    call(x._local_tensor, source.redistribute(x.device_mesh, x.placements)._local_tensor, *args[2:], **kwargs)
    return x


def _of_one_mesh(propagate: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
    """What torch says of DTensors on two meshes does not say what to do."""
    try:
        return propagate(call, *args, **kwargs)
    except RuntimeError as e:
        if "different mesh" in str(e) or "same mesh" in str(e):
            raise AutoparError(
                f"{call} of parameters, gradients or state of models on two different meshes",
                where=str(e).splitlines()[0][:300],
                fix="compile both models on one mesh, or take the whole of one, t.full_tensor(), which counts as the same on all ranks; outputs of models on "
                "different meshes are ordinary tensors and can be mixed",
            ) from e
        raise


def _power(call: Any, args: Any, kwargs: Any) -> Any:
    """A sum or norm whose parts are on several ranks is added up first."""
    x = args[0]
    if any(p.is_partial() for p in x.placements):
        _write(x, _plain(x).pow(args[1]))
    else:
        call(x._local_tensor, args[1])
    return x


def _plain(t: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return t.full_tensor().clone() if isinstance(t, DTensor) else t


def _write(x: Any, whole: torch.Tensor) -> None:
    """Puts `whole` into the DTensor: into its shards, or, where it was Partial, replicated."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    placements = tuple(Replicate() if p.is_partial() else p for p in x.placements)
    there: Any = distribute_tensor(whole, x.device_mesh, placements, src_data_rank=None)
    if placements == tuple(x.placements):
        x._local_tensor.copy_(there._local_tensor)
    else:
        move_parameter(x, there)


def _numpy(t: Any, *, force: bool = False) -> Any:
    return t.full_tensor().numpy(force=force)


def _tolist(t: Any) -> Any:
    return t.full_tensor().tolist()


def _storage(t: Any) -> Any:
    """safetensors asks for it, where somebody saves a model as if it were whole: Hugging Face's Trainer, on one rank."""
    raise AutoparError(
        f"a tensor of shape {tuple(t.shape)} lies on {t.device_mesh.size()} processes, and has no memory that one of them could save or share",
        fix="all ranks call model.save_pretrained(folder) or autopar.checkpoint.save; for Hugging Face's Trainer make it of autopar.trainer(Trainer, mesh), "
        "which saves and resumes by itself",
    )


def _reshape(t: Any, *shape: Any) -> Any:
    """Where the parts of a tensor are not parts of the new shape, that is made of the whole. A view may not: what is written into it would be lost."""
    from torch.distributed.tensor import Replicate

    try:
        with trying():
            return torch.Tensor.reshape(t, *shape)
    except RuntimeError:
        whole = t.redistribute(placements=[Replicate()] * t.device_mesh.ndim)
        return torch.Tensor.reshape(whole, *shape)


def _data_ptr(t: Any) -> int:
    """Of what stands for the shard, which is nobody's memory; an optimizer that hands it to a kernel is refused at its first step."""
    mode = current()
    if mode is not None:
        mode.memory_asked(t)
    return int(torch.Tensor.data_ptr(t))


def _data(t: Any) -> Any:
    return torch.Tensor.data.__get__(t)  # type: ignore[attr-defined]


def _set_data(t: Any, value: torch.Tensor) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if tuple(value.shape) != tuple(t.shape):
        raise RuntimeError(
            f"a parameter of shape {tuple(t.shape)} is on a mesh: .data = ... of shape {tuple(value.shape)} cannot be put there"
        )
    with torch.no_grad():
        if isinstance(value, DTensor):
            there: torch.Tensor = value.redistribute(t.device_mesh, t.placements).detach()
        else:
            there = distribute_tensor(value.detach(), t.device_mesh, t.placements, src_data_rank=None)
        torch.Tensor.data.__set__(t, there)  # type: ignore[attr-defined]
        move_parameter(t, there)
