"""What a model of released size goes through: trained on, saved, loaded, decoded with, regenerated from, exported and verified.

Everything is done by the commands that users type and by `headstart.load`; texts are compared with those of autoregressive decoding.
"""

import gc
import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from families import Scripted, left_padded, say, unpadded
from released_model import WORDS, configuration, text, write
from safetensors.torch import load_file
from small_run import read_log
from torch import Tensor
from transformers import TopPLogitsWarper

from headstart import Backbone, Drafter, SpeculativeModel, TreeShape, load_backbone
from headstart.cli.main import main
from headstart.heads.checkpoint import load_drafter
from headstart.inference.capture.capture import BackendName
from headstart.inference.engine.noise import gumbel
from headstart.inference.engine.proposer import Proposer
from headstart.inference.engine.suffix import SuffixProposer
from headstart.training.recipe.yaml_text import dump_yaml

Options = dict[str, Any]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NEW, LENGTHS, SEEDS = 12, (23, 7, 14), [5, 77, -3]
ROUNDING = 0.03
"""Differences of bf16 logits, as a share of the largest, by which a pick may change."""
LONG, LONG_EAGER, LONG_NEW = 8000, 4000, 6
"""Tokens of the long prompt, with eager attention, whose matrices of all pairs of 8,000 take 19 GB in GPT-OSS, and of its continuation."""
SAMPLED: Options = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
NARROW = 896
"""Widest model with which heads read three taps, and a narrower one has Muon: both take the cube of the width."""
WIDE = 2560
"""From this width on, the feed-forward part of heads is as wide as this: as wide as the model's, training would take 14 GB."""
LARGE = 160_000_000
"""Weights of layers with which 8,000 tokens take minutes in fp32: read in bf16 alone."""
GREEDY: Options = {"do_sample": False}
OPTIONS = {"greedy": GREEDY, "sampled": SAMPLED}
TREE = {"tree": TreeShape(16, 5)}


