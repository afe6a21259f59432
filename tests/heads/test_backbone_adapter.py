"""Heads trained on a backbone that carries a frozen PEFT adapter, and adapters on quantized backbones."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from errors import error_of, output_of
from families import prompts, random_drafter, texts, tiny
from small_run import make_recipe, prepared, train_once
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import headstart
from headstart.cli.main import main
from headstart.heads.backbone.backbone import Backbone, load_backbone

PROMPT = "the cat sees the red"
pytestmark = pytest.mark.usefixtures("on_the_cpu")


def save_adapter(model: PreTrainedModel, folder: Path, seed: int = 0, **config: Any) -> Path:
    """An adapter with random weights, saved as PEFT does."""
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": "all-linear"} | config))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    wrapped.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, its backbone, an adapter of it, and heads trained on both."""
    where = tmp_path_factory.mktemp("adapted")
    data = {"max_length": 96}
    recipe = make_recipe(where, data=data, train={"steps": 4}, save={"every": 2}, drafter={"kind": "medusa", "depth": 3})
    model = AutoModelForCausalLM.from_pretrained(where / "backbone")
    save_adapter(model, where / "given", use_dora=True)
    save_adapter(AutoModelForCausalLM.from_pretrained(where / "backbone"), where / "other", seed=1)
    train_once(recipe, f"backbone.adapter={where}/given")
    return where


