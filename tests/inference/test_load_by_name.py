"""What drafts without training is loaded in Python by the names that the command line has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import LAYERS, left_padded, prompts, say, tiny
from users_model import in_training, state

import headstart
from headstart.cli.arguments import PROPOSERS
from headstart.inference.proposers import NAMES
from headstart.inference.proposers.suffix import SuffixProposer
from headstart.support.errors import UserError

ROWS = left_padded(prompts((9, 4)))


def test_the_command_line_has_the_same_names() -> None:
    assert set(NAMES) == set(PROPOSERS)
    page = (Path(__file__).parents[2] / "docs" / "decode.md").read_text()
    assert all(f'| `--propose {name}` | `proposers="{name}"` |' in page for name in NAMES)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"proposers": "suffix"}, ["suffix"]),
        ({"proposers": ("suffix", "recycling", "suffix")}, ["suffix", "recycling"]),
        ({"proposers": ["history", SuffixProposer()]}, ["history", "suffix"]),
        ({"proposers": tuple(NAMES), "early_exit": 2}, list(NAMES)),
        ({"draft_model": tiny("llama", num_hidden_layers=2)}, []),
    ],
    ids=["one", "two", "mixed", "all and early exit", "a loaded draft model"],
)
def test_by_name_in_python(given: dict[str, Any], names: list[str]) -> None:
    model = tiny("llama")
    heads = headstart.load(None, backbone=model, **given)
    assert [one.name for one in heads.proposers] == names and bool(heads.drafters) == bool({"early_exit", "draft_model"} & given.keys())
    expected = model.generate(**ROWS, max_new_tokens=16, do_sample=False)
    assert torch.equal(say(heads, ROWS, max_new_tokens=16, do_sample=False), expected)


def test_a_draft_model_from_a_folder_and_one_in_training(tmp_path: Path) -> None:
    model, small = tiny("llama"), in_training("llama", num_hidden_layers=2)
    small.save_pretrained(tmp_path)
    before = state(small)
    for given in (str(tmp_path), small):
        heads = headstart.load(None, backbone=model, draft_model=given)
        assert say(heads, ROWS, max_new_tokens=8, return_dict_in_generate=True).tau >= 1
    assert state(small) == before, "the draft model is the user's too"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"proposers": ("suffix", "sufix")}, "no proposer 'sufix'; choose any of suffix, recycling, history"),
        ({"early_exit": LAYERS + 1}, f"early exit.layers is from 1 to {LAYERS}"),
        ({"draft_model": "/nowhere"}, "draft model: no backbone at '/nowhere'"),
        ({"draft_model": tiny("llama", vocab_size=70)}, "70"),
    ],
)
def test_mistakes_are_one_line(given: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        headstart.load(None, backbone=tiny("llama"), **given)
    assert "\n" not in str(caught.value)
