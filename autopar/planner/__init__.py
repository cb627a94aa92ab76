"""From a captured graph, a cluster and a mesh to a `Plan`. The integer program itself is in `solver/`.

In: `Graph` folded into classes of equal layers, `Cluster`, mesh. Out: `Plan`. Hand layouts follow the data through the graph (layout.py, propagate.py); planned ones
are formulated (`formulation/`), solved in stages (stages.py, attempt.py, best_cut.py) and applied (planning.py); offline.py is `autopar.plan`: it captures (task.py) and plans
on several meshes, as several numbers of micro-batches (over_meshes.py). Questions afterwards: explain.py, frontier.py, budgets.py, refit.py. **Add what users may ask for in request.py.**
"""
