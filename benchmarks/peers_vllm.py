"""Times vLLM on prompts, for benchmarks/peers.py; run as a script by the Python of an environment with vLLM.

    python peers_vllm.py JOB.json RESULT.json

It imports vLLM and torch alone, and `vllm_driver.py` of `headstart verify` by its path. Job: ``model`` (folder), ``heads`` (vLLM's
speculative configuration; null: none), ``prompts`` (lists of tokens), ``new_tokens``, ``stop`` (tokens that end a text), ``dtype``,
``batches`` (numbers of sequences decoded together), ``max_model_len`` and ``eager`` (true: vLLM compiles nothing). Result: ``version``,
``threads`` and ``runs``, one for each batch size: ``batch``, ``seconds``, ``texts`` (the tokens written after each prompt) and ``counters``
(vLLM's metrics of speculative decoding over the timed prompts); or ``error``.

The engine runs in this process, so that it has these threads and no more. Prompts are decoded greedily, batch by batch, as by `headstart
bench`: a batch begins when the one before has ended. The first batch is decoded once before the clock starts.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any

DRIVER = Path(__file__).parents[1] / "inference" / "serving" / "verification" / "vllm_driver.py"
SHARED = runpy.run_path(str(DRIVER))


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Load the engine and measure it at every batch size of the job."""
    import torch
    import vllm

    if job["heads"] is not None and job["heads"]["method"] == "dflash":
        SHARED["norm_context_keys_by_layer"]()
    engine = vllm.LLM(
        model=job["model"],
        speculative_config=job["heads"],
        dtype=job["dtype"],
        enforce_eager=job["eager"],
        skip_tokenizer_init=True,
        enable_prefix_caching=False,   # a warmed-up prompt would be read from it
        disable_log_stats=False,       # without it there are no metrics
        max_num_seqs=max(job["batches"]),
        max_model_len=job["max_model_len"],
    )
    greedy = vllm.SamplingParams(
        temperature=0, max_tokens=job["new_tokens"], stop_token_ids=job["stop"], ignore_eos=True, detokenize=False
    )
    runs = [measure(engine, greedy, job["prompts"], batch) for batch in job["batches"]]
    return {"version": vllm.__version__, "threads": torch.get_num_threads(), "runs": runs}


def measure(engine: Any, greedy: Any, prompts: list[list[int]], batch: int) -> dict[str, Any]:
    """Decode all prompts, ``batch`` at a time."""
    groups = [[{"prompt_token_ids": prompt} for prompt in prompts[i : i + batch]] for i in range(0, len(prompts), batch)]
    engine.generate(groups[0], greedy, use_tqdm=False)
    before, texts = SHARED["counters"](engine), []
    start = time.perf_counter()
    for group in groups:
        texts += [list(output.outputs[0].token_ids) for output in engine.generate(group, greedy, use_tqdm=False)]
    seconds = time.perf_counter() - start
    return {"batch": batch, "seconds": seconds, "texts": texts, "counters": change(before, SHARED["counters"](engine))}


def change(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return by how much each counter, or each element of one that is a list, has grown."""
    return {
        name: [new - old for old, new in zip(before[name], value, strict=True)] if isinstance(value, list) else value - before[name]
        for name, value in after.items()
    }


if __name__ == "__main__":
    SHARED["main"](Path(sys.argv[1]), Path(sys.argv[2]), serve)
