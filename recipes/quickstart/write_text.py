"""Write the training data of the embedded backbone's heads with the backbone itself, and select the prompts for measurements.

    python recipes/quickstart/write_text.py [--backbone recipes/quickstart/backbone] [--out recipes/quickstart]

`train.jsonl.gz`: openings from training files, continued by the backbone itself, half of them greedily and half by sampling at
temperature 1. `prompts.jsonl`: openings from held-out files (PSF-2.0), which are never trained on.
"""

import argparse
import gzip
import json
import random
from pathlib import Path

import torch
from pretrain import held_out, library_files
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

OPENING, LENGTH = 128, 256
"""Tokens of real text at the start of a training passage, and its total length. With much longer openings the backbone writes little; with
short ones it writes loops."""
PROMPT = 64
"""Tokens of a prompt for measurements."""


def passages(tokenizer: PreTrainedTokenizerFast, files: list[str], count: int, tokens: int, seed: int) -> list[list[int]]:
    """``count`` passages of ``tokens`` tokens, each from a random file and starting at the beginning of a line."""
    draw = random.Random(seed)
    found: list[list[int]] = []
    while len(found) < count:
        text = draw.choice(files)
        start = text.rfind("\n", 0, draw.randrange(len(text) - 1000)) + 1
        ids = tokenizer(text[start : start + 8 * tokens])["input_ids"]
        if len(ids) >= tokens:
            found.append(ids[:tokens])
    return found


def write_text(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.backbone)
    model = LlamaForCausalLM.from_pretrained(args.backbone, dtype=torch.float32).eval().to(device)
    library = [(held_out(name), text) for name, text in sorted(library_files(args.library).items()) if len(text) > 2000]
    openings = passages(tokenizer, [text for held, text in library if not held], args.passages, OPENING, args.seed)
    rows: list[str] = []
    for i in tqdm(range(0, len(openings), args.batch_size), desc="writing"):
        batch = torch.tensor(openings[i : i + args.batch_size], device=device)
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if (i // args.batch_size) % 2 else {"do_sample": False}
        ids = model.generate(batch, attention_mask=torch.ones_like(batch), max_new_tokens=LENGTH - OPENING, **sampling)
        rows += tokenizer.batch_decode(ids, skip_special_tokens=True)
    args.out.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
    (args.out / "train.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    held_files = [text for held, text in library if held]
    prompts = [tokenizer.decode(ids) for ids in passages(tokenizer, held_files, args.prompts, PROMPT, args.seed + 1)]
    (args.out / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in prompts))


if __name__ == "__main__":
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backbone", type=Path, default=here / "backbone")
    parser.add_argument("--out", type=Path, default=here)
    parser.add_argument("--passages", type=int, default=2400)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=80)
    parser.add_argument("--library", type=Path, metavar="FOLDER", help="a standard library (default: this Python's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    write_text(parser.parse_args())
