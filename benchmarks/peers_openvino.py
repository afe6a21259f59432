"""OpenVINO GenAI for benchmarks/peers.py; run by the Python of its environment: ``python peers_openvino.py FD`` (see peers_engines.py).

Further keys of the job: ``heads`` (the folder of converted heads; null: none), ``depth`` (tokens drafted in a pass) and ``precision`` (f32
or bf16, in which it computes). It takes one prompt at a time and is greedy. Of accepted drafts it says how many there were, not how deep.
"""

import runpy
from pathlib import Path
from typing import Any


def load(job: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Load the engine, and say what it is."""
    import openvino_genai as ov

    how = {"INFERENCE_NUM_THREADS": job["threads"], "INFERENCE_PRECISION_HINT": job["precision"]}
    heads = {} if job["heads"] is None else {"draft_model": ov.draft_model(job["heads"], "CPU", **how)}
    return ov.LLMPipeline(job["model"], "CPU", **how, **heads), {"version": ov.__version__, "threads": job["threads"]}


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


if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("peers_answers.py")))["answer"](load, write)
