"""The torch-free graph, and where its tensors lie on a mesh. Nothing here imports torch.

In: what `autopar.capture.describe` saw of an fx graph. Out: `Graph` (graph.py), `Mesh` with refined axes (mesh.py), `Placement` as digits (placement.py), the
collectives between two placements (redistribution.py), what a rewritten graph's calls are (calls.py).
**Add a kind of collective in redistribution.py**, and its cost in `autopar/cost/links.py`.
"""
