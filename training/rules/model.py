"""What the rules look at in a model: its sizes and context from the configuration, its chat template from the tokenizer. No weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from headstart.heads.backbone.backbone import load_tokenizer
from headstart.heads.backbone.gguf_file import SUFFIX
from headstart.heads.backbone.model_config import empty_model
from headstart.heads.backbone.probes import UNTRIED, decoder_layers, layer_kinds
from headstart.heads.backbone.shipped import EMBEDDED
from headstart.support.errors import UserError, notice, waiting
from headstart.training.features.backbone import read_config
from headstart.training.recipe import sections

THOUGHTS = ("<think>", "<|channel|>analysis", "enable_thinking")
"""Texts in the chat templates of models that write their reasoning before an answer."""


CONTEXT = 2048
"""Positions assumed for a model whose configuration states none."""


@dataclass(frozen=True)
class ModelFacts:
    path: str
    """Hub id or folder, as the recipe names the backbone."""
    parameters: int
    layers: int
    width: int
    vocab: int
    context: int
    packable: bool
    """Whether several documents may share a row: not where recurrent layers run here."""
    chat: bool
    """Whether the tokenizer has a chat template."""
    thinks: bool
    """Whether the chat template knows reasoning before the answer."""
    refusal: str | None = None
    """Why heads for it are trained and exported only; None if it decodes with them too."""

    @property
    def name(self) -> str:
        """The folder of its recipes: the last part of the path in lower case."""
        return "embedded" if self.path == EMBEDDED else Path(self.path).name.lower().removesuffix(SUFFIX)


@waiting("reading the model's configuration and tokenizer")
def read_facts(path: str, *, trust_remote_code: bool = False) -> ModelFacts:
    """Look at a model, a folder or hub id. Raises UserError if it is no backbone."""
    config = read_config(sections.Backbone(path=path, trust_remote_code=trust_remote_code))
    model = empty_model(config, path, trust_remote_code=trust_remote_code)
    config = model.config.get_text_config()
    stated, readout = config.to_dict(), model.get_output_embeddings()
    layers = decoder_layers(model, config.num_hidden_layers)
    tokenizer = _tokenizer(path, trust_remote_code)
    template = "" if tokenizer is None else str(tokenizer.get_chat_template() if tokenizer.chat_template else "")
    _, recurrent, no_trees = layer_kinds(model, layers)
    context = stated.get("max_position_embeddings") or stated.get("n_positions")
    if context is None:
        notice(f"assumed: a context of {CONTEXT:,} tokens: its configuration states none")
    return ModelFacts(
        path=path, parameters=sum(weight.numel() for weight in model.parameters()),
        layers=len(layers), width=config.hidden_size, vocab=readout.weight.shape[0], context=context or CONTEXT,
        packable=recurrent is None, chat=tokenizer is None or bool(template),
        thinks=any(text in template for text in THOUGHTS), refusal=None if no_trees is None else f"{no_trees}; {UNTRIED}",
    )  # fmt: skip


def _tokenizer(path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    try:
        return load_tokenizer(path, trust_remote_code=trust_remote_code)
    except UserError:
        notice("assumed: a tokenizer with a chat template: none could be read")
        return None
