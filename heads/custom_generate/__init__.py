"""The code that a checkpoint carries so that `transformers` decodes with it: `generate.py`, copied as it is."""
