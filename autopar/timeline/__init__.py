"""What a rank does in a step, in time: calls on streams and the memory that is in use meanwhile. Torch-free; needs no graph and no solver.

In: a profile, the calls of a step with equal layers told once (profile.py), as a plan and its file have it. Out: every call of every layer when it runs (replay.py,
expand.py), and the same as trace-event JSON for Perfetto (perfetto.py). `autopar.planner.profiling` makes profiles, `autopar.simulate` replays rewritten graphs.
**Add a field of a call in profile.py**, and its column in the plan's schema.
"""
