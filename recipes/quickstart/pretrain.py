"""Pretrain the embedded default: a small Llama on the source of the Python standard library (PSF-2.0).

    python recipes/quickstart/pretrain.py --out out/backbone --minutes 75

Writes a standard `transformers` folder (bf16 safetensors, tokenizer, config) with `training.json`, a record of the training with the bits
per byte on held-out files. Resumes from `--out` after an interruption. The model has sixteen layers of width 192: deep and narrow, so
that a one-layer drafter costs about as little relative to this backbone as relative to a large one.
"""
import argparse
import hashlib
import json
import math
import sysconfig
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"
TABLES = ("encodings/", "pydoc_data/", "lib2to3/pgen2", "site-packages/")
"""Excluded paths: code tables, generated help text and third-party packages."""


def held_out(name: str) -> bool:
    """True for one file in twenty, chosen by the hash of its path relative to the library's root."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 0


def library_files() -> dict[str, str]:
    """The source of every readable program, by path relative to the library's root."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(TABLES):
            try:
                found[name] = path.read_text("utf-8")
            except UnicodeDecodeError:
                continue
    return {name: text for name, text in found.items() if text.strip()}


def train_tokenizer(texts: list[str], vocab: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; any text round-trips."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END, eos_token=END, pad_token=END, model_max_length=512, padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """The tokens of all files in sequence, each file followed by the end token."""
    runs = [encoding.ids + [tokenizer.eos_token_id] for encoding in tokenizer.backend_tokenizer.encode_batch(texts)]
    return torch.tensor([token for run in runs for token in run], dtype=torch.int32)


def build(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=192, intermediate_size=512, num_hidden_layers=16, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.03,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, files: list[str], tokenizer: PreTrainedTokenizerFast) -> float:
    """Cross-entropy in bits per byte of whole held-out files, in chunks of the context length."""
    T, nats = model.config.max_position_embeddings, 0.0
    stream = encode(tokenizer, files).long()
    model.eval()
    for windows in torch.cat([torch.zeros(1, dtype=torch.long), stream]).unfold(0, T + 1, T).split(16):
        logits = model(windows[:, :-1]).logits.float()
        nats += torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="sum").item()
    model.train()
    counted = (len(stream) // T) * T
    return nats / math.log(2) / (sum(len(text.encode()) for text in files) * counted / len(stream))


def optimizers(model: LlamaForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for the tied embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in name]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def pretrain(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    files = library_files()
    train = [text for name, text in files.items() if not held_out(name)]
    test = [text for name, text in files.items() if held_out(name)]
    tokenizer = train_tokenizer(train, 4096)
    stream, model = encode(tokenizer, train), build(tokenizer)
    state, done, spent = args.out / "resume.pt", 0, 0.0
    opts = optimizers(model, args.lr)
    if state.exists():
        kept = torch.load(state, weights_only=True)
        model.load_state_dict(kept["model"])
        for opt, values in zip(opts, kept["optimizers"], strict=True):
            opt.load_state_dict(values)
        done, spent = kept["step"], kept["seconds"]
    args.out.mkdir(parents=True, exist_ok=True)
    sizes = {"parameters": model.num_parameters(), "train_tokens": len(stream), "files": len(train), "held_out_files": len(test)}
    print(json.dumps(sizes), flush=True)
    T, start, budget = model.config.max_position_embeddings, time.monotonic() - spent, args.minutes * 60
    starts = torch.randperm(len(stream) // T - 1, generator=torch.Generator().manual_seed(1))
    while (now := time.monotonic() - start) < budget:
        progress = now / budget
        scale = min(1.0, (done + 1) / 100) * (1.0 if progress < 0.4 else (1 - progress) / 0.6 * 0.98 + 0.02)
        where = (starts[(done * args.batch_size + torch.arange(args.batch_size)) % len(starts)] * T + (done * 37) % T).long()
        windows = stream[where[:, None] + torch.arange(T + 1)].long()
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            hidden = model.model(windows[:, :-1]).last_hidden_state
            logits = model.lm_head(hidden)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = args.lr * scale
            opt.step()
            opt.zero_grad()
        done += 1
        spent, tokens = time.monotonic() - start, done * args.batch_size * T
        if done % 10 == 0:
            pace = {"step": done, "loss": round(loss.item(), 4), "tokens": tokens, "tokens_per_second": round(tokens / spent)}
            print(json.dumps(pace | {"minutes": round(spent / 60, 1)}), flush=True)
        if done % 200 == 0:
            states = [opt.state_dict() for opt in opts]
            torch.save({"model": model.state_dict(), "optimizers": states, "step": done, "seconds": spent}, state.with_suffix(".tmp"))
            state.with_suffix(".tmp").rename(state)
    facts = sizes | {
        "steps": done,
        "tokens": done * args.batch_size * T,
        "minutes": args.minutes,
        "held_out_bytes": sum(len(text.encode()) for text in test),
        "python": sysconfig.get_python_version(),
    }
    model = model.bfloat16()
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    facts["bits_per_byte"] = round(bits_per_byte(model.float(), test, tokenizer), 4)
    (args.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    state.unlink(missing_ok=True)
    print(json.dumps(facts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/backbone"))
    parser.add_argument("--minutes", type=float, default=75, help="wall-clock budget; the schedule follows it")
    parser.add_argument("--batch-size", type=int, default=12, help="sequences of 512 tokens a step")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="autocast (fast where the CPU has AVX512-BF16)")
    pretrain(parser.parse_args())
