"""A LoRA adapter trained on the backbone together with heads (Medusa-2): training, bit-for-bit resume, saving and decoding."""

import functools
import importlib
import json
import shutil
import signal
import sys
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
from errors import refuses
from families import random_drafter, state, texts, tiny
from safetensors.torch import load_file, save_file
from small_run import Forked, make_recipe, prepared, read_log
from transformers import AutoModelForCausalLM

import headstart
from headstart import Backbone, Features, load_backbone
from headstart.training.objective.loss_rows import lm_loss

LORA = {
    "rank": 2, "alpha": 4.0, "dropout": 0.1, "lr_ratio": 1.0, "use_dora": True, "kl_weight": 0.5, "warmup_ratio": 0.4, "ramp_ratio": 0.3,
}  # fmt: skip
STEPS, ALONE, MICRO_BATCHES = 10, 4, 2
"""Steps of a run, those that train the heads alone, and forward passes of each."""


def joint_recipe(folder: Path, **lora: float | bool) -> Path:
    drafter = {"kind": "tests.helpers.dying", "depth": 2, "taps": [1, 3, 5], "draft_vocab_size": 40}
    train = {"steps": STEPS, "micro_batch": 2, "ema_decay": 0.5, "optimizer": "muon"}
    return make_recipe(folder, 6, backbone={"lora": LORA | lora}, drafter=drafter, train=train, save={"every": 3})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("joint")
    assert Forked(1, [str(joint_recipe(folder))], folder / "said.txt").wait() == 0, (folder / "said.txt").read_text()
    return folder


def tensors(out: Path) -> dict[str, torch.Tensor]:
    return load_file(max((out / "state").glob("step-*")) / "tensors.safetensors")


def test_the_adapter_moves_and_the_base_does_not(trained: Path) -> None:
    output, log = (trained / "said.txt").read_text(), [line for line in read_log(trained / "out") if "loss" in line]
    assert "frozen but for an adapter of" in output
    assert not [line for line in log[:ALONE] if "lm_loss" in line] and log[-1]["lm_loss"] < log[ALONE]["lm_loss"]
    assert "lm_kl" not in log[ALONE] and log[-1]["lm_kl"] > 0, "at first it is the original backbone"
    state = tensors(trained / "out")
    moved = {name: tensor for name, tensor in state.items() if name.startswith("adapter/") and "lora_B" in name}
    assert len(moved) == 6 * 7 and all(tensor.abs().max() > 0 for tensor in moved.values()), "B begins at 0"
    assert {f"average/{name}" for name in moved} <= state.keys()
    assert {f"optimizer/exp_avg/{name}" for name in moved} <= state.keys()
    assert not [name for name in state if "base_layer" in name or "embed_tokens" in name and name.startswith("adapter")]
    run = prepared(trained / "recipe.yaml")  # already at its last step
    base = load_file(trained / "backbone" / "model.safetensors")
    now = {name.replace(".base_layer.", "."): weight for name, weight in run.backbone.model.state_dict().items() if "lora_" not in name}
    assert all(torch.equal(now[name], weight) for name, weight in base.items())
    assert all(torch.equal(weight.detach(), state[f"adapter/{name}"]) for name, weight in run.backbone.trainable.items())


