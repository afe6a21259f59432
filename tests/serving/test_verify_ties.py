"""``headstart verify``: exports are equal to their heads; of two tokens that are equally likely either may be picked, of others neither."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import engines_alone
import pytest
import torch
from engines_alone import plain_reader_agrees
from families import SIZES, build, random_drafter, tiny
from torch import Tensor

from headstart.cli.main import main
from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.checkpoint import load_drafter
from headstart.heads.own_readout import OwnReadoutDrafter
from headstart.serving.export import Request, export
from headstart.serving.reference import TOLERANCE, agreement, reference
from headstart.serving.verify.drafts import Transcript
from headstart.serving.verify.verify import Check, recorded, verify

PROMPTS = [[5, 9, 33, 12, 7], [1, 2, 3, 4, 50, 60, 7]]
KINDS: dict[str, dict[str, Any]] = {"eagle3": {}, "eagle": {}, "medusa": {}, "block": {"correction": "none"}}
CLOSE, APART = 1 + TOLERANCE / 10, 1 + 100 * TOLERANCE
"""How much larger the logit of an odd token is than that of the even one before it."""


def swapped(one: Transcript) -> Transcript:
    """The last draft of each round and the last token written are the other of two."""
    rounds = tuple(replace(at, drafts=(*at.drafts[:-1], at.drafts[-1] ^ 1)) for at in one.rounds)
    return replace(one, written=(*one.written[:-1], one.written[-1] ^ 1), rounds=rounds)


def engine(*arguments: Any) -> list[Transcript]:
    return [swapped(one) for one in engines_alone.reference(*arguments)]


@torch.no_grad()
def pair(weight_VD: Tensor, apart: float) -> None:
    """Give tokens 2 k and 2 k + 1 logits that differ by a factor."""
    weight_VD[1::2] = weight_VD[: len(weight_VD) // 2 * 2 : 2] * apart


def served(folder: Path, kind: str, apart: float) -> Check:
    """Heads of a backbone, both with such pairs of tokens, and what engines load of them."""
    model = tiny("llama", vocab_size=62)
    pair(model.get_output_embeddings().weight, apart)
    model.save_pretrained(folder / "backbone")
    backbone = load_backbone(str(folder / "backbone"))
    drafter = random_drafter(kind, backbone, depth=3, **KINDS[kind])
    if isinstance(drafter, OwnReadoutDrafter):
        for layer in drafter.output_layers():
            pair(layer.weight, apart)
    drafter.save_pretrained(folder / "heads")
    shutil.copytree(folder / "heads", folder / "served", ignore=shutil.ignore_patterns("headstart.json"))
    return Check(folder / "served", backbone, str(folder / "heads"), "reference", PROMPTS, new_tokens=5)


@pytest.mark.parametrize("apart", [1.0, CLOSE, APART])
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_of_equal_logits_either_token_may_be_drafted(tmp_path: Path, kind: str, apart: float) -> None:
    check = served(tmp_path, kind, apart)
    drafter = load_drafter(tmp_path / "heads", check.backbone)
    other = [one | {"drafts": [one["drafts"][0] ^ 1], "logits": one["logits"][:1]} for one in reference(drafter)]
    found = agreement(drafter, other)
    assert found.whole is (apart != APART) and (found.equal < found.drafts) is (apart == APART)


@pytest.mark.parametrize("kind", KINDS)
def test_near_ties_are_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    engines_alone.stand_in(monkeypatch, engine)
    verdict = verify(replace(served(tmp_path, kind, CLOSE), engine="vllm"))
    text, one = "\n".join(verdict.lines()), verdict.comparison
    assert verdict.equal and one is not None and one.first is None and one.equal_texts == one.prompts, text
    assert one.equal_drafts == one.drafts == verdict.report()["comparison"]["equal_drafts"] and one.rounds > one.prompts


def test_tokens_that_are_not_equally_likely_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines_alone.stand_in(monkeypatch, engine)
    verdict = verify(replace(served(tmp_path, "eagle3", APART), engine="vllm"))
    one = verdict.comparison
    assert not verdict.equal and one is not None and one.equal_texts == 0 and one.equal_drafts == one.drafts - one.rounds
    assert one.first is not None and one.first.depth is None and one.first.ours == one.first.theirs ^ 1


def test_a_text_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny("llama").save_pretrained(tmp_path / "backbone")
    backbone = load_backbone(str(tmp_path / "backbone"))
    random_drafter("eagle3", backbone, depth=3).save_pretrained(tmp_path / "heads")

    def other(*arguments: Any) -> list[Transcript]:
        return [replace(one, written=(one.written[0] ^ 1, *one.written[1:]), rounds=()) for one in engines_alone.reference(*arguments)]

    engines_alone.stand_in(monkeypatch, other)
    verdict = verify(Check(tmp_path / "heads", backbone, None, "vllm", PROMPTS[:1], new_tokens=5))
    named = "first difference: prompt 1, after 5 tokens, the text: tokens headstart"
    assert not verdict.equal and any(line.startswith(named) for line in verdict.lines())


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_the_output_layer_of_a_backbone_may_have_a_bias(tmp_path: Path, kind: str) -> None:
    model = build("Phi", SIZES | {"num_key_value_heads": 4})
    torch.nn.init.normal_(model.get_output_embeddings().bias, std=5)  # otherwise it changes few tokens
    model.save_pretrained(tmp_path / "backbone")
    backbone = load_backbone(str(tmp_path / "backbone"))
    random_drafter(kind, backbone, depth=3).save_pretrained(tmp_path / "heads")
    export(Request(str(tmp_path / "heads"), kind, tmp_path / "out"))
    verdict = verify(Check(tmp_path / "out", backbone, str(tmp_path / "heads"), "reference", [], 5))
    assert verdict.equal and plain_reader_agrees(tmp_path / "out", str(tmp_path / "heads"), backbone), list(verdict.lines())


def test_an_export_knows_its_heads_and_backbone(on: Backbone, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = tmp_path / "heads"
    random_drafter("eagle", on).save_pretrained(heads)
    export(Request(str(heads), "eagle", tmp_path / "out"))
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert "drafts are those of the trained heads" in capsys.readouterr().out
    random_drafter("eagle", on, seed=9).save_pretrained(heads)  # trained on since
    assert recorded(tmp_path / "out")[:2] == (None, on.name)
    assert main(["verify", str(tmp_path / "out")]) == 0  # by the drafts that are stored
    assert main(["verify", str(tmp_path / "out"), "--heads", str(heads)]) == 1
    assert "is not as in the original heads" in capsys.readouterr().out
