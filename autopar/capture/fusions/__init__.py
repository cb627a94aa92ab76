"""Operators of ours in place of what a captured program does in many: patterns in the joint graph, forward and backward replaced together.

In: a captured program. Out: one that computes the same with fewer operators, and what was found. **A pattern is a line in `PATTERNS`** (table.py): its name, a
function that finds it, what it is replaced by. A program is fused before it is planned, so that a plan has a strategy, a price and memory for the operator.
"""