def test_saved_as_a_standard_adapter_and_decoded_with(trained: Path) -> None:
    """The averaged adapter is saved; PEFT loads it alone, and heads decode exactly what that model generates."""
    out, state = trained / "out", tensors(trained / "out")
    metadata = json.loads((out / "headstart.json").read_text())
    alone = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(trained / "backbone"), str(out / "adapter")).eval()
    weights = dict(alone.get_base_model().named_parameters())
    averaged = {name.removeprefix("average/adapter/"): tensor for name, tensor in state.items() if name.startswith("average/adapter/")}
    assert averaged and all(torch.equal(weights[name], tensor) for name, tensor in averaged.items())
    importlib.import_module("tests.helpers.dying")
    model = AutoModelForCausalLM.from_pretrained(trained / "backbone")
    heads = headstart.load(out, backbone=model)
    assert heads.backbone.adapter is not None and heads.backbone.adapter.digest() == metadata["contract"]["adapter"]
    assert not heads.backbone.trainable and not any(weight.requires_grad for weight in heads.backbone.adapter.parameters.values())
    ours = headstart.load(out, backbone=alone)  # passed as it is: the adapter is already attached
    bare = AutoModelForCausalLM.from_pretrained(trained / "backbone")
    differs = False
    for seed in range(2):
        row = torch.randint(1, 250, (1, 7), generator=torch.Generator().manual_seed(seed))
        options = {"attention_mask": torch.ones_like(row), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        expected = alone.generate(input_ids=row, **options)
        assert torch.equal(model.generate(row, custom_generate=heads.generate, **options), expected)
        assert torch.equal(alone.generate(input_ids=row, custom_generate=ours.generate, **options), expected)
        differs = differs or not torch.equal(bare.generate(row, **options), expected)
    assert differs, "the adapter changes nothing: the test holds nothing"


def test_unloading_takes_the_adapter_off_again(trained: Path) -> None:
    importlib.import_module("tests.helpers.dying")
    model = AutoModelForCausalLM.from_pretrained(trained / "backbone").train()
    before = state(model)
    with headstart.load(trained / "out", backbone=model):
        names = [name for name, weight in model.named_parameters() if weight.requires_grad]
        assert names and not any("lora" in name for name in names), "the base is trained as before"
    assert state(model) == before


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize(("number", "step"), [(signal.SIGKILL, 5), (signal.SIGTERM, 5), (signal.SIGKILL, 8)])
def test_killed_and_resumed_is_the_same_bit_for_bit(trained: Path, tmp_path: Path, number: signal.Signals, step: int) -> None:
    """Killed in its first joint step, so that it goes on from one of the heads alone, and killed later."""
    out, command = tmp_path / "out", [str(trained / "recipe.yaml"), f"save.dir={tmp_path / 'out'}"]
    fatal = {"HEADSTART_TEST_SIGNAL": str(int(number)), "HEADSTART_TEST_FORWARD": str((step - 1) * MICRO_BATCHES + 2)}
    assert Forked(1, command, tmp_path / "said.txt", **fatal).wait() != 0
    assert Forked(1, command, tmp_path / "said.txt").wait() == 0, (tmp_path / "said.txt").read_text()
    assert "resuming from" in (tmp_path / "said.txt").read_text()
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (out / file).read_bytes() == (trained / "out" / file).read_bytes()
    expected, resumed = tensors(trained / "out"), tensors(out)
    assert expected.keys() == resumed.keys() and all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """Adapter gradients are summed over processes (without dropout, whose noise differs between processes)."""
    recipe = str(joint_recipe(tmp_path, dropout=0.0, use_dora=False))
    for processes in (1, 2):
        log = tmp_path / f"{processes}.txt"
        arguments = [recipe, f"save.dir={tmp_path}/{processes}", "train.micro_batch=null", "train.steps=5"]
        assert Forked(processes, arguments, log).wait() == 0, log.read_text()
    one, two = tensors(tmp_path / "1"), tensors(tmp_path / "2")
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=2e-4, rtol=1e-3, msg=name)


