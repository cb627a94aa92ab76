"""A differential fuzzer: random modules, as text, under random settings, against plain eager PyTorch on one device.

    python -m tests.fuzz --seconds 600 --seed 1

`generate` draws a program (`program`) by the `grammar`, `settings` how it is run, `run` runs it, `judge` compares, `shrink` makes what fails small.
"""
