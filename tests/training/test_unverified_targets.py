"""Heads for models that decoding refuses: planned, trained on a server's hidden states and exported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from small_run import make_recipe, read_log
from torch import Tensor
from transformers import PreTrainedModel
from vllm_of_states import StatesServer, states_server

from headstart.cli.main import main
from headstart.cli.train import main as train
from headstart.heads.backbone.head_only import final_norm, load_head_only
from headstart.heads.backbone.hooks import tapped
from headstart.heads.backbone.probes import decoder_layers

pytestmark = pytest.mark.usefixtures("on_the_cpu")
SIZES = {"vocab_size": 256, "hidden_size": 32, "max_position_embeddings": 256, "num_attention_heads": 4, "pad_token_id": 0}
SHAPES: dict[str, dict[str, Any]] = {
    "DeepseekV4": {
        "num_hidden_layers": 6, "head_dim": 16, "q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "moe_intermediate_size": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4,
    },
    "NemotronH": {
        "layers_block_type": ["mamba", "moe", "attention", "mamba"], "head_dim": 8, "num_key_value_heads": 2, "intermediate_size": 32,
        "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip


class Transformers(StatesServer):
    """States of the forward pass of transformers: of a layer with several streams their mean, of the last what its norm is given."""

    model: PreTrainedModel

    def _read(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []
        handle = final_norm(self.model).register_forward_pre_hook(lambda module, args: kept.append(args[0]))
        count = self.model.config.num_hidden_layers
        with torch.no_grad(), tapped(decoder_layers(self.model, count), self.layers[:-1]) as taps:
            logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
            found = [taps[layer][0] for layer in self.layers[:-1]]
        handle.remove()
        flat = [one.mean(1) if one.ndim == 3 else one for one in found]
        return torch.stack([*flat, kept[-1][0]], 1), logits

    def states(self, tokens: list[int]) -> Tensor:
        return self._read(tokens)[0]

    def log_probs(self, tokens: list[int]) -> Tensor:
        return self._read(tokens)[1].float().log_softmax(-1)


@pytest.fixture(params=[pytest.param("DeepseekV4", marks=pytest.mark.slow), "NemotronH"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StatesServer]:
    drafter = {"kind": "eagle3", "depth": 2, "taps": [1, 2, 3]}
    make_recipe(tmp_path, drafter=drafter, data={"max_length": 32}, train={"steps": 50, "batch_size": 2})
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**SIZES, **SHAPES[request.param], bos_token_id=None, eos_token_id=None)
    model = getattr(transformers, f"{request.param}ForCausalLM")(config).eval()
    for weight in model.parameters():
        weight.data.mul_(3.0 if weight.ndim > 1 else 1.0)
    model.save_pretrained(tmp_path / "backbone")
    layers = (1, 2, 3, config.num_hidden_layers)
    name = f"backbone-layers-{'-'.join(map(str, layers))}"
    with states_server(load_head_only(str(tmp_path / "backbone"), dtype="fp32"), tmp_path / "states", layers, name, Transformers) as server:
        assert isinstance(server, Transformers)
        server.model = model
        yield server


def test_heads_are_trained_and_exported(target: StatesServer, tmp_path: Path, capsys: Any) -> None:
    recipe = str(tmp_path / "recipe.yaml")
    assert train([recipe, f"save.dir={tmp_path}/refused"]) == 2
    assert "heads for it are trained on a server's hidden states (features.endpoint), exported" in capsys.readouterr().err
    served = [f"features.endpoint={target.url}", f"features.folder={target.folder}", "features.patience=10"]
    assert main(["plan", "--no-calibration", recipe, *served]) == 0
    assert train([recipe, *served]) == 0
    losses = [line["loss"] for line in read_log(tmp_path / "out") if "loss" in line]
    assert len(losses) == 50 and sum(losses[-10:]) < sum(losses[:10])
    assert main(["export", "--heads", str(tmp_path / "out"), "--to", "vllm", "--out", str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported" / "config.json").exists()
