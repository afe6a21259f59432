"""In bf16 on a CPU, decoding with drafts computes the logits of autoregressive decoding bit for bit."""

import itertools
from typing import Any

import pytest
import torch
from families import SIZES, VOCAB, backbone, build, prompts, random_drafter, say, shake, tiny
from needs import needs_a_compiler

from headstart import Backbone, SpeculativeModel, TreeShape, load, load_backbone, load_tokenizer
from headstart.chat.prompts import Prompt
from headstart.heads.backbone.tree_attention import attend, attend_exactly
from headstart.inference.bench import judging
from headstart.inference.bench.bench import Plan, compare
from headstart.inference.bench.judging import LogitsComparison, continued
from headstart.inference.bench.systems import AR, HeadstartSystem
from headstart.inference.capture import onednn
from headstart.inference.capture.capture import BackendName
from headstart.inference.measure import Settings
from headstart.support.devices import bf16_instructions

TREE = TreeShape(12, 4)
needs_bf16 = pytest.mark.skipif(not bf16_instructions() or not onednn.available(torch.bfloat16), reason="no instructions for bf16")
WIDE = {"hidden_size": 64, "intermediate_size": 96}
"""Products of fewer than 64 inputs take another order of sums for a single row on CPUs with AMX."""
WIDER = {"llama": WIDE, "qwen3": WIDE | {"head_dim": 16}, "gpt2": {"n_embd": 64}}


def compared(on: Backbone, tokens: int, temperatures: tuple[float, ...], batches: tuple[int, ...], capture: str) -> list[tuple[int, int]]:
    """For each temperature and batch size the texts that differ from autoregressive decoding, and the positions with other logits."""
    drafter, found = random_drafter("medusa", on, depth=3).to(on.dtype), []
    drafts = HeadstartSystem("heads", SpeculativeModel(on, drafter, capture=capture))  # type: ignore[arg-type]
    ar = HeadstartSystem(AR, SpeculativeModel(on, capture=capture))  # type: ignore[arg-type]
    for temperature, batch in itertools.product(temperatures, batches):
        settings, counts, texts = Settings(tokens, temperature, tree=TREE), LogitsComparison(), 0
        asked = list(enumerate(prompts((40, 25))))
        for group in [asked] if batch == 2 else [[one] for one in asked]:
            texts += counts.add_texts(*(continued(system, dict(group), settings, 0) for system in (drafts, ar)))
        assert counts.positions >= 2 * tokens
        found.append((texts, counts.differing))
    return found


@needs_bf16
@pytest.mark.parametrize("family", WIDER)
def test_drafts_change_no_bit_of_the_logits(family: str) -> None:
    model = tiny(family, **WIDER[family])
    shake(model)  # so that attention matters
    assert compared(Backbone(model.bfloat16()), 24, (0.0, 1.0), (1,), "trace") == [(0, 0)] * 2


RELEASED = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 2}
"""The widths of SmolLM2-135M; a single row times its last weight of a layer, of 1,536 inputs, is added up in another order."""


@needs_bf16
@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize("capture", [pytest.param("off", marks=pytest.mark.slow), "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_drafts_change_no_bit_at_released_widths(dtype: torch.dtype, capture: str) -> None:
    model = tiny("llama", **RELEASED, vocab_size=VOCAB)
    shake(model)
    assert compared(Backbone(model.to(dtype)), 32, (0.0,), (1, 2), capture) == [(0, 0)] * 2


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("capture", ["off", "trace", pytest.param("compile", marks=[pytest.mark.slow, needs_a_compiler])])
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=needs_bf16)])
def test_the_settings_of_the_demo_change_no_token(dtype: Any, capture: BackendName) -> None:
    """The embedded model with heads that ship, greedy and sampled; docs/decode.md names where bits may differ, on which processors."""
    on = load_backbone("embedded", dtype=dtype, device="cpu")
    heads, plain = load("embedded-mlp", on, capture=capture), load(None, on, capture=capture)
    tokenizer = load_tokenizer("embedded")
    for text, sample in itertools.product(("def add(a, b):", "for name in names:"), (False, True)):
        rows = tokenizer(text, return_tensors="pt")
        options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": sample} | ({"seed": 0} if sample else {})
        assert torch.equal(say(heads, rows, **options), say(plain, rows, **options)), (text, sample)


def zigzag(prefix: int, nodes: int, slots: int, dtype: torch.dtype) -> torch.Tensor:
    """The mask of a tree whose nodes have their parents two before them."""
    mask = torch.full((1, 1, nodes, slots), torch.finfo(dtype).min, dtype=dtype)
    mask[..., :prefix] = 0
    for node in range(nodes):
        mask[..., node, prefix + node % 2 : prefix + node + 1 : 2] = 0
    return mask


@pytest.mark.parametrize("slots", [128, 1088])
def test_attention_in_fp32_has_the_bits_of_the_plain_step(slots: int) -> None:
    torch.manual_seed(0)
    nodes, least = 9, torch.finfo(torch.float32).min
    query, keys, values = (torch.randn(1, heads, count, 64) for heads, count in ((9, nodes), (3, slots), (3, slots)))
    mask = zigzag(slots - 30, nodes, slots, torch.float32)
    together = attend_exactly(query, keys, values, mask)
    for node in range(nodes):
        own = (mask[0, 0, node] == 0).nonzero()[:, 0]
        order = torch.cat([own, (mask[0, 0, node] != 0).nonzero()[:, 0]])
        plain = torch.full((1, 1, 1, slots), least)
        plain[..., : len(own)] = 0
        alone = attend_exactly(query[:, :, [node]], keys[:, :, order], values[:, :, order], plain)
        assert torch.equal(alone, together[:, :, [node]])


