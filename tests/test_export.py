"""`headstart export`: what is written is what was trained, in the layout of an engine; what an engine cannot read is refused in one line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from every_head import VARIANTS
from families import VOCAB, prompts, random_drafter, tiny
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from headstart.cli.main import main
from headstart.heads.backbone.adapter import new_adapter
from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.heads.methods import build_drafter
from headstart.inference.serving.engine_table import with_table
from headstart.inference.serving.engines import ENGINES, METHODS, TABLE, method_of
from headstart.inference.serving.export.export import PROVENANCE, Request, export
from headstart.inference.serving.formats.format import formats, layouts_of, require_sound
from headstart.inference.serving.layout import Layout, write_layout
from headstart.inference.serving.trained import read_trained
from headstart.support.errors import UserError
from headstart.support.files import file_hash

DV, D = 23, 32
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"depth": 3}),
    "eagle3-small": ("eagle3", {"depth": 3, "draft_vocab_size": DV, "layers": 2, "fc_norm": True, "norm_output": True}),
    "eagle": ("eagle", {}),
    "medusa": ("medusa", {"depth": 3}),
    "medusa-small": ("medusa", {"depth": 2, "layers": 2, "draft_vocab_size": DV}),
    "mlp": ("mlp", {"depth": 3, "tie_weights": True}),
    "mlp-small": ("mlp", {"depth": 3, "draft_vocab_size": DV}),
    "hydra": ("hydra", {"depth": 2}),
    "dflash": ("block", {"depth": 4, "correction": "none", "taps": [1, 3, 5]}),
    "dspark": ("block", {"depth": 4}),
    "domino": ("block", {"depth": 4, "correction": "recurrent"}),
    "mtp": ("mtp", {"depth": 2}),
    "draft_model": ("draft_model", {"layers": 2}),
    "pard": ("draft_model", {"layers": 2, "parallel": True, "depth": 3}),
}
COPIED = {
    "eagle3": "vllm sglang trtllm", "eagle3-small": "vllm", "eagle": "vllm sglang", "dflash": "vllm sglang trtllm", "dspark": "vllm sglang",
    "domino": "sglang", "draft_model": "vllm sglang trtllm transformers", "pard": "vllm trtllm", "mlp": "tgi",
}  # fmt: skip
"""Heads whose checkpoint an engine reads as it is."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved backbone and heads of every kind."""
    folder = tmp_path_factory.mktemp("export")
    tiny("llama").save_pretrained(folder / "backbone")
    on = load_backbone(str(folder / "backbone"))
    for name, (kind, arguments) in KINDS.items():
        drafter = random_drafter(kind, on, **arguments)
        if arguments.get("draft_vocab_size"):
            drafter.use_vocabulary(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:DV])
        drafter.save_pretrained(folder / name)
    return folder


