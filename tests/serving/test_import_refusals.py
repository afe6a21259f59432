"""What `headstart import` refuses: one line that names what is wrong, and nothing is written."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import pytest
import torch
from families import VOCAB, tiny
from foreign import DV, D, Tensors, normal, write

from headstart.cli.main import main

Folder = tuple[dict[str, Any], Tensors]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backbone")
    tiny("llama").save_pretrained(folder)
    return folder


def changed(made: Folder, config: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> Folder:
    """The folder with keys and tensors replaced, or left out where they are None; ``__`` stands for a dot."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return {**made[0], **(config or {})}, {name: tensor for name, tensor in {**made[1], **named}.items() if tensor is not None}


EAGLE3, EAGLE1, MEDUSA, HYDRA = foreign.safeailab_eagle3, foreign.safeailab_eagle1, foreign.medusa, lambda: foreign.hydra(False)
DFLASH, DSPARK, DOMINO = (lambda kind=kind: foreign.block(kind) for kind in ("dflash", "dspark", "domino"))
IDS = "eagle_aux_hidden_state_layer_ids"
CASES: list[tuple[Callable[[], Folder], str]] = [
    (lambda: changed(EAGLE3(), {"architectures": None}, fc__weight=None), "no known layout"),
    (lambda: changed(EAGLE3(), norm__weight=None), "lacks the tensor norm.weight [32] of eagle3 heads"),
    (lambda: changed(EAGLE3(), norm__weight=None, final__weight=normal(D)), "it has final.weight [32], which they do not have"),
    (lambda: changed(EAGLE3(), extra__weight=normal(3, 4)), "has a tensor extra.weight [3, 4], which eagle3 heads of its config"),
    (lambda: changed(EAGLE3(), fc__weight=normal(3 * D, D)), "fc.weight is [96, 32]; with this config.json and backbone it is [32, 96]"),
    (lambda: changed(EAGLE3(), fc__weight=normal(D, 2 * D)), "fc.weight is [32, 64]; with this config.json and backbone it is [32, 96]"),
    (lambda: changed(EAGLE3(), fc__weight=normal(D, 3 * D) * torch.nan), "leaves weight fc.weight of Eagle3 not a number"),
    (lambda: changed(EAGLE3(), {"hidden_size": 64}), "(EAGLE-3) is for a backbone of width 64; BACKBONE has width 32: give the backbone"),
    (lambda: changed(EAGLE3(), t2d=None, config={"vocab_size": 99}), "is for a backbone of vocabulary 99; BACKBONE has vocabulary 61"),
    (lambda: changed(EAGLE3(), {"hidden_act": "gelu"}), "hidden_act 'gelu' in config.json; heads here compute silu alone"),
    (lambda: changed(EAGLE3(), {"num_attention_heads": 5}), "config.json is no configuration of a decoder layer"),
    (lambda: changed(EAGLE3(), {IDS: "2"}), f"{IDS} in config.json is a list of layer numbers; got '2'"),
    (lambda: changed(EAGLE3(), {IDS: [1, 4, 9]}), "reads the layers [1, 4, 9], and the backbone has 6"),
    (lambda: EAGLE3(ids=False), "the default [2, 3, 3] is none for 6 layers"),
    (lambda: changed(EAGLE3(), d2t=None, t2d=None), "drafts 23 of the backbone's 61 tokens and has no d2t"),
    (lambda: changed(EAGLE3(), d2t=torch.zeros(DV, dtype=torch.int64)), "d2t and t2d disagree, whether d2t holds offsets or tokens"),
    (lambda: changed(EAGLE3(), t2d=None, d2t=torch.full((DV,), 50)), "d2t names tokens twice or beyond the vocabulary of 61"),
    (lambda: changed(EAGLE3(), d2t=torch.zeros(DV - 1, dtype=torch.int64)), "d2t is int64 [22]; expected are 23 whole numbers"),
    (lambda: changed(EAGLE3(), embed_tokens__weight=normal(VOCAB, D)), "has embed_tokens.weight [61, 32] of its own, which is not"),
    (lambda: changed(EAGLE3(), {"logit_scale": 2.0}), "scales logits by 2.0, which eagle3 heads here do not"),
    (lambda: changed(EAGLE1(), fc__bias=None), "lacks the tensor fc.bias [32], and its config.json says bias: true"),
    (lambda: changed(EAGLE1(), norm__weight=normal(D)), "has a norm norm.weight [32] in "),
    (lambda: changed(foreign.speculators_eagle3(), {"speculators_model_type": "xpress"}), "holds heads of speculators' type 'xpress'"),
    (lambda: changed(foreign.speculators_eagle3(), {"transformer_layer_config": {**foreign.LAYER, "hidden_size": 48}}), "org/target"),
    (lambda: changed(MEDUSA(), **{"1__0__linear__bias": None}), "lacks the tensor 1.0.linear.bias [32] of medusa heads"),
    (lambda: changed(MEDUSA(), token_map=torch.arange(9)), "has a truncated vocabulary (token_map [9] in "),
    (lambda: changed(HYDRA(), {"hydra_head_arch": "eagle-attn"}), "hydra_head_arch 'eagle-attn'; hydra heads here are mlp or prefix-mlp"),
    (lambda: changed(HYDRA(), {"grounded_heads": False}), "grounded_heads false"),
    (lambda: changed(foreign.accelerator(False), {"tie_weights": True}), "says tie_weights, but speculator.emb.1.weight differs"),
    (lambda: changed(foreign.accelerator(False), {"n_predict": None}), "config.json does not say n_predict"),
    (lambda: changed(DFLASH(), {"dflash_config": {"target_layer_ids": [1, 8]}}), "reads the taps [2, 9], and the backbone has 6 layers"),
    (lambda: changed(DFLASH(), {"sample_from_anchor": True}), "has sample_from_anchor true"),
    (lambda: changed(DFLASH(), {"draft_vocab_size": 23}), "drafts 23 of the backbone's 61 tokens; block heads here draft all"),
    (lambda: changed(DFLASH(), {"block_size": "8"}), "block_size in config.json is a whole number of at least 1; got '8'"),
    (lambda: changed(DSPARK(), {"markov_head_type": "gated"}), "has a Markov head of type 'gated'"),
    (lambda: changed(DOMINO(), {"dflash_config": {**DOMINO()[0]["dflash_config"], "shift_label": False}}), "'shift_label': False"),
]  # fmt: skip


