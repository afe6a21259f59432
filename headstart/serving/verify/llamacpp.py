"""Drafts of llama.cpp, for comparison with Headstart's own: `draft` runs `llamacpp_driver.py` in an environment with xllamacpp."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headstart.heads.backbone.gguf_file import find_gguf
from headstart.serving.layouts.llamacpp import BLOCK_FILE, FILE
from headstart.serving.verify.drafts import CHECKOUT, EngineProcess, EngineSettings, Round, Transcript
from headstart.support.errors import UserError

LLAMACPP = EngineProcess(
    engine="llama.cpp",
    package="xllamacpp 2026.10.11549",
    variable="HEADSTART_LLAMACPP_PYTHON",
    python=CHECKOUT / ".venv-llamacpp" / "bin" / "python",
    driver=Path(__file__).with_name("llamacpp_driver.py"),
    quantised="llama.cpp multiplies quantised weights by inputs of 8 bits, so that texts and drafts differ where scores are close; "
    "an F32 file of the backbone shows what is due to the heads",
)


def draft(folder: Path, backbone: str, prompts: list[list[int]], settings: EngineSettings) -> list[Transcript]:
    """Decode the prompts in llama.cpp with the heads in ``folder``, in fp32, greedily and one at a time.

    Raises UserError if llama.cpp is not installed or refuses the heads, and for a backbone or heads that are no GGUF file.
    """
    file = next((folder / name for name in (FILE, BLOCK_FILE) if (folder / name).is_file()), None)
    if file is None:
        names = f"{FILE} or {BLOCK_FILE}"
        raise UserError(f"{folder} holds no {names}, which llama.cpp drafts with: headstart export --to llama.cpp writes one")
    texts = serve(file, backbone, prompts, settings)["texts"]
    if any(text["accepted"] and not text["drafts"] for text in texts):
        unnamed = "llama.cpp's log names no drafts of DFlash2 heads, so that these cannot be compared"
        raise UserError(f"{unnamed}: verify {folder} without --engine, against the drafts that the export stored")
    return [transcript(prompt, text, settings) for prompt, text in zip(prompts, texts, strict=True)]


def serve(heads: Path | None, backbone: str, prompts: Sequence[Sequence[int]], settings: EngineSettings) -> dict[str, Any]:
    """Return all that the driver returns: of each prompt in ``texts`` its ``tokens``, ``drafts``, and the number of drafts ``accepted``."""
    model = find_gguf(backbone)
    if model is None:
        raise UserError(f"llama.cpp is verified with the backbone as a GGUF file, and {backbone} is none: give --backbone FILE.gguf")
    return LLAMACPP.run({
        "backbone": str(model.path.resolve()),
        "heads": None if heads is None else str(heads.resolve()),
        "blocks": heads is not None and heads.name == BLOCK_FILE,
        "prompts": [list(prompt) for prompt in prompts],
        "new_tokens": settings.new_tokens,
        "depth": settings.depth,
        "room": max(map(len, prompts)) + settings.new_tokens + 2 * settings.depth + 2,
        "ends": bool(settings.end_tokens),
    })  # fmt: skip


def transcript(prompt: Sequence[int], found: dict[str, Any], settings: EngineSettings) -> Transcript:
    """Make rounds of llama.cpp's drafts: the first continues the prompt and the root; each keeps what the text has too."""
    written = settings.ended(found["tokens"])
    rounds, at = [], 1
    for drafts in found["drafts"]:
        if at >= len(written):
            break
        text = written[at:]
        kept = next((i for i, pair in enumerate(zip(drafts, text, strict=False)) if pair[0] != pair[1]), min(len(drafts), len(text)))
        rounds.append(Round(len(prompt) + at, tuple(drafts), kept))
        at += kept + 1
    return Transcript(tuple(prompt), tuple(written), tuple(rounds))