class Released:
    """A random model of a released one's sizes in ``folder``, and heads trained on it."""

    def __init__(self, model: str, dtype: str, folder: Path, drafter: dict[str, Any] | None = None) -> None:
        """``drafter``: that section of the recipe; by default EAGLE-3."""
        self.model, self.dtype, self.folder, self.config = model, dtype, folder, configuration(model).get_text_config()
        self.vocab = write(model, DTYPES[dtype], folder / "backbone")
        self._plain: dict[tuple[str, bool], list[list[int]]] = {}
        self._write_text(drafter or self._eagle3())

    def _eagle3(self) -> dict[str, Any]:
        width = self.config.hidden_size
        taps, intermediate = [0, 1, 2] if width <= NARROW else None, None if width < WIDE else WIDE
        return {"kind": "eagle3", "depth": 3, "draft_vocab_size": 8192, "taps": taps, "intermediate_size": intermediate}

    def _write_text(self, drafter: dict[str, Any]) -> None:
        rng = random.Random(0)
        rows = [text([rng.randrange(WORDS, self.vocab) for _ in range(48)]) for _ in range(6)]
        (self.folder / "text.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        recipe = {
            "backbone": {"path": str(self.folder / "backbone"), "dtype": self.dtype},
            "drafter": drafter,
            "data": {"train": str(self.folder / "text.jsonl"), "eval_rows": 2, "max_length": 64},
            "train": {"steps": 2, "batch_size": 2, "optimizer": "muon" if self.config.hidden_size < NARROW else "adamw"},
            "eval": {"prompts": 1, "max_new_tokens": 6},
            "regenerate": {"max_new_tokens": 8, "prompt_tokens": 16, "batch_size": 2, "limit": 4},
            "save": {"dir": str(self.folder / "heads")},
            "log": {"every": 1},
            "seed": 7,
        }
        (self.folder / "recipe.yaml").write_text(dump_yaml(recipe))

    @cached_property
    def heads(self) -> Path:
        """The folder of heads that two steps of the training command made."""
        self.command("train", str(self.folder / "recipe.yaml"))
        return self.folder / "heads"

    def command(self, name: str, *arguments: str) -> None:
        AcceleratorState._reset_state(True)
        assert main([name, *arguments]) == 0
        gc.collect()  # another backbone is loaded next

    @cached_property
    def backbone(self) -> Backbone:
        return load_backbone(str(self.folder / "backbone"), dtype=self.dtype, device="cpu")  # type: ignore[arg-type]

    @cached_property
    def drafter(self) -> Drafter:
        return load_drafter(self.heads, self.backbone)

    def drafting(self, truths: list[list[int]], proposers: Sequence[Proposer] = (), capture: BackendName = "off") -> SpeculativeModel:
        """The trained heads beside a drafter that is mostly right, so that whole paths of trees are accepted."""
        right = Scripted(self.backbone, truths, "nearly")
        return SpeculativeModel(self.backbone, self.drafter, proposers=[right, *proposers], capture=capture)

    def prompt(self, length: int, seed: int) -> Tensor:
        return torch.randint(WORDS, self.vocab, (length,), generator=torch.Generator().manual_seed(seed))

    @cached_property
    def rows(self) -> list[Tensor]:
        return [self.prompt(length, i) for i, length in enumerate(LENGTHS)]

    def plain(self, way: str, together: bool = False) -> list[list[int]]:
        """The texts of autoregressive decoding, "greedy" or "sampled": each row by itself, or ``together`` where a batch rounds otherwise.

        In bf16 a prompt among longer ones is read with other sums than alone.
        """
        together = together and self.dtype == "bf16"
        if (way, together) not in self._plain:
            model, options = SpeculativeModel(self.backbone, capture="off"), {"max_new_tokens": NEW} | OPTIONS[way]
            if together:
                batch = left_padded(self.rows)
                found = unpadded(say(model, batch, **options | seeded(way, SEEDS)), batch)
            else:
                each = zip(self.rows, SEEDS, strict=True)
                found = [say(model, one(row), **options | seeded(way, seed))[0].tolist() for row, seed in each]
            self._plain[way, together] = found
        return self._plain[way, together]

    @property
    def body(self) -> int:
        return sum(weight.numel() for weight in self.backbone.layers.parameters())

    @property
    def exact(self) -> bool:
        """Whether trees give the bits of plain steps: bf16 sums of eager attention and of recurrent layers depend on the tree."""
        return self.dtype == "fp32" or (self.backbone.model.config._attn_implementation == "sdpa" and self.backbone.recurrent is None)

    def require_same(self, texts: list[list[int]], way: str) -> None:
        """The texts of the first rows are those of autoregressive decoding, or what the model itself writes but for rounding."""
        assert not self.exact or texts == self.plain(way, together=len(texts) > 1)[: len(texts)]
        for tokens, row, seed in zip(texts, self.rows, SEEDS, strict=False):
            require_picks(self.backbone, tokens, len(row), seed if way == "sampled" else None)


Step = Callable[[Released], None]


def seeded(way: str, seed: int | list[int]) -> dict[str, Any]:
    return {"seed": seed} if way == "sampled" else {}


