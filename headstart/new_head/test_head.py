"""The contract of the head: run by pytest in the folder above this one."""

from collections.abc import Callable

import pytest

from headstart.heads.base import Drafter
from headstart.inference.contract import CHECKS, small_drafter


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract(check: Callable[[Drafter], None]) -> None:
    check(small_drafter("my_head.head"))