def refused(folder: Path | str, home: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an import that exits with status 2 and writes nothing."""
    assert main(["import", str(folder), "--backbone", str(home), "--out", str(out), "--max-new-tokens", "2"]) == 2
    printed = capsys.readouterr()
    assert not out.exists() and not printed.out
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    return line.replace(str(home), "BACKBONE")


def test_what_does_not_fit_is_named(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, (make, message) in enumerate(CASES):
        folder = write(tmp_path / str(i), *make())
        assert message in refused(folder, home, tmp_path / "out", capsys), i


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("exploded"),))


def test_damaged_and_hostile_files(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, tensors = EAGLE3()

    def message(name: str) -> str:
        return refused(tmp_path / name, home, tmp_path / "out", capsys)

    (write(tmp_path / "pickle", config, {}, "x.pt") / "x.pt").write_bytes(pickle.dumps({"fc.weight": Bomb()}))
    assert "is no file of tensors alone, or damaged" in message("pickle") and not (tmp_path / "exploded").exists()
    write(tmp_path / "object", config, {"fc.weight": [1, 2]}, "x.bin")  # type: ignore[dict-item]
    assert "holds other things than named tensors (fc.weight)" in message("object")
    whole = write(tmp_path / "cut", config, tensors) / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:-10])
    assert "is truncated or damaged" in message("cut")
    for shard, fault in (("../cut/model.safetensors", "outside of it"), ("missing.safetensors", "lacks missing.safetensors")):
        folder = write(tmp_path / "index", config, tensors)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": shard}}))
        assert fault in message("index")
    write(tmp_path / "twice", config, tensors, "a.safetensors")
    write(tmp_path / "twice", config, tensors, "b.safetensors")
    assert "has the tensor d2t in a.safetensors and in b.safetensors" in message("twice")
    (write(tmp_path / "json", config, tensors) / "config.json").write_text("{")
    assert "config.json is damaged" in message("json")
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in message("empty")
    assert "no heads at '../no/where': no such folder, and not on the hub" in refused("../no/where", home, tmp_path / "out", capsys)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/note").touch()
    assert main(["import", str(tmp_path / "cut"), "--backbone", str(home), "--out", str(tmp_path / "full")]) == 2
    assert "exists and is not an empty folder; give a new one" in capsys.readouterr().err
