"""economize for benchmarks/peers.py; run by the Python of an environment with it: ``python peers_economize.py FD`` (see peers_engines.py).

Further keys of the job: ``heads`` (the folder of EAGLE-3 heads as `headstart export --to vllm` writes them; null: none), ``depth`` (tokens
drafted in a pass) and ``dtype``. Sampled rows have selectors of their own, so they are decoded one after the other.
"""

import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load(job: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Load the engine, and say what it is."""
    import economize
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    engine = economize.apply(model) if job["heads"] is None else economize.load(model, job["heads"])
    return engine, {"version": economize.__version__, "threads": torch.get_num_threads()}


def write(engine: Any, job: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Continue the prompts as one batch."""
    import economize
    import torch

    first: dict[int, float] = {}

    def stop(row: int) -> Callable[[Any], bool]:
        """Ask after each token whether the text has ended, and note when the first was written."""
        return lambda ids_T: bool(first.setdefault(row, time.perf_counter())) and int(ids_T[-1]) in job["stop"]

    hot, rows = asked["temperature"] > 0, range(len(asked["prompts"]))
    how = economize.DecodeConfig(
        cycle_length=1 if job["heads"] is None else job["depth"] + 1, verifier="rejection" if hot and job["heads"] is not None else "greedy"
    )
    picks = [economize.TopPSampler(temperature=asked["temperature"], top_p=1.0, seed=seed) if hot else None for seed in asked["seeds"]]
    prompts = [torch.tensor(prompt) for prompt in asked["prompts"]]
    found = engine.decode_batch(prompts, asked["new_tokens"], decoding=how, selectors=picks, stops=[stop(row) for row in rows])
    accepted = [0] * (how.cycle_length - 1)
    for _, count in (cycle for result in found for cycle in result.acceptance):
        for depth in range(count):
            accepted[depth] += 1
    return {
        "texts": [result.tokens.tolist() for result in found],
        "decoding": time.perf_counter() - max(first.values()),
        "accepted": accepted,
    }


if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("peers_answers.py")))["answer"](load, write)
