"""A tiny backbone with random heads, a chat template and a context of 96."""

import functools

from chat_templates import CHATML, make_tokenizer
from families import build, random_drafter

from headstart.chat.prompts import Prompter
from headstart.heads.backbone.backbone import Backbone
from headstart.inference.generate import SpeculativeModel

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4, "max_position_embeddings": 96}


@functools.cache
def talker() -> tuple[SpeculativeModel, Prompter]:
    """The session's shared heads and prompter; tests must not modify them."""
    tokenizer = make_tokenizer(CHATML)
    on = Backbone(build("Llama", SIZES | {"vocab_size": len(tokenizer)}))
    return SpeculativeModel(on, random_drafter("medusa", on, depth=3)), Prompter(tokenizer)
