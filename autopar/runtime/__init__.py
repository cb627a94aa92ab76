"""A training step that runs: the module people call.

In: a module, a mesh, a plan. Out: `ParallelModule` (module.py), whose first call of each kind makes a step (build.py) that is rewritten and lowered (step.py, lower.py),
reads inputs (inputs.py), and gives outputs and gradients (outputs.py, gradients.py). Parameters are cut or made in place by init.py.
"""
