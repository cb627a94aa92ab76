"""Save on four processes, resume on (2, 2) and on one; safetensors round trips; checkpoints that are wrong are refused by name."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import pickle
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.checkpoint import dcp as checkpoint
from autopar.checkpoint.safetensors import load_safetensors, save_safetensors
from autopar.errors import CheckpointError
from autopar.runtime.init import distribute
from tests.dist.launch import run
from tests.dist.test_init import mixed
from tests.models import ZOO
from tests.wide import cases


def _setup(sizes: tuple[int, ...], layout: str, seed: int, name: str = "gpt2", **kw: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = ZOO[name].build(**kw).train()
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])
    compiled = autopar.compile(model, mesh, layout=layout, backend="aot_eager")
    return compiled, torch.optim.AdamW(compiled.parameters(), lr=1e-2)


def _train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    batch = ZOO["gpt2"].inputs(8, 16)
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _save(name: str, folder: str) -> list[float]:
    model, optimizer = _setup((4,), "fsdp", 0, name)
    _train(model, optimizer, 3)
    checkpoint.save(folder, model, optimizer, step=3, extra={"note": [1, 2]})
    return _train(model, optimizer, 5)


def _resume(name: str, folder: str, sizes: tuple[int, ...], layout: str) -> list[float]:
    model, optimizer = _setup(sizes, layout, 99, name)
    optimizer.param_groups[0]["lr"] = 7.0
    assert checkpoint.load(folder, model, optimizer) == {"step": 3, "extra": {"note": [1, 2]}}
    assert optimizer.param_groups[0]["lr"] == 1e-2
    return _train(model, optimizer, 5)


@pytest.mark.parametrize("name", cases(["toy-dropout", "gpt2"], ["toy-dropout"]))
def test_resume_on_other_meshes(name: str, tmp_path: Path) -> None:
    """Dropout is on: the random counters resume too. Losses agree to the rounding of another order of sums."""
    want = run(_save, 4, name, str(tmp_path / "c"))[0]
    for sizes, layout in [((2, 2), "fsdp+tp"), ((1,), "fsdp")]:
        n = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
        got = run(_resume, n, name, str(tmp_path / "c"), sizes, layout)[0]
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2e-5, atol=0)


# ---- bytes, on meshes without a compiled step ----------------------------------------------------------------------


class Mixed(nn.Module):
    """Uneven rows, dtypes, a scalar, a tie, buffers kept and not, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 13), nn.Linear(8, 3, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.randn(()))
        self.tied = self.a.weight
        self.frozen = nn.Parameter(torch.randn(5, 4), requires_grad=False)
        self.register_buffer("gone", torch.randn(3), persistent=False)


def _placed(seed: int, sizes: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(seed)
    model = Mixed()
    mesh = DeviceMesh("cpu", torch.arange(math.prod(sizes)).reshape(sizes))
    distribute(model, mesh, mixed(len(sizes)))
    return model


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW([{"params": p[:2], "lr": 0.5}, {"params": p[2:]}], lr=0.1, betas=(0.8, 0.9)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
}


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, n: int = 2) -> None:
    for i in range(n):
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.full_like(p, 0.1 * (i + 1)) + p.detach() * 0.3
        optimizer.step()


def _everything(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    names = {id(p): n for n, p in model.named_parameters()}
    out: dict[str, Any] = dict(model.state_dict())
    for p, state in optimizer.state.items() if optimizer else ():
        out.update({f"{names[id(p)]} {k}": v for k, v in state.items()})
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in out.items()}


def _assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for n, a in one.items():
        b = other[n]
        assert type(a) is type(b), n
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and a.shape == b.shape, n
            assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), n
        else:
            assert a == b, n


def _save_mixed(folder: str) -> dict[str, Any]:
    wanted = {}
    for name, make in OPTIMIZERS.items():
        model = _placed(0, (4,))
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        _steps(model, optimizer)
        model.norm.running_mean.fill_(7.0)
        if name == "sgd":
            for i, state in enumerate(optimizer.state.values()):
                state["count"] = i
        checkpoint.save(Path(folder) / name, model, optimizer, step=5)
        wanted[name] = _everything(model, optimizer)
    checkpoint.save(Path(folder) / "no step", model, OPTIMIZERS["adamw"]([p for p in model.parameters() if p.requires_grad]))
    _load_mixed(folder, (2, 2), wanted)
    return wanted


