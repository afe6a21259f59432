"""Recipes: every shipped one loads, every mistake is named, and a written recipe reads back equal."""

import ast
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from errors import error_of, refusal, refuses
from pydantic import ValidationError
from transformers.utils.chat_template_utils import render_jinja_template

from headstart.training.recipe import recipe as module
from headstart.training.recipe import sections, training
from headstart.training.recipe.recipe import Data, Objective, Train, load_recipe, to_dict, to_yaml
from headstart.training.recipe.yaml_text import read_yaml

ROOT = Path(__file__).parents[3]
SHIPPED = sorted(path for path in ROOT.glob("recipes/*/*.yaml") if path.parent.name not in ("accelerate", "shared"))
LEAST = """
backbone: {path: some/model}
drafter: {kind: medusa, depth: 4}
data: {train: rows.jsonl}
save: {dir: out}
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str = LEAST) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_shipped_recipe_loads_and_names_its_paper(path):
    recipe = load_recipe(path)
    assert path.stem.startswith(recipe.drafter["kind"])  # medusa2.yaml trains the same heads otherwise
    extended = read_yaml(path).get("extends", [])
    files = [path, *(path.parent / name for name in ([extended] if isinstance(extended, str) else extended))]
    assert re.search(r"\d{4}\.\d{5}", "".join(file.read_text() for file in files))


def test_the_vicuna_template_writes_what_the_model_was_trained_on():
    template = load_recipe(ROOT / "recipes/vicuna-7b-v1.5/medusa.yaml").data.chat_template
    messages = [{"role": role, "content": text} for role, text in [("user", "hi"), ("assistant", "hello"), ("user", "bye")]]
    (text,), _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, eos_token="</s>")
    assert text == (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
        "and polite answers to the user's questions. USER: hi ASSISTANT: hello</s>USER: bye ASSISTANT:"
    )


def test_defaults_and_the_least_recipe(write):
    recipe = load_recipe(write())
    assert recipe == load_recipe(write(LEAST + "train:\n"))  # an empty section
    assert (recipe.seed, recipe.train.steps, recipe.train.epochs, recipe.objective.terms) == (0, None, 1.0, {"kl": 1.0})
    assert recipe.drafter == {"kind": "medusa", "depth": 4}


@pytest.mark.parametrize(("override", "key", "value"), [
    ("train.lr=3e-4", "train.lr", 3e-4),
    ("train.lr=1", "train.lr", 1.0),
    ("train.precision=no", "train.precision", "no"),
    ("log.wandb=off", "log.wandb", "off"),
    ("log.name=1e-3 again", "log.name", "1e-3 again"),
    ("log.name=2024-01-01", "log.name", "2024-01-01"),
    ("log.name='7'", "log.name", "7"),
    ("data.limit=1_000", "data.limit", 1000),
    ("data.limit=null", "data.limit", None),
    ("save.resume=false", "save.resume", False),
    ("save.dir=out/a=b", "save.dir", "out/a=b"),
    ("train.betas=[0, 0.99]", "train.betas", (0.0, 0.99)),
    ("drafter.depth=3", "drafter", {"kind": "medusa", "depth": 3}),
    ("drafter={kind: eagle3, taps: [1, 2]}", "drafter", {"kind": "eagle3", "taps": [1, 2]}),
    ("objective.terms={kl: 1, ce: .1}", "objective.terms", {"kl": 1.0, "ce": 0.1}),
    ("objective={depth_decay: 1}", "objective.depth_decay", 1.0),
    ("backbone.path=other/model", "backbone.path", "other/model"),
    ("data.eval=*.jsonl", "data.eval", "*.jsonl"),
])  # fmt: skip
def test_overrides(write, override, key, value):
    field = load_recipe(write(), [override])
    for name in key.split("."):
        field = vars(field)[name]
    assert field == value and type(field) is type(value)


def test_later_overrides_win(write):
    assert load_recipe(write(), ["train.lr=1", "train.lr=2"]).train.lr == 2


@pytest.mark.parametrize(("override", "message"), [
    ("train.lrr=1", "unknown key train.lrr; did you mean train.lr?"),
    ("batch_size=4", "unknown key batch_size; did you mean train.batch_size?"),
    ("lr=4", "unknown key lr; did you mean train.lr?"),
    ("eval.zzz=4", "unknown key eval.zzz; known: eval.every, eval.prompts,"),
    ("train.lr=fast", "train.lr is a number above 0 or 'auto'; got 'fast'"),
    ("train.lr=0", "train.lr is a number above 0 or 'auto'; got 0"),
    ("train.micro_batch=3", "train.micro_batch divides train.batch_size=8; got 3"),
    ("save.resume=yes", "save.resume is true or false; got 'yes'"),
    ("data.train.path=x", "data.train is 'rows.jsonl', with no keys below it"),
    ("drafter=medusa", "drafter is a section with keys of its own; got 'medusa'"),
    ("drafter={depth: 3}", "missing key drafter.kind"),
    ("drafter.kind=3", "drafter.kind is text; got 3"),
    ("drafter.kind=medusaa", "unknown drafter 'medusaa'; did you mean 'medusa'?"),
    ("drafter.kind=no.such.module", "no module 'no.such.module' for the drafter"),
    ("drafter.layer=2", "unknown key drafter.layer; did you mean drafter.layers?"),
    ("drafter={kind: eagle3, taps: [1, x]}", "drafter.taps[1] is a whole number; got 'x'"),
    ("drafter={kind: tests.helpers.dying, dept: 2}", "unknown key drafter.dept; did you mean drafter.depth?"),
    ("save={every: 3}", "missing key save.dir"),
    ("objective.terms={kll: 1}", "objective.terms knows kl, reverse_kl, js, ce, tv, lk_alpha, lk, topk_kl, features; got 'kll'"),
    ("objective.terms={kl: 0}", "objective.terms needs a weight above 0"),
    ("objective.on_policy=.nan", "objective.on_policy is a number of at least 0; got nan"),
    ("objective.terms={}", "objective.terms needs a weight above 0; got {}"),
    ("train={schedule: wsd, warmup_ratio: .1, decay_ratio: .95}", "train.decay_ratio is at most 0.9 beside train.warmup_ratio=0.1"),
    ("seed", "'seed' is not an override; write key=value"),
    ("train..lr=1", "'train..lr=1' is not an override"),
    ("data.limit=", "'data.limit=' gives no value; write data.limit=null"),
    ("train.betas=[1", "not valid YAML"),
    ("data.train=[]", "data.train is a file or the name of a dataset, or a list"),
    ("data.train=3", "data.train is a file or the name of a dataset, or a list"),
    ("data.train=''", "data.train is a file or the name of a dataset, or a list"),
    ("data.train=[{path: a.jsonl, weigth: 1}]", "unknown key data.train[0].weigth; did you mean data.train[0].weight?"),
    ("data.train=[{weight: 1}]", "missing key data.train[0].path"),
    ("data.train=[{path: a.jsonl, weight: 1}, b.jsonl]", "data.train[1].weight is a number above 0, as other entries"),
    ("data.train=[3]", "data.train[0]"),
    ("data.chat_template=model/chat_template.jinja", "data.chat_template is the text of a Jinja template, with {{ }} or {% %} in it"),
    ("data.train=[*.csv]", "found undefined alias '.csv'; text that begins with * is written in quotes"),
])  # fmt: skip
def test_what_is_wrong_is_named(write, override, message):
    assert message in refusal(load_recipe, write(), [override])


def test_steps_or_epochs(write):
    path = write(LEAST + "train: {epochs: 2}\n")
    with pytest.raises(match=r"train.steps and train.epochs=3.0 are two lengths.*null; got 9"):
        load_recipe(path, ["train.steps=9", "train.epochs=3"])
    for overrides in (["train.steps=9"], ["train.steps=9", "train.epochs=null"], ["train.epochs=3", "train.epochs=null", "train.steps=9"]):
        train = load_recipe(path, overrides).train
        assert (train.steps, train.epochs) == (9, None), "the length that is given replaces the recipe's"
    assert load_recipe(path, ["train.steps=null"]).train.epochs == 2
    train = load_recipe(write(LEAST + "train: {steps: 2}\n"), ["train.epochs=0.5"]).train
    assert (train.steps, train.epochs) == (None, 0.5)
    assert (Train(steps=9).epochs, Train().epochs) == (None, 1.0)


@pytest.mark.parametrize(("text", "message"), [
    ("", "missing key backbone"),
    ("- 1\n- 2\n", "a recipe is a mapping of keys to values; got [1, 2]"),
    ("seed: 1\ntrain: {lr: 1\n", "line 3: not valid YAML"),
    (LEAST + "seed: 1\nseed: 2\n", 'line 7: not valid YAML: found duplicate key "seed"'),
    (LEAST + "train:\n  lr: 1\n  lr: 2\n", 'line 8: not valid YAML: found duplicate key "lr"'),
    (LEAST + "1: 2\n", "a key is text; got 1"),
    (LEAST + "seed: !!python/name:os.system\n", "line 6: the tag tag:yaml.org,2002:python/name:os.system; tags are not read"),
    ("seed: \x00\n", "not valid YAML"),
    (LEAST.replace("{path: some/model}", "some/model"), "backbone is a section with keys of its own; got 'some/model'"),
])  # fmt: skip
def test_a_broken_file_is_named(write, text, message):
    error = refusal(load_recipe, write(text))
    assert message in error and "recipe.yaml" in error


def test_a_missing_file_is_named(tmp_path):
    refuses(r"recipe .*nowhere.yaml: there is no such file", load_recipe, tmp_path / "nowhere.yaml")
    refuses("recipe .* is a folder", load_recipe, tmp_path)


def test_made_in_python_it_is_held_to_the_same_rules():
    for make in (lambda: Objective(depth_decay=0.0), lambda: Data(train="x.jsonl", limit=0), lambda: Train(batch_size=4, micro_batch=3)):
        with pytest.raises(ValidationError, match="depth_decay|limit|micro_batch"):
            make()


EAGLE3 = "drafter={kind: eagle3, depth: 2}"
ON_POLICY = "objective.on_policy=0.5"
LORA = "backbone.lora={rank: 2}"


@pytest.mark.parametrize(("changes", "message"), [
    (["data.columns={prompt: a, completion: b}", "data.column=c"], "data.columns stands in place of data.column"),
    ([ON_POLICY, "cache.dir=x"], "objective.on_policy needs the backbone, which does not run with cache.dir='x'"),
    (["drafter={}", "heads=[{kind: eagle3, objective: {on_policy: 1}}]", "cache.dir=x"], "heads.eagle3: objective.on_policy needs the"),
    ([ON_POLICY], f"{ON_POLICY}: what medusa drafts does not depend on its own proposals, so it learns nothing"),
    ([ON_POLICY, EAGLE3, "drafter.depth=1"], "needs a drafter that goes on from its proposals; eagle3 has drafter.depth=1: raise it"),
    ([ON_POLICY, EAGLE3, "backbone.shard=true"], "drafts are read by each process for itself, and backbone.shard has all read alike"),
    (["backbone.shard=true", "backbone.dtype=int8"], "backbone.shard needs weights of one dtype, which backbone.dtype=int8 has not"),
    ([LORA, "backbone.shard=true"], "backbone.shard cannot be combined with backbone.lora"),
    ([LORA, "cache.dir=x"], "cache.dir keeps features, which change with backbone.lora"),
    ([LORA, EAGLE3, ON_POLICY], "objective.on_policy needs a frozen backbone"),
    ([LORA, "drafter={}", "heads=[{kind: medusa}, {kind: mlp}]"], "heads would each need an adapter with backbone.lora; train one"),
    ([LORA, "backbone.lora.target_modules=nothing"], "no adapter fits LlamaForCausalLM: Target modules nothing not found"),
    (["objective.terms={features: 1}"], "objective.terms.features compares a drafter's hidden states with the backbone's, but Medusa"),
    (["train.gradient_checkpointing=true"], "train.gradient_checkpointing is not available for Medusa"),
    (["drafter={kind: mlp, depth: 2, inner_dim: 24, freeze_readout: true}"],
     "drafter.freeze_readout needs output layers as wide as the backbone, 16"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused_before_the_run_has_a_folder(changes, message, small, tmp_path, capsys):
    error = error_of(capsys, "train", small, *changes, f"save.dir={tmp_path}/out")
    assert message in error and not (tmp_path / "out").exists()


HOSTILE = [
    "log.name='no'", "log.project='1e-3'", "save.dir='null'", 'data.subset="a: b\\n# c"', "train.lr=1e-7", "train.max_grad_norm=.inf",
]  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("path", {path.stem: path for path in SHIPPED}.values(), ids=lambda path: f"{path.parent.name}-{path.stem}")
@pytest.mark.parametrize("overrides", [[], HOSTILE, ["train.steps=3", "train.epochs=null"]], ids=["plain", "hostile", "changed"])
def test_written_out_it_reads_back_equal(write, path, overrides):
    recipe = load_recipe(path, overrides)
    assert load_recipe(write(to_yaml(recipe))) == recipe
    assert to_dict(recipe)["train"]["betas"] == [0.9, 0.95]


def test_sections_are_read_without_torch():
    code = "import sys, headstart.training.recipe.recipe; assert not {'torch', 'transformers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_every_field_is_documented():
    bodies = [ast.parse(Path(source.__file__).read_text()).body for source in (sections, training, module)]
    classes = [node for body in bodies for node in body if isinstance(node, ast.ClassDef)]
    bare = [
        f"{node.name}.{ast.unparse(statement.target)}"
        for node in classes
        for statement, after in itertools.pairwise([*node.body, ast.Pass()])
        if isinstance(statement, ast.AnnAssign) and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]
    assert {"Recipe", "Data", "Train"} <= {node.name for node in classes} and not bare
