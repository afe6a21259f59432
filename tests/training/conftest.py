"""Training in this process is on the CPU; a recipe that several files plan with."""

from pathlib import Path

import pytest
from small_run import make_recipe


@pytest.fixture(autouse=True)
def always_on_the_cpu(on_the_cpu: None) -> None:
    """`on_the_cpu`, for every test of this folder."""


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recipe(tmp_path_factory.mktemp("small"))
