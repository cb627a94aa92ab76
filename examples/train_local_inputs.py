"""Each rank reads its own part of the data set, through a DistributedSampler: `inputs="local"`.

    python examples/train_local_inputs.py --plain                    one process, ordinary PyTorch
    torchrun --nproc-per-node 4 examples/train_local_inputs.py       four processes, the same losses

`model.data_rank` and `model.data_world` say which part a rank should pass. They are not the rank and the world size: ranks that split a matrix
rather than the batch read the same rows. The loss is that of the whole batch, on every rank.
"""

from __future__ import annotations

import argparse
import inspect

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

SEQ, ROWS, GLOBAL_BATCH = 64, 64, 8


def dataset() -> TensorDataset:
    """Consecutive windows of a text that every machine has."""
    text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8).long()
    return TensorDataset(text[: ROWS * SEQ].view(ROWS, SEQ))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true", help="ordinary PyTorch on one process")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--layout", help="a hand layout, such as fsdp; default: planned")
    parser.add_argument("--backend", default="aot_eager", help="inductor for speed; aot_eager starts at once")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    data_rank, data_world = 0, 1
    if not args.plain:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        model = autopar.compile(model, mesh, inputs="local", layout=args.layout, backend=args.backend)
        data_rank, data_world = model.data_rank, model.data_world

    data = dataset()
    sampler = DistributedSampler(data, num_replicas=data_world, rank=data_rank, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // data_world, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (ids,) in loader:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if args.plain or dist.get_rank() == 0:
                print(f"step {step} loss {loss.item():.6f}", flush=True)
            step += 1

    if not args.plain:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
