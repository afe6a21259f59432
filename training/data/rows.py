"""Read rows of training data from files, also tables, or a dataset, as mappings from column to value."""

import csv
import glob
import io
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from headstart.support.errors import UserError, cause
from headstart.support.files import as_path, file_hash, require_file, value_hash
from headstart.support.hub import cut_off, reaching
from headstart.support.json_text import COMPRESSED, LINES, MAX_LINE, Row, open_file, parse_json, read_jsonl, without_fill
from headstart.support.text import decode, require_characters

TABLES = {".csv": ",", ".tsv": "\t"}
ENDINGS = (*(kind + packed for kind in (*LINES, ".json", *TABLES) for packed in ("", *COMPRESSED)), ".parquet")
KINDS = f"{', '.join((*LINES, '.json', *TABLES))} (each also with {' or '.join(COMPRESSED)}) or .parquet"
SHIPPED = "quickstart:"
"""Prefix of files in the installed package's quickstart folder."""
WHOLE_BYTES = 4 << 30
"""Size of a file from which on it is not read to see whether it has changed."""
SAVED, SPLITS = ("state.json", "dataset_info.json"), "dataset_dict.json"
"""Files of a folder of `Dataset.save_to_disk`, and that of a folder of several splits."""


def read_rows(source: str, *, split: str = "train", subset: str | None = None, limit: int | None = None) -> list[Row]:
    """Read the first ``limit`` rows of local files (one, or all that a pattern such as ``data/*.jsonl`` matches, by name), of a folder
    of `Dataset.save_to_disk`, or of a split of a dataset (a hub name or a folder of files). Raises UserError.
    """
    path = as_path("data", source)
    if names_file(source):
        rows = list(islice((row for file in files_of(source) for row in _read_file(file)), limit))
    elif (path / SPLITS).is_file() or all((path / name).is_file() for name in SAVED):
        rows = _read_saved(path, split, limit)
    else:
        rows = _first(_open_dataset(source, split, subset), limit)
    if not rows:
        raise UserError(f"{source} holds no rows")
    return rows


def fingerprint(source: str, *, split: str = "train", subset: str | None = None) -> str | None:
    """Return text that changes with a source's rows: contents of files, from 4 GB on their times; None if unknown. Raises UserError."""
    path, local = as_path("data", source), names_file(source)
    if not local and not path.is_dir():
        known = getattr(_open_dataset(source, split, subset), "_fingerprint", None)
        return None if known is None else str(known)
    try:
        files = files_of(source) if local else sorted(file for file in path.rglob("*") if file.is_file())
        states = [(file, file.stat()) for file in files]
        large = {file: [str(file.resolve()), state.st_size, state.st_mtime_ns] for file, state in states if state.st_size >= WHOLE_BYTES}
        return value_hash([[file.name, large[file] if file in large else file_hash(file)] for file in files])
    except OSError:  # reading says why
        return None


def names_file(source: str) -> bool:
    """Whether it names local files, there or not, and no dataset."""
    path = as_path("data", source)
    local = path.exists() or source.startswith((SHIPPED, "/", ".", "~")) or source.endswith(ENDINGS) or glob.has_magic(source)
    return local and not path.is_dir()


def files_of(source: str) -> list[Path]:
    """Return the local files that are named: one, or all that a pattern matches, sorted. Raises UserError if there is none."""
    path = as_path("data", source)
    if source.startswith(SHIPPED):
        if not (name := source.removeprefix(SHIPPED)) or Path(name).name != name:
            raise UserError(f"{source} names no shipped file: after {SHIPPED} comes its name alone, as in quickstart:train.jsonl.gz")
        path = Path(__file__).parent.parent.parent / "recipes" / "quickstart" / name
    elif glob.has_magic(source) and not path.exists():
        files = [file for file in map(Path, sorted(glob.glob(str(path), recursive=True))) if not file.is_dir()]
        if not files:
            raise UserError(f"data {source}: no file matches this pattern; check it (** stands for folders at any depth)")
        return [_known(file) for file in files]
    require_file("data file", path)
    return [_known(path)]


