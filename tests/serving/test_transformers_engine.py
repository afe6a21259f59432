"""transformers reads what is exported for it: its assisted decoding drafts what Headstart drafts and writes what the model writes alone."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engines_alone import headstart_drafts
from families import VOCAB, backbone, prompts, random_drafter, texts, tiny
from plain.base import Target
from plain.drafts import headstart_logits, judged, reference_drafts
from plain.folders import read_heads
from plain.layer import read_rope
from shrink import shrunk
from test_contract import OTHER_LAYER
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from headstart import Backbone, SpeculativeModel, load, load_backbone, load_tokenizer
from headstart.heads.methods import build_drafter
from headstart.serving.export import Request, export
from headstart.serving.layouts.files import read_files
from headstart.serving.verify.drafts import EngineSettings, Transcript, acceptance

FEW = 5
"""So few tokens that random heads are right now and then."""
PROMPTS = [(prompt % 4 + 1).tolist() for prompt in prompts((9, 1))]
BLOCK = {"correction": "none", "depth": 4, "layers": 2, "taps": [1, 3, 5]}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny("qwen3", vocab_size=FEW).save_pretrained(folder)
    return folder


def exported(heads: Path, to: str, out: Path) -> Path:
    export(Request(str(heads), to, out))
    return out


class Recording:
    """A candidate generator that keeps its drafts: from the root on, since the pass over the prompt verifies none."""

    def __init__(self, model: PreTrainedModel, prompt: int, depth: int) -> None:
        self.made, self.prompt, self.depth = model._get_candidate_generator, prompt, depth
        self.drafted: list[tuple[int, tuple[int, ...]]] = []

    def __call__(self, **arguments: Any) -> Any:
        self.generator = self.made(**arguments)
        self.own, self.generator.get_candidates = self.generator.get_candidates, self.get_candidates
        return self.generator

    def get_candidates(self, input_ids: Tensor, **outputs: Any) -> tuple[Tensor, None]:
        T = input_ids.shape[1]
        candidates_1T = self.own(input_ids, **outputs)[0][:, : T + (self.depth if T > self.prompt else 0)]
        if candidates_1T.shape[1] > T:
            self.drafted.append((T, tuple(candidates_1T[0, T:].tolist())))
        return candidates_1T, None


def drafted_by_transformers(folder: Path, backbone: Path, prompt: list[int], settings: EngineSettings) -> Transcript:
    """Its own assisted decoding, past the end of the text by the length of a draft, so that the last rounds are whole."""
    model = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32)
    model.generation_config = GenerationConfig(do_sample=False)
    if json.loads((folder / "config.json").read_text())["model_type"] == "qwen3":
        assistant, options = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), {}
        lengths = {"num_assistant_tokens": settings.depth, "num_assistant_tokens_schedule": "constant"}
        assistant.generation_config = GenerationConfig(do_sample=False, assistant_confidence_threshold=0.0, **lengths)
    else:
        assistant, options = AutoModel.from_pretrained(folder, dtype=torch.float32), {"speculation_type": "dflash"}
    ids_1T, recording = torch.tensor([prompt]), Recording(model, len(prompt), settings.depth)
    model._get_candidate_generator = recording
    options |= {"attention_mask": torch.ones_like(ids_1T), "max_new_tokens": settings.new_tokens + settings.depth}
    text = model.generate(ids_1T, assistant_model=assistant, **options)[0].tolist()
    written = settings.ended(text[len(prompt) :])
    rounds = [judged(at, drafts, text) for at, drafts in recording.drafted if at < len(prompt) + len(written)]
    return Transcript(tuple(prompt), tuple(written), tuple(rounds))


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize(("kind", "to", "arguments"), [("block", "dflash-hf", BLOCK), ("draft_model", "draft-model", {"layers": 2})])
def test_it_drafts_what_headstart_drafts(model_folder: Path, tmp_path: Path, kind: str, to: str, arguments: dict[str, Any]) -> None:
    on = load_backbone(str(model_folder), dtype="fp32", device="cpu")
    random_drafter(kind, on, **arguments).save_pretrained(tmp_path / "heads")
    folder = exported(tmp_path / "heads", to, tmp_path / "out")
    heads = load(tmp_path / "heads", on, capture="off")
    plain = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    for depth, ends in ((4, ()), (2, (3,))):
        settings = EngineSettings(depth, 16, ends)
        ours = headstart_drafts(heads, PROMPTS, settings)
        theirs = [drafted_by_transformers(folder, model_folder, prompt, settings) for prompt in PROMPTS]
        assert theirs == ours and sum(one.kept for transcript in theirs for one in transcript.rounds) > 0
        for transcript, prompt in zip(theirs, PROMPTS, strict=True):
            ids, end = torch.tensor([prompt]), list(ends) or None
            alone = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, eos_token_id=end)
            assert list(transcript.text) == alone[0].tolist()


def test_the_documented_examples_run(tmp_path: Path) -> None:
    """The code of docs/serving.md, on the embedded backbone; all of it writes what the model writes alone."""
    on = load_backbone("embedded", dtype="fp32", device="cpu")
    on.model.save_pretrained(tmp_path / "model")
    load_tokenizer("embedded").save_pretrained(tmp_path / "model")
    for name, kind, arguments in (
        ("eagle3", "eagle3", {}), ("dflash", "block", {"correction": "none", "layers": 1}), ("draft-model", "draft_model", {"layers": 1})
    ):  # fmt: skip
        build_drafter(kind, on, arguments).save_pretrained(tmp_path / name)
    exported(tmp_path / "dflash", "dflash-hf", tmp_path / "for-transformers")
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")
    section = page.partition("\n## transformers\n")[2].partition("\n## ")[0]
    code = "".join(re.findall(r"```python\n(.*?)```", section, re.S)).replace("max_new_tokens=32", "max_new_tokens=12")
    scope: dict[str, Any] = {}
    exec(code.replace("Qwen/Qwen3-0.6B", str(tmp_path / "model")).replace("out/", f"{tmp_path}/"), scope)
    model, one = scope["model"], scope["one"]
    assert torch.equal(scope["text"], model.generate(**scope["inputs"], max_new_tokens=12))
    alone = model.generate(**one, max_new_tokens=12)
    assert all(torch.equal(scope[name], alone) for name in ("dflash", "drafted"))


# The reference reading of what a checkpoint's files say drafts what Headstart drafts, token by token, with the same logits.

HEADS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "eagle3", {}),
    ("qwen3", "eagle3", {"draft_vocab_size": 23, "layers": 2, "sliding_window": 6}),
    ("llama", "eagle3", {"fc_norm": True, "norm_output": True, "taps": [0, 1, 4, 6]}),
    ("llama", "eagle3", {"norm_before_fc": True, "norm_before_residual": True, "qk_norm": True}),
    ("llama", "eagle3", {"norm_before_residual": True, "layer": OTHER_LAYER}),
    ("llama", "peagle", {"depth": 3, "layers": 2, "fc_norm": True, "own_embedding": True}),
    ("qwen3", "peagle", {"depth": 4, "layers": 3, "sliding_window": 5, "draft_vocab_size": 23, "qk_norm": True, "mask_token": 7}),
    ("gemma3", "eagle", {"depth": 3}),
    ("gpt2", "medusa", {"layers": 2, "draft_vocab_size": 23}),
    ("llama", "mlp", {}),
    ("llama", "mlp", {"tie_weights": True, "inner_dim": 20, "scale_input": False, "draft_vocab_size": 23}),
    ("qwen3", "block", {"depth": 3, "layers": 2, "correction": "none"}),
    ("llama", "block", {"depth": 3, "layers": 1, "correction": "markov", "correction_rank": 6}),
    ("llama", "block", {"depth": 3, "layers": 2, "correction": "none", "causal": True}),
    ("llama", "block", {"depth": 3, "layers": 2, "correction": "recurrent", "correction_rank": 6}),
    ("qwen3", "block", {"depth": 3, "layers": 2, "correction": "none", "sliding_window": 5}),
    ("llama", "block", {"depth": 3, "layers": 2, "correction": "selector", "correction_rank": 6, "selector_candidates": 5}),
    ("qwen3", "block", {"depth": 3, "layers": 2, "correction": "selector", "correction_rank": 6, "convolution": True}),
    ("llama", "block", {"depth": 3, "layers": 2, "correction": "markov", "convolution": True, "causal": True}),
    ("llama", "mtp", {}),
    ("llama", "mtp", {"shared": False, "layout": "mimo"}),
    ("llama", "mtp", {"layout": "qwen3_5"}),
    ("llama", "draft_model", {"layers": 2}),
    ("llama", "draft_model", {"parallel": True, "depth": 3}),
]


@pytest.mark.parametrize("family,kind,arguments", HEADS, ids=[f"{kind}-{'-'.join(arguments)}" for _, kind, arguments in HEADS])
def test_the_reading_drafts_as_headstart_does(tmp_path: Path, family: str, kind: str, arguments: dict[str, Any]) -> None:
    on = backbone(family)
    drafter = random_drafter(kind, on, **arguments)
    if drafter.vocabulary is not None:
        drafter.use_vocabulary(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))[:23])
    drafter.save_pretrained(tmp_path)
    target = Target(on.model)
    reading = read_heads(read_files(tmp_path), on)
    assert not reading.faults
    depth = 3
    settings = EngineSettings(depth, 8)
    prompts = [texts(1, 7, seed)[0].tolist() for seed in range(2)]
    ours = headstart_drafts(SpeculativeModel(on, drafter, capture="off"), prompts, settings)
    theirs = reference_drafts(reading, target, prompts, settings)
    assert ours == theirs
    assert sum(len(one.rounds) for one in ours) > 5
    assert 1 <= acceptance(ours)["tau"] <= acceptance(ours)["mean_acceptance_length"]
    text = ours[0].text[:9]
    expected = headstart_logits(drafter, text, [3, 8, 1])
    with torch.no_grad():
        found = reading.on(target, target.read([*text, 3, 8, 1], reading.taps)).logits_at(len(text), [3, 8, 1])
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-4)


def test_heads_state_the_rotation_they_trained_with() -> None:
    """Pythia rotates a quarter of each head, its EAGLE-3 heads all of theirs."""
    on = Backbone(shrunk("pythia-1b"))
    assert on.config.to_dict()["rope_parameters"]["partial_rotary_factor"] == 0.25
    assert read_rope(random_drafter("eagle3", on).engine_config()).share == 1.0


def test_the_readers_share_nothing_with_the_heads() -> None:
    files = [Path(__file__).parents[1] / "oracles" / "plain" / f"{name}.py" for name in ("base", "block", "eagle", "heads", "layer")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    modules = {node.module or "" for node in nodes if (node.module or "").startswith("headstart")}
    assert not modules