def _load_mixed(folder: str, sizes: tuple[int, ...], wanted: dict[str, Any]) -> None:
    for name, make in OPTIMIZERS.items():
        model = _placed(9, sizes)
        gone, tied = model.gone.clone(), model.tied is model.a.weight
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        for g in optimizer.param_groups:
            g["lr"] = 3.0
        assert checkpoint.load(Path(folder) / name, model, optimizer) == {"step": 5, "extra": None}
        _assert_same(_everything(model, optimizer), wanted[name])
        assert tied and model.tied is model.a.weight and torch.equal(gone, model.gone)
        assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == options
        for p, state in optimizer.state.items():
            assert all(v.placements == p.placements for v in state.values() if isinstance(v, DTensor))
        _steps(model, optimizer)
    optimizer = OPTIMIZERS["adamw"]([p for p in model.parameters() if p.requires_grad])
    _steps(model, optimizer)
    checkpoint.load(Path(folder) / "no step", model, optimizer)
    assert not optimizer.state


def test_byte_for_byte_on_other_meshes(tmp_path: Path) -> None:
    wanted = run(_save_mixed, 4, str(tmp_path))[0]
    run(_load_mixed, 1, str(tmp_path), (1,), wanted)
    plain = Mixed()  # without processes: a model nobody distributed
    optimizer = OPTIMIZERS["adamw"]([p for p in plain.parameters() if p.requires_grad])
    checkpoint.load(tmp_path / "adamw", plain, optimizer)
    _assert_same(_everything(plain, optimizer), wanted["adamw"])


# ---- what is refused -----------------------------------------------------------------------------------------------


def _data(folder: Path) -> Path:
    """Where DCP's files are."""
    return folder / json.loads((folder / checkpoint.MANIFEST).read_text())["data"]


def _resum(folder: Path) -> None:
    """The manifest of a forger, who mends the sums."""
    manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
    for name in manifest["files"]:
        data = (_data(folder) / name).read_bytes()
        manifest["files"][name] = [len(data), zlib.crc32(data)]
    (folder / checkpoint.MANIFEST).write_text(json.dumps(manifest))


