"""A backbone with heads of every kind on disk, made once for all these tests, which leave it as it is."""

from pathlib import Path

import pytest
from exported import make_home

from headstart.heads.backbone.backbone import Backbone, load_backbone


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def on(home: Path) -> Backbone:
    return load_backbone(str(home / "backbone"))