def exported(home: Path, name: str, to: str, out: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """The report, the configuration and the tensors of an export."""
    report = export(Request(str(home / name), to, out, **options))
    weights = next(iter(out.glob("*.safetensors")))
    return report, json.loads((out / "config.json").read_text()), load_file(weights)


def refused(home: Path, name: str, to: str, out: Path, **options: Any) -> str:
    """The message of an export that writes nothing."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(UserError) as caught:
        export(Request(str(home / name), to, out, **options))
    assert sorted(out.parent.iterdir()) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", COPIED)
def test_a_checkpoint_that_an_engine_reads_is_copied(home: Path, tmp_path: Path, name: str) -> None:
    stored = load_file(home / name / "model.safetensors")
    for engine in COPIED[name].split():
        if (name, engine) == ("dflash", "transformers"):
            continue
        report, config, tensors = exported(home, name, engine, tmp_path / engine)
        assert tensors.keys() == stored.keys() and all(torch.equal(tensors[key], stored[key]) for key in stored)
        expected = json.loads((home / name / "config.json").read_text())
        assert config == expected | ({"base_model_name_or_path": str(home / "backbone")} if name == "mlp" else {})
        assert "nothing changed" in report["notes"][0] and list(report["launch"]) == [engine]
        assert str(tmp_path / engine) in report["launch"][engine]["line"]
        provenance = json.loads((tmp_path / engine / PROVENANCE).read_text())
        assert provenance["heads"]["sha256"] == file_hash(home / name / "model.safetensors")
        assert provenance["heads"]["path"] == str(home / name) and provenance["backbone"] == str(home / "backbone")


def test_launch_lines(home: Path, tmp_path: Path) -> None:
    line = exported(home, "eagle3", "vllm", tmp_path / "a")[0]["launch"]["vllm"]["line"]
    program, serve, target, flag, config = shlex.split(line)
    assert (program, serve, target, flag) == ("vllm", "serve", str(home / "backbone"), "--speculative-config")
    assert json.loads(config) == {"method": "eagle3", "model": str(tmp_path / "a"), "num_speculative_tokens": 3}
    words = shlex.split(exported(home, "dspark", "sglang", tmp_path / "b")[0]["launch"]["sglang"]["line"])
    assert words[words.index("--speculative-algorithm") + 1] == "DSPARK" and words[-2:] == ["--speculative-dspark-block-size", "4"]
    options = shlex.split(exported(home, "eagle3", "trtllm", tmp_path / "c")[0]["launch"]["trtllm"]["line"])[1]
    assert json.loads(options)["speculative_config"]["eagle3_layers_to_capture"] == [0, 2, 4]
    pard = exported(home, "pard", "vllm", tmp_path / "d")[0]["launch"]["vllm"]["line"]
    assert '"parallel_drafting": true' in pard and '"method": "draft_model"' in pard


def test_dtype_is_written_and_stated(home: Path, tmp_path: Path) -> None:
    _, config, tensors = exported(home, "eagle3-small", "vllm", tmp_path / "out", dtype="bf16")
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    assert kinds.pop("d2t") == torch.int64 and kinds.pop("t2d") == torch.bool and {*kinds.values()} == {torch.bfloat16}


@pytest.mark.parametrize("name,layout,head", [("medusa-small", "medusa", "{}.2.weight"), ("mlp-small", "mlp-speculator", "speculator.head.{}.weight")])
def test_truncated_output_layers_are_written_over_the_whole_vocabulary(
    home: Path, tmp_path: Path, name: str, layout: str, head: str
) -> None:
    report, config, tensors = exported(home, name, layout, tmp_path / "out")
    stored = load_file(next((home / name).glob("*.safetensors")))
    drafted = stored["t2d"].nonzero().flatten()
    hidden = torch.randn(200, D, generator=torch.Generator().manual_seed(1))
    for k in range(2):
        full, small = tensors[head.format(k)], stored[head.format(k)]
        assert list(full.shape) == [VOCAB, D]
        assert torch.equal((hidden @ full.T).argmax(-1), drafted[(hidden @ small.T).argmax(-1)])
    assert "draft_vocab_size" not in config and not {"d2t", "t2d"} & set(tensors)
    assert any("whole vocabulary" in note for note in report["notes"])


def test_medusa_is_written_for_three_readers(home: Path, tmp_path: Path) -> None:
    report, config, tensors = exported(home, "medusa", "medusa", tmp_path / "out")
    assert "architectures" not in config and config["medusa_fc_bias"] and config["base_model_name_or_path"] == str(home / "backbone")
    pickled = torch.load(tmp_path / "out" / "medusa_lm_head.pt", weights_only=True)
    assert pickled.keys() == tensors.keys() and all(torch.equal(pickled[key], tensors[key]) for key in tensors)
    assert list(report["launch"]) == ["tgi", "vllm", "trtllm"]   # engines of today first
    assert "up to 0.32" in report["launch"]["vllm"]["support"]


def test_speculators(home: Path, tmp_path: Path) -> None:
    _, config, tensors = exported(home, "eagle3-small", "speculators", tmp_path / "a")
    assert "model_type" not in config and config["speculators_model_type"] == "eagle3" and config["norm_before_residual"] is False
    assert config["fc_norm"] and config["norm_output"] and config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert config["transformer_layer_config"]["num_hidden_layers"] == 2 and config["draft_vocab_size"] == DV
    spec = config["speculators_config"]
    assert spec["verifier"] == {"name_or_path": str(home / "backbone"), "architectures": ["LlamaForCausalLM"]}
    assert spec["proposal_methods"][0]["speculative_tokens"] == 3
    stored = load_file(home / "eagle3-small" / "model.safetensors")
    table = AutoModelForCausalLM.from_pretrained(home / "backbone").get_input_embeddings().weight
    assert torch.equal(tensors.pop("embed_tokens.weight"), table)
    renamed = {name.replace("midlayer.", "layers.0."): x for name, x in stored.items() if name != "layers.1.hidden_norm.weight"}
    assert tensors.keys() == renamed.keys() and all(torch.equal(tensors[name], renamed[name]) for name in renamed)

    _, config, tensors = exported(home, "dspark", "speculators", tmp_path / "b")
    assert config["sample_from_anchor"] is True and config["markov_rank"] == 256 and config["block_size"] == 4
    taps = json.loads((home / "dspark" / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
    assert config["aux_hidden_state_layer_ids"] == taps and tensors.keys() == load_file(home / "dspark" / "model.safetensors").keys()


def test_transformers_drafts_with_dflash(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own class reads every tensor, and drafts what Headstart drafts after the same text."""
    export(Request(str(home / "dflash"), "transformers", tmp_path / "out"))
    assistant, loading = AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    model = AutoModelForCausalLM.from_pretrained(home / "backbone", dtype=torch.float32)
    drafts: list[tuple[Tensor, Tensor]] = []
    draft = DFlashTokenCandidateGenerator.get_candidates

    def noted(self: Any, input_ids: Tensor, **rest: Any) -> tuple[Tensor, Tensor | None]:
        candidates, logits = draft(self, input_ids, **rest)
        drafts.append((input_ids, candidates[:, input_ids.shape[1] :]))
        return candidates, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", noted)
    ids = prompts((9,))[0][None]
    plain = model.generate(ids, max_new_tokens=16, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=assistant, speculation_type="dflash"), plain)
    on = load_backbone(str(home / "backbone"))
    drafter = random_drafter("block", on, **KINDS["dflash"][1])
    compared = [(text, theirs) for text, theirs in drafts if theirs.numel()]
    assert len(compared) > 3
    for text, theirs in compared:
        features: Features = on.read(text[:, :-1], taps=drafter.taps)
        hidden, _ = drafter.step(drafter.begin(features), text[:, -1:], torch.zeros(1, 1, dtype=torch.int64), 0)
        assert drafter.readout(hidden, 0).argmax(-1)[:, : theirs.shape[1]].tolist() == theirs.tolist()