def _calls(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls module.name(argument) when it is opened."""
    return b"\x80\x04" + b"".join(b"\x8c" + bytes([len(s)]) + s.encode() for s in (module, name)) + b"\x93" + b"\x8c" + bytes(
        [len(argument)]
    ) + argument.encode() + b"\x85R."  # fmt: skip


class Touch:
    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (self.file,)


def _damage(folder: Path, how: str) -> None:
    index, manifest = _data(folder) / ".metadata", folder / checkpoint.MANIFEST
    shard = _data(folder) / "__1_0.distcp"
    touched = str(folder.parent / "ran")
    if how == "cut off":
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    elif how == "one bit":
        data = bytearray(shard.read_bytes())
        at = data.find(torch.load(folder.parent / "value.pt").numpy().tobytes())
        assert at > 0
        data[at] ^= 1
        shard.write_bytes(data)
    elif how == "no shard":
        shard.unlink()
    elif how == "index":
        index.write_bytes(index.read_bytes()[:-100])
    elif how == "no manifest":
        manifest.unlink()
    elif how == "half a manifest":
        manifest.write_text(manifest.read_text()[:-20])
    elif how == "names a function":
        index.write_bytes(_calls("builtins", "print", "x"))
    elif how == "names a function of a module":
        index.write_bytes(_calls("torch.distributed.checkpoint.metadata", "os.mkdir", touched))
    elif how == "lists an object":
        saved = pickle.loads(index.read_bytes())
        name = "model.a.bias"
        saved.state_dict_metadata[name] = BytesStorageMetadata()
        where = next(i for i in saved.storage_data if i.fqn == name)
        info = saved.storage_data.pop(where)
        body = io.BytesIO()
        torch.save(Touch(touched), body)
        with shard.open("ab") as f:
            offset = f.tell()
            f.write(body.getvalue())
        saved.storage_data[dataclasses.replace(where, offset=None, index=None)] = dataclasses.replace(
            info, relative_path=shard.name, offset=offset, length=len(body.getvalue())
        )
        index.write_bytes(pickle.dumps(saved))
    if how.startswith(("names", "lists")):
        _resum(folder)


DAMAGED = {
    "cut off": r"damaged: __1_0.distcp, which holds a\.bias, .* and \d+ more, is not",
    "one bit": r"damaged: __1_0.distcp, which holds a\.bias, .* and \d+ more, is not",
    "no shard": r"damaged: __1_0.distcp, which holds",
    "index": r"damaged: \.metadata",
    "no manifest": "incomplete",
    "half a manifest": "manifest cannot be read",
    "names a function": "names builtins.print",
    "names a function of a module": "names torch.distributed.checkpoint.metadata.os.mkdir",
    "lists an object": "names torch.distributed.checkpoint.metadata.BytesStorageMetadata",
}


def _refused(folder: str) -> None:
    model = _placed(0, (2,))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS["adamw"](trained)
    _steps(model, optimizer)
    good = Path(folder) / "good"
    checkpoint.save(good, model, optimizer)
    if dist.get_rank() == 1:
        torch.save(model.a.weight.to_local().detach(), Path(folder) / "value.pt")
    before = _everything(model, optimizer)

    for how, match in DAMAGED.items():
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.copytree(good, Path(folder) / how)
            _damage(Path(folder) / how, how)
        dist.barrier()
        with pytest.raises(CheckpointError, match=match):
            checkpoint.load(Path(folder) / how, model, optimizer)
    assert not (Path(folder) / "ran").exists()

    other = nn.ModuleDict({"a": nn.Linear(8, 13), "c": nn.Linear(2, 2)})
    with pytest.raises(
        CheckpointError,
        match=r"missing in the checkpoint: a\.weight, c\.bias, c\.weight; unknown to the model: b\.bias, b\.weight, frozen, .* and 5 more",
    ):
        checkpoint.load(good, other)
    wide = Mixed()
    wide.a.bias, wide.b = nn.Parameter(torch.zeros(14)), nn.Linear(8, 3)
    with pytest.raises(
        CheckpointError, match=r"a\.bias \(\[\[13\], 'float32'\] saved, \[\[14\], 'float32'\] here\), b\.weight \(.*bfloat16"
    ):
        checkpoint.load(good, wide)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        checkpoint.load(Path(folder) / "nowhere", model)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):  # on rank 1 alone, but rank 0 does not wait for it
        checkpoint.load(good if dist.get_rank() == 0 else Path(folder) / "nowhere", model)
    with pytest.raises(CheckpointError, match="state of AdamW, not of SGD"):
        checkpoint.load(good, model, OPTIMIZERS["sgd"](trained))
    with pytest.raises(CheckpointError, match=r"other parameter groups.*only one of them trains scale"):
        checkpoint.load(good, model, torch.optim.AdamW(trained[1:]))
    checkpoint.save(Path(folder) / "alone", model)
    with pytest.raises(CheckpointError, match="holds no optimizer"):
        checkpoint.load(Path(folder) / "alone", model, optimizer)
    with pytest.raises(CheckpointError, match="JSON"):
        checkpoint.save(Path(folder) / "x", model, extra={"a": object() if dist.get_rank() == 0 else 1})
    (Path(folder) / "file").touch()
    with pytest.raises(CheckpointError, match="FileExists"):
        checkpoint.save(Path(folder) / "file", model)
    _assert_same(_everything(model, optimizer), before)
    checkpoint.load(good, model, optimizer)
    _assert_same(_everything(model, optimizer), before)


def test_wrong_checkpoints_are_refused(tmp_path: Path) -> None:
    """On every rank, by name, without running what they say, and with nothing of model or optimizer touched."""
    run(_refused, 2, str(tmp_path))


# ---- safetensors ---------------------------------------------------------------------------------------------------


def _same_bytes(one: Path, other: Path) -> bool:
    """Whether two safetensors files are equal; the order of the header's entries is a hash map's, and says nothing."""

    def parts(file: Path) -> tuple[dict[str, Any], bytes]:
        data = file.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        return json.loads(data[8:end]), data[end:]

    return parts(one) == parts(other)


# What is tied, and so stored only under its first name.
SAFE = {"mixed": ["a.weight"], "gpt2": ["lm_head.weight"], "llama": []}


def _safetensors(folder: str) -> None:
    for name in SAFE:
        _round_trip(Path(folder) / name, name)


def _round_trip(folder: Path, name: str) -> None:
    """`source/model.safetensors` holds another model's values: read, written in one file and in many, read again."""
    for sizes in ((4,), (2, 2)):
        torch.manual_seed(5)
        model = Mixed() if name == "mixed" else ZOO[name].build()
        distribute(model, init_device_mesh("cpu", sizes), mixed(len(sizes)))
        tensors = {id(t): t for t in model.state_dict(keep_vars=True).values()}.values()
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        read = load_safetensors(model, folder / "source")
        assert read <= 1.1 * sum(t.numel() * t.element_size() for t in local)
        whole, parts = folder / f"whole{len(sizes)}", folder / f"parts{len(sizes)}"
        save_safetensors(model, parts, max_shard_size=100)
        save_safetensors(model, parts, max_shard_size=20_000 if name != "mixed" else 400)
        save_safetensors(model, whole)
        if dist.get_rank() == 0:
            assert _same_bytes(whole / "model.safetensors", folder / "source" / "model.safetensors")
            files = sorted(parts.glob("*.safetensors"))
            index = json.loads((parts / "model.safetensors.index.json").read_text())
            assert len(files) > 1 and {f.name for f in files} == set(index["weight_map"].values())
            assert sum(f.stat().st_size for f in files) > index["metadata"]["total_size"] > 0
            for f in files:
                held = load_file(f)
                size = sum(t.numel() * t.element_size() for t in held.values())
                assert size <= (20_000 if name != "mixed" else 400) or len(held) == 1
                assert all(index["weight_map"][n] == f.name for n in held)
        dist.barrier()
        before = _everything(model, None)
        with torch.no_grad():
            for t in tensors:
                t.zero_()
        load_safetensors(model, parts)
        _assert_same(_everything(model, None), before)
        save_safetensors(model, parts)  # one file now: nothing of the old ones may be read again
        assert [f.name for f in parts.iterdir()] == ["model.safetensors"]
        dist.barrier()


def test_safetensors_round_trip(tmp_path: Path) -> None:
    for name, tied in SAFE.items():
        torch.manual_seed(1)
        source = Mixed() if name == "mixed" else ZOO[name].build()
        state = {n: t.clone().contiguous() for n, t in source.state_dict().items() if n not in tied}
        (tmp_path / name / "source").mkdir(parents=True)
        save_file(state, tmp_path / name / "source" / "model.safetensors", metadata={"format": "pt"})
    run(_safetensors, 4, str(tmp_path))


def _distributed(module: nn.Module) -> nn.Module:
    distribute(module, init_device_mesh("cpu", (dist.get_world_size(),)), mixed(1))
    return module


def _transformers(folder: str) -> None:
    import transformers as T

    base = _distributed(ZOO["gpt2"].build().transformer)
    model = _distributed(ZOO["gpt2"].build())
    save_safetensors(base, Path(folder) / "base")
    load_safetensors(model, Path(folder) / "base")
    _assert_same(_everything(model.transformer, None), _everything(base, None))

    half = _distributed(ZOO["llama"].build().half())
    model = _distributed(ZOO["llama"].build())
    save_safetensors(half, Path(folder) / "half", max_shard_size=5000)
    load_safetensors(model, Path(folder) / "half")
    _assert_same(_everything(model, None), {n: t.float() for n, t in _everything(half, None).items()})

    model.config.save_pretrained(Path(folder) / "half")
    again = T.LlamaForCausalLM.from_pretrained(Path(folder) / "half", dtype=torch.float16)
    _assert_same(_everything(again, None), _everything(half, None))

    before = _everything(model, None)
    for how, match in (
        ("names", r"missing: model\.norm\.weight; unknown to the model: other"),
        ("shape", r"lm_head\.weight is \[96, 31\] in the checkpoint, \[96, 32\] in the model"),
        ("cut off", "cannot be read"),
        ("no file", "cannot be read"),
        ("index", "cannot be read"),
        ("nothing", "there is no safetensors checkpoint"),
    ):
        bad = Path(folder) / how
        save_safetensors(model, bad, max_shard_size=5000)
        if dist.get_rank() == 0:
            index = bad / "model.safetensors.index.json"
            files = json.loads(index.read_text())["weight_map"]
            last = bad / files["lm_head.weight"]
            if how == "names":
                index.write_text(index.read_text().replace("model.norm.weight", "other"))
            elif how == "shape":
                save_file({n: t[..., 1:].contiguous() for n, t in load_file(last).items()}, last)
            elif how == "cut off":
                last.write_bytes(last.read_bytes()[:-1])
            elif how == "no file":
                last.unlink()
            elif how == "index":
                index.write_text("[]")
            else:
                index.unlink()
        dist.barrier()
        with pytest.raises(CheckpointError, match=match):
            load_safetensors(model, bad)
    _assert_same(_everything(model, None), before)
    (Path(folder) / "taken").touch()
    with pytest.raises(CheckpointError, match="FileExists"):
        save_safetensors(model, Path(folder) / "taken")


def test_transformers_reads_what_we_write_and_we_what_it_writes(tmp_path: Path) -> None:
    """A base model's file, another dtype, from_pretrained; wrong files are refused before any tensor is touched."""
    run(_transformers, 2, str(tmp_path))
