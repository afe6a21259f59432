"""Read rows of training data from a file or a dataset, as mappings from column to value."""
from __future__ import annotations

import zlib
from itertools import islice
from pathlib import Path

from headstart.support.errors import UserError, cause
from headstart.support.files import as_path, require_file
from headstart.support.json_text import parse_json
from headstart.support.jsonl import Row, open_file, read_jsonl
from headstart.support.text import decode

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
SHIPPED = "quickstart:"
"""Prefix of files in the installed package's quickstart folder."""


def read_rows(source: str, *, split: str = "train", subset: str | None = None, limit: int | None = None) -> list[Row]:
    """Read the first ``limit`` rows of a local file, or of a split of a dataset (a hub name or a folder of files)."""
    path = as_path("data", source)
    if source.startswith(SHIPPED):
        if not (name := source.removeprefix(SHIPPED)) or Path(name).name != name:
            raise UserError(f"{source} names no shipped file: after {SHIPPED} comes its name alone, as in quickstart:train.jsonl.gz")
        path = Path(__file__).parent.parent.parent / "recipes" / "quickstart" / name
    rows = _read_file(path, limit) if names_file(source) else _read_dataset(source, split, subset, limit)
    if not rows:
        raise UserError(f"{source} holds no rows")
    return rows


def names_file(source: str) -> bool:
    """Whether it names a local file, there or not, and no dataset."""
    path = as_path("data", source)
    local = path.exists() or source.startswith((SHIPPED, "/", ".", "~")) or source.endswith(ENDINGS)
    return local and not path.is_dir()


def _read_file(path: Path, limit: int | None) -> list[Row]:
    require_file("data file", path)
    if not path.name.endswith(ENDINGS):
        raise UserError(f"{path} is not a kind of file that can be read; its name should end in {', '.join(ENDINGS)}")
    try:
        if path.suffix == ".parquet":
            return _read_parquet(path, limit)
        if path.name.removesuffix(".gz").endswith(".jsonl"):
            return [row for _, row in islice(read_jsonl(path), limit)]
        with open_file(path) as file:
            return _read_json(decode(file.read(), str(path)), path)[:limit]
    except (OSError, EOFError, zlib.error) as error:   # truncated gzip, no permission
        raise UserError(f"{path} cannot be read: {cause(error)}; check the file") from None


def _read_json(text: str, path: Path) -> list[Row]:
    try:
        rows = parse_json(text, str(path))
    except UserError as error:
        raise UserError(f"{error}; one row a line belongs in a .jsonl file") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: a .json file of data is one list of rows, each a mapping from column to value")
    return rows


def _read_parquet(path: Path, limit: int | None) -> list[Row]:
    import pyarrow.parquet  # type: ignore[import-untyped]  # here, since only Parquet files need it

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        return list(islice((row for batch in batches for row in batch.to_pylist()), limit))
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {cause(error)}; check the file") from None


def _read_dataset(name: str, split: str, subset: str | None, limit: int | None) -> list[Row]:
    import datasets  # here, since it takes seconds to import

    try:
        table = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"no data {name}, split {split}: it is no file here, and as a dataset it gives: {reason}") from None
    return table.select(range(min(limit or len(table), len(table)))).to_list()
