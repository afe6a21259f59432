"""``headstart new-head`` and ``headstart check-head``, for heads of one's own; libraries are imported when they run."""

from __future__ import annotations

import argparse
import keyword
import sys
from pathlib import Path
from typing import Any

from headstart.support.errors import UserError, one_line

NEW_HEAD_EXAMPLE = """examples:
  headstart new-head my_head
  headstart check-head my_head.head
  headstart train my_head/recipe.yaml"""
CHECK_HEAD_EXAMPLE = """examples:
  headstart check-head my_head.head
  headstart check-head eagle3 depth=2 draft_vocab_size=40"""
FILES = {"head.py": "head.py", "recipe.yaml": "recipe.yaml", "test_head.py": "test_{name}.py"}


def add_new_head(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart new-head``."""
    parser.add_argument("name", metavar="NAME", help="name of the new folder, valid in Python, such as my_head")


def new_head(args: argparse.Namespace) -> int:
    """Write a folder with a working head, a recipe and a test."""
    from headstart.support.files import atomic

    name = args.name
    if not name.isidentifier() or keyword.iskeyword(name) or name in sys.stdlib_module_names or not name.islower():
        raise UserError(f"{name!r} can't name a package of Python; use lower-case letters, digits and _, such as my_head")
    folder = Path(name)
    if folder.exists():
        raise UserError(f"{folder} is there already; choose another name, or remove it")
    named = {"my_head": name, "MyHead": name.title().replace("_", "")}
    with atomic(folder, folder=True) as path:
        (path / "__init__.py").touch()
        for source, target in FILES.items():
            text = (Path(__file__).parents[1] / "new_head" / source).read_text()
            for old, new in named.items():
                text = text.replace(old, new)
            (path / target.format(name=name)).write_text(text)
    print(f"{folder}/head.py: a working head, to be changed\nheadstart check-head {name}.head\nheadstart train {name}/recipe.yaml")
    return 0


def add_check_head(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart check-head``."""
    parser.add_argument("module", metavar="MODULE", help="the dotted name of the module with the head, or a kind that ships")
    parser.add_argument("arguments", nargs="*", metavar="KEY=VALUE", help="its arguments, as below `drafter` in a recipe")


def check_head(args: argparse.Namespace) -> int:
    """Hold a head with random weights to the contract on a small random Llama; the exit status is 1 if it breaks it."""
    from headstart.cli.loading import quiet
    from headstart.inference.contract import CHECKS, Broken, small_drafter
    from headstart.training.recipe.yaml_text import override

    quiet()
    given: dict[str, Any] = {}
    for argument in args.arguments:
        override(given, argument)
    broken = 0
    for check in CHECKS:
        drafter = small_drafter(args.module, **given)
        about = (check.__doc__ or "").split("\n")[0]
        try:
            check(drafter)
        except Broken as error:
            broken += 1
            print(f"broken  {about}\n        {error}")
        except (UserError, KeyboardInterrupt):
            raise
        except Exception as error:  # the head's own
            broken += 1
            place = _place(error, args.module)
            print(f"broken  {about}\n        {place}{type(error).__name__}: {one_line(str(error))}")
        else:
            print(f"ok      {about}")
    print(f"{args.module} breaks {broken} of {len(CHECKS)} rules" if broken else f"{args.module} keeps the contract")
    return int(broken > 0)


def _place(error: BaseException, module: str) -> str:
    """``head.py:41: `` where the innermost line of the head's module raised the error."""
    file, found, trace = getattr(sys.modules.get(module), "__file__", None), "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            found = f"{Path(str(file)).name}:{trace.tb_lineno}: "
        trace = trace.tb_next
    return found
