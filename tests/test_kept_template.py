"""One chat template for a checkpoint: saved with the heads, and used by every command and by `load`."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import backbone, random_drafter
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from headstart.heads.checkpoint import load_drafter
from headstart.support.chat.settings import ChatSettings, template_hash
from headstart.support.errors import UserError


def test_heads_that_keep_no_template_need_the_tokenizers(tmp_path: Path) -> None:
    def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])), chat_template=template)

    trained = tokenizer("{{ messages }}")
    random_drafter("medusa", backbone("llama")).save_pretrained(tmp_path, {"chat_template": template_hash(trained.chat_template)})
    load_drafter(tmp_path, backbone("llama"), tokenizer=trained)
    load_drafter(tmp_path, backbone("llama"))
    for other in ("{{ messages }} ", None):
        assert "chat template" in str(pytest.raises(UserError, load_drafter, tmp_path, backbone("llama"), tokenizer=tokenizer(other)).value)
        load_drafter(tmp_path, backbone("llama"), tokenizer=tokenizer(other), allow_finetuned=True)
    assert template_hash(None) is None
    kept = {"chat_template": template_hash(trained.chat_template), "chat": ChatSettings().to_card(trained)}
    random_drafter("medusa", backbone("llama")).save_pretrained(tmp_path / "kept", kept)
    for other in ("{{ messages }} ", None):   # the heads bring theirs
        load_drafter(tmp_path / "kept", backbone("llama"), tokenizer=tokenizer(other))
