"""A plain reading of exported heads: tensors and sizes to drafts, in fp32, by the formulas of the papers and of the engines' loaders.

It is what exports and imports are checked against, so it shares nothing with ``headstart.heads`` and keeps no caches but the keys of known
tokens. One file a method; `headstart.inference.serving.layouts` says what the files of a folder hold.
"""
