"""Parts of the shard pass (`passes/shard.py`), which hand each other values: the graph that is made (emit.py), every tensor's versions (versions.py), an
operator's local form (operators.py), parameters and gradients (parameters.py), names of groups (groups.py).

In: captured nodes and the plan's choices. Out: nodes of the local graph. **Add a local lowering in `passes/local/`, not here.**
"""
