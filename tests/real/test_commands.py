"""Every command of the README on a released model, SmolLM2-135M-Instruct from its GGUF file, on a CPU or on a GPU where there is one.

Tokens are compared in fp32. The heads, after three steps, draft little that is right, so n-gram drafts go with them.
"""

import pytest
from command import ON_A_GPU, Folder
from fetch import NAME

QUESTION = "What is the capital of France?"
LINE = "SmolLM2-135M-Instruct.Q4_1.gguf, Q4_1, 98.4 MB; dequantized to bf16 269.0 MB of memory"
PYTHON = """
import json, torch, headstart
backbone = headstart.load_backbone("FILE", dtype="fp32")
tokenizer, model = headstart.load_tokenizer("FILE"), backbone.model
heads = headstart.load("heads", backbone=backbone, tokenizer=tokenizer)
turns = [{"role": "user", "content": "QUESTION"}]
asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
asked, how = asked.to(model.device), {"max_new_tokens": 40, "do_sample": False}
alone = model.generate(**asked, **how)
drafted = model.generate(**asked, **how, custom_generate=heads.generate, return_dict_in_generate=True)
carried = model.generate(**asked, **how, custom_generate="heads", trust_remote_code=True)
print(json.dumps({
    "same": torch.equal(alone, drafted.sequences) and torch.equal(alone, carried), "last": int(alone[0, -1]), "tau": drafted.tau,
    "text": tokenizer.decode(alone[0, asked["input_ids"].shape[1]:]),
}))
""".replace("FILE", NAME).replace("QUESTION", QUESTION)


def test_plan(at: Folder) -> None:
    out = at.run("plan", "recipe.yaml", "--no-calibration").stdout
    assert f"backbone  {LINE}" in out and "fits      " in out


def test_new_recipe(at: Folder) -> None:
    at.run("new-recipe", NAME, "--data", "chats.jsonl", "--memory", "16", "--out", "new.yaml")
    at.run("plan", "new.yaml", "--no-calibration")


def test_regenerate(at: Folder) -> None:
    words = ["regenerate.out=answers.jsonl", "regenerate.limit=4", "regenerate.max_new_tokens=48", "regenerate.batch_size=4"]
    at.run("regenerate", "recipe.yaml", *words, "regenerate.unfinished=keep", "--json", "regenerated.json")  # its answers are long
    report = at.json("regenerated.json")
    assert report["turns"] == 4 and report["tokens"] > 40


def test_train_saves_what_it_was_trained_on(at: Folder, heads: str) -> None:
    card = at.json("heads/headstart.json")
    assert card["backbone"] == NAME and card["contract"]["precision"] == "bfloat16 gguf Q4_1"
    assert card["contract"]["stored"] == ["Q8_0", "Q8_0"] and card["provenance"]["draft_vocabulary"]["size"] == 8192


def test_cache_and_train_from_it(at: Folder) -> None:
    at.run("cache", "recipe.yaml", "cache.dir=features", "data.limit=12", "data.eval_rows=2")
    at.run("train", "recipe.yaml", "cache.dir=features", "data.limit=12", "data.eval_rows=2", "train.steps=1", "save.dir=cached")


def test_inspect(at: Folder, heads: str) -> None:
    assert "label tokens" in at.run("inspect", "recipe.yaml", "--row", "3").stdout
    assert NAME in at.run("inspect", heads).stdout


def test_generate_writes_what_the_model_writes_alone(at: Folder, heads: str) -> None:
    words = ["--dtype", "fp32", "--chat", "--max-new-tokens", "48", QUESTION]
    drafted = at.run("generate", "--heads", heads, "--propose", "suffix", *words)
    assert drafted.stdout == at.run("generate", "--backbone", NAME, "--no-draft", *words).stdout
    assert "Paris" in drafted.stdout and "dequantized to fp32 538.1 MB of memory" in drafted.stderr


def test_python_and_the_end_of_a_turn(at: Folder, heads: str) -> None:
    found = at.python(PYTHON)
    assert found["same"] and found["tau"] >= 1
    assert found["text"].endswith("<|im_end|>") and found["last"] == 2


def test_chat(at: Folder, heads: str) -> None:
    said = at.run("chat", "--heads", heads, "--max-new-tokens", "24", typed=f"{QUESTION}\n/exit\n")
    assert "Paris" in said.stdout


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bench(at: Folder, heads: str, dtype: str) -> None:
    words = ["--prompts", "prompts.jsonl", "--chat", "--limit", "2", "--max-new-tokens", "32", "--temperature", "0", "1"]
    at.run("bench", "--heads", heads, "--propose", "suffix", "--dtype", dtype, *words, "--json", f"{dtype}.json", "--html", "bench.html")
    results = at.json(f"{dtype}.json")["results"]
    assert len(results) == 2 and (ON_A_GPU and dtype == "bf16" or all(row["identical"] for row in results))


def test_export_verify_and_import(at: Folder, heads: str) -> None:
    assert "few engines load" in at.run("export", "--heads", heads, "--to", "vllm", "--out", "served").stdout
    at.run("verify", "served", "--max-new-tokens", "8", "--prompt-tokens", "16")
    at.run("import", "served", "--backbone", NAME, "--out", "imported")
    at.run("push", heads, "someone/heads", "--dry-run", "pushed")
