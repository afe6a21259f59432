"""Decodes prompts in vLLM and records every draft; run as a script by the Python of an environment with vLLM (see `vllm.py`).

    python vllm_driver.py JOB.json RESULT.json

It imports vLLM and torch alone, nothing of Headstart. Job: ``backbone`` (folder), ``prompts`` (lists of tokens), ``new_tokens``, ``stop``
(tokens that end a text), ``max_model_len`` and ``speculative`` (vLLM's speculative configuration; null: none). Result: ``version``,
``texts`` (the tokens written after each prompt), ``passes`` (for each prompt, the tokens that each forward pass kept and the draft that
followed it) and ``counters`` (vLLM's own metrics of speculative decoding); or ``error``.

Prompts are decoded one at a time, greedily and in fp32, without compiling, on one thread.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where its drafts are recorded
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
METRIC = "vllm:spec_decode_"


def record_drafts() -> list[dict[str, list[int]]]:
    """Make vLLM's model runner append what each forward pass kept, and the draft that followed, to the returned list."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    passes: list[dict[str, list[int]]] = []
    propose = GPUModelRunner.propose_draft_token_ids

    def recording(self: Any, scheduler_output: Any, sampled_token_ids: Any, *rest: Any) -> Any:
        drafts = propose(self, scheduler_output, sampled_token_ids, *rest)
        (kept,), (drafted,) = (ids if isinstance(ids, list) else ids.tolist() for ids in (sampled_token_ids, drafts))
        passes.append({"kept": [token for token in kept if token >= 0], "drafted": list(drafted)})  # -1 stands for a rejected draft
        return drafts

    GPUModelRunner.propose_draft_token_ids = recording
    return passes


def norm_context_keys_by_layer() -> None:
    """Mend DFlash in builds whose ``rms_norm`` takes one weight: norm the context's keys of every draft layer with that layer's weight.

    vLLM norms the keys of all layers in one call, with one row of weights per layer. The CUDA kernel takes the rows (vLLM #46761); the CPU
    build's kernel of 0.32.0 uses the first layer's for all, as that of XPUs did (vLLM #56431), which lowers acceptance and raises no error.
    """
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normed(self: Any, all_k: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(all_k)
        for layer, keys, weight in zip(output, all_k, self._k_norm_weights, strict=True):
            ops.rms_norm(layer, keys, weight, self._rms_norm_eps)
        return output

    DFlashQwen3Model._normalize_context_k = normed


def counters(engine: Any) -> dict[str, Any]:
    """Return vLLM's own metrics of speculative decoding: a number, or a list by draft position."""
    found = {}
    for metric in engine.get_metrics():
        if metric.name.startswith(METRIC):
            found[metric.name.removeprefix(METRIC)] = getattr(metric, "values", None) or metric.value
    return found


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Decode the prompts of the job."""
    import vllm

    passes = record_drafts()
    norm_context_keys_by_layer()
    engine = vllm.LLM(
        model=job["backbone"],
        speculative_config=job["speculative"],
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        max_num_seqs=1,
        max_model_len=job["max_model_len"],
        max_num_batched_tokens=max(job["max_model_len"], 512),  # a prompt is read in one pass
        async_scheduling=False,
    )
    greedy = vllm.SamplingParams(temperature=0, max_tokens=job["new_tokens"], stop_token_ids=job["stop"], ignore_eos=True, detokenize=False)
    texts, recorded = [], []
    for prompt in job["prompts"]:
        passes.clear()
        (output,) = engine.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
        texts.append(list(output.outputs[0].token_ids))
        recorded.append(list(passes))
    return {"version": vllm.__version__, "texts": texts, "passes": recorded, "counters": counters(engine)}


def main(job: Path, result: Path, work: Callable[[dict[str, Any]], dict[str, Any]] = decode) -> None:
    """Run the job and write its result, or the error that stopped it."""
    os.environ.update(ENVIRONMENT)
    try:
        found = work(json.loads(job.read_text()))
    except Exception as error:  # vLLM's own refusals are of many types
        found = {"error": f"{type(error).__name__}: {error}"}
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
