"""Token ids as llama.cpp itself gives them, by node-llama-cpp (`npm install --prefix FOLDER node-llama-cpp`).

    python tests/oracles/llama_ids.py FOLDER                                writes tests/heads/llama_ids.json, which the tests compare with
    python tests/oracles/llama_ids.py FOLDER FILE.gguf ... --texts X.json   compares the tokenizers that Headstart makes of files

X.json: a list of texts; without it, those of the tests. The status is 1 if an id differs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent / "helpers")]
from gguf_vocabularies import TEXTS, of_bytes, of_pieces, write_vocabulary  # noqa: E402

from headstart import load_tokenizer  # noqa: E402
from headstart.heads.backbone.gguf_header import RULES  # noqa: E402

NEWER = {"glm4", "glm5"}
"""Names that llama-cpp-python 0.3.36 knows, or treats as Headstart does, and node-llama-cpp 3.22.1 does not yet."""
EXPECTED = HERE.parent / "heads" / "llama_ids.json"


def of_llama(folder: Path, texts: list[str], files: list[Path]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as asked:
        json.dump(texts, asked)
        asked.flush()
        command = ["node", str(HERE / "llama_ids.mjs"), str(folder.absolute()), asked.name, *map(str, files)]
        return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def write_expected(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        files = {f"pieces {spaced}".lower(): {**of_pieces(), "add_space_prefix": spaced} for spaced in (True, False)}
        files |= {pre: {**of_bytes(), "pre": pre} for names in RULES for pre in names.split()}
        paths = {name: write_vocabulary(Path(made) / f"{place}.gguf", keys) for place, (name, keys) in enumerate(files.items())}
        paths["pieces phi3"] = write_vocabulary(Path(made) / "phi3.gguf", of_pieces(), "phi3", "Phi-3")
        found = of_llama(folder, TEXTS, [*paths.values()])
    of_files = {name: found["files"][str(path)] for name, path in paths.items() if name not in NEWER}
    distinct = list({json.dumps(one["ids"]): None for one in of_files.values()})
    names = {name: [distinct.index(json.dumps(one["ids"])), one["begins"]] for name, one in of_files.items()}
    rows = ",\n  ".join(distinct).replace(" ", "")
    EXPECTED.write_text(f'{{"llama.cpp": {json.dumps(found["version"])},\n "names": {json.dumps(names)},\n "ids": [\n  {rows}\n]}}\n')
    print(f"{EXPECTED}: {len(names)} names, {len(distinct)} ways to split {len(TEXTS)} texts, by {found['version']}")


def compare(folder: Path, files: list[Path], texts: list[str]) -> int:
    found, wrong = of_llama(folder, texts, files)["files"], 0
    for file in files:
        tokenizer, apart = load_tokenizer(str(file)), []
        for text, right in zip(texts, found[str(file)]["ids"], strict=True):
            if tokenizer(text, add_special_tokens=False)["input_ids"] != right:
                apart.append(text)
        wrong += len(apart)
        print(f"{file.name}: {len(apart)} of {len(texts)} texts differ{''.join(f'; {text[:80]!r}' for text in apart[:3])}")
    return int(wrong > 0)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("files", type=Path, nargs="*")
    options.add_argument("--texts", type=Path)
    args = options.parse_args()
    if args.files:
        return compare(args.folder, args.files, TEXTS if args.texts is None else json.loads(args.texts.read_text()))
    write_expected(args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
