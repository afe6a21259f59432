"""Layouts of heads on disk, one class each: names of tensors and configuration, read and written. `layout.py` says what a layout is."""
