"""Heads for a model that decoding refuses (Jamba): recipe, plan, training here, from a cache and a server, export, verify on stored
features."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import error_of, output_of
from safetensors.torch import load_file, save_file
from server import StatesServer, states_server
from small_run import losses, make_recipe, read_log
from torch import Tensor
from transformers import JambaConfig, JambaForCausalLM, PreTrainedModel

from headstart.cli.main import main
from headstart.cli.train import main as train
from headstart.heads.backbone.head_only import final_norm, load_head_only
from headstart.heads.backbone.hooks import tapped
from headstart.heads.backbone.probes import decoder_layers
from headstart.serving.verify.vllm import VLLM

EAGLE = {"kind": "eagle3", "depth": 2, "taps": [1, 2, 3]}
SIZES = {"vocab_size": 256, "hidden_size": 32, "max_position_embeddings": 48, "num_attention_heads": 4, "pad_token_id": 0}
SHAPE = {
    "num_hidden_layers": 4, "num_key_value_heads": 2, "intermediate_size": 32, "num_experts": 2, "expert_layer_period": 2,
    "expert_layer_offset": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2,
    "use_mamba_kernels": False,
}  # fmt: skip


class Transformers(StatesServer):
    """States of the forward pass of transformers: of the last layer what its norm is given."""

    model: PreTrainedModel

    def _read(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []
        handle = final_norm(self.model).register_forward_pre_hook(lambda module, args: kept.append(args[0]))
        count, shape = self.model.config.num_hidden_layers, (1, len(tokens), self.model.config.hidden_size)
        with torch.no_grad(), tapped(decoder_layers(self.model, count), self.layers[:-1], shape) as taps:
            logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
            found = [taps[layer][0] for layer in self.layers[:-1]]
        handle.remove()
        return torch.stack([*found, kept[-1][0]], 1), logits

    def states(self, tokens: list[int]) -> Tensor:
        return self._read(tokens)[0]

    def log_probs(self, tokens: list[int]) -> Tensor:
        return self._read(tokens)[1].float().log_softmax(-1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A folder with a recipe and a backbone."""
    folder = tmp_path_factory.mktemp("jamba")
    make_recipe(folder, drafter=EAGLE, data={"max_length": 32}, train={"steps": 20, "batch_size": 2})
    torch.manual_seed(0)
    model = JambaForCausalLM(JambaConfig(**SIZES, **SHAPE, bos_token_id=None, eos_token_id=None)).eval()
    for weight in model.parameters():
        weight.data.mul_(3.0 if weight.ndim > 1 else 1.0)
    model.save_pretrained(folder / "backbone")
    return folder, model


@pytest.fixture
def served(target: tuple[Path, PreTrainedModel], tmp_path: Path) -> Iterator[StatesServer]:
    folder, model = target
    layers = (1, 2, 3, model.config.num_hidden_layers)
    name = f"backbone-layers-{'-'.join(map(str, layers))}"
    with states_server(load_head_only(str(folder / "backbone"), dtype="fp32"), tmp_path / "states", layers, name, Transformers) as server:
        assert isinstance(server, Transformers)
        server.model = model
        yield server


@pytest.fixture(scope="module")
def cached(target: tuple[Path, PreTrainedModel]) -> tuple[Path, list[float]]:
    """A cache by transformers' own forward pass, and the losses of heads trained from it, which are in ``cached``."""
    folder = target[0]
    assert main(["cache", str(folder / "recipe.yaml"), f"cache.dir={folder}/cache", "cache.dtype=exact"]) == 0
    assert train([str(folder / "recipe.yaml"), f"cache.dir={folder}/cache", "cache.dtype=exact", f"save.dir={folder}/cached"]) == 0
    return folder, losses(folder / "cached")


def test_they_are_trained_here_from_a_cache_and_from_a_server(
    target: Any, cached: tuple[Path, list[float]], served: StatesServer, tmp_path: Path, capsys: Any
) -> None:
    """20 steps each, with the same losses; evaluated as teacher-forced chains, and the run says why."""
    (folder, wanted), near = cached, 3e-5
    assert len(wanted) == 20 and sum(wanted[-10:]) < sum(wanted[:10])
    assert train([str(folder / "recipe.yaml"), f"save.dir={tmp_path}/here"]) == 0
    err = capsys.readouterr().err
    assert f"only      {type(target[1]).__name__} has layers of kind" in err and "train and export only" in err
    assert "as a teacher-forced chain on held-out features (not decoded), accepted per depth" in err
    assert train([str(folder / "recipe.yaml"), f"features.endpoint={served.url}", f"features.folder={served.folder}"]) == 0
    assert losses(tmp_path / "here") == pytest.approx(wanted, rel=near)
    assert losses(folder / "out") == pytest.approx(wanted, rel=near)
    runs = [read_log(run) for run in (tmp_path / "here", folder / "cached")]
    one, other = (next(line["teacher_forced_tau"] for line in run if "teacher_forced_tau" in line) for run in runs)
    assert one == pytest.approx(other, rel=near)


@pytest.mark.parametrize(
    ("change", "message"), [("data.packing=true", "follows no mask: no packing"), ("objective.on_policy=0.5", "trees of drafts")]
)
def test_what_needs_masks_is_refused_in_one_line(change: str, message: str, target: Any, tmp_path: Path, capsys: Any) -> None:
    assert message in error_of(capsys, "train", target[0] / "recipe.yaml", f"save.dir={tmp_path}/out", change)


@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_an_export_is_verified_without_running_the_backbone(
    to: str, target: Any, cached: tuple[Path, Any], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal as it is, and different where it is damaged; an engine, which decodes, is refused in one line."""
    folder, out = cached[0], tmp_path / "exported"
    assert main(["export", "--heads", str(folder / "cached"), "--to", to, "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(["verify", str(out)]) == 0 and capsys.readouterr().out.startswith("EQUAL: ")
    assert main(["verify", str(folder / "cached")]) == 0  # a checkpoint of Headstart is its own original
    monkeypatch.setenv(VLLM.variable, sys.executable)
    error = error_of(capsys, "verify", out, "--engine", "vllm")
    assert "train and export only" in error and "leave out --engine vllm" in error
    file = next(out.glob("*.safetensors"))
    tensors = load_file(file)
    save_file(tensors | {"fc.weight": tensors["fc.weight"].roll(32, 1)}, file, {"format": "pt"})
    assert "fc.weight" in output_of(capsys, "verify", str(out), status=1)


@pytest.mark.slow
def test_recipe_and_plan_say_train_and_export_only(target: Any, tmp_path: Path, capsys: Any) -> None:
    """In one line each; the recipe trains here, as for any other model."""
    folder, recipe = target[0], tmp_path / "recipe.yaml"
    arguments = ["new-recipe", str(folder / "backbone"), "--data", str(folder / "text.jsonl"), "--gpus", "1", "--memory", "1.2"]
    arguments += ["--method", "medusa"]  # whose plan takes a fifth of eagle3's time
    assert main([*arguments, "--out", str(recipe)]) == 0
    assert sum("train and export only" in line for line in capsys.readouterr().out.splitlines()) == 1
    assert "endpoint" not in recipe.read_text()
    out = output_of(capsys, "plan", "--gpus", "1", "--memory", "1.2", "--no-calibration", str(recipe))
    assert sum("train and export only" in line for line in out.splitlines()) == 1 and "backbone activations" in out
    error = error_of(capsys, *arguments[:-1], "draft_model", "--out", f"{tmp_path}/draft_model.yaml")
    assert error.startswith("error: a draft model of type ")
