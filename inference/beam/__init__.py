"""Speculative beam search: the sequences and scores of transformers' beam search, in fewer forward passes."""
