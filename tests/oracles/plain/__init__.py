"""A plain reading of exported heads: files to drafts, in fp32, by the formulas of the papers and of the engines' loaders.

Exports, imports and decoding are tested against it, so it shares nothing with ``headstart.heads`` and keeps no caches but the keys of known
tokens. One file a method; `folders` says what the files of a folder hold, `drafts` drafts along texts.
"""