def answer(folder: Path, adapter: str | None) -> str:
    """transformers' and PEFT's greedy continuation of the prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder / "backbone")
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, str(folder / adapter)).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "backbone")
    ids = tokenizer(PROMPT, return_tensors="pt")
    out = model.generate(input_ids=ids.input_ids, attention_mask=ids.attention_mask, max_new_tokens=16, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(out[0, ids.input_ids.shape[1] :]))


def test_heads_are_trained_on_it_and_saved_with_it(folder: Path) -> None:
    out, given = folder / "out", load_backbone(str(folder / "backbone"), device="cpu")
    given.attach(str(folder / "given"))
    contract = json.loads((out / "headstart.json").read_text())["contract"]
    assert contract["adapter"] == given.adapter_digest and not given.trainable
    run = prepared(folder / "recipe.yaml", f"backbone.adapter={folder}/given")  # at its last step
    model = AutoModelForCausalLM.from_pretrained(folder / "backbone")
    wrapped = peft.PeftModel.from_pretrained(model, str(folder / "given")).eval()
    tokens = texts(2, 12)
    read = run.backbone.read(tokens).hidden_BTD
    torch.testing.assert_close(read, model.model(tokens).last_hidden_state)
    assert wrapped.peft_config["default"].use_dora and not run.backbone.trainable
    saved = load_backbone(str(folder / "backbone"), device="cpu")
    heads = headstart.load(out, backbone=saved)
    assert saved.adapter_digest == contract["adapter"] and torch.equal(saved.read(tokens).hidden_BTD, read)
    assert heads.drafter is not None


@pytest.mark.slow
def test_every_command_puts_it_on(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, expected, bare = str(folder / "out"), answer(folder, "given"), answer(folder, None)
    assert expected != bare
    asked = [PROMPT, "--max-new-tokens", "16", "--raw", "--capture", "off"]
    backbone = ["--backbone", str(folder / "backbone")]
    alone = [*backbone, "--propose", "suffix", "--adapter", str(folder / "given")]
    for options in (["--heads", out], ["--heads", out, "--no-draft"], alone):
        assert output_of(capsys, "generate", *options, *asked).strip() == expected.strip()
    assert output_of(capsys, "generate", *backbone, *asked).strip() == bare.strip()
    (tmp_path / "prompts.txt").write_text(PROMPT)
    measured = ["--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "8", "--json", str(tmp_path / "report.json")]
    assert main(["bench", "--heads", out, *measured, "--capture", "off"]) == 0
    capsys.readouterr()
    assert "adapter" in output_of(capsys, "inspect", out)
    recipe = [str(folder / "recipe.yaml"), f"backbone.adapter={folder}/given"]
    for command in (["plan", *recipe, "--no-calibration", "--memory", "4"], ["inspect", *recipe]):
        assert main(command) == 0


def test_prepared_data_are_its_own(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, given = str(folder / "recipe.yaml"), f"backbone.adapter={folder}/given"
    cached = [f"cache.dir={tmp_path}/features", "cache.dtype=exact", f"save.dir={tmp_path}/out"]
    assert main(["cache", recipe, given, *cached]) == 0
    assert main(["train", recipe, given, *cached]) == 0
    capsys.readouterr()
    for other in ("null", f"{folder}/other"):
        error = error_of(capsys, "train", recipe, f"backbone.adapter={other}", cached[0], cached[1], f"save.dir={tmp_path}/none")
        assert "backbone.adapter: found " in error
    answers = [f"regenerate.out={tmp_path}/answers.jsonl", "regenerate.limit=2", "regenerate.max_new_tokens=16"]
    assert main(["regenerate", recipe, given, f"regenerate.heads={folder}/out", *answers]) == 0
    assert main(["regenerate", recipe, given, answers[0].replace("answers", "again"), *answers[1:]]) == 0
    assert main(["regenerate", recipe, answers[0].replace("answers", "bare"), *answers[1:]]) == 0
    written = [(tmp_path / f"{name}.jsonl").read_text() for name in ("answers", "again", "bare")]
    assert written[0] == written[1] != written[2]


def test_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(folder / "recipe.yaml")

    def error(*changes: str) -> str:
        return error_of(capsys, "train", recipe, f"save.dir={tmp_path}/out", *changes)

    assert "backbone.adapter stays frozen, and backbone.lora trains another" in error("backbone.adapter=x", "backbone.lora={}")
    assert "shard cannot be combined with backbone.adapter" in error("backbone.adapter=x", "backbone.shard=true")
    assert "regenerate.model is the server's name" in error("backbone.adapter=x", "regenerate.endpoint=http://localhost:1")
    assert "ramp_ratio" in error("backbone.lora={warmup_ratio: 0.7, ramp_ratio: 0.7}")
    assert "no adapter at '/nowhere/at/all'" in error("backbone.adapter=/nowhere/at/all")
    assert "lacks adapter_config.json, so it is no PEFT adapter" in error(f"backbone.adapter={folder}/backbone")
    assert "is a PEFT adapter: give it as backbone.adapter" in error(f"backbone.path={folder}/given")
    wide = {"hidden_size": 32, "intermediate_size": 64}
    others = {"wide": tiny("llama", **wide), "short": tiny("llama", hidden_size=16, num_hidden_layers=2), "gpt2": tiny("gpt2")}
    for name, model in others.items():
        save_adapter(model, tmp_path / name)
        message = error(f"backbone.adapter={tmp_path}/{name}")
        assert message.startswith(f"error: the adapter in {tmp_path}/{name} does not fit LlamaForCausalLM") and "trained on" in message
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "backbone"), prompt).save_pretrained(str(tmp_path / "prompt"))
    assert "changes the prompt, not the layers" in error(f"backbone.adapter={tmp_path}/prompt")


def test_a_run_goes_on_with_the_adapter_it_began_with(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder / "given", tmp_path / "adapter")
    command = ["train", str(folder / "recipe.yaml"), f"backbone.adapter={tmp_path}/adapter", f"save.dir={tmp_path}/out", "train.steps=2"]
    assert main(command) == 0
    shutil.copytree(folder / "other", tmp_path / "adapter", dirs_exist_ok=True)
    assert "was trained with adapter" in error_of(capsys, *command, "train.steps=3")


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("use_dora", [False, True])
def test_quantized_backbones(tmp_path: Path, dtype: str, use_dora: bool) -> None:
    """The adapter is added to the quantized layers; decoding is lossless and gradients are those of the dequantized model."""
    model = tiny("llama", hidden_size=64, intermediate_size=128)
    model.save_pretrained(tmp_path / "model")
    save_adapter(model, tmp_path / "adapter", use_dora=use_dora)
    load = functools.partial(load_backbone, str(tmp_path / "model"), dtype=dtype, device="cpu")
    on = load()
    bare = on.read(texts(2, 9)).hidden_BTD
    on.attach(str(tmp_path / "adapter"))
    assert not torch.equal(on.read(texts(2, 9)).hidden_BTD, bare)
    with on.without_adapter():
        assert torch.equal(on.read(texts(2, 9)).hidden_BTD, bare)
    heads = headstart.SpeculativeModel(on, random_drafter("eagle3", on))
    row = prompts((9,))[0][None]
    options = {"attention_mask": torch.ones_like(row), "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(on.model.generate(row, custom_generate=heads.generate, **options), on.model.generate(row, **options))
    trained, dense = load(), Backbone(dequantized(load()))
    for one in (trained, dense):
        torch.manual_seed(0)
        one.add_lora(2, 4.0, 0.0, use_dora=use_dora)
        with torch.no_grad():
            for name, weight in one.trainable.items():
                weight.add_(0.05 if "lora_B" in name else 0)
    found, expected = (
        torch.autograd.grad(one.read(texts(2, 9)).hidden_BTD.square().sum(), list(one.trainable.values())) for one in (trained, dense)
    )
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-2, rtol=1e-3)


def dequantized(on: Backbone) -> PreTrainedModel:
    """A plain model with the values of the quantized one."""
    model = tiny("llama", hidden_size=64, intermediate_size=128)
    weights = dict(on.model.named_parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            value = weights[name]
            weight.copy_(value if type(value) is torch.nn.Parameter else value.dequantize())
    return model
