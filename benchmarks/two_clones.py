"""Compares the speed of two clones of the project: ``python benchmarks/two_clones.py OLD NEW [--rounds 5]``.

Each clone trains EAGLE-3 heads on the embedded backbone for some steps, then decodes the same prompts with the heads that ship:
autoregressively, in a fixed tree, and in adaptive trees alone and with n-gram drafts, greedily and at temperature 1, traced (nothing is
compiled). The clones alternate in separate processes. Prints JSON: tokens per second of each, the median and range of the ratio
NEW / OLD of paired runs, whether the outputs are the same, and tau of each. Run it on an otherwise idle machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DECODE = """
import json, sys, time, torch, headstart
from transformers import AutoTokenizer
heads_dir, prompts_file, tokens, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(threads)
backbone = headstart.load_backbone("embedded")
tokenizer = headstart.load_tokenizer("embedded")
prompts = [torch.tensor([tokenizer(json.loads(line)["text"])["input_ids"][:48]]) for line in open(prompts_file)][:12]
alone = headstart.load(heads_dir, backbone=backbone, capture="trace")
merged = headstart.load(heads_dir, backbone=backbone, capture="trace", proposers=["suffix", "recycling"])
systems = {
    "AR": (alone, {"speculate": False}), "fixed tree": (alone, {"tree": headstart.TreeShape(12, 4)}),
    "adaptive": (alone, {}), "adaptive, n-grams": (merged, {}),
}
out = {}
for temperature in (0.0, 1.0):
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0} if temperature else {"do_sample": False}
    for name, (heads, own) in systems.items():
        for measured in (False, True):   # the first round captures
            start, written, texts, taus = time.perf_counter(), 0, [], []
            for i, ids in enumerate(prompts):
                mask = torch.ones_like(ids)
                done = backbone.model.generate(input_ids=ids, attention_mask=mask, custom_generate=heads.generate, max_new_tokens=tokens,
                    return_dict_in_generate=True, **how, **own, **({"seed": i} if temperature else {}))
                texts.append(done.sequences[0].tolist()); taus.append(done.tau); written += len(texts[-1]) - ids.shape[1]
            seconds = time.perf_counter() - start
        out[f"T={temperature:g} {name}"] = {"tokens_per_second": written / seconds, "texts": texts, "tau": sum(taus) / len(taus)}
print(json.dumps(out))
"""


def environment(root: Path, threads: int) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def run(root: Path, threads: int, *command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=root, env=environment(root, threads), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{root}: {' '.join(command[:3])} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def train(root: Path, folder: Path, steps: int, threads: int) -> float:
    """Train heads into the folder; returns the median of the tokens per second in its log."""
    settings = [f"train.steps={steps}", "log.every=10", "eval.prompts=1", f"save.dir={folder}", "save.resume=false"]
    run(root, threads, str(root / "train_heads.py"), str(root / "recipes/quickstart/eagle3.yaml"), *settings)
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return statistics.median(line["tokens_per_second"] for line in lines if "tokens_per_second" in line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    roots = {"old": args.old.resolve(), "new": args.new.resolve()}
    results: dict[str, list[dict[str, Any]]] = {"old": [], "new": []}
    for number in range(args.rounds):
        for name in sorted(roots, reverse=bool(number % 2)):
            with tempfile.TemporaryDirectory() as folder:
                speed = train(roots[name], Path(folder) / "heads", args.steps, args.threads)
                heads = roots[name] / "recipes/quickstart/heads/eagle3"
                prompts = str(roots[name] / "recipes/quickstart/prompts.jsonl")
                printed = run(roots[name], args.threads, "-c", DECODE, str(heads), prompts, str(args.max_new_tokens), str(args.threads))
                results[name].append({"training": {"tokens_per_second": speed}} | json.loads(printed.splitlines()[-1]))
    report: dict[str, Any] = {}
    for system in results["old"][0]:
        speeds = {name: [one[system]["tokens_per_second"] for one in runs] for name, runs in results.items()}
        ratios = [new / old for new, old in zip(speeds["new"], speeds["old"], strict=True)]
        report[system] = {name: statistics.median(values) for name, values in speeds.items()}
        report[system] |= {"ratio": statistics.median(ratios), "range": [min(ratios), max(ratios)]}
        if system != "training":
            first = {name: runs[0][system] for name, runs in results.items()}
            report[system]["same tokens"] = first["old"]["texts"] == first["new"]["texts"]
            report[system]["tau"] = {name: one["tau"] for name, one in first.items()}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
