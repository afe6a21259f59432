"""Random models of released sizes, through all that users do, in `make test-all`: the smallest of every family, and every method."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from architectures import served
from released_model import MODELS, configuration
from released_run import STEPS, Released, Step, dtypes, exports
from released_sizes import SMALLEST

from headstart.heads.methods import methods

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def go(model: str, dtype: str, steps: tuple[Step, ...], drafter: dict[str, Any] | None = None) -> None:
    with TemporaryDirectory() as folder:  # not one of pytest's, which keeps those of three runs
        released = Released(model, dtype, Path(folder), drafter)
        for step in steps:
            step(released)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype"), [(model, dtype) for model in MODELS for dtype in dtypes(model)])
def test_every_family_at_the_sizes_of_its_smallest_released_model(model: str, dtype: str) -> None:
    go(model, dtype, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*methods()} - {"eagle3"}))
def test_every_other_method_on_a_released_size(kind: str) -> None:
    go("smollm2-135m-instruct", "fp32", tuple(step for step in STEPS if step is not exports), {"kind": kind, "depth": 3})


def test_every_row_of_the_table_has_a_released_size_of_its_class() -> None:
    assert set(SMALLEST) == {one.name for one in served()}
    for one in served():
        assert configuration(SMALLEST[one.name]).get_text_config().model_type == one.model().config.get_text_config().model_type, one.name
