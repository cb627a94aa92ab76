"""Plans for every number of devices or nodes that failures may leave, made ahead: what each takes, and how long making them takes.

    python -m benchmarks.elastic_templates                                                       Llama-3-8B, 64 to 48 devices
    python -m benchmarks.elastic_templates --cluster h100:128x8 --unit node --batch 1024

Nothing is trained: these are `autopar.elastic.plans.templates`, by the cost model's prices. The last line has seconds from building the model to the table, and of the processor.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

from autopar.elastic.plans import templates
from autopar.models import configs
from benchmarks.record import write


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3-8b", help="a name in autopar.models.configs, or the path of a config.json")
    parser.add_argument("--cluster", default="h100:8x8")
    parser.add_argument("--unit", default="device", help="what fails as one: device or node")
    parser.add_argument("--survive", type=int, default=16, help="units that may be lost")
    parser.add_argument("--batch", type=int, default=256, help="sequences of a step, whatever is left")
    parser.add_argument("--seq", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences that are dealt as one")
    parser.add_argument("--layers", type=int, help="only so many of the model's")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    a = parse()
    began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    config = configs.config(a.model)
    made = templates(
        configs.build(config, a.layers), configs.inputs(config, a.batch, a.seq), a.cluster,
        global_batch=a.batch, survive=a.survive, unit=a.unit, micro_batch=a.micro_batch,
    )  # fmt: skip
    print(made)
    took, of_processor = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_utime - used
    print(f"{took:.1f} s, {of_processor:.1f} s of the processor")
    write(a.out, "python -m benchmarks.elastic_templates", {"seconds": round(took, 1), "cpu_s": round(of_processor, 1), **made.document()})


if __name__ == "__main__":
    main()
