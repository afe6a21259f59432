"""Training: ``headstart train RECIPE [section.key=value ...]``, and ``train_heads.py`` for launchers that need a script; ``headstart
new-head`` and ``headstart check-head``, for heads of one's own. Libraries are imported when they run."""

from __future__ import annotations

import argparse
import keyword
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.cli.arguments import DEBUG, add_debug, add_recipe
from headstart.cli.main import USER, Guard, rank, report
from headstart.support.errors import UserError, one_line, waiting
from headstart.support.files import atomic, require_folder
from headstart.support.text import lasting_stderr, open_streams, require_arguments_text

if TYPE_CHECKING:
    from headstart.training.recipe.recipe import Recipe

TRAIN_EXAMPLE = """examples:
  headstart train recipes/quickstart/eagle3.yaml train.lr=3e-4 save.dir=out/mine
  accelerate launch train_heads.py recipes/quickstart/eagle3.yaml train.lr=3e-4 save.dir=out/mine
  torchrun --nproc-per-node 2 train_heads.py recipes/quickstart/eagle3.yaml"""


def add_train(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart train`` and ``train_heads.py``."""
    add_recipe(parser, "YAML file: the only configuration")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``train_heads.py``; returns the exit status of `train`, or that of an error (`Guard`)."""
    open_streams()
    parser = argparse.ArgumentParser(prog="train_heads.py", description="Train heads by a recipe.", epilog=TRAIN_EXAMPLE)
    add_train(parser)
    add_debug(parser)
    words = list(sys.argv[1:] if argv is None else argv)
    with Guard(debug=DEBUG in words) as guard:
        guard.status = train(parser.parse_args(words))
    return guard.status


def train(args: argparse.Namespace) -> int:
    """Train by a recipe; returns 0 (done) or 128 + signal (stopped, saved and resumable). Errors are logged beside the run."""
    from headstart.training.recipe.recipe import load_recipe  # here, so that --help does not wait for it

    require_arguments_text(args.overrides)
    recipe = load_recipe(args.recipe, args.overrides)
    folder = require_folder("save.dir", recipe.save.dir)
    with lasting_stderr(), Guard(folder, args.debug) as guard:
        guard.status = _train(recipe)
    return guard.status


def _train(recipe: Recipe) -> int:
    with waiting("importing torch and transformers"):
        import torch

        from headstart.support.devices import plain_arithmetic
        from headstart.training.loop import train
        from headstart.training.run.processes import keep_group, lost_process, sole_run
        from headstart.training.setup import prepare

    try:
        with plain_arithmetic(), sole_run(recipe.save.dir) if rank() == 0 else nullcontext():
            run = prepare(recipe)
            try:
                return train(run)
            finally:
                run.source.close()
                run.log.close()
                keep_group()
                run.accelerator.end_training()
    except torch.OutOfMemoryError as error:
        size, chunk, length = recipe.train.micro_batch, recipe.objective.chunk_size, recipe.data.max_length
        lower = f"train.micro_batch (now {size or 'null'}), objective.chunk_size ({chunk}) or data.max_length ({length})"
        raise UserError(f"out of memory; lower {lower}: {str(error).splitlines()[0]}") from None
    except OSError as error:  # a full or failing disk, no permission
        fault = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
        remedy = f"put that right, and the same command goes on from what was last saved in {recipe.save.dir}"
        raise UserError(f"the run has ended: {fault}; {remedy}") from None
    except RuntimeError as error:
        if (lost := lost_process(error, recipe.save.dir)) is None:
            raise
        return report(str(lost), USER, wait=False)


NEW_HEAD_EXAMPLE = """examples:
  headstart new-head my_head
  headstart check-head my_head.head
  headstart train my_head/recipe.yaml"""
CHECK_HEAD_EXAMPLE = """examples:
  headstart check-head my_head.head
  headstart check-head eagle3 depth=2 draft_vocab_size=40"""
FILES = {"head.py": "head.py", "recipe.yaml": "recipe.yaml", "test_head.py": "test_{name}.py"}


def add_new_head(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the new folder, valid in Python, such as my_head")


def new_head(args: argparse.Namespace) -> int:
    """Write a folder with a working head, a recipe and a test."""
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
        except UserError:
            raise
        except Exception as error:  # but for what breaks the contract, the head's own
            broken += 1
            place = "" if isinstance(error, Broken) else f"{_place(error, args.module)}{type(error).__name__}: "
            print(f"broken  {about}\n        {place}{one_line(str(error))}")
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
