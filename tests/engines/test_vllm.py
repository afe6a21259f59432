"""vLLM serves heads trained here: the text of vLLM without drafts, and the drafts of Headstart, token by token (fp32, greedy)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engines_alone import headstart
from safetensors.torch import load_file, save_file
from trained import HEADS, ROOT, trained

from headstart.heads.backbone.backbone import load_backbone
from headstart.heads.checkpoint import load_drafter
from headstart.heads.eagle import AutoregressiveDrafter
from headstart.serving.verify import vllm
from headstart.serving.verify.drafts import EngineSettings, acceptance
from headstart.serving.verify.vllm import VLLM
from headstart.support.errors import UserError

NEW_TOKENS = 24
REFUSED = {"mlp": r"'MLPSpeculatorPreTrainedModel'\] are not supported", "dspark": "dspark speculative decoding"}
"""Heads that vLLM 0.32's CPU build does not serve -> its words."""


@pytest.fixture(scope="session")
def plain(prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """What vLLM writes without drafts."""
    return [one.written for one in vllm.serve(None, "embedded", prompts, EngineSettings(0, NEW_TOKENS))[0]]


@pytest.mark.parametrize("name", [name for name in HEADS if name not in REFUSED])
def test_vllm_drafts_what_headstart_drafts(name: str, prompts: list[list[int]], plain: list[tuple[int, ...]]) -> None:
    folder, settings = trained(name), EngineSettings(HEADS[name].depth, NEW_TOKENS)
    served, result = vllm.serve(folder, "embedded", prompts, settings)
    counters = result["counters"]
    assert result["version"].startswith("0.32.0")
    assert [one.written for one in served] == plain
    assert served == headstart(folder, "embedded", prompts, settings)
    accepted = acceptance(served)
    kept, rounds = [round(rate * counters["num_drafts"]) for rate in accepted["acceptance_rate_per_pos"]], accepted["rounds"]
    assert counters["num_drafts"] == rounds and counters["num_accepted_tokens_per_pos"] == kept
    print(f"{name}: {len(prompts)} prompts, {rounds} rounds of {settings.depth}, accepted {kept}, "
          f"mean acceptance length {accepted['mean_acceptance_length']:.3f}")  # fmt: skip
    assert kept[0], "no draft was accepted: this test compares heads that have learnt nothing"


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_refuses(name: str, prompts: list[list[int]]) -> None:
    with pytest.raises(UserError, match=REFUSED[name]):
        vllm.draft(trained(name), "embedded", prompts[:1], EngineSettings(HEADS[name].depth, 4))


PROMPTS = 3


def test_vllm_beside_headstart(tmp_path: Path) -> None:
    given = ["--heads", "embedded", "--prompts", "recipes/quickstart/prompts.jsonl", "--limit", str(PROMPTS), "--max-new-tokens", "24"]
    chain = ["--nodes", "5", "--width", "1", "--temperature", "0", "--batch-size", "1", "2", "--vllm-eager", "--dtype", "fp32"]
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), *given, *chain, "--threads", "1", "--vllm", str(VLLM.find_python())]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "--json", str(tmp_path / "peers.json")], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "peers.json").read_text())
    assert report["versions"]["vllm"].startswith("0.32.0")
    rows = [row for row in report["baselines"] if row["name"].startswith("vLLM")]
    assert [(row["batch"], row["name"]) for row in rows] == [
        (batch, system) for batch in (1, 2) for system in ("vLLM", "vLLM with embedded, chain of 4")
    ]
    assert {row["prompts_differing_from_headstart"] for row in rows} == {0} and all(row["decode_tokens_per_second"] for row in rows)
    ours = next(row for row in report["results"] if row["batch"] == 1 and row["head"] == "embedded, alone")
    assert abs(rows[1]["tau"] - ours["tau"]) < 0.05 * ours["tau"]  # vLLM counts drafts past the end of a text too


# SGLang's own modules load heads trained here and give the same logits (its engine has no CPU build to install).

PACKAGES = ROOT / ".venv-engines" / "sglang"
NAMES = ("eagle3", "eagle3-whole-vocabulary", "eagle3.1-two-layers", "eagle")


@pytest.mark.skipif(not PACKAGES.is_dir(), reason="SGLang 0.5.23 is not in .venv-engines/sglang: `make engines` installs it")
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_sglang_gives_the_same_logits(name: str, prompts: list[list[int]], tmp_path: Path) -> None:
    backbone = load_backbone("embedded", dtype="fp32", device="cpu")
    folder = trained(name)
    drafter = load_drafter(folder, backbone)
    assert isinstance(drafter, AutoregressiveDrafter)
    features = backbone.read(torch.tensor([max(prompts, key=len)]), taps=drafter.taps)
    hidden_TX = features.concatenated(drafter.taps)[0] if drafter.taps else features.hidden_BTD[0]
    inputs = {
        "ids_T": features.tokens_BT[0, 1:].clone(),  # the pair of position t: the token after it, the hidden states of t
        "hidden_TX": hidden_TX[:-1].contiguous(),
        "embed_VD": backbone.embed.weight.clone(),
        "unembed_VD": backbone.unembed.weight.clone(),
    }
    save_file(inputs, tmp_path / "inputs.safetensors")
    command = [VLLM.find_python(), "-I", Path(__file__).with_name("sglang_driver.py"), PACKAGES, folder, tmp_path / "inputs.safetensors"]
    done = subprocess.run([*command, tmp_path / "result.safetensors"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = load_file(tmp_path / "result.safetensors")
    ours_TV = drafter.readout(drafter.forward_dense(features)[0], 0)[0]
    torch.testing.assert_close(theirs["logits_TV"][: len(ours_TV)], ours_TV, rtol=1e-4, atol=1e-4)
    if drafter.vocabulary is not None:
        torch.testing.assert_close(theirs["tokens_DV"], drafter.vocabulary)
