"""How much to draft: acceptance, latency, and the tree with the most expected tokens per second."""
