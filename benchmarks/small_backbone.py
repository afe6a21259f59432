"""Pretrains a small Llama on a text file in minutes, so that benchmarks/transfer.py has backbones of other sizes, tokenizers and data.

    python benchmarks/small_backbone.py --text wikitext2_valid.txt --out own/prose2 --minutes 5
    python benchmarks/small_backbone.py --text chat_train.jsonl --out own/tasks5 --layers 5 --width 160 --heads 5 --kv-heads 1 --vocab 1536
    python benchmarks/small_backbone.py --text own/prose2 --out own/prose2-longer --minutes 20

Reads plain text, JSON lines with ``text`` or ``messages``, or a folder that it has written before. One paragraph (or row) in ten is held
out, chosen by its hash, and written with the others beside the model: ``train.jsonl.gz`` and ``eval.jsonl.gz``, rows of ``text`` for heads
to be trained and measured on. ``training.json`` records the sizes, the steps and the held-out loss. The schedule follows the wall clock.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.recipes.quickstart.pretrain import train_tokenizer

LENGTH, ROWS, HELD_OUT = 128, 16, 10
"""Tokens of a window, windows of a step, and one text in how many is held out."""


def read_texts(file: Path, characters: int) -> list[str]:
    """Return texts of some paragraphs each, up to ``characters`` in all."""
    texts: list[str] = []
    if file.suffix == ".jsonl":
        for line in file.read_text().splitlines():
            row = json.loads(line)
            texts.append(row["text"] if "text" in row else "\n\n".join(message["content"] for message in row["messages"]))
    else:
        texts = [paragraph.strip() for paragraph in file.read_text().split("\n") if len(paragraph.strip()) > 200]
    kept, total = [], 0
    for text in texts:
        if total < characters:
            kept.append(text)
            total += len(text)
    return kept


def read_splits(source: Path, characters: int) -> dict[str, list[str]]:
    """Return the texts to train on and those held out, as the folder ``source`` has them, or by the hash of each text."""
    if source.is_dir():
        files = {name: gzip.open(source / f"{name}.jsonl.gz", "rt").read() for name in ("train", "eval")}
        return {name: [json.loads(line)["text"] for line in lines.splitlines()] for name, lines in files.items()}
    texts = read_texts(source, characters)
    held = {text for text in texts if int(hashlib.sha256(text.encode()).hexdigest(), 16) % HELD_OUT == 0}
    return {"train": [text for text in texts if text not in held], "eval": [text for text in texts if text in held]}


def stream_of(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """Return the tokens of all texts in sequence, each before an end token."""
    assert tokenizer.eos_token_id is not None
    ids = tokenizer.backend_tokenizer.encode_batch(texts)
    return torch.tensor([token for one in ids for token in [*one.ids, tokenizer.eos_token_id]])


def build(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> LlamaForCausalLM:
    end = tokenizer.eos_token_id
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=args.width, intermediate_size=args.feed_forward or 32 * round(args.width * 2.6 / 32),
        num_hidden_layers=args.layers, num_attention_heads=args.heads, num_key_value_heads=args.kv_heads or args.heads,
        max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.04, bos_token_id=end, eos_token_id=end, pad_token_id=end,
    ))  # fmt: skip


def pretrain(model: LlamaForCausalLM, stream: Tensor, args: argparse.Namespace) -> int:
    """Train for ``args.minutes``: Muon for hidden matrices, AdamW for the rest. Returns the number of steps."""
    hidden = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed_tokens" not in name]
    rest = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed_tokens" in name]
    muon = torch.optim.Muon(hidden, lr=args.lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    optimizers = [muon, torch.optim.AdamW(rest, lr=args.lr)]
    start, done, draw = time.monotonic(), 0, torch.Generator().manual_seed(1)
    while (part := (time.monotonic() - start) / (60 * args.minutes)) < 1:
        first = torch.randint(len(stream) - LENGTH, (ROWS, 1), generator=draw)
        windows = stream[first + torch.arange(LENGTH + 1)]
        cross_entropy(model(windows[:, :-1]).logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(1.0, (done + 1) / 50, 0.02 + 1.4 * (1 - part))
            optimizer.step()
            optimizer.zero_grad()
        done += 1
    return done


@torch.no_grad()
def loss(model: LlamaForCausalLM, stream: Tensor) -> float:
    """Return the mean cross-entropy in nats a token over whole windows."""
    windows = stream.unfold(0, LENGTH + 1, LENGTH)
    parts = [cross_entropy(model(w[:, :-1]).logits.flatten(0, 1), w[:, 1:].flatten()).item() * len(w) for w in windows.split(ROWS)]
    return sum(parts) / len(windows)


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    splits = read_splits(args.text, args.characters)
    tokenizer = train_tokenizer(splits["train"], args.vocab)
    model = build(tokenizer, args)
    stream = stream_of(tokenizer, splits["train"])
    steps = pretrain(model, stream, args)
    facts = {
        "parameters": model.num_parameters(), "training_tokens": steps * ROWS * LENGTH, "different_tokens": len(stream), "steps": steps,
        "held_out_loss": round(loss(model, stream_of(tokenizer, splits["eval"])), 4), "minutes": args.minutes,
    }  # fmt: skip
    model.bfloat16().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    for name, rows in splits.items():
        with gzip.open(args.out / f"{name}.jsonl.gz", "wt") as lines:
            lines.writelines(json.dumps({"text": text}) + "\n" for text in rows)
    (args.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="plain text, JSON lines with text or messages, or a folder written before")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--characters", type=int, default=1_500_000, help="of the text, at most")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--feed-forward", type=int, help="2.6 times the width unless given")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=8e-3)
    main(parser.parse_args())
