"""SGLang's own modules load heads trained here and give the same logits (its engine has no CPU build to install)."""

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from trained import ROOT, trained

from headstart.heads.backbone.backbone import load_backbone
from headstart.heads.checkpoint import load_drafter
from headstart.heads.eagle import AutoregressiveDrafter
from headstart.serving.verify.vllm import VLLM

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
