"""See the package."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests import sweep
from tests.fuzz.settings import Setting
from tests.fuzz.workers import Worker
from tests.sweep.small import HEADS_OF, classes, program


def main() -> None:
    a = argparse.ArgumentParser(description=sweep.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--seconds", type=float, default=1e9)
    a.add_argument("--heads", default=",".join(HEADS_OF))
    a.add_argument("--models", default="", help="model types, such as bert,llama; default: all")
    a.add_argument("--mesh", default="a=2", help='of simulated ranks, such as a=2,tp=2; "" for one process alone')
    a.add_argument("--layout", default="fsdp")
    a.add_argument("--backend", default="aot_eager", help="of the run on one process")
    a.add_argument("--shard", default="0/1", help="k/n: every n-th model, from the k-th")
    a.add_argument("--out", type=Path, help="a file for what each came to, a line of JSON each")
    o = a.parse_args()
    settings = [Setting(backend=o.backend)]
    if o.mesh:
        settings.append(Setting({k: int(v) for k, v in (x.split("=") for x in o.mesh.split(","))}, o.layout))
    k, n = map(int, o.shard.split("/"))
    wanted = [(h, t) for h in o.heads.split(",") for t in classes(h) if not o.models or t in o.models.split(",")]
    wanted = wanted[k::n]
    worker, start, came = Worker(), time.monotonic(), Counter[str]()
    try:
        for head, kind in wanted:
            if time.monotonic() - start > o.seconds:
                break
            got = worker.ask({"source": program(head, kind), "settings": [asdict(s) for s in settings]}, 600)
            if "died" in got:
                what, text = "died", str(got["died"])
            elif "failure" in got:
                what, text = f"failed: {got['failure']['kind']}", f"{got['setting']}\n{got['failure']['text']}"
            elif got["unfit"]:
                what, text = "eager refuses", got["unfit"]
            elif got["refused"]:
                what, text = "refused", next(iter(got["refused"]))
            else:
                what, text = "equal", ""
            came[what.split(":")[0]] += 1
            print(f"{head:12} {kind:28} {got.get('seconds', 0):5.1f} s  {what}  {text if what != 'equal' else ''}".rstrip(), flush=True)
            if o.out:
                with o.out.open("a") as f:
                    f.write(json.dumps({"head": head, "model": kind, "what": what, "text": text}) + "\n")
    finally:
        worker.close()
    print(f"{sum(came.values())} models in {time.monotonic() - start:.0f} s: {dict(came)}")


if __name__ == "__main__":
    main()
