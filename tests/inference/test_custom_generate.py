"""transformers decodes with the code that a checkpoint carries: ``model.generate(custom_generate=folder, trust_remote_code=True)``."""

import copy
import gc
import json
import shutil
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import refuses
from families import LAYERS, ROW, ROWS, Noted, heads, in_training, left_padded, prompts, random_drafter, say, state, tiny
from huggingface_hub import constants
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import headstart
from headstart import Backbone, TreeShape
from headstart.cli.arguments import PROPOSERS
from headstart.heads.card import METADATA
from headstart.inference.custom_generate import kept
from headstart.inference.engine.proposer import NAMES
from headstart.inference.engine.suffix import SuffixProposer
from headstart.inference.generate import GenerateOutput

LENGTH = 12


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("llama")


@pytest.fixture(scope="module")
def folders(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    on, folder = Backbone(model), tmp_path_factory.mktemp("heads")
    for kind in ("eagle3", "medusa", "draft_model"):
        random_drafter(kind, on).save_pretrained(folder / kind)
    return {kind: folder / kind for kind in ("eagle3", "medusa", "draft_model")}


def carried(model: PreTrainedModel, folder: Path, rows: dict[str, Tensor] = ROWS, **options: Any) -> Any:
    options = {"max_new_tokens": LENGTH, "do_sample": False, "trust_remote_code": True} | options
    return model.generate(**rows, custom_generate=str(folder), **options)


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_it_writes_what_the_model_writes_alone(model: PreTrainedModel, folders: dict[str, Path], kind: str) -> None:
    folder = folders[kind]
    plain = model.generate(**ROWS, max_new_tokens=LENGTH, do_sample=False)
    assert torch.equal(carried(model, folder), plain)
    sampled = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3}
    out = carried(model, folder, return_dict_in_generate=True, tree=TreeShape(8, 3), **sampled)
    assert isinstance(out, GenerateOutput) and out.nodes is not None and max(out.nodes) == 8
    assert torch.equal(out.sequences, carried(model, folder, speculate=False, **sampled))
    alone = model.generate(**ROW, max_new_tokens=LENGTH, do_sample=False)
    eos = int(alone[0, 13])
    stopped = carried(model, folder, ROW, eos_token_id=eos, streamer=(noted := Noted()))
    assert torch.equal(stopped, model.generate(**ROW, max_new_tokens=LENGTH, do_sample=False, eos_token_id=eos))
    assert torch.equal(torch.cat([part.flatten() for part in noted.got]), stopped[0]) and noted.ended == 1
    refuses("tree is 'auto' or a TreeShape", carried, model, folder, tree=3)


def test_heads_are_loaded_once_and_again_when_they_change(folders: dict[str, Path], tmp_path: Path) -> None:
    model, folder = tiny("llama"), tmp_path / "mine"
    shutil.copytree(folders["eagle3"], folder)
    loaded = lambda: [entry.heads for entry in kept[model].entries.values()]  # noqa: E731
    carried(model, folder)
    (first,) = loaded()
    carried(model, folder)
    assert loaded() == [first] and first.drafter is not None
    random_drafter("eagle3", Backbone(model), seed=5).save_pretrained(folder)
    plain = model.generate(**ROWS, max_new_tokens=LENGTH, do_sample=False)
    assert torch.equal(carried(model, folder), plain)
    (second,) = loaded()
    assert second is not first and second.drafter is not None
    assert not torch.equal(second.drafter.state_dict()["fc.weight"], first.drafter.state_dict()["fc.weight"])
    for size in (model.config.vocab_size + 8, model.config.vocab_size):
        model.resize_token_embeddings(size)
    assert torch.equal(carried(model, folder), plain) and loaded()[0] is not second, "after a resize, and back"
    twin = copy.deepcopy(model)  # a copy has heads of its own
    assert twin not in kept and torch.equal(carried(twin, folder), plain)
    model.double()
    assert carried(model, folder).shape == plain.shape and loaded()[0].drafter.fc.weight.dtype == torch.float64


def test_nothing_stays_on_the_model_and_nothing_keeps_it(folders: dict[str, Path]) -> None:
    model = in_training("llama")
    before = state(model)
    carried(model, folders["eagle3"])
    assert state(model) == before
    model.generation_config.eos_token_id = eos = int(carried(model, folders["eagle3"])[0, -3])
    model.generation_config = copy.deepcopy(model.generation_config)  # what is put on it later counts
    plain = model.generate(**ROWS, max_new_tokens=LENGTH, do_sample=False)
    assert eos in plain and torch.equal(carried(model, folders["eagle3"]), plain) and model in kept
    gone = weakref.ref(model)
    del model, before
    gc.collect()
    assert gone() is None and not [one for one in kept if one is gone()]


def test_a_hub_id_and_a_revision_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commits of a repository as they lie in the hub's cache; the weights come from the revision that the code comes from."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model, repository, commits = tiny("llama"), tmp_path / "models--someone--heads", {"main": "a" * 40, "old": "b" * 40}
    (repository / "refs").mkdir(parents=True)
    for name, commit in commits.items():
        random_drafter("medusa", Backbone(model)).save_pretrained(repository / "snapshots" / commit)
        (repository / "refs" / name).write_text(commit)
    plain = model.generate(**ROWS, max_new_tokens=4, do_sample=False)
    assert torch.equal(carried(model, Path("someone/heads"), max_new_tokens=4), plain)
    assert torch.equal(carried(model, Path("someone/heads"), max_new_tokens=4, revision="old"), plain)
    assert [entry.folder.name for entry in kept[model].entries.values()] == list(commits.values())


