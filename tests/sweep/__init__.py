"""Other people's models, made small: every architecture of transformers by the heads that it has, held against eager as the fuzzer's programs are.

    python -m tests.sweep --seconds 600 [--heads causal,masked] [--models bert,llama] [--mesh a=2] [--layout fsdp] [--backend aot_eager] [--shard 0/2]

A model is a program (`tests.fuzz.program`) whose text names its class, so it is judged, run on ranks and told of as those are.
"""
