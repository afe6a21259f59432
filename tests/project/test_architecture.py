"""Import order of the layers, imports without extras, length of files and functions, public names.

train_heads.py, headstart/cli -> training, headstart/serving -> inference -> heads -> headstart/support -> torch, transformers
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx
import pytest

import headstart
from headstart.heads.methods import methods

ROOT = Path(__file__).parents[2]
LAYERS = ("heads", "inference", "training")
"""Bottom up."""
FOLDERS = ("headstart/support", "headstart/chat", *LAYERS, "headstart/serving", "headstart/cli")
PLUGIN = "plugins/headstart-cpu/headstart_cpu"
LONGEST_FILE = 300
LONGEST_FUNCTION = 40
MOST_PARAMETERS = 6
FRONT_DOOR = {"inference/generate.py": {"generate", "load"}}
"""Functions whose signatures follow transformers' ``generate`` and ``from_pretrained``."""
PUBLIC = {
    "Backbone", "Drafter", "Features", "SpeculativeModel", "TreeShape", "__version__", "show", "stateless", "custom_generate", "grammar",
    "load", "load_backbone", "load_recipe", "load_tokenizer",
}  # fmt: skip
FACADE_FOR_ALL = {"__version__", "chat", "recipes", "support"}
"""Names any layer may take from `headstart` itself (recipes are data); other public names are imported from their own modules."""


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def parsed(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import in a file, at any nesting; relative imports made absolute."""
    package = ["headstart", *path.relative_to(ROOT).parent.parts]
    for node in parsed(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def fault(name: str) -> str | None:
    """The reason a module of the layers may not import this name, if any; the order of rooms is that of the picture, below."""
    top, _, rest = name.partition(".")
    if top in LAYERS:
        return f"write headstart.{name}"
    if top in ("train_heads", "tests", "headstart_cpu"):
        return f"nothing imports {top}"
    below = rest.split(".")[0]
    known = top != "headstart" or not rest or below in LAYERS or below in FACADE_FOR_ALL
    return None if known else f"import {below} from the module it lives in"


def test_imports_are_from_where_names_live() -> None:
    imports = [(path, line, name) for layer in LAYERS for path in sources(layer) for line, name in imported(path)]
    faults = [f"{path.relative_to(ROOT)}:{line}: {name}: {why}" for path, line, name in imports if (why := fault(name))]
    assert not faults, "\n".join(faults)
    for name in ("heads.base", "headstart.load", "train_heads", "headstart_cpu.trace"):
        assert fault(name)


@pytest.mark.parametrize("folder", [*LAYERS, "recipes"])
def test_one_import_root_by_relative_links(folder: str) -> None:
    link = ROOT / "headstart" / folder
    assert link.is_symlink() and os.readlink(link) == f"../{folder}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in (*([] if parts[0] == "headstart" else ["headstart"]), *parts) if part != "__init__")


def run_time_imports(path: Path, modules: set[str]) -> Iterator[str]:
    """Modules of the project that a file imports, including inside functions but not under TYPE_CHECKING."""
    guards = [node for node in parsed(path) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    hidden = {id(node) for guard in guards for statement in guard.body for node in ast.walk(statement)}
    for node in parsed(path):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in hidden:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else node.module for name in names if name in modules or node.module in modules)


def package_of(module: str) -> str:
    """The folder of a module; a module directly in a layer is its own package."""
    above = module.rpartition(".")[0]
    return module if above in {f"headstart.{layer}" for layer in LAYERS} else above


def cycles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Sets of packages that import each other, directly or indirectly."""
    graph = networkx.DiGraph([(one, other) for one, others in edges.items() for other in others])
    return [group for group in networkx.strongly_connected_components(graph) if len(group) > 1]


def test_packages_import_one_way_inside_the_layers_too() -> None:
    files = {module_name(path): path for folder in FOLDERS for path in sources(folder)}
    edges: dict[str, set[str]] = {}
    for module, path in files.items():
        others = {package_of(name) for name in run_time_imports(path, set(files))}
        edges.setdefault(package_of(module), set()).update(others - {package_of(module)})
    assert len(edges) > 20 and sum(map(len, edges.values())) > 50
    assert cycles(edges) == []
    assert [name for name, others in edges.items() if "headstart.cli" in others] == []
    assert edges["headstart.support"] <= {"headstart.support"}


def test_files_import_one_way() -> None:
    """Imports in functions and for types are counted."""
    files = {module_name(path): path for folder in FOLDERS for path in sources(folder)}
    edges: dict[str, set[str]] = {}
    for module, path in files.items():
        names = {name if name in files else name.rpartition(".")[0] for _, name in imported(path)}
        edges[module] = (names & {*files}) - {module}
    assert len(edges) > 150 and cycles(edges) == []


def test_no_function_is_long_or_takes_many_parameters() -> None:
    faults = []
    for path in [path for folder in (*FOLDERS, PLUGIN) for path in sources(folder)]:
        name = path.relative_to(ROOT).as_posix()
        for node in parsed(path):
            if not isinstance(node, ast.FunctionDef) or node.name in FRONT_DOOR.get(name, ()):
                continue
            length = (node.end_lineno or 0) - node.lineno + 1
            parameters = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            count = sum(parameter.arg not in ("self", "cls") for parameter in parameters)
            if length > LONGEST_FUNCTION or count > MOST_PARAMETERS:
                faults.append(f"{name}:{node.lineno}: {node.name}: {length} lines, {count} parameters")
    assert not faults, "\n".join(faults)


def test_no_file_is_long() -> None:
    folders = (*FOLDERS, PLUGIN, "plugins/headstart-cpu/tests", "recipes", "tests", "benchmarks")
    paths = [path for folder in folders for path in sources(folder)]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in [*paths, *ROOT.glob("*.py")]}
    assert not {path: length for path, length in lengths.items() if length > LONGEST_FILE}


