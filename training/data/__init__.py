"""Training data: rows, conversations, samples with loss masks, packing, and the batch order."""
