"""Other people's training loops, around a compiled model: what they ask of a model that is on one device, met on a mesh.

In: a class of theirs. Out: a subclass of it, or a callback. Their code stays as it is: nothing of theirs is patched. **Add here** a library whose loop saves, loads or counts by itself.
"""