def test_every_drafter_names_its_paper() -> None:
    """One file per method, whose first lines cite its paper."""
    docstrings = {kind: ast.get_docstring(ast.parse((ROOT / "heads" / f"{kind}.py").read_text())) or "" for kind in methods()}
    assert {"medusa", "eagle3"} <= set(docstrings)
    lacking = [kind for kind, docstring in docstrings.items() if not re.search(r"\b\d{4}\.\d{5}\b", docstring)]
    assert not lacking, f"no arXiv id in the docstring of {lacking}"


IMPORT_EVERYTHING = """
import importlib, importlib.machinery, sys

class WithoutExtras(importlib.machinery.PathFinder):
    # Finds nothing for a refused name, which is what a library sees that looks for a package not installed.
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in ("wandb", "peft", "tensorboard", "tensorboardX") else super().find_spec(name, path, target)

sys.meta_path = [WithoutExtras if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
import headstart
assert not {"torch", "transformers", "yaml"} & set(sys.modules), "import headstart loads a library"

layers = ("heads", "inference", "training")
for i, layer in enumerate(layers):
    for name in MODULES[layer]:
        importlib.import_module(name)
    above = [name for name in sys.modules for other in layers[i + 1:] if name.startswith(f"headstart.{other}")]
    assert not above, f"importing {layer} imports {above}"
import train_heads
assert not {"wandb", "peft", "tensorboard", "tensorboardX"} & set(sys.modules), "an extra was imported"
for name in headstart.__all__:
    assert getattr(headstart, name) is not None
"""


@pytest.mark.slow
def test_every_module_imports_without_extras() -> None:
    modules = {
        layer: [".".join(["headstart", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__") for path in sources(layer)]
        for layer in LAYERS
    }
    code = f"MODULES = {modules!r}\n{IMPORT_EVERYTHING}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


def test_public_names_are_pinned() -> None:
    assert set(headstart.__all__) == PUBLIC
    assert PUBLIC <= set(dir(headstart))
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        headstart.__getattr__("lod")


# The picture of the house in docs/design.md is that of the folders and of their imports.

PICTURE = re.search(r"## Layout\n\n```\n(.*?)```", (ROOT / "docs" / "design.md").read_text(), re.DOTALL)
assert PICTURE is not None
FLOORS = [[room.strip(" /") for room in floor.split(",")] for floor in PICTURE[1].splitlines()[0].split("->")]
"""Rooms by floor, from above: each imports those below it."""


def room_of(module: str) -> str:
    """The room of a module, as the picture names it; the public names of `headstart` are no room."""
    first = module.split(".")[1] if "." in module else ""
    return first if first in LAYERS else f"headstart/{first}"


def test_every_room_imports_those_below_it() -> None:
    floor_of = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    modules = {module_name(path): path for folder in FOLDERS for path in sources(folder)}
    assert {room_of(module) for module in modules} == {*floor_of} - {"train_heads.py"}
    seen = set()
    for module, path in modules.items():
        for _, name in imported(path):
            used = name if name in modules else name.rpartition(".")[0]
            if used in modules and room_of(used) != room_of(module):
                seen.add((room_of(module), room_of(used)))
    assert not {(a, b) for a, b in seen if floor_of[a] >= floor_of[b]}
    assert all(any(floor_of[a] == number for a, _ in seen) for number in range(len(FLOORS) - 1)), "no floor is skipped"


def test_every_folder_is_in_the_picture_and_there() -> None:
    assert PICTURE is not None
    named = {name for path in re.findall(r"(?:[\w-]+/)+", PICTURE[1]) for name in path.strip("/").split("/")}
    packages = {path.parent.name for folder in (*FOLDERS, "headstart") for path in (ROOT / folder).rglob("__init__.py")}
    assert packages <= named, packages - named
    tops = ("headstart", *LAYERS, "plugins", "recipes")
    folders = {path.name for top in tops for path in ((ROOT / top), *(ROOT / top).rglob("*")) if path.is_dir()}
    assert named <= folders, named - folders