def test_code_in_a_checkpoint_runs_only_where_it_is_trusted(model: PreTrainedModel, folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        carried(model, folders["eagle3"], trust_remote_code=False)
    (folders["eagle3"] / "custom_generate" / "generate.py").write_text("raise RuntimeError('run')\n")
    drafter = headstart.load(folders["eagle3"], backbone=model).drafter  # loading heads does not read it
    assert drafter is not None
    drafter.save_pretrained(folders["eagle3"])
    assert (folders["eagle3"] / "custom_generate" / "requirements.txt").read_text() == f"headstart>={headstart.__version__}\n"


def test_heads_of_another_model_and_damaged_heads(model: PreTrainedModel, folders: dict[str, Path], tmp_path: Path) -> None:
    other = tiny("llama", seed=4)
    refuses("with other weights", carried, other, folders["medusa"])
    plain = other.generate(**ROWS, max_new_tokens=LENGTH, do_sample=False)
    assert torch.equal(carried(other, folders["medusa"], allow_finetuned=True), plain)
    refuses("hidden_size|model_type", carried, tiny("gpt2"), folders["medusa"])
    shutil.copytree(folders["medusa"], tmp_path / "damaged")
    card = json.loads((tmp_path / "damaged" / METADATA).read_text())
    (tmp_path / "damaged" / METADATA).write_text(json.dumps(card | {"format": 99}))
    refuses("format 99", carried, model, tmp_path / "damaged")
    (tmp_path / "damaged" / METADATA).unlink()
    refuses(f"no {METADATA}", carried, model, tmp_path / "damaged")


def test_without_headstart_it_says_what_lacks(model: PreTrainedModel, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "headstart", None)
    with pytest.raises(ImportError, match="pip install headstart") as caught:
        carried(model, folders["medusa"])
    assert "\n" not in str(caught.value)


def test_a_draft_model_loaded_as_a_model_generates_alone(folders: dict[str, Path]) -> None:
    """from_pretrained replaces the ``generate`` of a model in whose folder it finds this code."""
    alone = AutoModelForCausalLM.from_pretrained(folders["draft_model"])
    trusted = AutoModelForCausalLM.from_pretrained(folders["draft_model"], trust_remote_code=True)
    options = {"max_new_tokens": 8, "do_sample": False}
    assert "generate" in vars(trusted)
    assert torch.equal(trusted.generate(**ROWS, **options), alone.generate(**ROWS, **options))
    model = heads("llama", "medusa").backbone.model
    refuses("pass it as heads=", headstart.custom_generate, model, None, {})


# What drafts without training is loaded in Python by the names that the command line has.

TWO = left_padded(prompts((9, 4)))


def test_the_command_line_has_the_same_names() -> None:
    assert set(NAMES) == set(PROPOSERS)
    page = (Path(__file__).parents[2] / "docs" / "decode.md").read_text()
    assert all(f'| `--propose {name}` | `proposers="{name}"` |' in page for name in NAMES)


@pytest.mark.parametrize(("given", "names"), [
    ({"proposers": "suffix"}, ["suffix"]),
    ({"proposers": ("suffix", "recycling", "suffix")}, ["suffix", "recycling"]),
    ({"proposers": ["history", SuffixProposer()]}, ["history", "suffix"]),
    ({"proposers": tuple(NAMES), "early_exit": 2}, list(NAMES)),
    ({"draft_model": tiny("llama", num_hidden_layers=2)}, []),
], ids=["one", "two", "mixed", "all and early exit", "a loaded draft model"])  # fmt: skip
def test_by_name_in_python(given: dict[str, Any], names: list[str]) -> None:
    model = tiny("llama")
    heads = headstart.load(None, backbone=model, **given)
    assert [one.name for one in heads.proposers] == names and bool(heads.drafters) == bool({"early_exit", "draft_model"} & given.keys())
    expected = model.generate(**TWO, max_new_tokens=16, do_sample=False)
    assert torch.equal(say(heads, TWO, max_new_tokens=16, do_sample=False), expected)


def test_a_draft_model_from_a_folder_and_one_in_training(tmp_path: Path) -> None:
    model, small = tiny("llama"), in_training("llama", num_hidden_layers=2)
    small.save_pretrained(tmp_path)
    before = state(small)
    for given in (str(tmp_path), small):
        heads = headstart.load(None, backbone=model, draft_model=given)
        assert say(heads, TWO, max_new_tokens=8, return_dict_in_generate=True).tau >= 1
    assert state(small) == before, "the draft model is the user's too"


@pytest.mark.parametrize(("given", "named"), [
    ({"proposers": ("suffix", "sufix")}, "no proposer 'sufix'; choose any of suffix, recycling, history"),
    ({"early_exit": LAYERS + 1}, f"early exit.layers is from 1 to {LAYERS}"),
    ({"draft_model": "/nowhere"}, "draft model: no backbone at '/nowhere'"),
    ({"draft_model": tiny("llama", vocab_size=70)}, "70"),
])  # fmt: skip
def test_mistakes_are_one_line(given: dict[str, Any], named: str) -> None:
    refuses(named, headstart.load, None, backbone=tiny("llama"), **given)
