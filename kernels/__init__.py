"""Custom operators and kernels, each with an eager reference, a fake, a backward and a sharding rule.

In: tensors of one rank. Out: attention.py, CTC (ctc.py), counter-based random numbers (random.py). **Add a kernel in a file of its own**, with its rule in `autopar/rules/`.
"""
