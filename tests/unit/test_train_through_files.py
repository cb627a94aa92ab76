"""A model whose activations are more than the process may have in memory: it trains with its activations in files, and not without."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.wide import wide

LIMIT_MB = (
    390  # beside what the process has when the step is compiled, and what is on its way to a slow disk; the activations alone are 512 MB
)

CHILD = """
    import resource, sys
    import torch
    from torch import nn
    import autopar
    from autopar.offload import find_store

    directory, offloads, limit = sys.argv[1], sys.argv[2] == "files", int(sys.argv[3]) << 20
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.GELU())], nn.Linear(512, 8))
    x, y = torch.randn(16384, 512), torch.randint(0, 8, (16384,))
    how = {"memory": 300e6, "offload": autopar.Offload(host=False, nvme=directory)} if offloads else {"memory": "fastest", "offload": False}
    compiled = autopar.compile(model, (1,), backend="aot_eager", optimizer="sgd", loss_fn=nn.functional.cross_entropy, **how)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    step = compiled.prepare(x, target=y)
    assert not compiled.plan.repeated
    heavy = [n for n in compiled.plan.recompute if "addmm" in n]
    now = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (now + limit,) * 2)
    losses = []
    for _ in range(2):
        loss = compiled(x, target=y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print("losses", losses, "products made again", len(heavy), "away", sorted(set(compiled.plan.offload.values())))
"""


def child(directory: Path, how: str, limit_mb: int) -> subprocess.CompletedProcess[str]:
    # Small blocks in freed large ones would make the heap grow, which is not what RLIMIT_DATA is to show.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(directory), how, str(limit_mb)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)


@wide
def test_trains_through_files(tmp_path: Path) -> None:
    files, memory, plenty = child(tmp_path, "files", LIMIT_MB), child(tmp_path, "memory", LIMIT_MB), child(tmp_path, "memory", 0)
    assert files.returncode == 0, files.stderr
    assert plenty.returncode == 0, plenty.stderr
    assert memory.returncode != 0 and "allocate" in memory.stderr, memory.stderr
    losses, _, rest = files.stdout.partition(" products")
    assert losses == plenty.stdout.partition(" products")[0]  # bitwise
    assert "made again 0" in rest and "['nvme']" in rest
    assert list(tmp_path.iterdir()) == []
