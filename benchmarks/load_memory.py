"""Peak resident memory of loading a pretrained Llama onto a mesh, and of writing it, against the bytes of a rank's shards and of the whole.

    python -m benchmarks.load_memory --processes 4 --out benchmarks/results/load_memory.json

The shape is that of Llama-3-8B (its ratios of width, heads and vocabulary), scaled to the machine: by default a quarter as wide, half as deep. The checkpoint is written by one process, in
files that are scaled, too. Then two ways of loading it, each with processes of its own:

    parts   `autopar.from_pretrained`: built on the meta device, every rank reads its slices
    whole   transformers' `from_pretrained` on every rank, and `autopar.compile`

What Python, torch and a first, tiny model take is the baseline and not counted. Resident memory counts pages of files that were read through a mapping.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

import autopar
from benchmarks.init_memory import CLEAR_REFS, resident_bytes
from benchmarks.record import write

WIDTH, DEPTH, WORDS = 4096, 32, 128256  # of Llama-3-8B
FILE_SHARE = 5e9 / 32.1e9  # of its bytes in float32, which save_pretrained puts into one file
OPTIONS: dict[str, Any] = {"layout": "fsdp", "backend": "aot_eager"}


def config(scale: int, deep: int) -> Any:
    width = WIDTH // scale
    return transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 7 // 2,
        num_hidden_layers=DEPTH // deep,
        num_attention_heads=32 // scale,
        num_key_value_heads=8 // scale,
        vocab_size=WORDS // scale,
    )


def tiny() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=128
        )
    )


class Growth:
    """Bytes that this process grew by at most, and seconds."""

    def __enter__(self) -> Growth:
        gc.collect()
        CLEAR_REFS.write_text("5")
        self.before, self.begin = resident_bytes("VmRSS"), time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.peak, self.seconds = resident_bytes("VmHWM") - self.before, time.perf_counter() - self.begin


def child(a: argparse.Namespace) -> dict[str, Any]:
    dist.init_process_group("gloo")
    n = dist.get_world_size()
    autopar.compile(tiny(), (n,), **OPTIONS).save_pretrained(a.folder / "tiny")
    autopar.from_pretrained(transformers.LlamaForCausalLM, a.folder / "tiny", (n,), **OPTIONS)
    dist.barrier()
    with Growth() as load:
        if a.way == "parts":
            model = autopar.from_pretrained(transformers.LlamaForCausalLM, a.folder / "model", (n,), **OPTIONS)
        else:
            model = autopar.compile(transformers.LlamaForCausalLM.from_pretrained(a.folder / "model"), (n,), **OPTIONS)
        dist.barrier()
    shards = sum(p.to_local().nbytes for p in model.parameters())
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    with Growth() as save:
        model.save_pretrained(a.folder / f"again-{a.way}", max_shard_size=int(whole * FILE_SHARE))
    largest = torch.tensor([load.peak, save.peak, load.seconds, save.seconds], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    loaded, saved, load_s, save_s = largest.tolist()
    found = {
        "way": a.way, "ranks": n, "parameters": sum(p.numel() for p in model.parameters()), "whole_bytes": whole, "shard_bytes": shards,
        "load_peak_growth_bytes": int(loaded), "load_of_shards": round(loaded / shards, 3), "load_s": round(load_s, 1),
        "save_peak_growth_bytes": int(saved), "save_of_whole": round(saved / whole, 3), "save_s": round(save_s, 1),
    }  # fmt: skip
    dist.destroy_process_group()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--scale", type=int, default=4, help="how many times less wide than the 8-billion-parameter model")
    parser.add_argument("--deep", type=int, default=2, help="how many times less deep")
    parser.add_argument("--out", type=Path, help="where to write the result (JSON)")
    parser.add_argument("--way", help=argparse.SUPPRESS)  # of a child
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    a = parser.parse_args()
    torch.set_num_threads(1)
    if a.way:
        found = child(a)
        (a.folder / f"{a.way}.json").write_text(json.dumps(found))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = transformers.LlamaForCausalLM(config(a.scale, a.deep))
        whole = sum(p.numel() * p.element_size() for p in model.parameters())
        model.save_pretrained(Path(folder) / "model", max_shard_size=int(whole * FILE_SHARE))
        del model
        for way in ("parts", "whole"):
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={a.processes}"]
            subprocess.run([*launcher, "-m", "benchmarks.load_memory", "--way", way, "--folder", folder], check=True)
            rows.append(json.loads((Path(folder) / f"{way}.json").read_text()))
            print(json.dumps(rows[-1]), flush=True)
    write(a.out, "python -m benchmarks.load_memory", {"rows": rows})


if __name__ == "__main__":
    main()
