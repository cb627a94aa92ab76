"""The plan: what is decided about a captured step. Torch-free.

In: decisions of the planner, or a file. Out: what passes apply (decisions.py), what people ask (plan.py), texts (text.py), comparisons (diff.py), files (schema.py,
checks.py). **Add a decision as a field of `Decisions`**, with its line in the schema, in the text and in the comparison.
"""
