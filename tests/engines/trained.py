"""Heads that the tests of engines share, trained for a minute each and kept in out/engines."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "out" / "engines"
TRAINING = ("train.steps=30", "train.batch_size=2", "eval.prompts=1", "eval.max_new_tokens=16")


@dataclass(frozen=True)
class Heads:
    """A recipe of recipes/quickstart with further arguments, and the number of tokens that vLLM is told to draft."""

    recipe: str
    arguments: tuple[str, ...] = ()
    depth: int = 4


PARALLEL = ("drafter.parallel=true", "drafter.depth=4", "drafter.draft_depth=4", "drafter.mask_token=100")
HEADS = {
    "eagle3": Heads("eagle3"),
    "eagle3-whole-vocabulary": Heads("eagle3", ("drafter.draft_vocab_size=null",)),
    "eagle3.1-two-layers": Heads("eagle3", ("drafter.fc_norm=true", "drafter.norm_output=true", "drafter.layers=2")),
    "eagle3-for-llama.cpp": Heads("eagle3", ("drafter.norm_output=false", "train.steps=120", "train.batch_size=3")),
    "peagle": Heads("peagle", ("train.steps=60",), depth=5),
    "eagle": Heads("eagle"),
    "medusa": Heads("medusa"),
    "dflash": Heads("block", ("drafter.correction=none",), depth=5),
    "dflash2": Heads("block", ("drafter.correction=selector", "drafter.convolution=true"), depth=5),
    "dspark": Heads("block", depth=5),
    "draft-model": Heads("draft_model"),
    "parallel-draft-model": Heads("draft_model", PARALLEL),
    "mlp": Heads("mlp"),
}


def trained(name: str) -> Path:
    """Return the folder of these heads, trained in an earlier run or now."""
    folder, heads = CACHE / name, HEADS[name]
    if not (folder / "headstart.json").is_file():
        command = [sys.executable, str(ROOT / "train_heads.py"), str(ROOT / "recipes" / "quickstart" / f"{heads.recipe}.yaml")]
        done = subprocess.run(
            [*command, *TRAINING, *heads.arguments, f"save.dir={folder}"],
            cwd=ROOT, env=os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
    return folder
