"""Draft models that are trained: start values, gradients, parallel drafts, and checkpoints that are ordinary transformers folders.

Shape suffixes: B batch, T positions, M anchors, N tree nodes, D width, V vocabulary.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from errors import refusal, refuses
from families import LAYERS, STRANGERS, VARIANTS, VOCAB, backbone, every_head, random_drafter, texts, tiny
from safetensors import safe_open
from test_draft_model import words
from torch import Tensor
from transformers import AutoModelForCausalLM

from headstart import Backbone, Drafter, SpeculativeModel, TreeShape, load_backbone, load_tokenizer
from headstart.heads.backbone.features import Anchors, Features
from headstart.heads.checkpoint import load_drafter
from headstart.heads.draft_model import DraftModel
from headstart.heads.methods import build_drafter, construct_drafter
from headstart.inference.measure import Settings, continue_text
from headstart.training.data.batches import Batch, collate
from headstart.training.data.data import Sample
from headstart.training.features.source import LiveFeatures, LiveWithCache
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.loss_rows import StepKey, sample_anchors
from headstart.training.objective.objective import TrainStep, rollout
from headstart.training.recipe.recipe import Objective, Train
from headstart.training.run.optimizer import build_optimizer, learning_rate

CLOSE = {"atol": 3e-5, "rtol": 1e-4}
PARALLEL = {"parallel": True, "depth": 4}
NEW = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}


def built(on: Backbone, arguments: dict[str, Any]) -> DraftModel:
    return cast(DraftModel, build_drafter("draft_model", on, arguments))


def random(on: Backbone, arguments: dict[str, Any]) -> DraftModel:
    return cast(DraftModel, random_drafter("draft_model", on, **arguments))


@pytest.mark.parametrize("arguments", [{"layers": 2}, PARALLEL, {"architecture": NEW}], ids=["pruned", "parallel", "new"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_the_folder_is_an_ordinary_model(family: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    on, tokens_BT = backbone(family), texts(2, 12)
    drafter = random(on, arguments)
    drafter.save_pretrained(tmp_path)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    hidden = drafter(Features(tokens_BT, torch.zeros(2, 12, 1)))
    torch.testing.assert_close(drafter.readout(hidden[0], 0), model(tokens_BT).logits[:, 1:-1], **CLOSE)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    plain = on.model.generate(tokens_BT[:1], **options)
    assert torch.equal(on.model.generate(tokens_BT[:1], assistant_model=model, **options), plain)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__] and config["dtype"] == "float32" and config["vocab_size"] == VOCAB
    assert config.get("pard_token") == (VOCAB - 1 if drafter.config.parallel else None)
    assert (tmp_path / "generation_config.json").is_file()
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) != model.config.tie_word_embeddings


@pytest.mark.parametrize(
    "arguments,kept", [({}, [0]), ({"layers": 3}, [0, 1, 2]), ({"layers": 3, "choose": "even", "untie": True}, [0, 2, 5])], ids=str
)
def test_a_pruned_model_starts_as_layers_of_the_backbone(arguments: dict[str, Any], kept: list[int]) -> None:
    for family in ("qwen3", "gemma3"):
        on = backbone(family)
        drafter, own = built(on, arguments), dict(on.model.named_parameters(remove_duplicate=False))
        assert drafter.depth == 6 and drafter.model.config.num_hidden_layers == len(kept)
        if family == "gemma3":
            assert drafter.model.config.layer_types == [on.config.layer_types[number] for number in kept]
        for name, weight in drafter.model.named_parameters(remove_duplicate=False):
            source = re.sub(r"layers\.(\d+)", lambda match: f"layers.{kept[int(match[1])]}", name)
            assert torch.equal(weight, own[source]), name
        tied = drafter.model.get_input_embeddings().weight is drafter.model.get_output_embeddings().weight
        assert tied == (on.config.tie_word_embeddings and "untie" not in arguments)
    whole = built(backbone("llama"), {"layers": LAYERS})
    read = Features(texts(1, 9), torch.zeros(1, 9, 1))
    torch.testing.assert_close(whole(read)[0], backbone("llama").read(texts(1, 9)).hidden_BTD[:, 1:-1], **CLOSE)


def test_a_smaller_model_is_fitted_to_the_vocabulary(tmp_path: Path) -> None:
    """Its folder is needed for the start values alone."""
    target, small = tmp_path / "target", tmp_path / "small"
    backbone("llama").model.save_pretrained(target)
    words().save_pretrained(target)
    on, model = load_backbone(str(target)), tiny("llama", seed=3, vocab_size=VOCAB - 9, num_hidden_layers=2, tie_word_embeddings=True)
    model.save_pretrained(small)
    refuses(f"draft model .* has a vocabulary of {VOCAB - 9} and backbone .* of {VOCAB}", built, on, {"path": str(small)})
    words(3).save_pretrained(small)
    refuses("token 3 is 'other3' to draft model", built, on, {"path": str(small)})
    words().save_pretrained(small)
    drafter, tokens_BT = built(on, {"path": str(small)}), texts(1, 9) % (VOCAB - 9)
    logits_BTV = drafter.readout(drafter(Features(tokens_BT, torch.zeros(1, 9, 1)))[0], 0)
    assert logits_BTV.shape[-1] == VOCAB
    torch.testing.assert_close(logits_BTV[..., :-9], model(tokens_BT).logits[:, 1:-1], **CLOSE)
    drafter.save_pretrained(tmp_path / "heads")
    shutil.rmtree(small)
    loaded = load_drafter(tmp_path / "heads", on)
    assert isinstance(loaded, DraftModel) and loaded.arguments == drafter.arguments
    assert (tmp_path / "heads" / "tokenizer.json").is_file()
    refuses("no draft model at .*small", construct_drafter, "draft_model", on, {"path": str(small)})


def alone(drafter: DraftModel, text_T: Tensor) -> Tensor:
    """The model's last hidden states over a text, by transformers alone."""
    hidden_TD: Tensor = drafter.model.base_model(text_T[None]).last_hidden_state[0]
    return hidden_TD


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_parallel_drafts_are_those_of_masks_after_the_root(family: str) -> None:
    """Several anchors in a row and in a document; the masks of one do not see those of another."""
    drafter = random(backbone(family), PARALLEL | {"mask_token": 7})
    tokens_BT, document_BT = texts(2, 20), torch.tensor([[0] * 20, [0] * 8 + [1] * 10 + [-1] * 2])
    features = Features(tokens_BT, torch.zeros(2, 20, 1), document_BT=document_BT)
    at = Anchors(torch.tensor([1, 0, 1, 0, 0]), torch.tensor([11, 2, 3, 3, 17]))
    hidden = drafter(features, at)
    for m, (row, t) in enumerate(zip(at.row_M.tolist(), at.position_M.tolist(), strict=True)):
        first = 8 if (row, t) == (1, 11) else 0
        text_TD = alone(drafter, torch.cat([tokens_BT[row, first : t + 2], torch.full((3,), 7)]))
        for k in range(4):
            torch.testing.assert_close(hidden[k][m], text_TD[t + 1 - first + k], **CLOSE)
    nothing = drafter(features, Anchors(at.row_M[:0], at.position_M[:0]))
    assert [x.shape[0] for x in nothing] == [0] * 4, "a batch without anchors"


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rollouts_carry_gradients(family: str) -> None:
    """The states of drafted tokens and their gradients are those of one pass over the whole text (2310.08461)."""
    on, make = backbone(family), torch.Generator().manual_seed(0)
    drafter = random(on, {"layers": 3, "depth": 4}).requires_grad_(True)
    rows = [Sample(torch.randint(1, VOCAB, (length,), generator=make), torch.ones(length, dtype=torch.bool)) for length in (9, 12, 7)]
    features = LiveWithCache(on, ()).read(collate(rows, [[0, 1], [2]]))
    anchors = sample_anchors(features, 4, 0.5, StepKey(1, 1), first_depth=1)
    assert len(anchors) > 4
    tokens_MN, hidden = rollout(FusedLoss(Objective(on_policy=1.0), drafter), features, anchors)
    plain = []
    places = zip(anchors.at.row_M.tolist(), anchors.at.position_M.tolist(), anchors.first_M.tolist(), strict=True)
    for m, (row, t, first) in enumerate(places):
        plain.append(alone(drafter, torch.cat([features.tokens_BT[row, first : t + 2], tokens_MN[m]]))[t + 1 - first :])
    torch.testing.assert_close(torch.stack(hidden, 1), torch.stack(plain), **CLOSE)
    grads = []
    for states in (torch.stack(hidden, 1), torch.stack(plain)):
        drafter.zero_grad()
        states.square().sum().backward()
        grads.append([weight.grad.clone() for weight in drafter.parameters() if weight.grad is not None])
    assert len(grads[0]) == len(grads[1]) > 10
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * other.abs().max().item())


