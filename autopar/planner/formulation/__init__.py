"""Graph, mesh and costs become the solver's Problem, and its decision a plan again.

In: classes of operators (symmetry.py), rules, costs. Out: a Problem. In order:

    strategies.py, clusters.py       what an operator may do, which operators are decided together
    parameter_storage.py, times.py   where parameters may be stored, what operators take
    program.py, wires.py             who makes and reads what; values, with the arcs between their placements
    recompute.py, where_kept.py      what may be made again, what may be kept away from the device
    problem.py                       all of it in one walk
    lifetimes.py, live_bytes.py      when tensors live; bytes by position
    memory_rows.py                   rows of the program, with recompute_chains.py, relaxed_rows.py and offload.py
    lower_bound.py, layouts.py       a bound for every plan; hand layouts as constraints
    apply.py                         a decision as a Plan

**A new kind of choice** is a `Choice` in problem.py, its name in names.py, and its part of apply.py.
"""
