"""From a module and example inputs to one joint forward and backward graph, at global shapes.

In: nn.Module and inputs, on any device or none. Out: `Captured` (an fx graph on fake tensors, capture.py) and its torch-free `Graph` (describe.py). What Python does
besides computing is allowed or refused by name (effects.py). Deep models are captured with few layers and tiled (depth_reduced.py, tile.py; two depths at once:
forked.py). **To catch a torch function as one operator while capturing, add it in ops.py.**
"""
