"""Public model configurations by name, without network or weights.

In: "llama3-70b" or a config.json. Out: a transformers config to build a model on the meta device. **Add a model in table.py**, with the page it is from.
"""
