"""docs/quickstart.ipynb: its cells run, in short, and show the text and the tree; its stored outputs are those of a whole run."""

import ast
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headstart
from headstart.heads.methods import build_drafter
from headstart.inference.generate import SpeculativeModel
from headstart.support.errors import UserError
from headstart.support.terminal import show

NOTEBOOK = Path(__file__).parents[2] / "docs" / "quickstart.ipynb"
SHORTER = {"steps=60": "steps=3", "limit=300": "limit=12", "prompts=2": "prompts=1", ": 80": ": 12", ": 40": ": 8"}


def cells(kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


def run(source: str, scope: dict[str, Any]) -> Any:
    """Run a cell and return the value of its last line, which a notebook would show."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), scope)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), scope) if isinstance(last, ast.Expr) else None


def drawn(tree: Any) -> str:
    show([tree], out := io.StringIO())
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_the_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    shown = []
    for cell in cells("code"):
        source = "".join(cell["source"])
        for long, short in SHORTER.items():
            source = source.replace(long, short)
        value = run(source, scope)
        shown += [] if value is None or value == 0 else [value]
    out = capsys.readouterr().out
    assert "greedy, the same: True" in out and "sampled, the same: True" in out
    text, tree, sampled = shown
    assert text._repr_html_().count("<span") == 2 + scope["out"].passes and "→" in drawn(tree) and str(sampled)


def test_its_outputs_are_stored() -> None:
    outputs = [output for cell in cells("code") for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    stored = json.dumps(outputs)
    assert "text/html" in stored and stored.count("text/html") == 3 and "the same: True" in stored
    assert "tau " in stored and "the same: False" not in stored and "/tmp/" not in stored and "/home/" not in stored


def test_show_puts_each_pass_in_brackets() -> None:
    backbone, tokenizer = headstart.load_backbone("embedded"), headstart.load_tokenizer("embedded")
    torch.manual_seed(0)
    heads = SpeculativeModel(backbone, build_drafter("medusa", backbone, {"depth": 2}), capture="off")
    inputs = tokenizer(["import os", "def read(path):\n    return"], return_tensors="pt", padding=True, padding_side="left")
    arguments = {"custom_generate": heads.generate, "tree": headstart.TreeShape(6, 3), "max_new_tokens": 9, "do_sample": False}
    out = backbone.model.generate(**inputs, return_dict_in_generate=True, **arguments)
    for row, prompt in enumerate(("import os", "def read(path):\n    return")):
        shown = headstart.show(out, tokenizer, row)
        assert shown.prompt.endswith(prompt) and len(shown.passes) == len(shown.trees) + 1
        assert "".join(token for tokens in shown.passes for token in tokens) == tokenizer.decode(out.sequences[row, -9:])
        assert str(shown).count("[") >= len(shown.passes) and "pass 1:" in shown._repr_html_()
        lines = drawn(shown.tree(1))
        assert lines.count("\n") == len(shown.trees[0].tokens) + 1 and lines.count("✓") == len(shown.passes[1]) - 1 and "→" in lines
        with pytest.raises(UserError, match="there is no pass 99"):
            shown.tree(99)
    with pytest.raises(UserError, match="there is no row 2; the output has 2"):
        headstart.show(out, tokenizer, 2)
    with pytest.raises(UserError, match="return_dict_in_generate"):
        headstart.show(backbone.model.generate(**inputs, **arguments), tokenizer)
