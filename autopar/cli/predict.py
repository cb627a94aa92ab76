"""`autopar predict`: what a step of one layout takes."""

from __future__ import annotations

from typing import Annotated

import typer

from autopar.cli.options import AsJson, Batch, Computed, Devices, How, Imbalance, Model, Sequence, SomeLayers, StateOf, built
from autopar.cli.screen import Screen
from autopar.planner.layout import RECOMPUTE, Layout


def predict(
    model: Model,
    cluster: Devices,
    batch: Batch,
    seq: Sequence,
    tp: Annotated[int, typer.Option(min=1, help="devices that split tensors")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="devices that split the sequence")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="devices that split the layers")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="devices with data that share the routed experts")] = 1,
    expert_tp: Annotated[
        int | None,
        typer.Option(min=1, help="devices that split what an expert has inside; experts then lie over the next ep of tp x cp x dp"),
    ] = None,
    virtual: Annotated[int, typer.Option(min=1, help="stages of a pipeline rank")] = 1,
    micro_batch: Annotated[int, typer.Option(min=1, help="sequences of a replica at a time")] = 1,
    zero: Annotated[int, typer.Option(min=0, max=3, help="what replicas shard: 1 optimizer, 2 gradients too, 3 parameters too")] = 0,
    recompute: Annotated[str, typer.Option(help=f"what backward makes again: {', '.join(RECOMPUTE)}")] = "none",
    offload: Annotated[float, typer.Option(min=0.0, max=1.0, help="fraction of the activations kept in host memory")] = 0.0,
    sequence_parallel: Annotated[
        bool | None, typer.Option(help="between products, split along the sequence; without it as is fastest")
    ] = None,
    runtime: How = "autopar",
    precision: Computed = "bf16",
    optimizer: StateOf = "adamw",
    imbalance: Imbalance = 1.0,
    layers: SomeLayers = None,
    as_json: AsJson = False,
) -> None:
    """Say what a step of a hand layout takes; data parallelism is what the sizes leave of the devices."""
    layout = Layout(
        tp=tp, cp=cp, pp=pp, ep=ep, virtual=virtual, micro_batch=micro_batch, zero=zero, recompute=recompute, offload=offload,
        sequence_parallel=sequence_parallel, expert_tp=expert_tp,
    )  # fmt: skip
    from autopar.hardware.cluster import Cluster
    from autopar.planner.imbalance import checked, refuse_more

    layout.replicas(Cluster.of(cluster).size)  # said before a model is built
    refuse_more(checked(imbalance, Cluster.of(cluster).size), layout.ep, f"ep={layout.ep} ranks")
    with Screen("predicting") as on_progress:
        module, shapes = built(model, layers, batch, seq)
        from autopar.predict import predict as run

        done = run(
            module, shapes, cluster, layout, global_batch=batch, runtime=runtime, precision=precision, optimizer=optimizer, progress=on_progress, imbalance=imbalance,
        )  # fmt: skip
    if as_json:
        from autopar.cli.documents import prediction_document

        typer.echo(prediction_document(done))
    else:
        typer.echo(done.text())
