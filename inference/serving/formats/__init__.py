"""Layouts of exported heads, one file each; `format.py` says what a layout is."""
