"""A program cut into the stages of a pipeline.

In: the captured program, its plan, and the stage of every operator (`autopar.planner.cuts`). `separate.py` gives each stage a copy of what it reads of parameters, so that
gradients of one that several stages read stay apart; `cut.py` takes what a stage runs out of the rewritten graph: a joint graph like any other, for the passes behind it.
"""
