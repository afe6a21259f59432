"""Layouts of heads on disk, one class and one file each: names of tensors, configuration, writing, reading and checks.

`layout.py` says what a layout is; export, import and verification follow from it. `reader/` drafts with what was read.
"""
