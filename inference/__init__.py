"""Decoding: drafting, verification and sampling, beam search, captured forward passes, and benchmarks."""
