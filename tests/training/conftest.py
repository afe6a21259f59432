"""Training in this process is on the CPU."""

import pytest


@pytest.fixture(autouse=True)
def always_on_the_cpu(on_the_cpu: None) -> None:
    """`on_the_cpu`, for every test of this folder."""
