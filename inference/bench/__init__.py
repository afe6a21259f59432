"""Benchmarks on prompt sets: comparison of systems, tables and reports; measurement of this machine's costs."""
