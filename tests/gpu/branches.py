"""Files of ours that do something else on a GPU than on a CPU, and what `make gpu-check` runs of them there.

    python -m tests.gpu.branches

prints those of which nothing is run on one GPU. A test holds the table against the sources (`tests/unit/test_gpu_branches.py`): a branch in a new file has to be put here.
"""

from __future__ import annotations

import ast

from tests.structure import sources

FEATURES, ONE, MODELS = "tests/gpu/test_features.py", "tests/gpu/test_one_gpu.py", "tests/gpu/test_models.py"
KERNELS = "tests/kernels"
# By module: the test that runs it on the GPU, as file::function, or a folder of such.
EXERCISED = {
    "autopar.api": f"{FEATURES}::test_same_numbers",
    "autopar.distributed.groups": f"{FEATURES}::test_same_numbers",
    "autopar.hardware.detect": f"{ONE}::test_llama_trains",
    "autopar.kernels.attention": f"{ONE}::test_llama_bf16",
    "autopar.kernels.loss_head": f"{FEATURES}::test_same_numbers",
    "autopar.kernels.triton": KERNELS,
    "autopar.kernels.triton.launching": KERNELS,
    "autopar.offload.buffers": f"{FEATURES}::test_offload",
    "autopar.offload.disk": f"{FEATURES}::test_offload",
    "autopar.offload.host": f"{FEATURES}::test_offload",
    "autopar.offload.streams": f"{FEATURES}::test_offload",
    "autopar.passes.demands": f"{MODELS}::test_images",
    "autopar.runtime.artifacts": f"{FEATURES}::test_compiled_ahead",
    "autopar.runtime.build": f"{FEATURES}::test_same_numbers",
    "autopar.runtime.micro_batches": f"{FEATURES}::test_same_numbers",
    "autopar.runtime.step": f"{FEATURES}::test_same_numbers",
}
# By module: why not, in words.
NOT_EXERCISED = {
    "autopar.cli.compile": "the command itself; what it writes is loaded as a first run's is",
    "autopar.elastic.newcomer": "wants several processes",
    "autopar.elastic.state": "wants several processes",
    "autopar.hardware.calibrate.copies": "`autopar calibrate` takes minutes of its own",
    "autopar.hardware.calibrate.measure": "`autopar calibrate` takes minutes of its own",
    "autopar.hardware.calibrate.result": "`autopar calibrate` takes minutes of its own",
    "autopar.hardware.calibrate.timing": "`autopar calibrate` takes minutes of its own",
    "autopar.hardware.calibrate.work": "`autopar calibrate` takes minutes of its own",
    "autopar.hardware.calibrate.world": "`autopar calibrate` takes minutes of its own",
    "autopar.kernels.experts": "grouped products in bf16: routed experts are not run on the GPU",
    "autopar.runtime.executor": "wants several processes: pipelines",
    "autopar.runtime.init_record": "models that begin on the meta device are not run on the GPU",
    "autopar.runtime.init": "models that begin on the meta device are not run on the GPU",
    "autopar.watch.monitor": "peak memory of the allocator, and waiting for the device: not run on the GPU",
    "autopar.watch.trace": "events of the device in a trace: not run on the GPU",
}


def branching() -> set[str]:
    """Modules that ask torch for CUDA, or a tensor or device whether it is on one."""
    return {module for module, path in sources().items() if any(map(_is_branch, ast.walk(ast.parse(path.read_text()))))}


def _is_branch(n: ast.AST) -> bool:
    if isinstance(n, ast.Attribute):
        return n.attr == "is_cuda" or ast.unparse(n).startswith("torch.cuda.")
    if isinstance(n, ast.Compare):
        device = any(
            (isinstance(s, ast.Attribute) and s.attr in ("type", "device_type")) or (isinstance(s, ast.Name) and s.id == "kind")
            for s in ast.walk(n.left)
        )
        return device and any(isinstance(c, ast.Constant) and c.value in ("cuda", "cpu") for c in n.comparators)
    return False


def main() -> None:
    print(f"CUDA-only branches: files of which a part is run on one GPU {len(EXERCISED)}, files of which nothing is {len(NOT_EXERCISED)}:")
    for module, why in NOT_EXERCISED.items():
        print(f"    not exercised: {module}: {why}")


if __name__ == "__main__":
    main()
