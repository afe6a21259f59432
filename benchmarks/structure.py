"""Measures the size of the source and the depth of its call chains: ``python benchmarks/structure.py [--root CLONE]``.

Counts files, lines, classes and pairs of packages that import each other, then runs ``headstart generate`` and one training step on the
embedded backbone and reports the deepest chain of calls of the project's own functions. Prints JSON. ``--root``: another clone to measure,
for comparison; its commands run with ``PYTHONPATH`` set to it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDERS = ("heads", "inference", "training", "headstart")
TRACE = """
import json, runpy, sys
root, out, *arguments = sys.argv[1:]
longest = []

def project(frame):
    return frame.f_code.co_filename.startswith(root) and ".venv" not in frame.f_code.co_filename

def watch(frame, event, argument):
    global longest
    if event != "call" or not project(frame):
        return
    chain = []
    while frame is not None:
        if project(frame) and not frame.f_code.co_name.startswith("<"):
            chain.append(f"{frame.f_code.co_filename.removeprefix(root)}:{frame.f_code.co_qualname}")
        frame = frame.f_back
    if len(chain) > len(longest):
        longest = chain[::-1]

entry, *rest = arguments
sys.argv = [entry, *rest]
sys.setprofile(watch)
try:
    runpy.run_path(entry, run_name="__main__") if entry.endswith(".py") else runpy.run_module(entry, run_name="__main__")
except SystemExit:
    pass
finally:
    sys.setprofile(None)
    open(out, "w").write(json.dumps(longest))
"""


def sources(root: Path) -> list[Path]:
    return sorted(
        path for folder in FOLDERS for path in (root / folder).rglob("*.py") if not any(part.is_symlink() for part in path.parents)
    )


def package(name: str, root: Path) -> str | None:
    """The package of a dotted module or name, such as ``inference.engine``; None if it is not part of the project."""
    parts = name.split(".")
    if parts[0] != "headstart" or len(parts) < 2:
        return None
    base = root if parts[1] in FOLDERS else root / "headstart"
    folder = [part for part in parts[1:] if part.isidentifier()]
    while folder and not (base / Path(*folder)).is_dir():
        folder.pop()
    return ".".join(folder) or None


def mutual(root: Path) -> list[str]:
    """Pairs of packages that import each other."""
    edges: set[tuple[str, str]] = set()
    for path in sources(root):
        importer = ".".join(path.relative_to(root).parent.parts).removeprefix("headstart.") or "headstart"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported = package(f"{node.module}.{node.names[0].name}", root)
                if imported and imported != importer:
                    edges.add((importer, imported))
    return sorted(f"{a} <-> {b}" for a, b in edges if a < b and (b, a) in edges)


def deepest(root: Path, *arguments: str) -> list[str]:
    """The deepest chain of calls of the project's own functions while that command runs."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "chain.json"
        environment = {**os.environ, "PYTHONPATH": str(root), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", TRACE, f"{root}/", str(out), *arguments]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        if not out.exists():
            raise SystemExit(done.stderr[-2000:])
        chain: list[str] = json.loads(out.read_text())
        return chain


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="the clone to count and run (this one)")
    root = parser.parse_args().root.resolve()
    files = sources(root)
    classes = [node for path in files for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    with tempfile.TemporaryDirectory() as folder:
        recipe = [str(root / "recipes/quickstart/eagle3.yaml"), "train.steps=1", "train.batch_size=2", "eval.prompts=1", "data.limit=80"]
        train = deepest(root, str(root / "train_heads.py"), *recipe, "data.eval_rows=2", f"save.dir={folder}/heads")
        decode = ["--heads", f"{folder}/heads", "--max-new-tokens", "8", "--nodes", "6", "def f("]
        generate = deepest(root, "headstart.cli", "generate", *decode)
    report: dict[str, Any] = {
        "files": len(files),
        "lines": sum(len(path.read_text().splitlines()) for path in files),
        "classes": len([node for node in classes if not node.name.startswith("_")]),
        "packages importing each other": mutual(root),
        "deepest chain, generate": {"length": len(generate), "chain": generate},
        "deepest chain, train one step": {"length": len(train), "chain": train},
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
