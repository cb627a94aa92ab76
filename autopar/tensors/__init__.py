"""Tensors of torch and of modules, by public means: how one lies in memory (memory_format.py), and which a module has, each once (owned.py).

In: tensors, real or fake; modules. Out: formats as orders of dims, strides, boxes of what a rank holds. **Add a memory format in memory_format.py.**
"""