def test_large_batches_keep_fewer_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "MOST_LOGITS", 2 * 5 * VOCAB + 7)
    on = backbone("shallow")
    asked = [Prompt(ids_T) for ids_T in prompts((12, 9, 11, 10))]
    report = compare([("m", SpeculativeModel(on, random_drafter("medusa", on)))], asked, Plan(12, tree=TREE, batches=(1, 2)))
    assert [row["logits"]["positions"] for row in report["results"]] == [4 * 10, 4 * 5]


@pytest.mark.parametrize("prefix", [60, 150, 700, 1500])
def test_attention_of_a_node_does_not_depend_on_its_tree(prefix: int) -> None:
    torch.manual_seed(0)
    nodes = 9
    query, keys, values = (torch.randn(1, heads, prefix + nodes, 64).bfloat16() for heads in (6, 2, 2))
    query, mask = 2 * query[:, :, -nodes:], zigzag(prefix, nodes, prefix + nodes, torch.bfloat16)
    together = attend_exactly(query, keys, values, mask)
    expected = attend(query.float(), keys.float(), values.float(), mask.float())
    assert torch.allclose(together.float(), expected, rtol=0.01, atol=0.002)
    assert torch.allclose(attend_exactly(query, keys, values, mask, 0.3).float(), attend(query, keys, values, mask, 0.3).float(), atol=0.02)
    for node in range(nodes):
        own = (mask[0, 0, node] == 0).nonzero()[:, 0]
        alone = attend_exactly(query[:, :, node : node + 1], keys[:, :, own], values[:, :, own], torch.zeros(1, 1, 1, len(own)).bfloat16())
        assert torch.equal(alone, together[:, :, node : node + 1])


@pytest.mark.parametrize("keys", [100, 700])
def test_attention_of_a_row_does_not_depend_on_the_other_rows(keys: int) -> None:
    """One row takes torch's kernel or blocks of keys, several take one product for each key head."""
    torch.manual_seed(0)
    query, past, values = (torch.randn(4, heads, positions, 64).bfloat16() for heads, positions in ((6, 3), (2, keys), (2, keys)))
    mask = torch.zeros(4, 1, 3, keys).masked_fill(torch.rand(4, 1, 3, keys) > 0.7, torch.finfo(torch.bfloat16).min).bfloat16()
    together = attend_exactly(2 * query, past, values, mask)
    for row in range(4):
        one = slice(row, row + 1)
        assert torch.equal(attend_exactly(2 * query[one], past[one], values[one], mask[one]), together[one])


def test_logits_that_differ_are_counted() -> None:
    found, logits_TV = LogitsComparison(), torch.tensor([[8.0, 1, -torch.inf], [7.0, 2, 3]])
    found.add(logits_TV, logits_TV.clone())
    assert found == LogitsComparison(positions=2, largest_logit=8.0)
    found.add(logits_TV, logits_TV + torch.tensor([[0.0], [0.5]]))
    assert found == LogitsComparison(positions=4, differing=1, largest_difference=0.5, largest_logit=8.0)
    found.add(logits_TV, logits_TV * torch.tensor([[1.0], [torch.nan]]))
    assert (found.positions, found.differing, found.largest_difference) == (6, 2, torch.inf)


@pytest.mark.parametrize(("saved", "instructions", "dtype", "loaded"), [
    (torch.bfloat16, True, "auto", torch.bfloat16),
    (torch.bfloat16, False, "auto", torch.float32),
    (torch.float32, True, "auto", torch.float32),
    (torch.float16, True, "auto", torch.float32),
    (torch.bfloat16, True, "fp32", torch.float32),
])  # fmt: skip
def test_the_dtype_on_a_cpu(saved: torch.dtype, instructions: bool, dtype: str, loaded: torch.dtype, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("headstart.heads.backbone.model_config.bf16_instructions", lambda: instructions)
    tiny("llama").to(saved).save_pretrained(tmp_path)
    assert load_backbone(str(tmp_path), dtype=dtype, device="cpu").dtype == loaded  # type: ignore[arg-type]


OTHER_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("Qwen3Moe", {"moe_intermediate_size": 1536, "num_experts": 8}),
    "recurrent": ("Qwen3_5Text", {"layer_types": ["linear_attention", "full_attention"]}),
    "soft-capped": ("Gemma2", {"query_pre_attn_scalar": 64}),
    "sinks": ("GptOss", {"num_local_experts": 8}),
}
"""Of the experts one may have a single token of a tree, and its products more than 1,024 inputs."""
WIDER_MIXED = {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 2, "num_experts_per_tok": 2, "tie_word_embeddings": False}


@needs_bf16
@pytest.mark.parametrize(("layers", "dtype"), [
    *((layers, torch.bfloat16) for layers in OTHER_LAYERS),
    *(pytest.param(layers, torch.float32, marks=pytest.mark.slow) for layers in ("experts", "recurrent")),
])  # fmt: skip
def test_drafts_change_no_bit_of_other_layers(layers: str, dtype: torch.dtype) -> None:
    name, sizes = OTHER_LAYERS[layers]
    on = Backbone(build(name, SIZES | WIDER_MIXED | sizes).to(dtype))
    assert compared(on, 24, (0.0,), (1, 2), "off") == [(0, 0)] * 2
