"""Training loops at random: the same calls, in the same order, on `autopar.compile`'s module and on the plain one.

    python -m tests.fuzz --loops --seconds 300 --seed 1 [--processes 2]

A loop is a list of actions, so it can be printed, repeated and made small by leaving actions out. After each action losses, gradients (where one
process would see them, too), parameters and buffers are compared.
"""

from __future__ import annotations

import contextlib
import copy
import random
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import checkpoint
from autopar.errors import AutoparError
from tests.fuzz.names import fill, randn
from tests.spmd.simulate import fake_world

Action = tuple[Any, ...]
D = torch.float64


class Plain(nn.Module):
    """Two layers with running statistics, of which one stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.down.bias.requires_grad_(False)
        fill(self, D)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.down(torch.tanh(self.norm(self.up(x)))), y)


class Tied(nn.Module):
    """Words whose table is the head's weight, and a branch that evaluation leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix, self.extra = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.words.weight
        fill(self, D)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.mix(self.words((x[:, 0].abs() * 4).long() % 8)))
        if self.training:
            h = h + self.extra(h)
        return F.cross_entropy(self.head(h), (y[:, 0].abs() * 4).long() % 8)


class Image(nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        fill(self, D)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        h = F.relu(self.norm(self.conv(x.view(-1, 2, 3))))
        return F.smooth_l1_loss(self.out(h.flatten(1)), y)


MODELS: dict[str, Callable[[], nn.Module]] = {"plain": Plain, "tied": Tied, "image": Image}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd-plain": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "": lambda o: None,
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
    "warmup": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=4),
}


def draw(seed: int) -> tuple[dict[str, str], list[Action]]:
    rng = random.Random(seed)
    what = {
        "model": rng.choice(list(MODELS)),
        "optimizer": rng.choice(list(OPTIMIZERS)),
        "scheduler": rng.choice(list(SCHEDULERS)),
        "layout": rng.choice(("fsdp", "ddp")),
    }
    sizes = [8, rng.choice((8, 4, 6, 12))]
    kinds = {
        "step": 8, "accumulate": 2, "no_sync": 2, "eval": 1.5, "train": 1, "no_grad": 1.5, "two": 1.5, "clip": 2, "zero": 1, "save": 1, "load": 1, "state": 1,
        "freeze": 0.5, "rate": 0.7, "backward": 1, "fresh": 0.4, "poke": 0.5, "frozen_eval": 0.4,
    }  # fmt: skip
    out: list[Action] = []
    for i in range(rng.choice((4, 6, 8, 12))):
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        out.append((kind, rng.choice(sizes), 17 * seed % 1000 + i, rng.choice((True, False)), rng.choice((2, 3))))
    return what, out


class Loop:
    """One of the two: the module in use, with what belongs to it."""

    def __init__(self, what: dict[str, str], model: nn.Module, compile: Callable[[nn.Module], nn.Module] | None, folder: Path) -> None:
        self.what, self.compile, self.folder = what, compile, folder
        self.model: Any = compile(model) if compile else model  # a compiled one also has no_sync
        self.make()
        self.saved: Any = None

    def make(self) -> None:
        self.optimizer = OPTIMIZERS[self.what["optimizer"]]([p for p in self.model.parameters()])
        self.scheduler = SCHEDULERS[self.what["scheduler"]](self.optimizer)

    def loss(self, n: int, seed: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(randn(seed, n, 6, dtype=D), randn(seed + 1, n, 4, dtype=D))
        return loss

    def do(self, action: Action) -> list[Any]:
        """What can be seen of it."""
        kind, n, seed, flag, k = action
        seen: list[Any] = []
        if kind in ("step", "accumulate", "no_sync", "clip", "two"):
            if kind == "two":
                a, b = self.loss(n, seed), self.loss(8, seed + 2)
                seen += [a.detach(), b.detach()]
                (b.backward(), a.backward()) if flag else (a + 2 * b).backward()
            elif kind == "step":
                loss = self.loss(n, seed)
                loss.backward()
                seen.append(loss.detach())
            else:
                for i in range(k):
                    scope = self.model.no_sync() if kind == "no_sync" and i < k - 1 and self.compile else contextlib.nullcontext()
                    with scope:
                        loss = self.loss(n, seed + i) / k
                        loss.backward()
                    seen.append(loss.detach())
            if kind == "clip":
                seen.append(whole(nn.utils.clip_grad_norm_(self.model.parameters(), 0.05, error_if_nonfinite=True)))
            seen += self.grads()
            self.optimizer.step()
            if self.scheduler is not None and flag:
                self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=flag)
        elif kind == "backward":
            loss = self.loss(n, seed)
            loss.backward()
            seen.append(loss.detach())
        elif kind == "eval":
            self.model.eval()
            if flag:
                seen.append(self.loss(n, seed).detach())
                self.model.train()
        elif kind == "frozen_eval":
            # Statistics stay, gradients come.
            self.model.eval()
            self.loss(n, seed).backward()
            self.model.train()
        elif kind == "train":
            self.model.train()
        elif kind == "no_grad":
            with torch.no_grad() if flag else torch.inference_mode():
                seen.append(self.loss(n, seed).clone())
        elif kind == "zero":
            self.optimizer.zero_grad(set_to_none=flag)
        elif kind == "freeze":
            p = list(self.model.parameters())[seed % 2]
            p.requires_grad_(not p.requires_grad)
        elif kind == "rate":
            for g in self.optimizer.param_groups:
                g["lr"] *= 0.5
        elif kind == "poke":
            with torch.no_grad():
                next(iter(self.model.parameters())).mul_(0.9)
        elif kind == "save":
            path = self.folder / f"{seed}"
            if self.compile:
                checkpoint.save(path, self.model, self.optimizer)
                self.saved = path
            else:
                self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        elif kind == "load" and self.saved is not None:
            if self.compile:
                checkpoint.load(self.saved, self.model, self.optimizer)
            else:
                self.model.load_state_dict(copy.deepcopy(self.saved[0]))
                self.optimizer.load_state_dict(copy.deepcopy(self.saved[1]))
        elif kind == "state":
            self.model.load_state_dict({n: v * 1 for n, v in self.model.state_dict().items()})
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        elif kind == "fresh":
            self.make()
        return [*seen, *self.state()]

    def grads(self) -> list[Any]:
        return [whole(p.grad) for p in self.model.parameters()]

    def state(self) -> list[Any]:
        return [whole(t).clone() for t in [*self.model.parameters(), *self.model.buffers()]] + self.grads()


