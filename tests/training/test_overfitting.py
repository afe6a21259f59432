"""Heads trained on one continuation draft nearly all of it: anything less is a fault of alignment or masking."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from every_head import VARIANTS, every_head
from families import STRANGERS
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone, load_backbone, load_tokenizer
from headstart.heads.base import Drafter
from headstart.heads.methods import build_drafter
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, continue_text
from headstart.training.data.batches import Batch, collate
from headstart.training.data.data import Sample
from headstart.training.features.source import LiveFeatures
from headstart.training.objective.loss_rows import StepKey
from headstart.training.objective.objective import TrainStep
from headstart.training.recipe.recipe import Objective, Train
from headstart.training.run.optimizer import build_optimizer, learning_rate

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
