"""The integer program. Torch-free.

In: a Problem (problem.py): choices, values that flow between them, operators that may run twice, budgets. Out: a Decision with a bound (solve.py, model.py), priced
independently (evaluate.py) and, when small, against all others (brute_force.py). Repeated layers are found (stacks.py and the files beside it) and folded (fold.py, shrink.py); answers under
many budgets in frontier.py.
"""
