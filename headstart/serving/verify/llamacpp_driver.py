"""Decode prompts in llama.cpp and record every draft, without Headstart, by a Python with xllamacpp: ``llamacpp_driver.py JOB RESULT``.

Drafts are chains, and only llama.cpp's debug log names them: the process's stderr is a file, which is read at the end.
"""

import json
import os
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

CANDIDATE = re.compile(r"draft candidate +0, pos +(\d+): +(\d+) ")


def decode(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return of each prompt the tokens written, and how many drafts were accepted."""
    import xllamacpp as xl

    params = xl.CommonParams()
    params.model.path = job["backbone"]
    params.verbosity = 5  # drafts are in the debug log
    params.n_parallel, params.n_ctx, params.warmup = 1, max(job["room"], 512), False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xl.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xl.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if job["heads"] is not None:
        kinds = xl.common_speculative_type
        kind = kinds.COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH if job["blocks"] else kinds.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3
        params.speculative.types = [kind]
        draft = params.speculative.draft
        draft.mparams.path, draft.n_max, draft.n_min, draft.p_min = job["heads"], job["depth"], 0, 0.0
        draft.cache_type_k = draft.cache_type_v = xl.ggml_type.GGML_TYPE_F32
    server, local, found = xl.Server(params), urllib.request.build_opener(urllib.request.ProxyHandler({})), []
    for prompt in job["prompts"]:
        fixed = {"temperature": 0, "cache_prompt": False, "return_tokens": True, "ignore_eos": not job["ends"]}
        body = json.dumps({"prompt": prompt, "n_predict": job["new_tokens"], **fixed}).encode()
        post = urllib.request.Request(f"{server.listening_address}/completion", body, {"Content-Type": "application/json"})
        with local.open(post) as reply:  # handle_completions returns text alone
            answer = json.load(reply)
        found.append({"tokens": answer["tokens"], "accepted": answer["timings"].get("draft_n_accepted", 0)})
    return found


def drafts_of(log: str) -> list[list[list[int]]]:
    """Return the drafts of each prompt, in the order of decoding."""
    found: list[list[list[int]]] = []
    for part in log.split("processing task, is_child")[1:]:
        found.append([])
        for place, token in CANDIDATE.findall(part):
            found[-1] += [[]] if place == "0" else []
            found[-1][-1].append(int(token))
    return found


def main(job: Path, result: Path) -> None:
    """Run the job and write its result, or the error that stopped it."""
    log = result.with_name("stderr")
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    try:
        texts = decode(json.loads(job.read_text()))
        drafts = drafts_of(log.read_text(errors="replace"))
        found: dict[str, Any] = {"texts": [text | {"drafts": drafted} for text, drafted in zip(texts, drafts, strict=True)]}
    except Exception as error:  # llama.cpp's own refusals are of many types
        said = [line for line in log.read_text(errors="replace").splitlines() if "error" in line.lower()][-2:]
        found = {"error": f"{type(error).__name__}: {error} {' '.join(said)}"}
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
