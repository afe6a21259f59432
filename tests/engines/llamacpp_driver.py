"""llama.cpp in a process of its own, with xllamacpp and nothing of Headstart: a JSON request as the argument, JSON on the last line.

Prompts are token ids. Drafts are chains of ``depth`` tokens, named in the log on stderr.
"""

import json
import sys
import urllib.request

import xllamacpp as xl


def main() -> None:
    request = json.loads(sys.argv[1])
    params = xl.CommonParams()
    params.model.path = request["target"]
    params.verbosity = 5  # drafts are in the debug log
    params.n_parallel, params.n_ctx, params.warmup = 1, 512, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xl.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xl.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if request["draft"] is not None:
        params.speculative.types = [xl.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
        draft = params.speculative.draft
        draft.mparams.path, draft.n_max, draft.n_min, draft.p_min = request["draft"], request["depth"], 0, 0.0
        draft.cache_type_k = draft.cache_type_v = xl.ggml_type.GGML_TYPE_F32
    server = xl.Server(params)
    found = []
    for prompt in request["prompts"]:
        fixed = {"temperature": 0, "cache_prompt": False, "return_tokens": True, "ignore_eos": True}
        body = json.dumps({"prompt": prompt, "n_predict": request["new_tokens"], **fixed}).encode()
        post = urllib.request.Request(f"{server.listening_address}/completion", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(post) as reply:  # handle_completions returns text alone
            answer = json.load(reply)
        timings = answer["timings"]
        found.append({"tokens": answer["tokens"], "drafted": timings.get("draft_n", 0), "accepted": timings.get("draft_n_accepted", 0)})
    print("\n" + json.dumps(found))


main()
