"""Marks of tests that need something of the machine."""

import pytest
from headstart_cpu import kernels

needs_a_compiler = pytest.mark.skipif(kernels.unavailable() is not None, reason=str(kernels.unavailable()))
