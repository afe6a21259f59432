"""Measuring on prompt sets: systems side by side, tables, reports; this machine's costs."""
