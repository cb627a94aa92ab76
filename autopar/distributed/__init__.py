"""What the ranks of a mesh have and do together.

In: a DeviceMesh. Out: process groups under names that all ranks agree on (groups.py), what ranks compare and what one decides for all (agreement.py), errors that
reach every rank and say who is gone (failures.py, presence.py), and which part of a tensor a rank holds (shards.py).
"""
