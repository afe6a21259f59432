"""How a drafter is found by its name, and which of its arguments are refused."""

from __future__ import annotations

from typing import Any

import pytest
from families import DRAFTERS, LAYERS, VOCAB, backbone

from headstart.heads.methods import build_drafter, find_drafter
from headstart.support.errors import UserError

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("eagle3", {"taps": []}, "taps"),
    ("eagle3", {"taps": [1, LAYERS + 1]}, "taps"),
    ("eagle3", {"taps": [-1]}, "taps"),
    ("eagle3", {"draft_vocab_size": VOCAB + 1}, "draft_vocab_size"),
    ("eagle3", {"layers": 3}, "layers"),
    ("eagle3", {"sliding_window": 4}, "drafter.sliding_window is at least drafter.depth=5, the length of a draft; got 4"),
    ("eagle3", {"fc_norm": True, "norm_before_fc": True}, "drafter.fc_norm and drafter.norm_before_fc both norm the taps"),
    ("eagle", {"feature_noise": -0.1}, "feature_noise"),
    ("eagle", {"draft_vocab_size": 9}, "drafter.depth, drafter.draft_depth, drafter.intermediate_size, drafter.feature_noise"),
    ("medusa", {"layers": 0}, "drafter.layers is a whole number of at least 1 and at most 256; got 0"),
    ("medusa", {"dept": 3}, "did you mean drafter.depth"),
    ("medusa", {"taps": [1]}, "drafter.depth, drafter.draft_depth, drafter.draft_vocab_size, drafter.freeze_readout, drafter.layers"),
    ("hydra", {"depth": 2, "draft_depth": 3}, "Hydra cannot draft deeper than the 2 tokens"),
    ("mlp", {"tie_weights": True, "depth": 1}, "drafter.tie_weights shares weights between depths, .* of at least 2; got 1"),
    ("block", {"depth": 7, "sliding_window": 6}, "drafter.sliding_window is at least 7, the length of a block"),
    ("block", {"draft_vocab_size": 20}, "draft_vocab_size"),
    ("medussa", {}, "did you mean 'medusa'"),
    ("no.such.module", {}, "no.such.module"),
    ("json.decoder", {}, "exactly one Drafter"),
]


def test_wrong_arguments_are_refused_in_a_line() -> None:
    for kind, arguments, named in WRONG:
        with pytest.raises(UserError, match=named) as caught:
            build_drafter(kind, backbone("llama"), arguments)
        assert "\n" not in str(caught.value), named


def test_every_drafter_is_found_by_its_file() -> None:
    assert {"eagle3", "medusa"} <= set(DRAFTERS)
    for kind in DRAFTERS:
        assert find_drafter(kind).__module__ == f"headstart.heads.{kind}"
        assert find_drafter(f"headstart.heads.{kind}") is find_drafter(kind)
