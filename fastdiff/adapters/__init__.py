"""Adapters: LoRA and its relatives, which change the weights of a loaded model.

`names` finds the layer of a key, `headers` says what a file is, `files` reads and checks a file, `updates` computes
what a file adds to a weight, and `merging` writes the sum into the memory that the model already computes with.
"""
