"""The picture of the house in docs/design.md is that of the folders and of their imports."""

import re

from test_architecture import FOLDERS, LAYERS, ROOT, imported, module_name, sources

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
