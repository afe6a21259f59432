"""Every kind of head in one run: resumed, sharded, from a feature cache and on-policy."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import error_of, refusal, refuses
from families import VOCAB, backbone, every_head, following, random_drafter, read, texts, tiny
from safetensors.torch import load_file
from small_run import Forked, make_recipe, read_log, train_once

from headstart import Backbone, Drafter
from headstart.cli.main import main as headstart
from headstart.cli.train import main
from headstart.heads.methods import build_drafter, find_drafter, methods
from headstart.heads.warm_start import WarmStart, read_warm_start
from headstart.inference.contract import chain
from headstart.support.errors import UserError

HEADS = [{"kind": kind, **arguments} for kind, arguments in every_head(2)]
FILES = {kind: find_drafter(kind).file_name for kind in methods()}
STEPS = 4
CLOSE = {"rtol": 1e-3, "atol": 1e-4}
"""Another order of summation changes gradients by an ulp, and AdamW divides the smallest of them by as little."""
pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe of every kind of head, and its run in ``out``."""
    folder = tmp_path_factory.mktemp("together")
    train = {"steps": STEPS, "batch_size": 4, "micro_batch": 2, "schedule": "constant", "optimizer": "muon", "ema_decay": 0.5}
    return train_once(make_recipe(folder, heads=HEADS, train=train, data={"eval_rows": 0}, objective={"chunk_size": 50}))


def losses(out: Path) -> dict[str, list[float]]:
    lines = [line for line in read_log(out) if "loss" in line]
    return {kind: [line["loss"] for line in lines if line["head"] == kind] for kind in FILES}


def require_close(actual: Path, expected: Path) -> None:
    for kind, file in FILES.items():
        assert losses(actual)[kind] == pytest.approx(losses(expected)[kind], rel=1e-4), kind
        one, other = (load_file(out / kind / file) for out in (actual, expected))
        for name, tensor in other.items():
            torch.testing.assert_close(one[name], tensor, **CLOSE, msg=lambda text, name=name, kind=kind: f"{kind} {name}: {text}")