def test_mtp_modules_are_stitched_into_a_copy(home: Path, tmp_path: Path) -> None:
    report, config, tensors = exported(home, "mtp", "mtp-stitch", tmp_path / "out")
    own = load_file(home / "mtp" / "model.safetensors")
    assert own.keys() < tensors.keys() and all(torch.equal(tensors[name], own[name]) for name in own)
    assert config["num_nextn_predict_layers"] == 1 and report["launch"] == {} and (tmp_path / "out" / PROVENANCE).is_file()
    assert "deepseek modules" in report["notes"][1]
    assert "--dtype bf16 is not for mtp-stitch" in refused(home, "mtp", "mtp-stitch", tmp_path / "b", dtype="bf16")
    assert "--to mtp-stitch writes" in refused(home, "mtp", "vllm", tmp_path / "b")


def adapted(home: Path, folder: Path, dora: bool = False) -> Backbone:
    on = load_backbone(str(home / "backbone"))
    on.adapter = new_adapter(on.model, 4, 8.0, 0.0, "all-linear", dora)
    torch.manual_seed(3)
    for name, weight in on.adapter.parameters.items():
        if "lora" in name:
            weight.data.normal_(std=0.2)
    random_drafter("medusa", on, depth=2).save_pretrained(folder)
    return on


