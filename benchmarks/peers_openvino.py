"""OpenVINO GenAI for benchmarks/peers.py; run by the Python of its environment: ``python peers_openvino.py FD`` (see peers_engines.py).

Further keys of the job: ``heads`` (the folder of converted heads; null: none), ``depth`` (tokens drafted in a pass) and ``precision`` (f32
or bf16, in which it computes). It takes one prompt at a time and is greedy. Of accepted drafts it says how many there were, not how deep.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def load(job: dict[str, Any]) -> Any:
    """Load the engine."""
    import openvino_genai as ov

    how = {"INFERENCE_NUM_THREADS": job["threads"], "INFERENCE_PRECISION_HINT": job["precision"]}
    heads = {} if job["heads"] is None else {"draft_model": ov.draft_model(job["heads"], "CPU", **how)}
    return ov.LLMPipeline(job["model"], "CPU", **how, **heads)


def write(engine: Any, job: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Continue one prompt."""
    import numpy as np
    import openvino as core
    import openvino_genai as ov

    (prompt,) = asked["prompts"]
    config = ov.GenerationConfig(max_new_tokens=asked["new_tokens"], stop_token_ids=set(job["stop"]), do_sample=False, ignore_eos=False)
    if job["heads"] is not None:
        config.num_assistant_tokens = job["depth"]
    ids = core.Tensor(np.array([prompt], dtype=np.int64))
    result = engine.generate(ov.TokenizedInputs(ids, core.Tensor(np.ones((1, len(prompt)), dtype=np.int64))), config)
    times = result.perf_metrics
    accepted = [] if job["heads"] is None else [int(result.extended_perf_metrics.get_num_accepted_tokens())]
    decoding = (times.get_generate_duration().mean - times.get_ttft().mean) / 1e3
    return {"texts": [[int(token) for token in result.tokens[0]]], "decoding": decoding, "accepted": accepted}


def main(descriptor: int) -> None:
    """Answer lines until there are no more."""
    with os.fdopen(descriptor, "w") as answers:
        engine, job = None, {}
        for line in sys.stdin:
            try:
                if engine is None:
                    import openvino_genai

                    job = json.loads(line)
                    engine = load(job)
                    found = {"version": openvino_genai.__version__, "threads": job["threads"]}
                else:
                    found = write(engine, job, json.loads(line))
            except Exception as error:  # its refusals are of many types
                found = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
