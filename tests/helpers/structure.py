"""Size of the product's source and depth of its calls: ``python tests/helpers/structure.py [CLONE]`` prints JSON.

The counts are of heads/, inference/, training/ and headstart/, in every language. A line of code is one that is not blank, not a comment
and not part of a docstring. The depth of a call counts the frames of named functions of the project from the command to the call.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("heads", "inference", "training", "headstart")
PLUGIN = ("plugins/headstart-cpu/headstart_cpu",)
COMMENTS = ("//", "#", "/*", "*", "{#")
OBSERVED = """
import json, runpy, sys
root, out, wanted, *arguments = sys.argv[1:]
deepest, ran = [], set()

def own(frame):
    return frame.f_code.co_filename.startswith(root) and ".venv" not in frame.f_code.co_filename

def watch(frame, event, argument):
    global deepest
    if event != "call" or not own(frame):
        return
    if not deepest and not frame.f_code.co_name.startswith("<"):
        ran.add(frame.f_code.co_filename.removeprefix(root))
    if not frame.f_code.co_qualname.endswith(wanted):
        return
    chain = []
    while frame is not None:
        if own(frame) and not frame.f_code.co_name.startswith("<"):
            chain.append(f"{frame.f_code.co_filename.removeprefix(root)}:{frame.f_code.co_qualname}")
        frame = frame.f_back
    deepest = max(deepest, chain[::-1], key=len)

entry, *sys.argv[1:] = arguments
sys.argv[0] = entry
sys.setprofile(watch if wanted else None)
try:
    runpy.run_path(entry, run_name="__main__") if entry.endswith(".py") else runpy.run_module(entry, run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
finally:
    sys.setprofile(None)
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    imported = sorted(file.removeprefix(root) for file in files if file.startswith(root) and ".venv" not in file)
    open(out, "w").write(json.dumps({"chain": deepest, "imported": imported, "ran": sorted(ran)}))
"""


def sources(root: Path, folders: Sequence[str] = FOLDERS) -> list[Path]:
    """Text files of the product; compiled Python is none."""
    paths = (path for folder in folders for path in sorted((root / folder).rglob("*")))
    own = (path for path in paths if "__pycache__" not in path.parts and not any(part.is_symlink() for part in path.parents))
    return [path for path in own if path.is_file()]


def docstring_lines(tree: ast.AST) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is not None:
            lines |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def lines_of_code(path: Path) -> int:
    text = path.read_text()
    without = docstring_lines(ast.parse(text)) if path.suffix == ".py" else set()
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return sum(bool(line) and number not in without and not line.startswith(COMMENTS) for number, line in lines)


def observe(root: Path, function: str, *arguments: str) -> dict[str, list[str]]:
    """Runs a command: the deepest chain of calls that ends in a function of this name, the project's files that were imported, and those
    of which functions ran until the first such call."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "observed.json"
        environment = {**os.environ, "PYTHONPATH": str(root), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", OBSERVED, f"{root}/", str(out), function, *arguments]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        seen: dict[str, list[str]] = json.loads(out.read_text())
        return seen


def generate(root: Path, function: str = "", *flags: str) -> dict[str, list[str]]:
    rest = ["--max-new-tokens", "8", *flags, "def read_config(path):"]
    return observe(root, function, "headstart.cli", "generate", "--heads", "embedded", *rest)


def train(root: Path, function: str) -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        recipe = [str(root / "recipes/quickstart/eagle3.yaml"), "train.steps=1", "train.batch_size=2", "eval.prompts=1", "data.limit=80"]
        return observe(root, function, str(root / "train_heads.py"), *recipe, "data.eval_rows=2", f"save.dir={folder}/heads")


def counts(root: Path, folders: Sequence[str] = FOLDERS) -> dict[str, int]:
    files = sources(root, folders)
    lines = sum(len(path.read_text().splitlines()) for path in files)
    return {"files": len(files), "lines": lines, "lines of code": sum(map(lines_of_code, files))}


def size_of_tests(root: Path) -> dict[str, int]:
    """Lines of the tests, the plugin's and the oracles among them, and how often they replace something of the product."""
    files = [*(root / "tests").rglob("*.py"), *(root / "plugins").glob("*/tests/*.py"), root / "conftest.py"]
    texts = [path.read_text() for path in files]
    replaced = [name for text in texts for name in re.findall(r"monkeypatch\.setattr\(\s*([^)]*)", text)]
    private = sum(bool(re.search(r"""["'.]_[a-z]\w*["']""", name)) for name in replaced)
    return {"lines": sum(len(text.splitlines()) for text in texts), "setattr": len(replaced), "setattr of a private name": private}


def depths(root: Path) -> dict[str, int]:
    """Frames from a command's ``main``, and from ``SpeculativeModel.generate``, to a drafter's ``step``; from train_heads.py to a layer."""
    step = generate(root, "Drafter.step", "--nodes", "6", "--capture", "off")["chain"]
    inside = [frame.endswith(":SpeculativeModel.generate") for frame in step].index(True)
    layer = train(root, "DecoderLayer.forward_train")["chain"]
    return {"generate": len(step), "SpeculativeModel.generate": len(step) - inside, "train": len(layer)}


if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT).resolve()
    found = {**counts(root), "headstart-cpu": counts(root, PLUGIN), "imported by generate": len(generate(root)["imported"])}
    print(json.dumps({**found, "frames": depths(root)}, indent=2))
