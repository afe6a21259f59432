"""LoRA on a trained drafter: what is trained and saved, merged or not, resumed, in several processes; what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from accelerate.state import AcceleratorState
from families import DRAFTERS, backbone, random_drafter
from forked import Forked
from safetensors.torch import load_file
from small_run import make_recipe, read_log

from headstart.cli.main import main as headstart
from headstart.cli.train import main
from headstart.heads.backbone import adapter as adapters
from headstart.heads.backbone.adapter import DRAFTER_ADAPTER
from headstart.heads.backbone.backbone import load_backbone
from headstart.heads.checkpoint import load_drafter
from headstart.heads.lora import add_lora, merged
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, continue_text
from headstart.support.errors import UserError
from headstart.training.plan.fake_model import make_fake_models
from headstart.training.plan.memory import OPTIMIZER, MemoryPlan, MicroBatch
from headstart.training.recipe.recipe import load_recipe

WEIGHTS = "model.safetensors"
SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with trained EAGLE-3 heads in ``base``, a recipe that adapts them, and its run in ``out``."""
    folder = tmp_path_factory.mktemp("adapted")
    drafter = {"kind": "eagle3", "depth": 3, "draft_vocab_size": 40}
    train = {"steps": 6, "batch_size": 5, "schedule": "constant", "ema_decay": 0.5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        AcceleratorState._reset_state(True)
        assert main([str(make_recipe(folder, drafter=drafter)), f"save.dir={folder}/base"]) == 0
        drafter |= {"init": str(folder / "base"), "lora": {"rank": 2, "dropout": 0.1}}
        recipe = make_recipe(folder, drafter=drafter, train=train, eval={"prompts": 1, "every": 4}, save={"every": 3})
        assert main([str(recipe)]) == 0
    return folder


@pytest.mark.parametrize("kind", DRAFTERS)
def test_names_and_drafts_stay_those_of_the_drafter(kind: str) -> None:
    """An untrained adapter changes nothing; a merged one drafts as the adapted drafter does; the drafter's own weights stay."""
    plain, drafter = (random_drafter(kind, backbone("llama")) for _ in range(2))
    add_lora(drafter, 2, 4.0)
    assert drafter.lora is not None and drafter.tensors().keys() == plain.tensors().keys()
    assert all(torch.equal(drafter.tensors()[name], weight) for name, weight in plain.tensors().items())
    trained = {name for name, weight in drafter.named_parameters() if weight.requires_grad}
    assert trained == drafter.lora.weights.keys() != set()
    shapes = [weight.shape for weight in drafter.lora.weights.values()]
    assert not [shape for shape in shapes if backbone("llama").vocab in shape], "output layers are not adapted"
    features = backbone("llama").read(torch.arange(1, 21).view(2, 10), taps=drafter.taps)
    torch.manual_seed(0)
    before = plain(features)
    assert all(torch.equal(a, b) for a, b in zip(drafter(features), before, strict=True))
    with torch.no_grad():
        for weight in drafter.lora.weights.values():
            weight.normal_(std=0.2)
    one = merged(drafter)
    assert one.lora is None and one.depth == drafter.depth and one.state_dict().keys() == plain.state_dict().keys()
    moved = drafter(features)
    assert any(not torch.allclose(a, b) for a, b in zip(moved, before, strict=True))
    for a, b in zip(moved, one(features), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    drafter.load_tensors(plain.tensors())
    assert all(torch.equal(drafter.tensors()[name], weight) for name, weight in plain.tensors().items())


def test_only_the_adapter_is_trained_and_saved_beside_the_weights(adapted: Path) -> None:
    base, out = load_file(adapted / "base" / WEIGHTS), load_file(adapted / "out" / WEIGHTS)
    assert base.keys() == out.keys() and all(torch.equal(base[name], out[name]) for name in base)
    saved = load_file(adapted / "out" / DRAFTER_ADAPTER / "adapter_model.safetensors")
    assert {name.split(".lora_")[0] for name in saved} >= {"base_model.model.fc", "base_model.model.midlayer.mlp.down_proj"}
    config = peft.PeftConfig.from_pretrained(str(adapted / "out" / DRAFTER_ADAPTER))
    assert (config.r, config.lora_alpha) == (2, 32.0) and "midlayer.self_attn.q_proj" in config.target_modules
    assert any(weight.abs().sum() > 0 for name, weight in saved.items() if "lora_B" in name)
    losses = [line["loss"] for line in read_log(adapted / "out") if "loss" in line]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_merged_on_request_it_drafts_the_same(adapted: Path, tmp_path: Path) -> None:
    """The same command with ``merge`` saves whole weights; loading adds the adapter otherwise."""
    shutil.copytree(adapted / "out", tmp_path / "out")
    run = [str(adapted / "recipe.yaml"), f"save.dir={tmp_path}/out", "train.steps=7", "drafter.lora.merge=true"]
    assert main(run) == 0 and not (tmp_path / "out" / DRAFTER_ADAPTER).exists()
    assert main([*run[:2], f"save.dir={tmp_path}/apart", "train.steps=7"]) == 0
    on = load_backbone(str(adapted / "backbone"), device="cpu")
    whole, apart, base = (load_drafter(folder, on) for folder in (tmp_path / "out", tmp_path / "apart", adapted / "base"))
    for name, weight in whole.tensors().items():
        torch.testing.assert_close(weight, apart.tensors()[name], rtol=0, atol=1e-6)
    assert not torch.equal(whole.tensors()["fc.weight"], base.tensors()["fc.weight"])
    assert torch.equal(whole.tensors()["lm_head.weight"], base.tensors()["lm_head.weight"])
    settings = Settings(20, tree=TreeShape(6, 3, 3))
    drafts = [continue_text(SpeculativeModel(on, one), torch.arange(9), settings, 0).accept_lengths for one in (whole, apart)]
    assert drafts[0] == drafts[1]
    again = tmp_path / "again"
    apart.save_pretrained(again)  # a loaded drafter is merged
    assert not (again / DRAFTER_ADAPTER).exists() and torch.equal(load_file(again / WEIGHTS)["fc.weight"], apart.tensors()["fc.weight"])
    assert main([str(adapted / "recipe.yaml"), f"drafter.init={tmp_path}/apart", f"save.dir={tmp_path}/chained", "train.steps=1"]) == 0
    assert torch.equal(load_file(tmp_path / "chained" / WEIGHTS)["fc.weight"], apart.tensors()["fc.weight"])


def test_resumed_bit_for_bit_without_the_heads_it_started_from(adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "base"
    shutil.copytree(adapted / "base", source)
    run = [str(adapted / "recipe.yaml"), f"save.dir={tmp_path}/out", f"drafter.init={source}"]
    assert main([*run, "train.steps=3"]) == 0
    assert "(LoRA" in capsys.readouterr().err.replace("of LoRA", "(LoRA")
    shutil.rmtree(source)
    assert main(run) == 0
    for name in (WEIGHTS, f"{DRAFTER_ADAPTER}/adapter_model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (adapted / "out" / name).read_bytes()
    one, other = (load_file(folder / "state" / "step-00000006" / "tensors.safetensors") for folder in (tmp_path / "out", adapted / "out"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, SHARDED], ids=["replicated", "sharded"])
def test_two_processes_adapt_as_one_does(adapted: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    recipe, without_noise = str(adapted / "recipe.yaml"), ["drafter.lora.dropout=0", "train.micro_batch=1"]
    assert main([recipe, *without_noise, f"save.dir={tmp_path}/one"]) == 0
    log = tmp_path / "log.txt"
    assert Forked(2, [recipe, *without_noise, f"save.dir={tmp_path}/two"], log, **environment).wait() == 0, log.read_text()[-3000:]
    one, two = ([line["loss"] for line in read_log(tmp_path / name) if "loss" in line] for name in ("one", "two"))
    assert one == pytest.approx(two, rel=1e-5)
    for name in (WEIGHTS, f"{DRAFTER_ADAPTER}/adapter_model.safetensors"):
        for key, weight in load_file(tmp_path / "one" / name).items():
            torch.testing.assert_close(load_file(tmp_path / "two" / name)[key], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_planned_and_inspected(adapted: Path, tmp_path: Path) -> None:
    """The adapter is what is trained, and the checkpoint shows it."""
    recipe = load_recipe(adapted / "recipe.yaml")
    models = make_fake_models(recipe, accelerator=False)
    planned = MemoryPlan(recipe, models, False, False).step(MicroBatch(2, 32)).phases[OPTIMIZER]
    own, lora = (load_file(file) for file in (adapted / "out" / WEIGHTS, adapted / "out" / DRAFTER_ADAPTER / "adapter_model.safetensors"))
    adapter_bytes = sum(weight.nbytes for weight in lora.values())
    assert planned["gradients"] == planned["weight average"] == adapter_bytes and planned["optimizer state"] == 2 * adapter_bytes
    assert planned["drafter weights"] >= sum(weight.nbytes for weight in own.values()) + adapter_bytes
    with pytest.raises(UserError, match="holds eagle3 heads, this recipe trains medusa"):
        make_fake_models(load_recipe(adapted / "recipe.yaml", ["drafter.kind=medusa", "drafter.draft_depth=2"]), accelerator=False)
    file = tmp_path / "inspect.json"
    assert headstart(["inspect", str(adapted / "out"), "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    saved = load_file(adapted / "out" / DRAFTER_ADAPTER / "adapter_model.safetensors")
    assert found["adapter"] == {"parameters": sum(weight.numel() for weight in saved.values()), "weights_match_hash": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("drafter.init=null", "drafter.lora adapts trained heads; set init to their folder, or lora to null"),
        ("drafter.lora.rank=0", "drafter.lora.rank is a whole number of at least 1; got 0"),
        ("drafter.lora.rankk=1", "unknown key drafter.lora.rankk; did you mean drafter.lora.rank?"),
        ("drafter.lora.target_modules=[nothing]", "names no linear layer of Eagle3; it has: fc, midlayer.self_attn.q_proj"),
        ("drafter.lora.target_modules='('", "is not a regular expression"),
        ("train.gradient_checkpointing=true", "drafter.lora.dropout is 0 with train.gradient_checkpointing"),
        ("drafter.draft_vocab_size=41", "keeps the draft vocabulary of drafter.init"),
    ],
)
def test_bad_input(adapted: Path, tmp_path: Path, change: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(adapted / "recipe.yaml"), change, f"save.dir={tmp_path}/out"]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_damaged_adapters_are_refused(adapted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on = load_backbone(str(adapted / "backbone"), device="cpu")
    shutil.copytree(adapted / "out", tmp_path / "out")
    file = tmp_path / "out" / DRAFTER_ADAPTER / "adapter_model.safetensors"
    with monkeypatch.context() as patch, pytest.raises(UserError, match="pip install 'headstart\\[peft\\]'"):
        patch.setattr(adapters, "find_spec", lambda name: None)
        load_drafter(tmp_path / "out", on)
    config = file.with_name("adapter_config.json")
    config.write_text(config.read_text().replace('"r": 2', '"r": 3'))
    with pytest.raises(UserError, match="does not fit Eagle3 .* is \\[2, 48\\], not \\[3, 48\\]"):
        load_drafter(tmp_path / "out", on)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="truncated or changed"):
        load_drafter(tmp_path / "out", on)
    file.unlink()
    with pytest.raises(UserError, match="lacks its weights adapter_model.safetensors"):
        load_drafter(tmp_path / "out", on)


def test_beside_an_adapter_on_the_backbone(adapted: Path, tmp_path: Path) -> None:
    """Both adapters are trained, saved and put on again."""
    assert main([str(adapted / "recipe.yaml"), f"save.dir={tmp_path}/out", "backbone.lora.rank=2", "train.steps=2", "eval.every=0"]) == 0
    backbone = load_backbone(str(adapted / "backbone"), device="cpu")
    drafter = load_drafter(tmp_path / "out", backbone)
    assert backbone.adapter is not None and drafter.lora is None
    assert {"adapter", "drafter_adapter"} <= {path.name for path in (tmp_path / "out").iterdir()}