def one(row: Tensor) -> dict[str, Tensor]:
    return {"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]}


def require_picks(backbone: Backbone, tokens: list[int], start: int, seed: int | None) -> None:
    """Each token from ``start`` on is the model's pick after those before, or as good but for rounding."""
    logits_TV = backbone.model(torch.tensor([tokens]), logits_to_keep=len(tokens) - start + 1).logits[0].float()
    for place in range(start, len(tokens)):
        strict = loose = logits_TV[place - start]
        if seed is not None:
            noise_V = gumbel(torch.tensor([seed]), torch.tensor([[place]]), backbone.vocab)[0, 0]
            heated = strict[None] / SAMPLED["temperature"]
            strict, loose = (TopPLogitsWarper(p)(torch.tensor([tokens]), heated)[0] + noise_V for p in (0.94, 0.96))
        assert loose[tokens[place]] >= strict.max() - ROUNDING * logits_TV.abs().max(), f"token {place} is no near-tie"


def trains(of: Released) -> None:
    """Two steps of the training command, an evaluation, and the heads are there."""
    losses = [line["loss"] for line in read_log(of.heads) if "loss" in line]
    assert len(losses) == 2 and all(map(math.isfinite, losses))


def regenerates(of: Released) -> None:
    """Four rows are answered, with heads as without."""
    recipe, texts = str(of.folder / "recipe.yaml"), []
    for name, heads in (("with", str(of.heads)), ("without", "null")):
        of.command("regenerate", recipe, f"regenerate.out={of.folder}/{name}.jsonl", f"regenerate.heads={heads}")
        texts.append((of.folder / f"{name}.jsonl").read_text())
    assert texts[0] == texts[1] and len(texts[0].splitlines()) == 4


def exports(of: Released) -> None:
    """In the layout of vLLM; the files, read back, draft what the heads draft."""
    of.command("export", "--heads", str(of.heads), "--to", "vllm", "--out", str(of.folder / "served"))
    of.command("verify", str(of.folder / "served"))


def saves_and_loads(of: Released) -> None:
    """Heads that are loaded and saved again have the same weights."""
    of.drafter.save_pretrained(of.folder / "again")
    first, again = (load_file(folder / of.drafter.file_name) for folder in (of.heads, of.folder / "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(weight.to(again[name].dtype), again[name]) for name, weight in first.items())


def decodes(of: Released, *counts: int, ways: Iterable[str] = OPTIONS, options: Options = TREE, **given: Any) -> float:
    """So many first rows together, with the same heads after each other: each row as it is alone. Returns the last tau."""
    for way in ways:
        heads = of.drafting(of.plain(way, together=max(counts) > 1), **given)
        for count in counts:
            batch = left_padded(of.rows[:count])
            how = options | OPTIONS[way] | seeded(way, SEEDS[:count])
            out = say(heads, batch, max_new_tokens=NEW, return_dict_in_generate=True, **how)
            of.require_same(unpadded(out.sequences, batch), way)
    return out.tau


def decodes_in_trees(of: Released) -> None:
    """Greedy, where in fp32 the text is that of transformers' own generate too, and sampled; then rows of different lengths."""
    row, plain = of.rows[0], of.plain("greedy")[0]
    assert len(set(plain[len(row) :])) > 3, "a dull text shows nothing"
    if of.dtype == "fp32":
        assert of.backbone.model.generate(**one(row), max_new_tokens=NEW, **GREEDY)[0].tolist() == plain
    assert decodes(of, 1, ways=["greedy"]) > 1.5
    decodes(of, 1, ways=["sampled"])
    decodes(of, 3, options={"tree": TreeShape(12, 4)})


def decodes_adaptively_and_captured(of: Released) -> None:
    """Trees whose size follows from measured times, with a second source; forward passes traced and replayed."""
    decodes(of, 3, ways=["sampled"], options={}, proposers=[SuffixProposer()])
    decodes(of, 3, 1, ways=["greedy"], options={}, capture="trace")


def decodes_a_long_prompt(of: Released) -> None:
    if of.dtype == "fp32" and of.body > LARGE:
        return
    length = LONG_EAGER if of.backbone.model.config._attn_implementation == "eager" else LONG
    row = of.prompt(min(length, (of.backbone.max_positions or LONG + 64) - 64), 9)
    plain = say(SpeculativeModel(of.backbone, capture="off"), one(row), max_new_tokens=LONG_NEW, **GREEDY)
    out = say(of.drafting(plain.tolist()), one(row), tree=TreeShape(8, 3), max_new_tokens=LONG_NEW, **GREEDY)
    if of.exact:
        assert torch.equal(out, plain)
    else:
        require_picks(of.backbone, out[0].tolist(), len(row), None)


STEPS: tuple[Step, ...] = (
    trains, regenerates, exports, saves_and_loads, decodes_in_trees, decodes_adaptively_and_captured, decodes_a_long_prompt,
)  # fmt: skip
"""In this order: the commands load the backbone themselves, so it should not be in memory yet."""
