"""How a drafter is found by its name, and which of its arguments are refused."""

from __future__ import annotations

from typing import Any

import pytest
from families import DRAFTERS, LAYERS, VOCAB, backbone

from headstart.heads.methods import build_drafter, find_drafter
from headstart.support.errors import UserError


@pytest.mark.parametrize(
    "kind,arguments,named",
    [
        ("eagle3", {"depth": 0}, "depth"),
        ("eagle3", {"depth": "5"}, "depth"),
        ("eagle3", {"depth": True}, "depth"),
        ("eagle3", {"taps": 5}, "taps"),
        ("eagle3", {"taps": ["a", 1]}, "taps"),
        ("eagle3", {"taps": [1, 2.5]}, "taps"),
        ("eagle3", {"taps": []}, "taps"),
        ("eagle3", {"taps": [1, LAYERS + 1]}, "taps"),
        ("eagle3", {"taps": [-1]}, "taps"),
        ("eagle3", {"draft_vocab_size": VOCAB + 1}, "draft_vocab_size"),
        ("eagle3", {"draft_vocab_size": 0}, "draft_vocab_size"),
        ("eagle3", {"intermediate_size": 1.5}, "intermediate_size"),
        ("eagle3", {"layers": 3}, "layers"),
        ("eagle3", {"sliding_window": 0}, "sliding_window"),
        ("eagle3", {"sliding_window": 4}, "drafter.sliding_window is at least drafter.depth=5, the length of a draft; got 4"),
        ("eagle3", {"fc_norm": True, "norm_before_fc": True}, "drafter.fc_norm and drafter.norm_before_fc both norm the taps"),
        ("eagle", {"feature_noise": -0.1}, "feature_noise"),
        ("eagle", {"draft_vocab_size": 9}, "drafter.depth, drafter.draft_depth, drafter.intermediate_size, drafter.feature_noise"),
        ("medusa", {"layers": 0}, "layers"),
        ("medusa", {"dept": 3}, "did you mean drafter.depth"),
        ("medusa", {"taps": [1]}, "drafter.depth, drafter.draft_depth, drafter.draft_vocab_size, drafter.freeze_readout, drafter.layers"),
        ("medussa", {}, "did you mean 'medusa'"),
        ("no.such.module", {}, "no.such.module"),
        ("json.decoder", {}, "exactly one Drafter"),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(kind: str, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        build_drafter(kind, backbone("llama"), arguments)
    assert "\n" not in str(caught.value)


def test_every_drafter_is_found_by_its_file() -> None:
    assert {"eagle3", "medusa"} <= set(DRAFTERS)
    for kind in DRAFTERS:
        assert find_drafter(kind).__module__ == f"headstart.heads.{kind}"
        assert find_drafter(f"headstart.heads.{kind}") is find_drafter(kind)
