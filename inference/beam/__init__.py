"""Speculative beam search: the sequences and scores of plain beam search, in fewer passes."""