def test_resumed_it_is_the_same_bit_for_bit(together: Path, tmp_path: Path) -> None:
    for steps in (STEPS // 2, STEPS):
        assert main([str(together / "recipe.yaml"), f"save.dir={tmp_path}", f"train.steps={steps}"]) == 0
    for kind, file in FILES.items():
        assert (tmp_path / kind / file).read_bytes() == (together / "out" / kind / file).read_bytes(), kind
    assert losses(tmp_path) == losses(together / "out")


@pytest.mark.slow
def test_two_processes_shard_them(together: Path, tmp_path: Path) -> None:
    """FSDP2: each head is a unit; they end as in one process, in whole checkpoints."""
    said, arguments = tmp_path / "said", [str(together / "recipe.yaml"), f"save.dir={tmp_path}/out", "train.micro_batch=null"]
    environment = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    assert Forked(2, arguments, said, **environment).wait() == 0, said.read_text()[-3000:]
    assert "2 processes on cpu, sharded (FSDP2)" in said.read_text()
    require_close(tmp_path / "out", together / "out")


def test_from_a_feature_cache(together: Path, tmp_path: Path) -> None:
    cached = [str(together / "recipe.yaml"), f"cache.dir={tmp_path}/cache", "cache.dtype=exact"]
    assert headstart(["cache", *cached]) == 0
    assert main([*cached, f"save.dir={tmp_path}/out"]) == 0
    require_close(tmp_path / "out", together / "out")


@pytest.mark.slow
def test_on_their_own_drafts(together: Path, tmp_path: Path) -> None:
    """On-policy, resumed bit for bit, for every kind whose drafts depend on its own drafts."""
    heads = [{"kind": kind, **arguments} for kind, arguments in following(2)]
    given = [str(together / "recipe.yaml"), f"heads={json.dumps(heads)}", "objective.on_policy=0.5", "objective.on_policy_share=0.3"]
    for name, steps in (("parts", 1), ("parts", 2), ("whole", 2)):
        assert main([*given, f"save.dir={tmp_path}/{name}", f"train.steps={steps}"]) == 0
    for kind in (head["kind"] for head in heads):
        assert (tmp_path / "parts" / kind / FILES[kind]).read_bytes() == (tmp_path / "whole" / kind / FILES[kind]).read_bytes(), kind
        assert losses(tmp_path / "whole")[kind][0] > losses(together / "out")[kind][0]


# A new run starts from trained heads: what is taken over, what is refused, and what the new checkpoint says about it.

EAGLE3 = {"kind": "eagle3", "depth": 3, "draft_vocab_size": 40}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and in ``out`` trained EAGLE-3 heads."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = make_recipe(folder, drafter=EAGLE3, train={"steps": 20, "lr": 1e-2}, eval={"prompts": 1})
    return train_once(recipe)


def saved(kind: str, folder: Path, tokens: torch.Tensor | None = None, **arguments: Any) -> Drafter:
    drafter = random_drafter(kind, backbone("llama"), **arguments)
    if tokens is not None:
        drafter.use_vocabulary(tokens)
        for layer in drafter.output_layers():
            torch.nn.init.normal_(layer.weight)
    drafter.save_pretrained(folder)
    return drafter


def started(kind: str, path: Path, tokens: torch.Tensor | None = None, **arguments: Any) -> tuple[Drafter, WarmStart, str]:
    drafter = build_drafter(kind, backbone("llama"), arguments)
    if tokens is not None:
        drafter.use_vocabulary(tokens)
    start = read_warm_start(str(path), kind, drafter.backbone)
    start.require_fits(drafter)
    return drafter, start, start.apply(drafter)


@pytest.mark.parametrize(("old", "new"), [(23, 30), (23, None), (None, 23)])
def test_another_depth_and_draft_vocabulary(tmp_path: Path, old: int | None, new: int | None) -> None:
    """Weights shared by all depths are taken over at any depth; rows of the output layer by token."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))
    before, after = (None if size is None else tokens[:size] for size, tokens in ((old, order), (new, order.flip(0))))
    source = saved("eagle3", tmp_path, before, depth=3, draft_vocab_size=old)
    drafter, start, summary = started("eagle3", tmp_path, after, depth=5, draft_vocab_size=new)
    assert drafter.depth == 5 and start.same_backbone
    for name, weight in source.state_dict().items():
        if name not in ("lm_head.weight", "d2t", "t2d"):
            assert torch.equal(drafter.state_dict()[name], weight), name
    theirs = {int(token): row for row, token in enumerate(torch.arange(VOCAB) if before is None else before.sort().values)}
    ours = torch.arange(VOCAB) if after is None else after.sort().values
    assert drafter.vocabulary is None or torch.equal(drafter.vocabulary, ours)
    for row, token in enumerate(ours.tolist()):
        if token in theirs:
            assert torch.equal(drafter.lm_head.weight[row], source.lm_head.weight[theirs[token]])
    kept = len(theirs.keys() & set(ours.tolist()))
    assert f"{kept} of {len(ours)} draft tokens among them and {len(ours) - kept} new" in summary


@pytest.mark.parametrize("correction", ["selector", "none"])
def test_what_dflash2_adds_to_dflash_is_new(tmp_path: Path, correction: str) -> None:
    """The rest is taken over, so that it drafts the same; the summary names what is new."""
    source = saved("block", tmp_path, depth=3, layers=2, correction="none", causal=True)
    drafter, _, summary = started("block", tmp_path, depth=3, layers=2, correction=correction, convolution=True, causal=True)
    theirs, ours = source.state_dict(), drafter.state_dict()
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items()) and ours.keys() > theirs.keys()
    selector = " and 3 of candidate_selector" if correction == "selector" else ""
    assert summary == f"{tmp_path}: {len(theirs)} tensors, new are 4 of attention_conv and 4 of mlp_conv{selector}"
    features, tokens_BK = read(drafter.backbone, texts(2, 9), drafter), texts(2, 3, seed=4)
    one, other = (chain(heads, heads.begin(features), tokens_BK) for heads in (source, drafter))
    for logits, same in zip(one, other, strict=True):
        torch.testing.assert_close(logits, same, atol=1e-5, rtol=1e-5)
    for change in ({"correction": "markov"}, {"correction": "none", "convolution": False, "causal": False}):
        refuses(r"markov_head|drafter.causal true", started, "block", tmp_path, **{"depth": 3, "layers": 2, "causal": True} | change)
    saved("block", tmp_path / "second", depth=3, layers=2, correction="selector")
    with pytest.raises(UserError, match=r"tensor candidate_selector\.predecessor_codebook is \[61, 256\] there and missing here"):
        started("block", tmp_path / "second", depth=3, layers=2, correction="none")


@pytest.mark.parametrize("known", [39, 20])
def test_rows_of_new_tokens_move_as_the_others(tmp_path: Path, known: int) -> None:
    """New rows are what the map of the trained ones makes of the backbone's, exactly where enough rows tell the map."""
    generator = torch.Generator().manual_seed(1)
    order, model = torch.randperm(VOCAB, generator=generator), backbone("llama")
    turned = torch.eye(model.dim) + 0.1 * torch.randn(model.dim, model.dim, generator=generator)
    moved = (model.unembed.weight.detach() @ turned if known > model.dim else model.unembed.weight.detach()) + 3
    source = saved("eagle3", tmp_path, order[:known], depth=2, draft_vocab_size=known)
    source.lm_head.weight.data.copy_(moved[order[:known].sort().values])
    source.save_pretrained(tmp_path)
    drafter, _, _ = started("eagle3", tmp_path, order[-30:], depth=2, draft_vocab_size=30)
    assert (drafter.lm_head.weight - moved[drafter.vocabulary]).abs().max() < (1e-2 if known > model.dim else 1.5)  # unmoved: 3


def test_all_tensors_of_equal_heads(tmp_path: Path) -> None:
    source = saved("medusa", tmp_path, depth=2)
    drafter, start, summary = started("medusa", tmp_path, depth=2)
    assert all(torch.equal(drafter.state_dict()[name], weight) for name, weight in source.state_dict().items())
    assert summary == f"{tmp_path}: 6 tensors"
    assert start.provenance["path"] == str(tmp_path) and len(start.provenance["weights"]["sha256"]) == 64


def test_heads_of_a_fine_tuned_backbone(tmp_path: Path) -> None:
    saved("medusa", tmp_path)
    start = read_warm_start(str(tmp_path), "medusa", Backbone(tiny("llama", seed=1)))
    drafter = build_drafter("medusa", start.drafter.backbone, {})
    assert not start.same_backbone and "trained on a backbone with other weights" in start.apply(drafter)


@pytest.mark.parametrize(("kind", "arguments", "message"), [
    ("medusa", {"depth": 3}, "heads.2.0.linear.weight is missing there and [32, 32] here, where drafter.depth is 2 there and 3 here"),
    ("medusa", {"depth": 1}, "tensor heads.1.0.linear.weight is [32, 32] there and missing here, where drafter.depth is 2 there"),
    ("medusa", {"depth": 2, "layers": 2}, "where drafter.layers is 1 there and 2 here; give the drafter the same arguments"),
    ("eagle3", {"intermediate_size": 40}, "tensor midlayer.mlp.gate_proj.weight is [48, 32] there and [40, 32] here"),
    ("eagle3", {"norm_before_residual": True}, "norm_before_residual false, this drafter true: set drafter.norm_before_residual=false"),
    ("eagle3", {"layer": {"rms_norm_eps": 0.1}}, "computes with drafter.layer null, this drafter {"),
    ("eagle3", {"taps": (1, 3, 5)}, "reads the taps [2, 3, 4], this drafter [1, 3, 5]: set drafter.taps=[2, 3, 4]"),
])  # fmt: skip
def test_other_shapes_are_refused(tmp_path: Path, kind: str, arguments: dict[str, Any], message: str) -> None:
    saved(kind, tmp_path, **({"depth": 2} if kind == "medusa" else {"taps": (2, 3, 4)}))
    assert message in refusal(started, kind, tmp_path, **({"taps": (2, 3, 4)} if kind == "eagle3" else {}) | arguments)


def test_other_heads_are_refused(tmp_path: Path) -> None:
    saved("medusa", tmp_path)
    on = backbone("llama")
    for path, kind, backbone_, message in (
        (tmp_path, "eagle3", on, "holds medusa heads, this recipe trains eagle3; set drafter.kind=medusa"),
        (tmp_path, "medusa", backbone("qwen3"), "model_type llama"),
        (tmp_path / "none", "medusa", on, "no heads at"),
    ):
        assert message in refuses("^drafter.init: .*", read_warm_start, str(path), kind, backbone_)
    weights = tmp_path / "medusa_lm_head.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    refuses("^drafter.init: .* is truncated or changed", read_warm_start, str(tmp_path), "medusa", on)


def test_a_run_goes_on_from_trained_heads(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It starts better than a new run; resumed, it does not need the heads it started from; its checkpoint and log name them."""
    source = tmp_path / "source"
    shutil.copytree(trained / "out", source)
    recipe = [str(trained / "recipe.yaml"), f"drafter.init={source}", "drafter.draft_vocab_size=30", "train.schedule=constant"]
    assert headstart(["inspect", *recipe]) == 0
    assert main([*recipe, f"save.dir={tmp_path}/whole", "train.steps=6"]) == 0
    assert f"start     {source}: 12 tensors, 30 of 30 draft tokens" in capsys.readouterr().err.replace("13 tensors", "12 tensors")
    assert main([*recipe, f"save.dir={tmp_path}/out", "train.steps=4"]) == 0
    shutil.rmtree(source)
    assert main([*recipe, f"save.dir={tmp_path}/out", "train.steps=6"]) == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    first, noted = read_log(trained / "out"), read_log(tmp_path / "out")
    losses = [[line["loss"] for line in log if "loss" in line] for log in (first, noted)]
    assert losses[1][0] < 0.8 * losses[0][0]
    provenance = json.loads((tmp_path / "out" / "headstart.json").read_text())["provenance"]
    expected = json.loads((trained / "out" / "headstart.json").read_text())["weights"]
    assert provenance["init"] == {"path": str(source), "weights": expected, "same_backbone": True}
    assert [line["init"] for line in noted if "init" in line] == [provenance["init"]]
    said = error_of(capsys, "train", trained / "recipe.yaml", f"drafter.init={source}", f"save.dir={tmp_path}/new")
    assert "error: drafter.init: no heads at" in said
    assert headstart(["inspect", str(tmp_path / "out")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"from {source}" in shown and "30 of 256 tokens, 100.0% of the label tokens (held out 100.0%)" in shown


def test_one_of_several_heads_starts_from_trained_ones(trained: Path, tmp_path: Path) -> None:
    """Each of ``heads`` is what it is alone."""
    tree = {"kind": "eagle3", "depth": 4, "draft_vocab_size": 40, "init": str(trained / "out")}
    alone = make_recipe(tmp_path, drafter=tree, train={"steps": 3}, eval={"prompts": 1})
    assert main([str(alone), f"save.dir={tmp_path}/alone"]) == 0
    several = json.dumps({"a": tree, "b": {"kind": "medusa", "depth": 2}})
    assert main([str(alone), "drafter={}", f"heads={several}", f"save.dir={tmp_path}/both"]) == 0
    one, other = (load_file(folder / "model.safetensors") for folder in (tmp_path / "alone", tmp_path / "both" / "a"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    provenances = [json.loads((tmp_path / "both" / name / "headstart.json").read_text())["provenance"] for name in ("a", "b")]
    assert provenances[0]["init"]["path"] == str(trained / "out") and provenances[1]["init"] is None
    assert provenances[0]["draft_vocabulary"]["size"] == 40 and provenances[1]["draft_vocabulary"] is None


@pytest.mark.parametrize(("change", "message"), [
    ("drafter.init=''", "drafter.init is text that is not empty, or null"),
    ("drafter.draft_vocab_size=300", "at most the backbone's vocabulary of 256; got 300"),
    ("drafter={kind: tests.helpers.block_head, draft_vocab_size: 9}", "drafts the backbone's whole vocabulary; leave it out"),
])  # fmt: skip
def test_bad_input(trained: Path, tmp_path: Path, change: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error_of(capsys, "train", trained / "recipe.yaml", change, f"save.dir={tmp_path}/out")
