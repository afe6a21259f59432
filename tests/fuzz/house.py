"""A folder with all that the commands read, in miniature: a backbone with a chat template, heads, data, prompts, a recipe."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from chat_templates import make_chat_model

from headstart.heads.backbone.backbone import load_backbone
from headstart.heads.methods import build_drafter

RECIPE = """backbone: {path: backbone}
drafter: {kind: medusa, depth: 2}
data: {train: rows.jsonl, eval_rows: 1, max_length: 64}
train: {steps: 1, batch_size: 2}
eval: {prompts: 1, max_new_tokens: 4}
save: {dir: out}
"""
TALK = [{"role": "user", "content": "What is two?"}, {"role": "assistant", "content": "It is four."}]


def make_house(root: Path) -> Path:
    """Write the files into an existing folder; ``train`` with its recipe takes a second."""
    backbone = load_backbone(str(make_chat_model(root / "backbone", num_hidden_layers=3, max_position_embeddings=96)))
    # The name that a user in this folder would give.
    backbone.model.config._name_or_path = backbone.model.name_or_path = "backbone"
    build_drafter("medusa", backbone, {"depth": 2}).save_pretrained(root / "heads")
    (root / "rows.jsonl").write_text("".join(json.dumps({"messages": TALK}) + "\n" for _ in range(4)))
    (root / "text.jsonl").write_text("".join(json.dumps({"text": "It is four. And three? Six, I think."}) + "\n" for _ in range(4)))
    (root / "prompts.jsonl").write_text('{"prompt": "What is two?"}\n')
    (root / "recipe.yaml").write_text(RECIPE)
    return root


@contextmanager
def inside(house: Path) -> Iterator[Path]:
    """A copy of the house as the working folder."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(house, folder, dirs_exist_ok=True)
        os.chdir(folder)
        AcceleratorState._reset_state(True)
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"  # for logs of failures
        try:
            yield Path(folder)
        finally:
            os.chdir(before)
            torch.set_num_threads(1)