def test_rotary_frequencies_keep_their_precision() -> None:
    drafter = random(backbone("llama"), {})
    exact = [buffer.clone() for buffer in drafter.model.buffers()]
    drafter.to(torch.bfloat16)
    assert drafter.model.dtype == torch.bfloat16 and len(exact) > 0
    for buffer, before in zip(drafter.model.buffers(), exact, strict=True):
        assert torch.equal(buffer, before) and buffer.dtype == torch.float32


@pytest.mark.parametrize("arguments,named", [
    ({"layers": LAYERS + 1}, f"drafter.layers is from 1 to {LAYERS}, the layers that the backbone has; got {LAYERS + 1}"),
    ({"layers": 2, "path": "x"}, "drafter.layers prunes the backbone and goes with neither path nor architecture"),
    ({"parallel": True}, "drafter.depth is at least 2 with parallel"),
    ({"mask_token": 3}, "drafter.mask_token goes with parallel"),
    (PARALLEL | {"mask_token": VOCAB}, f"drafter.mask_token is a token of the vocabulary, from 0 to {VOCAB - 1}; got {VOCAB}"),
    (PARALLEL | {"draft_depth": 5}, "DraftModel cannot draft deeper than the 4 tokens"),
    ({"path": "/nowhere/model"}, "no draft model at '/nowhere/model'"),
    ({"architecture": {"model_type": "nonsense"}}, "drafter.architecture is no configuration"),
    ({"architecture": {"hidden_size": 8}}, "drafter.architecture is no configuration"),
    ({"architecture": {"model_type": "t5"}}, "a draft model of type 't5' cannot be built"),
], ids=str)  # fmt: skip
def test_wrong_arguments_are_refused_in_a_line(arguments: dict[str, Any], named: str) -> None:
    assert named in refusal(build_drafter, "draft_model", backbone("llama"), arguments)


