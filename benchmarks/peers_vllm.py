"""vLLM for benchmarks/peers.py; run by the Python of an environment with vLLM: ``python peers_vllm.py FD`` (see peers_engines.py).

It imports vLLM and torch alone, and `vllm_driver.py` of `headstart verify` by its path. Further keys of the job: ``heads`` (vLLM's
speculative configuration; null: none), ``dtype``, ``rows`` (the most sequences at a time), ``max_model_len`` and ``eager`` (true: vLLM
compiles nothing). The engine runs in this process, so that it has these threads and no more.
"""

import os
import runpy
from pathlib import Path
from typing import Any

DRIVER = Path(__file__).parents[1] / "headstart" / "serving" / "verify" / "vllm_driver.py"
SHARED = runpy.run_path(str(DRIVER))
BY_DEPTH = "num_accepted_tokens_per_pos"


def load(job: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Load the engine, and say what it is."""
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
        enable_prefix_caching=False,  # a warmed-up prompt would be read from it
        disable_log_stats=False,  # without it there are no metrics
        max_num_seqs=job["rows"],
        max_model_len=job["max_model_len"],
    )
    return engine, {"version": vllm.__version__, "threads": torch.get_num_threads()}


def write(engine: Any, job: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Continue the prompts as one batch."""
    import vllm

    sampling = [
        vllm.SamplingParams(
            temperature=asked["temperature"], seed=seed, max_tokens=asked["new_tokens"], stop_token_ids=job["stop"], ignore_eos=True,
            detokenize=False,
        )
        for seed in asked["seeds"]
    ]  # fmt: skip
    before = SHARED["counters"](engine).get(BY_DEPTH)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in asked["prompts"]], sampling, use_tqdm=False)
    after = SHARED["counters"](engine).get(BY_DEPTH, [])
    return {
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "decoding": decoding([output.metrics for output in outputs]),
        "accepted": [new - old for new, old in zip(after, before or [0] * len(after), strict=True)],
    }


def decoding(metrics: list[Any]) -> float | None:
    """Return the seconds from the last first token to the end; None where vLLM does not say."""
    if any(getattr(one, "first_token_ts", None) is None for one in metrics):
        return None
    return float(max(one.last_token_ts for one in metrics) - max(one.first_token_ts for one in metrics))


if __name__ == "__main__":
    os.environ.update(SHARED["ENVIRONMENT"])
    runpy.run_path(str(Path(__file__).with_name("peers_answers.py")))["answer"](load, write)
