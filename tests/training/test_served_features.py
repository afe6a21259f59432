"""Training on hidden states from servers: the live losses, through servers that fail, and every kind of wrong states by its cause."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import error_of, output_of
from safetensors.torch import load_file, save_file
from server import Change, StatesServer, states_server
from small_run import losses, make_recipe
from torch import Tensor

from headstart.cli.main import main
from headstart.cli.train import main as train
from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.training.features.cached import SUPPLEMENT
from headstart.training.features.manifest import read_manifest

LAYERS, NAME = (1, 3, 5, 6), "backbone-layers-1-3-5-6"
EAGLE = {"kind": "eagle3", "depth": 2, "taps": [1, 3, 5]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Backbone, list[float]]:
    """A folder with a recipe, its backbone, and the losses of a run beside it."""
    folder = tmp_path_factory.mktemp("run")
    recipe, file = make_recipe(folder, 6, drafter=EAGLE, train={"steps": 8}), folder / "backbone" / "model.safetensors"
    norm = {"model.norm.weight": torch.rand(16, generator=torch.Generator().manual_seed(0)) + 0.3}  # one of ones may be applied twice
    save_file(load_file(file) | norm, file, {"format": "pt"})
    assert train([str(recipe), f"save.dir={folder}/live"]) == 0
    return folder, load_backbone(str(folder / "backbone"), dtype="fp32", device="cpu"), losses(folder / "live")


@pytest.fixture
def served(run: tuple[Path, Backbone, list[float]], tmp_path: Path) -> Iterator[StatesServer]:
    with states_server(run[1], tmp_path / "states", LAYERS, NAME) as server:
        yield server


def command(of: Path, *servers: StatesServer, **changes: Any) -> list[str]:
    options = {"folder": str(servers[0].folder), "patience": 20, **changes}
    endpoints = json.dumps([server.url for server in servers])
    return [str(of / "recipe.yaml"), f"features.endpoint={endpoints}", *(f"features.{key}={value}" for key, value in options.items())]


@pytest.mark.parametrize("packing", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_the_losses_are_those_of_the_live_backbone(packing: str, run: Any, served: StatesServer, tmp_path: Path, capsys: Any) -> None:
    """Start values included, and evaluated; no file is left, and each sample is asked for once an epoch."""
    folder, _, live = run
    if packing == "true":
        assert train([str(folder / "recipe.yaml"), f"save.dir={tmp_path}/live", "data.packing=true"]) == 0
        live = losses(tmp_path / "live")
    assert train([*command(folder, served), f"save.dir={tmp_path}/out", f"data.packing={packing}"]) == 0
    assert losses(tmp_path / "out") == pytest.approx(live, rel=1e-5)
    err = capsys.readouterr().err
    assert "as a teacher-forced chain on held-out features" in err and f"from {served.url}" in err and "output layer alone" in err
    assert list(served.folder.iterdir()) == []
    assert all(body["kv_transfer_params"] == {"include_output_tokens": False} and body["max_tokens"] == 1 for body in served.asked)


def test_of_two_servers_one_dies_in_the_middle(run: Any, served: StatesServer, tmp_path: Path) -> None:
    folder, backbone, live = run
    with states_server(backbone, served.folder, LAYERS, NAME) as other:
        other.before = lambda number: "die" if number > 30 else ""
        assert train([*command(folder, served, other), f"save.dir={tmp_path}/out"]) == 0
        assert losses(tmp_path / "out") == pytest.approx(live, rel=1e-5)
        assert len(other.asked) > 30 and len(served.asked) > 30


@pytest.mark.parametrize("fate", ["busy", "no file", "torn", *(pytest.param(fate, marks=pytest.mark.slow) for fate in ("slow", "die"))])
def test_what_fails_now_and_then_is_asked_for_again(fate: str, run: Any, served: StatesServer, tmp_path: Path) -> None:
    folder, _, live = run
    served.before = lambda number: fate if number in (5, 40, 60) else ""
    assert train([*command(folder, served), f"save.dir={tmp_path}/out"]) == 0
    assert losses(tmp_path / "out") == pytest.approx(live, rel=1e-5) and list(served.folder.iterdir()) == []


def test_a_run_whose_servers_are_gone_is_saved_and_goes_on(run: Any, served: StatesServer, tmp_path: Path, capsys: Any) -> None:
    folder, _, live = run
    served.before = lambda number: "die" if number > 36 + 1 + 4 * 4 else ""  # start values, a probe and four steps
    out = [*command(folder, served, patience=2, prefetch=0), f"save.dir={tmp_path}/out"]
    assert "no hidden states for 2 s (features.patience), at last http://" in error_of(capsys, "train", *out)
    done = len(losses(tmp_path / "out"))
    assert 0 < done < 8 and [path.name for path in (tmp_path / "out" / "state").glob(f"step-*{done}")]
    served.before = lambda number: ""
    assert train(out) == 0
    assert losses(tmp_path / "out") == pytest.approx(live, rel=1e-5)


def test_a_cache_is_written_by_a_server(run: Any, served: StatesServer, tmp_path: Path) -> None:
    folder, _, live = run
    cache = [f"cache.dir={tmp_path}/cache", "cache.dtype=exact"]
    assert main(["cache", *command(folder, served), *cache]) == 0
    manifest = read_manifest(tmp_path / "cache")
    assert manifest is not None and not manifest.missing() and (tmp_path / "cache" / SUPPLEMENT).exists()
    served.before = lambda number: "die"
    assert train([str(folder / "recipe.yaml"), *cache, f"save.dir={tmp_path}/out"]) == 0
    assert losses(tmp_path / "out") == pytest.approx(live, rel=1e-5)


def zeros(layer: int | None, rows: slice) -> Change:
    def change(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden.clone()
        hidden[rows, slice(None) if layer is None else layer] = 0
        return hidden, tokens

    return change


def not_a_number(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    hidden = hidden.clone()
    hidden[3, 1, 0] = torch.nan
    return hidden, tokens


def others(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return hidden[torch.randperm(len(hidden), generator=torch.Generator().manual_seed(1))], tokens


FAULTS: dict[str, tuple[Change | str, str]] = {
    "zeros in a layer": (zeros(2, slice(None)), "zeros in layer 5, rows 0 to .*recurrent layers"),
    "zeros in all": (zeros(None, slice(None)), "zeros in layers 1, 3, 5, 6, rows 0 to "),
    "zeros in some rows": (zeros(None, slice(0, 4)), "zeros in layers 1, 3, 5, 6, rows 0 to 3 of .*prefill in chunks"),
    "NaN": (not_a_number, "NaN or infinity in layer 3, rows 3 to 3 of "),
    "rows of another request": (others, "rows of another request"),
    "tokens of another request": (lambda hidden, tokens: (hidden, tokens + 1), "the file holds other tokens .*rows of another request"),
    "fewer rows": (lambda hidden, tokens: (hidden[-5:], tokens), "5 rows for .* tokens: prefill in chunks has cut them"),
    "fewer tokens": (lambda hidden, tokens: (hidden[:5], tokens[:5]), "5 rows for .* tokens: prefill in chunks has cut them"),
    "fewer layers": (lambda hidden, tokens: (hidden[:, :3], tokens), "3 x 16 .layers x width. in place of 4 x 16"),
    "another width": (lambda hidden, tokens: (hidden[..., :8], tokens), "4 x 8 .layers x width. in place of 4 x 16"),
    "cut by chunks": ("cut", "rows 0 to .* are wrong and the others right: prefill in chunks"),
    "a layer off by one": ("off", "a layer off by one"),
    "a wrong final norm": ("normed", "a wrong final norm"),
    "the final norm of another": ("other norm", "the final norm of another checkpoint"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_states_are_refused_by_their_cause(fault: str, run: Any, served: StatesServer, tmp_path: Path, capsys: Any) -> None:
    folder, backbone, _ = run
    change, message = FAULTS[fault]
    if not isinstance(change, str):
        served.change = change
    elif change == "off":
        served.change = lambda hidden, tokens: (served_layers(backbone, tokens, (1, 3, 4, 5)), tokens)
    elif change == "cut":
        served.change = lambda hidden, tokens: (torch.cat([hidden.flip(0)[: len(hidden) // 2], hidden[len(hidden) // 2 :]]), tokens)
    elif change == "normed":
        served.change = lambda hidden, tokens: (torch.cat([hidden[:, :3], backbone.model.model.norm(hidden[:, 3:])], 1), tokens)
    else:
        served.readout = lambda hidden: backbone.readout(hidden / backbone.model.model.norm.weight)
    line = error_of(capsys, "train", *command(folder, served), f"save.dir={tmp_path}/out", "drafter.depth=2")
    assert f"{served.url} sent hidden states that cannot be trained on: " in line
    assert re.search(message, line), line


def served_layers(backbone: Backbone, tokens: Tensor, layers: tuple[int, ...]) -> Tensor:
    read = backbone.read(tokens[None], taps=layers)
    assert read.taps is not None
    return torch.stack([read.taps[layer][0] for layer in layers], 1)


def test_faults_that_begin_later_are_found_by_samples(run: Any, served: StatesServer, tmp_path: Path, capsys: Any) -> None:
    """After the first eight samples one of ``check_every`` is checked."""
    folder, backbone, _ = run
    sound = served.change
    served.before = lambda number: setattr(
        served, "change", sound if number < 40 else lambda hidden, tokens: (served_layers(backbone, tokens, (1, 3, 4, 5)), tokens)
    ) or ""  # fmt: skip
    assert "a layer off by one" in error_of(capsys, "train", *command(folder, served, check_every=25), f"save.dir={tmp_path}/out")
    checked = [i for i, body in enumerate(served.asked) if "logprobs" in body]
    assert 8 < len(checked) < len(served.asked) / 4


@pytest.mark.parametrize(("changes", "message"), [
    ({"model": "other"}, "does not serve 'other'.*start the server as headstart serve-features"),
    ({"folder": "/nowhere/at/all"}, "its files do not arrive in features.folder=/nowhere/at/all, which is not there"),
    ({"endpoint": "ftp://there"}, "features.endpoint"),
    ({"endpoint": "http://user:secret@there"}, r"features.endpoint is an address without user.*\(what was given is not shown\)"),
    ({"api_key": "NO_SUCH_KEY"}, "features.api_key=NO_SUCH_KEY names no environment variable"),
])  # fmt: skip
def test_impossible_settings(changes: dict[str, Any], message: str, run: Any, served: StatesServer, tmp_path: Path, capsys: Any) -> None:
    line = error_of(capsys, "train", *command(run[0], served, **changes), f"save.dir={tmp_path}/out")
    assert re.search(message, line) and "secret" not in line, line


@pytest.mark.parametrize("change", ["backbone.lora={rank: 2}", "objective.on_policy=0.5", "backbone.adapter=some/where"])
def test_what_needs_the_backbone_here_is_refused(change: str, run: Any, served: StatesServer, capsys: Any) -> None:
    assert change.split("=")[0] in error_of(capsys, "train", *command(run[0], served), change)


def test_the_line_of_a_server(run: Any, capsys: Any) -> None:
    line = output_of(capsys, "serve-features", "--cpu", "--port", "8123", str(run[0] / "recipe.yaml"))
    assert f"--served-model-name {NAME} --port 8123 --max-model-len 65" in line and "--no-enable-prefix-caching" in line
    assert '"eagle_aux_hidden_state_layer_ids": [1, 3, 5, 6]' in line and '"kv_connector": "HiddenStatesOnCPU"' in line
    assert line.startswith("PYTHONPATH=") and "-m vllm.entrypoints.openai.api_server --model" in line
    line = output_of(capsys, "serve-features", "--gpus", "4", str(run[0] / "recipe.yaml"), "backbone.dtype=bf16")
    assert line.startswith("vllm serve ") and "--tensor-parallel-size 4" in line
    assert '"kv_connector": "ExampleHiddenStatesConnector"' in line
    assert "--dtype bfloat16" in line and '"shared_storage_path": "/dev/shm/headstart-features"' in line