def test_reading_keeps_gradients_only_if_trainable() -> None:
    frozen, tokens = tiny("llama"), texts(2, 9)
    expected = Backbone(frozen).read(tokens).hidden_BTD
    config = peft.LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj", "down_proj"])
    on = Backbone(peft.get_peft_model(tiny("llama"), config), trainable=True)
    assert len(on.trainable) == 2 * 2 * on.num_layers and all(weight.requires_grad for weight in on.trainable.values())
    read = on.read(tokens, taps=(2,))
    assert read.hidden_BTD.requires_grad and read.taps is not None and read.taps[2].requires_grad
    with torch.no_grad():
        assert torch.equal(on.read(tokens).hidden_BTD, expected), "a fresh adapter changes nothing"
        for weight in on.trainable.values():
            weight.add_(0.1)
        still = on.read(tokens)
        assert torch.equal(on.read(tokens).hidden_BTD, still.hidden_BTD) and not still.hidden_BTD.requires_grad
    assert not torch.equal(on.read(tokens).hidden_BTD, on.read(tokens).hidden_BTD), "dropout, while training"
    with torch.no_grad():
        assert torch.equal(on.read(tokens).hidden_BTD, still.hidden_BTD)
    assert not Backbone(on.adapter.peft).read(tokens).hidden_BTD.requires_grad if on.adapter else False
    refuses("no adapter to train", Backbone, tiny("llama"), trainable=True)


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_lm_loss_is_the_models_own(chunk: int) -> None:
    on = Backbone(peft.get_peft_model(tiny("gemma3"), peft.LoraConfig(r=2, target_modules=["v_proj"])), trainable=True)
    tokens, mask = texts(2, 9), torch.rand(2, 9, generator=torch.Generator().manual_seed(0)) < 0.6
    features = on.read(tokens)
    labelled = Features(tokens, features.hidden_BTD, None, mask, torch.zeros_like(tokens))
    labels = tokens.masked_fill(~mask, -100)
    labels[:, :2] = -100  # no depth drafts the first two tokens
    expected_loss = F.cross_entropy(on.model(tokens).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    loss = lm_loss(on, labelled, chunk).cross_entropy
    torch.testing.assert_close(loss, expected_loss, atol=1e-4, rtol=1e-5)
    weights = list(on.trainable.values())
    for actual, expected in zip(torch.autograd.grad(loss, weights), torch.autograd.grad(expected_loss, weights), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    nothing = Features(tokens, on.read(tokens).hidden_BTD, None, torch.zeros_like(mask), torch.zeros_like(tokens))
    assert all(not grad.any() for grad in torch.autograd.grad(lm_loss(on, nothing, chunk).cross_entropy, weights))


def test_training_it_sharded_is_refused(trained: Path, tmp_path: Path) -> None:
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    with pytest.raises(AssertionError, match="failed with"):
        Forked(2, [str(trained / "recipe.yaml"), f"save.dir={tmp_path}"], tmp_path / "fsdp.txt", **fsdp).wait(grace=0)
    assert "error: backbone.lora is trained data-parallel" in (tmp_path / "fsdp.txt").read_text()


def test_refused_adapters(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("tests.helpers.dying")
    out = tmp_path / "out"
    shutil.copytree(trained / "out", out)
    file = out / "adapter" / "adapter_model.safetensors"
    good = load_file(file)
    fresh = functools.partial(load_backbone, str(trained / "backbone"), device="cpu")
    narrow = {name: weight[..., :-1].contiguous() for name, weight in good.items()}
    for bad in ({**good, "other": torch.zeros(2)}, dict(list(good.items())[1:]), narrow):
        save_file(bad, file)
        on = fresh()
        refuses("does not fit LlamaForCausalLM", headstart.load, out, backbone=on)
        assert on.adapter is None and not [name for name, _ in on.model.named_parameters() if "lora" in name]
    save_file({name: weight + 1 for name, weight in good.items()}, file)
    refuses("is changed", headstart.load, out, backbone=fresh())
    file.unlink()
    refuses("lacks", headstart.load, out, backbone=fresh())
    on = fresh()
    monkeypatch.setitem(sys.modules, "peft", None)
    refuses("pip install 'headstart\\[peft\\]'", headstart.load, trained / "out", backbone=on)


def test_heads_of_another_adapter(trained: Path, tmp_path: Path) -> None:
    """Heads trained without an adapter are refused on a backbone that has one, and vice versa, unless that is allowed."""
    importlib.import_module("tests.helpers.dying")
    on = load_backbone(str(trained / "backbone"), device="cpu")
    headstart.load(trained / "out", backbone=on)
    headstart.load(trained / "out", backbone=on)  # the adapter is already attached
    plain = load_backbone(str(trained / "backbone"), device="cpu")
    random_drafter("medusa", plain).save_pretrained(tmp_path / "plain")
    refuses("trained without an adapter", headstart.load, tmp_path / "plain", backbone=on)
    headstart.load(tmp_path / "plain", backbone=on, allow_finetuned=True)
    headstart.load(tmp_path / "plain", backbone=plain)
    refuses("load one of them", headstart.load, trained / "out", backbone=plain)
    other = load_backbone(str(trained / "backbone"), device="cpu")
    other.add_lora(3, 1.0, 0.0)
    refuses("this one carries", headstart.load, trained / "out", backbone=other)