def test_what_a_parallel_model_cannot_do() -> None:
    drafter: Drafter = random(backbone("llama"), PARALLEL)
    for refused, named in ((drafter.recompute, "gradient_checkpointing"), (lambda: drafter.limit(8), "keeps all keys")):
        refuses(named, refused)


# Heads trained on one continuation draft nearly all of it: anything less is a fault of alignment or masking.

DEPTH, NEW_TOKENS, SHARE = 4, 61, 0.9
PROMPT = "import os\nimport sys\n\n"
OBJECTIVE = Objective(terms={"ce": 1.0}, depth_weights="geometric", depth_decay=1.0)
TRAIN = Train(steps=30, optimizer="muon", lr=2e-2, min_lr_ratio=0.01)
LENGTHS = {"eagle3": 16, "medusa": 16, "peagle": 45}
"""Steps of the heads that learn faster, and of those that learn at half of the positions in each."""
HEADS = [*every_head(DEPTH), *((kind, {"depth": DEPTH}) for kind in STRANGERS)]
HEADS += [(kind, {**dict(every_head(DEPTH))[kind], **arguments}) for kind, arguments in VARIANTS]
HEADS.sort(key=lambda head: head[0] != "medusa")  # the first is the fast one


@dataclass(frozen=True)
class Conversation:
    """A prompt and the embedded backbone's greedy continuation, the only row of training data."""

    backbone: Backbone
    prompt_T: Tensor
    tokens_T: Tensor

    def frequent(self, count: int) -> Tensor:
        """That many tokens, those of the row among them."""
        return torch.bincount(self.tokens_T, minlength=self.backbone.vocab).topk(count).indices

    @property
    def batch(self) -> Batch:
        return collate([Sample(self.tokens_T, torch.arange(len(self.tokens_T)) >= len(self.prompt_T))], [[0]])


@pytest.fixture(scope="module")
def conversation() -> Conversation:
    on = load_backbone("embedded", device="cpu", dtype="fp32")
    prompt_T = torch.tensor(load_tokenizer("embedded")(PROMPT)["input_ids"])
    tokens_T = continue_text(SpeculativeModel(on, capture="off"), prompt_T, Settings(NEW_TOKENS), 0).sequences[0]
    answer = tokens_T[len(prompt_T) :].tolist()
    assert len(answer) == NEW_TOKENS and len(set(answer)) > NEW_TOKENS // 2, "a text that repeats itself shows nothing"
    return Conversation(on, prompt_T, tokens_T)


def overfit(drafter: Drafter, of: Conversation, train: Train = TRAIN) -> None:
    """Train with the objective and the optimizer of a recipe; the features, of a frozen backbone, are read once."""
    assert train.steps is not None
    drafter.train()
    step, optimizer = TrainStep(drafter, OBJECTIVE), build_optimizer(drafter, train)
    features = LiveFeatures(of.backbone, drafter.taps).read(of.batch)
    for number in range(1, train.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number, train.steps, train)
        (step(features, StepKey(0, number)).loss / NEW_TOKENS).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    drafter.eval().requires_grad_(False)


def accepted(drafter: Drafter, of: Conversation) -> float:
    """Tau in a chain of the drafter's depth, as a share of the most there can be; whole chains end with the row."""
    longest = drafter.depth + 1
    settings = Settings(1 + (NEW_TOKENS - 1) // longest * longest, tree=TreeShape(longest, 1))
    output = continue_text(SpeculativeModel(of.backbone, drafter, capture="off"), of.prompt_T, settings, 0)
    assert torch.equal(output.sequences[0], of.tokens_T[: output.sequences.shape[1]]) and output.tau is not None
    return output.tau / longest


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("kind,arguments", HEADS, ids=lambda value: value if isinstance(value, str) else "-".join(value))
def test_one_conversation_is_learnt(conversation: Conversation, kind: str, arguments: dict[str, Any]) -> None:
    torch.manual_seed(0)
    drafter = build_drafter(kind, conversation.backbone, arguments)
    if drafter.vocabulary is not None:
        drafter.use_vocabulary(conversation.frequent(len(drafter.vocabulary)))
    overfit(drafter, conversation, TRAIN.model_copy(update={"steps": LENGTHS.get(kind, TRAIN.steps)}))
    assert accepted(drafter, conversation) >= SHARE
