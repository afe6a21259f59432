"""Load the checkpoints of drafters (card.py), and compare the backbones that they were trained on and are loaded on."""

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from headstart.chat.conversation import Chat
from headstart.chat.template import ChatSettings, template_hash
from headstart.heads.backbone.adapter import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.fingerprint import tokenizer_digest
from headstart.heads.backbone.model_config import end_tokens, read_sizes
from headstart.heads.base import Drafter
from headstart.heads.card import FORMAT, METADATA, Card
from headstart.heads.methods import built_in, construct_drafter, require_weights
from headstart.support.errors import UserError, cause, notice
from headstart.support.files import atomic, file_hash, flush, settle
from headstart.support.hub import find_folder, inside, resolve_heads
from headstart.support.json_text import fault, read_json

AGAIN = "train or fetch the heads again"
ADAPTER_FILES = [f"{ADAPTER}/{file}" for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]


def recipe_section(provenance: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section of the recipe that heads were trained by; empty if they were not trained by a recipe."""
    recipe = provenance.get("recipe")
    section = recipe.get(name) if isinstance(recipe, dict) else None
    return section if isinstance(section, dict) else {}


def chat_settings(card: dict[str, Any]) -> ChatSettings:
    """Return how the conversations that the heads were trained on became tokens; heads of earlier versions keep their recipe's template."""
    provenance = card["provenance"]
    if provenance.get("chat") is None:
        template = recipe_section(provenance, "data").get("chat_template")
        return ChatSettings(template if isinstance(template, str) else None)
    return ChatSettings.from_card(provenance["chat"])


def chat_of(path: str | Path | None, tokenizer: PreTrainedTokenizerBase | None, backbone: Backbone) -> Chat | None:
    """Return what makes prompts as the heads' training did, on this backbone; None without a tokenizer or chat template."""
    if tokenizer is None:
        return None
    settings = ChatSettings() if path is None else chat_settings(read_metadata(path)[1])
    if not settings.template_of(tokenizer):
        return None
    if tokenizer.chat_template not in (None, settings.template_of(tokenizer)):
        advice = "make prompts with the chat attribute of the loaded heads: heads.chat.prompt(messages)"
        warnings.warn(f"{path} was trained with another chat template than this tokenizer's; {advice}", stacklevel=3)
    return Chat(tokenizer, replace(settings, ends=end_tokens(backbone.model.generation_config)))


def add_provenance(folder: Path, added: dict[str, Any]) -> None:
    """Add to the provenance of a saved checkpoint, or replace entries of it, atomically; no other file is touched."""
    settle(folder)
    card = read_json(folder / METADATA, AGAIN)
    card["provenance"] |= added
    with atomic(folder / METADATA) as temporary:
        temporary.write_text(json.dumps(card, indent=2) + "\n")
        flush(temporary)


def require_savable(drafter: Drafter) -> None:
    """Make what a save writes beside the weights, so that what it would raise is raised before a training."""
    drafter.engine_config()
    drafter.engine_files()
    drafter.backbone.contract()


def read_metadata(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """Return the local folder of a checkpoint and its ``headstart.json``.

    ``path``: a folder, a hub id, which is downloaded, or the name of heads that ship with the package (`resolve_heads`).
    """
    folder = resolve_heads(str(path)) or find_folder(path, "heads")
    settle(folder)
    card_file = inside(folder, METADATA)
    if not card_file.is_file():
        raise UserError(f"{path} has no {METADATA}: not heads saved by Headstart (or the run that writes them has not saved yet)")
    card = read_json(card_file, AGAIN)
    if card.get("format", FORMAT) != FORMAT:
        raise UserError(f"{card_file} is of format {card['format']}; this version reads format {FORMAT}")
    wrong = fault(Card, card)
    if wrong is None and Path(card["weights"]["file"]).name != card["weights"]["file"]:
        wrong = "weights.file names no file in the folder"
    if wrong is not None:
        raise UserError(f"{card_file} is damaged ({wrong}); {AGAIN}")
    for name in ("config.json", card["weights"]["file"], *ADAPTER_FILES):
        inside(folder, name)
    return folder, {key: card[key] for key in Card.model_fields}


def load_drafter(
    path: str | Path, backbone: Backbone, *, tokenizer: PreTrainedTokenizerBase | None = None, allow_finetuned: bool = False
) -> Drafter:
    """Load a trained drafter, in the backbone's dtype and on its device.

    Raises UserError if files are missing or damaged, or if the backbone is not the one the heads were trained on. ``allow_finetuned``
    allows another backbone of the same shape: decoding stays lossless, but fewer tokens may be accepted.
    """
    folder, card = read_metadata(path)
    check_contract(str(path), card, backbone, allow_finetuned)
    contract = card["contract"]
    trained = contract.get("precision") or ("another precision" if backbone.match(contract) == "rounded" else None)
    if trained is not None and trained != backbone.precision:
        notice(f"{path} was trained on {card['backbone']} in {trained}; here it is in {backbone.precision}: fewer drafts may be accepted")
    if tokenizer is not None and contract.get("tokenizer") not in (None, tokenizer_digest(tokenizer)):
        notice(f"{path} was trained with a tokenizer that gives other token ids for some texts than this one: fewer drafts may be accepted")
    if tokenizer is not None and not allow_finetuned:
        _require_template(str(path), card, tokenizer)
    try:
        drafter = read_drafter(str(path), folder, card, backbone)
        replaced = read_metadata(path)[1] != card
    except UserError:
        replaced = read_metadata(path)[1] != card
        if not replaced:
            raise
    if replaced:  # a run has saved newer heads meanwhile
        return load_drafter(path, backbone, tokenizer=tokenizer, allow_finetuned=allow_finetuned)
    backbone.require_adapter(str(path), folder / ADAPTER, contract.get("adapter"), allow_finetuned)
    return drafter.to(device=backbone.device, dtype=backbone.dtype).eval().requires_grad_(False)


def _require_template(path: str, card: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError if the heads' chat template is neither kept with them nor the tokenizer's."""
    stored, settings = card["provenance"].get("chat_template"), chat_settings(card)
    found = template_hash(settings.template_of(tokenizer))
    if stored and stored != found:
        raise UserError(
            f"{path} was trained with the chat template {stored}, which it does not keep; this tokenizer's is {found}: use the same one"
        )


def read_drafter(path: str, folder: Path, card: dict[str, Any], backbone: Backbone) -> Drafter:
    """Read the drafter of a checkpoint (see `read_metadata`) in fp32. Raises UserError if files are missing or damaged."""
    file = checked_weights(path, folder, card)
    if not built_in(card["kind"]) and card["kind"] not in sys.modules:
        kind = card["kind"]
        raise UserError(f"{path} was made by code of your own, {kind}; import that module before loading it (--head-module {kind})")
    drafter = construct_drafter(card["kind"], backbone, card["arguments"])
    try:
        drafter.load_tensors(load_file(file))
        drafter.load_files(folder)
    except (SafetensorError, RuntimeError) as error:
        raise UserError(f"{file} does not hold the tensors of {card['kind']}: {cause(error)}") from None
    require_weights(drafter, str(file))
    return drafter


def checked_weights(path: str, folder: Path, card: dict[str, Any]) -> Path:
    """Return the file of a checkpoint's weights. Raises UserError if it is missing or changed."""
    file = weights_file(path, folder, card)
    if file_hash(file) != card["weights"]["sha256"]:
        raise UserError(f"{file} is truncated or changed (its hash is not the one in {METADATA}); {AGAIN}")
    return file


def weights_file(path: str, folder: Path, card: dict[str, Any]) -> Path:
    """Return the file of a checkpoint's weights. Raises UserError if it is missing."""
    file: Path = folder / card["weights"]["file"]
    if not file.is_file():
        raise UserError(f"{path} lacks its weights {file.name}; {AGAIN}")
    return file


def require_adapter(path: str | Path, backbone: Backbone, allow_finetuned: bool = False) -> None:
    """Put the adapter that these heads were trained with, if any, on the backbone, without loading the heads. Raises UserError."""
    folder, card = read_metadata(path)
    backbone.require_adapter(str(path), folder / ADAPTER, card["contract"].get("adapter"), allow_finetuned)


def require_sizes(path: str, backbone: str, *, trust_remote_code: bool = False, whole: bool = True) -> None:
    """Raise UserError for heads of a backbone of other sizes than this one's files state, or, if ``whole``, without their weights.

    No weights are read, so that it is said at once.
    """
    folder, card = read_metadata(path)
    if whole:
        weights_file(path, folder, card)
    _require_alike(path, card, read_sizes(backbone, trust_remote_code=trust_remote_code), backbone)


def _require_alike(path: str, card: dict[str, Any], found: dict[str, Any], here: str) -> dict[str, Any]:
    """Return the heads' contract. Raises UserError, naming both backbones, unless it has what was ``found``."""
    trained, on = card["contract"], card["backbone"] or "another backbone"
    for key, value in found.items():
        if trained.get(key) != value:
            raise UserError(
                f"{path} was trained on {on} ({key} {trained.get(key)}); this backbone is {here} ({key} {value}): "
                "load the backbone it was trained on"
            )
    return dict(trained)


def check_contract(path: str, card: dict[str, Any], backbone: Backbone, allow_finetuned: bool) -> None:
    """Raise UserError, naming both backbones, if the heads were trained on another one."""
    found = backbone.contract()
    found.pop("weights")
    on, here = card["backbone"] or "another backbone", backbone.name or type(backbone.model).__name__
    trained = _require_alike(path, card, found, here)
    if not allow_finetuned and backbone.match(trained) == "other":
        raise UserError(
            f"{path} was trained on {on}; this backbone is {here}, of that shape with other weights: load the one it was trained on, "
            "or, if this is a fine-tune of it, pass allow_finetuned=True (--allow-finetuned)"
        )
