"""Read rows of training data from a file or a dataset, as mappings from column to value."""
from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path

from headstart.support.errors import UserError
from headstart.support.jsonl import Row, read_jsonl

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
SHIPPED = "quickstart:"
"""Prefix of files in the installed package's quickstart folder."""


def read_rows(source: str, *, split: str = "train", subset: str | None = None, limit: int | None = None) -> list[Row]:
    """Read the first ``limit`` rows of a local file, or of a split of a dataset (a hub name or a folder of files)."""
    path = Path(source).expanduser()
    if source.startswith(SHIPPED):
        path = Path(__file__).parent.parent.parent / "recipes" / "quickstart" / source.removeprefix(SHIPPED)
    local = path.exists() or source.startswith((SHIPPED, "/", ".", "~")) or source.endswith(ENDINGS)
    rows = _read_file(path, limit) if local and not path.is_dir() else _read_dataset(source, split, subset, limit)
    if not rows:
        raise UserError(f"{source} holds no rows")
    return rows


def _read_file(path: Path, limit: int | None) -> list[Row]:
    if not path.exists():
        raise UserError(f"no data file {path}: there is no such file")
    if not path.name.endswith(ENDINGS):
        raise UserError(f"{path} is not a kind of file that can be read; its name should end in {', '.join(ENDINGS)}")
    try:
        if path.suffix == ".parquet":
            return _read_parquet(path, limit)
        if path.name.removesuffix(".gz").endswith(".jsonl"):
            return [row for _, row in islice(read_jsonl(path), limit)]
        opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
        with opened as text:
            return _read_json(text.read(), path)[:limit]
    except (OSError, EOFError, UnicodeDecodeError) as error:   # truncated gzip, not UTF-8, no permission
        raise UserError(f"{path} cannot be read: {error}") from None


def _read_json(text: str, path: Path) -> list[Row]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}; one row a line belongs in a .jsonl file") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: a .json file of data is one list of rows, each a mapping from column to value")
    return rows


def _read_parquet(path: Path, limit: int | None) -> list[Row]:
    import pyarrow.parquet  # type: ignore[import-untyped]  # here, since only Parquet files need it

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        return list(islice((row for batch in batches for row in batch.to_pylist()), limit))
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _read_dataset(name: str, split: str, subset: str | None, limit: int | None) -> list[Row]:
    import datasets  # here, since it takes seconds to import

    try:
        table = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"no data {name}, split {split}: it is no file here, and as a dataset it gives: {reason}") from None
    return table.select(range(min(limit or len(table), len(table)))).to_list()