def _known(file: Path) -> Path:
    if not file.name.endswith(ENDINGS):
        raise UserError(f"{file} is not a kind of file that can be read; its name should end in {KINDS}")
    return file


def _read_file(path: Path) -> Iterator[Row]:
    name = path.name.removesuffix(path.suffix) if path.suffix in COMPRESSED else path.name
    try:
        if path.suffix == ".parquet":
            yield from _read_parquet(path)
        elif name.endswith(LINES):
            yield from (row for _, row in read_jsonl(path))
        elif name.endswith(".json"):
            yield from _read_json(path)
        else:
            yield from read_table(path, TABLES[Path(name).suffix])
    except (OSError, EOFError, zlib.error) as error:  # truncated, no permission
        raise UserError(f"{path} cannot be read: {cause(error)}; check the file") from None


def _read_json(path: Path) -> Iterator[Row]:
    """Yield the rows of one list or, where the file does not begin with one, of lines."""
    wanted = f"{path}: a .json file of data is one list of rows, each a mapping from column to value, or one such row a line"
    with open_file(path) as file:
        first = next((line for raw in file if (line := raw.removeprefix(b"\xef\xbb\xbf").lstrip())), b"")
    if first.startswith(b"{"):
        try:
            parse_json(decode(first, str(path)), str(path))
        except UserError as error:
            raise UserError(f"{error}; {wanted.removeprefix(f'{path}: ')}") from None
        yield from (row for _, row in read_jsonl(path))
        return
    with open_file(path) as file:
        rows = parse_json(decode(file.read(), str(path)), str(path))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(wanted)
    yield from rows


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet  # type: ignore[import-untyped]  # here, since only Parquet files need it

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from map(without_fill, batch.to_pylist(maps_as_pydicts="lossy"))
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {cause(error)}; check the file") from None


def _read_saved(path: Path, split: str, limit: int | None) -> list[Row]:
    import datasets  # here, since it takes seconds to import

    if (path / SPLITS).is_file():
        splits = sorted(state.parent.name for state in path.glob("*/state.json"))
        if split not in splits:
            first = splits[0] if splits else "SPLIT"
            raise UserError(f"{path} holds the splits {', '.join(splits) or '(none)'}, not {split}; name the folder of one, {path / first}")
        path = path / split
    try:
        return _first(datasets.load_from_disk(str(path)), limit)
    except (OSError, ValueError, KeyError, TypeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{path} cannot be read as a folder of Dataset.save_to_disk: {cause(error)}; save it again") from None


def _open_dataset(name: str, split: str, subset: str | None) -> Any:
    import datasets  # here, since it takes seconds to import

    try:
        with reaching(name):
            return datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        away = f"{away}; give a file" if (away := cut_off(name)) else f"as a dataset it gives: {cause(error, 200)}"
        raise UserError(f"no data {name}, split {split}: it is no file here, and {away}") from None


def _first(table: Any, limit: int | None) -> list[Row]:
    return [without_fill(row) for row in table.select(range(min(limit or len(table), len(table)))).to_list()]


def read_table(path: Path, delimiter: str) -> Iterator[Row]:
    """Yield the rows below the line of column names; an empty cell is null. Raises UserError with file and line; OSError as `open_file`."""
    csv.field_size_limit(MAX_LINE)
    with open_file(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        lines = csv.reader(text, delimiter=delimiter, strict=True)
        filled = (line for line in lines if line)
        try:
            names = next(filled, [])
            if len(set(names)) < len(names) or not all(name.strip() for name in names):
                raise UserError(f"{path}: the first line of a table names its columns, each once; got {', '.join(names)[:100]}")
            for number, line in enumerate(filled, 1):
                where = f"{path}, row {number}"
                if len(line) != len(names):
                    raise UserError(f"{where} has {len(line)} cells for {len(names)} columns; put text with delimiters in quotes")
                yield {name: require_characters(cell, where) or None for name, cell in zip(names, line, strict=True)}
        except csv.Error as error:
            raise UserError(f"{path}, line {lines.line_num}: {error}; write tables with a library, in UTF-8") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text after line {lines.line_num} ({error.reason}); save it as UTF-8") from None
