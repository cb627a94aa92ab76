"""Passes: fx graph in, fx graph out. A pass applies what the plan decided and decides nothing.

In: the captured graph and a Plan. Out: what every rank runs, forward and backward apart. manager.py has their order, what each requires and provides, and verifies
the graph after each. **Add a pass in a file of its own and name it there.** What an operator does on a shard, where that is more than itself, is in `local/`; what a
kernel demands of its operands' layout in demands.py.
"""