def test_an_adapter_is_merged_or_kept(home: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    on, ids = adapted(home, tmp_path / "heads"), prompts((9,))[0][None]
    report = export(Request(str(tmp_path / "heads"), "medusa", tmp_path / "merged"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "backbone", dtype=torch.float32)
    assert torch.allclose(merged(ids).logits, on.model(ids).logits, atol=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(home / "backbone", dtype=torch.float32)
    assert not torch.allclose(merged(ids).logits, plain(ids).logits, atol=1e-2)
    assert f"vllm serve {tmp_path}/merged/backbone" in report["launch"]["vllm"]["line"]
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["base_model_name_or_path"] == f"{tmp_path}/merged/backbone"
    kept = export(Request(str(tmp_path / "heads"), "medusa", tmp_path / "kept", adapter="keep"))
    assert (tmp_path / "kept" / "adapter" / "adapter_model.safetensors").is_file() and list(kept["launch"]) == ["vllm"]
    assert f"--enable-lora --max-lora-rank 8 --lora-modules adapted={tmp_path}/kept/adapter" in kept["launch"]["vllm"]["line"]
    assert "is for vLLM" in refused(tmp_path, "heads", "tgi", tmp_path / "no", adapter="keep")
    adapted(home, tmp_path / "dora", dora=True)
    assert "DoRA" in refused(tmp_path, "dora", "medusa", tmp_path / "no", adapter="keep")
    assert "without an adapter" in refused(home, "medusa", "medusa", tmp_path / "no", adapter="keep")


@pytest.mark.parametrize(
    "name,to,parts",
    [
        ("eagle3", "vlm", ("unknown format 'vlm'", "'vllm'", "speculators")),
        ("medusa", "vllm", ("up to version 0.32 only", "TGI reads them", "--to medusa")),
        ("medusa", "sglang", ("SGLang does not read Medusa", "TGI")),
        ("mlp", "vllm", ("0.9.2", "TGI")),
        ("mlp-small", "tgi", ("tie_weights only", "--to mlp-speculator")),
        ("hydra", "vllm", ("no other engine reads them today", "headstart.load")),
        ("hydra", "medusa", ("holds Hydra heads", "no engine reads these")),
        ("eagle", "trtllm", ("1.2.1", "EAGLE-3 only", "vLLM and SGLang read them")),
        ("domino", "vllm", ("Domino's correction", "SGLang reads them")),
        ("dspark", "dflash-hf", ("is of DFlash", "dflash, speculators")),
        ("eagle3", "transformers", ("does not read EAGLE-3",)),
        ("absent", "vllm", ("no heads at", "not on the hub")),
        ("backbone", "vllm", ("has no headstart.json",)),
    ],
)
def test_refusals(home: Path, tmp_path: Path, name: str, to: str, parts: tuple[str, ...]) -> None:
    message = refused(home, name, to, tmp_path / "out")
    assert all(part in message for part in parts), message


def test_folders_and_backbones_that_do_not_fit(home: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "not an empty folder" in refused(home, "eagle3", "vllm", tmp_path / "full")
    with pytest.raises(UserError, match="is a file; give a new folder"):
        export(Request(str(home / "eagle3"), "vllm", tmp_path / "full" / "file" / "out"))
    assert "no backbone at 'nobody/nothing'" in refused(home, "eagle3", "vllm", tmp_path / "out", backbone="nobody/nothing")
    tiny("llama", num_hidden_layers=2).save_pretrained(tmp_path / "other")
    message = refused(home, "eagle3", "vllm", tmp_path / "out", backbone=str(tmp_path / "other"))
    assert "num_hidden_layers 6" in message and "has 2" in message


def damaged(home: Path, folder: Path, name: str, tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    """Write heads with other tensors and another configuration, and return why they are refused."""
    folder.mkdir()
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    card = json.loads((home / name / "headstart.json").read_text())
    card["weights"]["sha256"] = file_hash(folder / "model.safetensors")
    (folder / "headstart.json").write_text(json.dumps(card))
    (folder / "config.json").write_text(json.dumps(config))
    return refused(folder.parent, folder.name, "vllm", folder.parent / "out")


def test_damaged_heads(home: Path, tmp_path: Path) -> None:
    name = "eagle3-small"
    tensors, config = load_file(home / name / "model.safetensors"), json.loads((home / name / "config.json").read_text())
    fc, shifted = tensors["fc.weight"], {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 3]}}
    cases = [
        ({"fc.weight": fc * torch.nan}, {}, "fc.weight holds NaN"),
        ({"fc.weight": fc.T}, {}, "tensor fc.weight of"),
        ({"norm.weight": None}, {}, "lacks tensor norm.weight [32]"),
        ({"norm.bias": torch.zeros(D)}, {}, "holds tensor norm.bias, for which config.json has no place"),
        ({"d2t": tensors["d2t"] + torch.arange(DV)}, {}, "d2t and t2d"),
        ({}, {"num_aux_hidden_states": 2}, "config.json says [32, 64]"),
        ({}, shifted, "not one less each"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [2, 3, 9], "eagle_config": {}}, "from 0 to 6"),
    ]
    for i, (changes, stated, part) in enumerate(cases):
        changed = {key: tensor for key, tensor in (tensors | changes).items() if tensor is not None}
        assert part in damaged(home, tmp_path / str(i), name, changed, config | stated), part


@pytest.mark.parametrize(("kind", "arguments"), [*VARIANTS, ("mlp", {"tie_weights": True}), ("eagle3", {"norm_before_fc": True})])
def test_the_shapes_expected_of_a_configuration_are_those_written(home: Path, tmp_path: Path, kind: str, arguments: dict[str, Any]) -> None:
    arguments |= {"draft_vocab_size": DV} if "draft_vocab_size" in arguments else {}
    arguments |= {"depth": 2} if "parallel" in arguments else {}
    random: Drafter = random_drafter(kind, load_backbone(str(home / "backbone")), **arguments)
    random.save_pretrained(tmp_path / "heads")
    require_sound(read_trained(str(tmp_path / "heads"), None))


def test_heads_that_only_vllm_computes(home: Path, tmp_path: Path) -> None:
    drafter = build_drafter("eagle", load_backbone(str(home / "backbone")), {})
    drafter.save_pretrained(tmp_path / "heads")
    tensors = load_file(tmp_path / "heads" / "model.safetensors") | {"fc.bias": torch.ones(D)}
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert "drops the bias of fc" in damaged(tmp_path, tmp_path / "biased", "heads", tensors, config)


def test_the_table_of_engines_is_that_of_the_docs() -> None:
    page = (Path(__file__).parent.parent / "docs" / "serving.md").read_text("utf-8")
    assert with_table(page) == page, "run python -m headstart.inference.serving.engine_table docs/serving.md"


def test_every_method_has_an_answer_from_every_engine() -> None:
    assert {(engine, method) for engine in ("vllm", "sglang", "trtllm") for method in METHODS} <= TABLE.keys()
    assert {method_of(kind, arguments) for kind, arguments in KINDS.values()} == METHODS.keys()
    assert {engine for engine, _ in TABLE} == ENGINES.keys()
    readable = {method for (_, method), entry in TABLE.items() if hasattr(entry, "how")}
    assert readable == {method for method in METHODS if layouts_of(method)}
    assert all(one.about and {*one.methods} <= METHODS.keys() and {*one.engines} <= ENGINES.keys() for one in formats().values())


def test_the_command(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", "--heads", str(home / "eagle3"), "--out", str(tmp_path / "out"), "--to"]
    assert main([*arguments, "vllm", "--json", str(tmp_path / "report.json")]) == 0
    printed = capsys.readouterr().out
    assert "layout eagle3" in printed and "vllm serve" in printed and "run in 0.32.0, 0.33.0" in printed
    assert json.loads((tmp_path / "report.json").read_text())["layout"] == "eagle3"
    assert main([*arguments, "vllm"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_layout_is_written_as_a_whole(tmp_path: Path) -> None:
    shared = torch.ones(4, 4)
    layout = Layout({"a": 1}, {"x": shared, "y": shared, "z": shared[1:2]}, "w.safetensors", {"code/run.py": b"pass"})
    write_layout(layout, tmp_path / "out")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {
        "out/config.json", "out/w.safetensors", "out/code/run.py",
    }  # fmt: skip
    with pytest.raises(UserError, match="tensor x holds NaN"):
        write_layout(Layout({}, {"x": shared / 0 * 0}, "w.safetensors"), tmp_path / "nan")
    with pytest.raises(AssertionError):
        write_layout(Layout({}, {}, "w.safetensors", {"../out/config.json": b""}), tmp_path / "escape")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
