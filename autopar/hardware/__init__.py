"""Hardware: what a device computes and holds, what links carry. Torch-free but for what is measured.

In: a name ("h100:32x8"), a JSON file, or this machine (detect.py, `calibrate/`). Out: `Cluster`. **Add a device as a file in `clusters/`.**
"""
