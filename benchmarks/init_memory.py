"""Peak resident memory of initialising a Llama that is built on the meta device, against the bytes of a rank's shards.

    torchrun --nproc-per-node 4 benchmarks/init_memory.py                                          1.1 B parameters, 4.5 GB of float32 in all
    torchrun --nproc-per-node 4 benchmarks/init_memory.py --hidden 1024 --layers 10 --vocab 16000

Rank 0 prints one JSON object; `ratio` is the largest of any rank. What Python, torch and a first, tiny model take is the baseline and not counted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from autopar.runtime.init import materialize

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (the peak since it was last reset)."""
    found = re.search(rf"{field}:\s+(\d+) kB", STATUS.read_text())
    assert found
    return int(found[1]) * 1024


def build(hidden: int, layers: int, vocab: int) -> torch.nn.Module:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=hidden,
                intermediate_size=hidden * 11 // 4,
                num_hidden_layers=layers,
                num_attention_heads=hidden // 64,
                num_key_value_heads=hidden // 64,
                vocab_size=vocab,
            )
        )


def placements(name: str, shape: tuple[int, ...]) -> tuple[Placement, ...]:
    return (Shard(0) if shape else Replicate(),)


def measure(mesh: DeviceMesh, hidden: int, layers: int, vocab: int) -> dict[str, float]:
    materialize(build(64, 1, 128), mesh, placements, 0, torch.device("cpu"))
    model = build(hidden, layers, vocab)
    CLEAR_REFS.write_text("5")
    before_bytes, begin_s = resident_bytes("VmRSS"), time.perf_counter()
    materialize(model, mesh, placements, 0, torch.device("cpu"))
    grown_bytes, seconds = resident_bytes("VmHWM") - before_bytes, time.perf_counter() - begin_s
    shard_bytes = sum(p.to_local().nbytes for p in model.parameters())
    largest = torch.tensor([grown_bytes / shard_bytes, float(grown_bytes), float(shard_bytes), seconds], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    ratio, grown, shards, slowest = largest.tolist()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "ranks": mesh.size(),
        "shard_bytes": int(shards),
        "peak_growth_bytes": int(grown),
        "ratio": round(ratio, 3),
        "seconds": round(slowest, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--out", type=Path, help="where to write the result (JSON)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = measure(init_device_mesh("cpu", (dist.get_world_size(),)), args.hidden, args.layers, args.vocab)
    if dist.get_rank() == 0:
        print(json.dumps(result))
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # torchrun runs this file by its path
        from benchmarks.record import write

        write(args.out, f"torchrun --nproc-per-node {dist.get_world_size()} benchmarks/init_memory.py", result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
