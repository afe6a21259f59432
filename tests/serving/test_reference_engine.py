"""The reference reading of what a checkpoint's files say drafts what Headstart drafts, token by token, with the same logits."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from engines_alone import headstart_drafts
from families import VOCAB, backbone, random_drafter, texts
from plain.base import Target
from plain.drafts import headstart_logits, reference_drafts
from plain.folders import read_heads
from plain.layer import read_rope
from shrink import shrunk
from test_contract import OTHER_LAYER

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.generate import SpeculativeModel
from headstart.serving.layouts.files import read_files
from headstart.serving.verify.drafts import EngineSettings, acceptance

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
