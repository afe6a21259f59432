"""A plain reading of exported heads: files to drafts, in fp32, by the formulas of the papers and of the engines' loaders.

It is what exports are checked against, so it shares no code with ``headstart.heads`` and keeps no caches but the keys of known tokens.
"""
