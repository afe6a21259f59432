"""Pretrain the embedded default: a small Llama on the source of the Python standard library and of some packages.

    python recipes/quickstart/pretrain.py --out out/backbone --minutes 4        # on a GPU; about 150 minutes on two cores

Writes a standard `transformers` folder (bf16 safetensors, tokenizer, config) with `training.json`, a record of the training with the bits
per byte on held-out files. Resumes from `--out` after an interruption. The model has twelve layers of width 384: deep and narrow, so
that a one-layer drafter costs about as little relative to this backbone as relative to a large one.
"""

import argparse
import hashlib
import importlib.util
import json
import math
import sysconfig
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"
PACKAGES = ("networkx", "numpy", "sympy", "torch", "transformers")
"""Packages whose source is read once where the standard library's is read several times; licences BSD-3-Clause and Apache-2.0."""
TABLES = ("encodings/", "pydoc_data/", "lib2to3/pgen2", "site-packages/")
"""Excluded paths: code tables, generated help text and third-party packages."""


def held_out(name: str) -> bool:
    """True for one file in twenty, chosen by the hash of its path relative to the library's root."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 0


def library_files(root: Path | None = None) -> dict[str, str]:
    """The source of every readable program of the standard library, by path relative to the library's root."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    names = ((path.relative_to(root).as_posix(), path) for path in sorted(root.rglob("*.py")))
    return read_texts((name, path) for name, path in names if not name.startswith(TABLES))


def package_files(package: str) -> dict[str, str]:
    """The source of an installed package, by path relative to the folder that holds it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed; install it, or leave it out of --packages")
    root = Path(spec.submodule_search_locations[0])
    return read_texts((path.relative_to(root.parent).as_posix(), path) for path in sorted(root.rglob("*.py")))


def read_texts(paths: Iterable[tuple[str, Path]]) -> dict[str, str]:
    """The texts that are UTF-8 and not blank, by name."""
    found = {}
    for name, path in paths:
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            found[name] = text
    return found


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
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=12,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, files: list[str], tokenizer: PreTrainedTokenizerFast) -> float:
    """Cross-entropy in bits per byte of whole held-out files, in chunks of the context length."""
    T, nats = model.config.max_position_embeddings, 0.0
    stream = encode(tokenizer, files).long().to(model.device)
    model.eval()
    for windows in torch.cat([stream.new_zeros(1), stream]).unfold(0, T + 1, T).split(16):
        logits = model(windows[:, :-1]).logits.float()
        nats += torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="sum").item()
    model.train()
    counted = (len(stream) // T) * T
    return nats / math.log(2) / (sum(len(text.encode()) for text in files) * counted / len(stream))


def optimizers(model: LlamaForCausalLM, lr: float, decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for the tied embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in name]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Corpus:
    """The tokens of the training files on the training device, in windows that are drawn in random order, pass by pass."""

    def __init__(self, tokens: torch.Tensor, length: int, device: torch.device) -> None:
        self.stream, self.length = tokens.to(device), length
        self.windows = len(tokens) // length - 1
        self.starts = torch.randperm(self.windows, generator=torch.Generator().manual_seed(1)).to(device)

    def batch(self, step: int, rows: int) -> torch.Tensor:
        """The windows ``[rows, length + 1]`` of a step; every pass over the data starts them elsewhere."""
        index = step * rows + torch.arange(rows, device=self.stream.device)
        shift = index // self.windows * 37 % self.length
        where = self.starts[index % self.windows] * self.length + shift
        return self.stream[where[:, None] + torch.arange(self.length + 1, device=self.stream.device)].long()


def pretrain(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    files = library_files(args.library)
    train = [text for name, text in files.items() if not held_out(name)]
    test = [text for name, text in files.items() if held_out(name)]
    more = [text for package in args.packages for text in package_files(package).values()]
    tokenizer = train_tokenizer(train, 4096)
    model = build(tokenizer).to(device)
    library = encode(tokenizer, train)
    stream = torch.cat([*[library] * args.repeats, encode(tokenizer, more)]) if more else library
    corpus = Corpus(stream, model.config.max_position_embeddings, device)
    state, done, spent = args.out / "resume.pt", 0, 0.0
    opts = optimizers(model, args.lr, args.weight_decay)
    if state.exists():
        kept = torch.load(state, weights_only=True)
        model.load_state_dict(kept["model"])
        for opt, values in zip(opts, kept["optimizers"], strict=True):
            opt.load_state_dict(values)
        done, spent = kept["step"], kept["seconds"]
    args.out.mkdir(parents=True, exist_ok=True)
    sizes = {"parameters": model.num_parameters(), "train_tokens": len(stream), "files": len(train + more), "held_out_files": len(test)}
    print(json.dumps(sizes), flush=True)

    def loss_of(windows: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            logits = model.lm_head(model.model(windows[:, :-1]).last_hidden_state)
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    measured = torch.compile(loss_of) if device.type == "cuda" else loss_of
    measured(corpus.batch(0, args.batch_size)).backward()  # compiles, outside the time that the schedule follows
    model.zero_grad()
    start, budget = time.monotonic() - spent, args.minutes * 60
    while (now := time.monotonic() - start) < budget:
        progress = now / budget
        scale = min(1.0, (done + 1) / 100) * (1.0 if progress < 0.4 else (1 - progress) / 0.6 * 0.98 + 0.02)
        loss = measured(corpus.batch(done, args.batch_size))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = args.lr * scale
            opt.step()
            opt.zero_grad()
        done += 1
        if done % 10 == 0:
            loss_now = loss.item()  # waits for the device, so that the time is that of the work done
            spent, tokens = time.monotonic() - start, done * args.batch_size * corpus.length
            pace = {"step": done, "loss": round(loss_now, 4), "tokens": tokens, "tokens_per_second": round(tokens / spent)}
            print(json.dumps(pace | {"minutes": round(spent / 60, 1)}), flush=True)
        if done % 1000 == 0 or (device.type == "cpu" and done % 200 == 0):
            states = [opt.state_dict() for opt in opts]
            torch.save({"model": model.state_dict(), "optimizers": states, "step": done, "seconds": spent}, state.with_suffix(".tmp"))
            state.with_suffix(".tmp").rename(state)
    facts = sizes | {
        "steps": done,
        "tokens": done * args.batch_size * corpus.length,
        "minutes": args.minutes,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "held_out_bytes": sum(len(text.encode()) for text in test),
        "packages": {package: version(package) for package in args.packages},
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
    parser.add_argument("--minutes", type=float, default=150, help="wall-clock budget; the schedule follows it")
    parser.add_argument("--batch-size", type=int, default=12, help="sequences of 512 tokens a step; 48 on a GPU")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1, help="of the hidden matrices")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="autocast")
    parser.add_argument("--library", type=Path, metavar="FOLDER", help="a standard library (default: this Python's)")
    parser.add_argument("--packages", nargs="*", default=PACKAGES, help=", ".join(PACKAGES))
    parser.add_argument("--repeats", type=int, default=3, help="how often the library's files are read for once the packages'")
    pretrain(parser.parse_args())