def whole(t: Any) -> Any:
    return t.full_tensor().detach() if isinstance(t, DTensor) else t.detach() if isinstance(t, torch.Tensor) else t


def differs(a: list[Any], b: list[Any]) -> str:
    if len(a) != len(b):
        return f"{len(b)} things, not {len(a)}"
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if (x is None) != (y is None):
            return f"{i} of {len(a)}: {'None' if y is None else 'not None'}, unlike eager's"
        if x is not None and not (
            x.shape == y.shape and x.dtype == y.dtype and torch.allclose(x.double(), y.double(), rtol=1e-7, atol=1e-9)
        ):
            return f"{i} of {len(a)}: {y}, not {x}"
    return ""


def check(what: dict[str, str], actions: list[Action], mesh: tuple[int, ...] = (1,)) -> str:
    """What went wrong, "" if nothing did. Runs in whatever world there is."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = Loop(what, MODELS[what["model"]](), None, folder)
        ours = Loop(what, MODELS[what["model"]](), lambda m: autopar.compile(m, mesh, layout=what["layout"], backend="aot_eager"), folder)
        for i, action in enumerate(actions):
            try:
                want = one.do(action)
            except Exception as e:
                return f"eager: {type(e).__name__}"
            try:
                got = ours.do(action)
            except AutoparError as e:
                return f"refused: {e.what}"
            except Exception as e:
                return f"action {i} {action}: {type(e).__name__}: {traceback.format_exc()[-1500:]}"
            wrong = differs(want, got)
            if wrong:
                return f"action {i} {action}: {wrong}"
    return ""


def is_failure(said: str) -> bool:
    return bool(said) and not said.startswith(("eager:", "refused:"))


def one_process(what: dict[str, str], actions: list[Action]) -> str:
    with fake_world(1):
        return check(what, actions)


def _gloo(what: dict[str, str], actions: list[Action], processes: int) -> str:
    return check(what, actions, (processes,))


def tried(what: dict[str, str], actions: list[Action], processes: int) -> str:
    if processes == 1:
        return one_process(what, actions)
    from tests.dist.launch import run

    # A checkpoint's folder is rank 0's, so those are for one process.
    actions = [a for a in actions if a[0] not in ("save", "load")]
    return next((s for s in run(_gloo, processes, what, actions, processes) if s), "")


def search(seed: int, loops: int, seconds: float, processes: int = 1) -> int:
    """Number of failures."""
    end, count, found = time.monotonic() + seconds, 0, Counter[str]()
    for number in range(seed, seed + loops):
        if time.monotonic() > end:
            break
        what, actions = draw(number)
        said = tried(what, actions, processes)
        count += 1
        found[said.split(":")[0] if not is_failure(said) else "failed"] += 1
        if is_failure(said):
            for i in reversed(range(len(actions))):
                rest = actions[:i] + actions[i + 1 :]
                again = tried(what, rest, processes)
                if is_failure(again):
                    actions, said = rest, again
            print(f"\n=== loop {number}\n{what}\n{actions}\n{said}", flush=True)
        elif said:
            print(f"loop {number}: {said}", flush=True)
    print(f"{count} loops: {dict(found)}")
    return found["failed"]
