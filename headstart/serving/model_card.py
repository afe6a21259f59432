"""The model card of published heads. It states what the files say and what was measured, and names no folder of this machine.

Figures are from reports of `headstart bench` and from the run's last evaluation. Of a path its last part is left, and hosts are taken out.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError
from yaml import YAMLError

from headstart.heads.backbone.adapter import ADAPTER
from headstart.heads.backbone.gguf_file import SUFFIX, find_gguf
from headstart.heads.checkpoint import recipe_section
from headstart.inference.bench.systems import ALONE, FIXED
from headstart.serving.engines import ENGINES, LINES, METHODS, Served, readers
from headstart.serving.export import BACKBONE, adapter_rank
from headstart.serving.layouts.layout import Checkpoint
from headstart.serving.reading import layouts_of
from headstart.support.errors import UserError
from headstart.support.files import require_file
from headstart.support.hub import is_hub_id, reaching, resolve
from headstart.support.json_text import log_lines, read_json

UNCHANGED = ("eagle3", "peagle", "draft_model", "pard")
"""Methods whose checkpoints engines load as they are, unless an adapter belongs to them; others are exported first."""
SETTINGS = {"nodes", "width", "prompts", "temperature", "max_new_tokens"}
"""Keys of an evaluation's settings that are shown."""
PATH = re.compile(r"""(?<![\w.:/~-])(?:~[\w.-]*|[A-Za-z]:)?[/\\](?:[^\s/\\'",:=]+[/\\])*([^\s/\\'",:=]+)[/\\]?""")
"""An absolute path in a command; the group is its last part."""
START = re.compile(r"[/~]|[A-Za-z]:[/\\]")
HOSTS = ("endpoint", "_name_or_path")
"""Keys whose values may name a host or folder and say nothing about the heads."""
TEXTS = ("template", "chat_template", "template_kwargs")
"""Keys of chat templates, in which ``</think>`` and ``/no_think`` are no paths."""


@dataclass(frozen=True)
class Measured:
    """Figures of one measurement as rows of the table, and its settings in a sentence."""

    rows: list[list[str]]
    about: str
    counted: bool = False
    """Whether acceptance was measured as vLLM counts it too."""


@dataclass(frozen=True)
class Heads:
    folder: Path
    method: str
    """See `engines.METHODS`, or the kind of code of the user's own."""
    card: dict[str, Any]
    """``headstart.json`` of the checkpoint; of an export whose checkpoint is gone only what it records."""
    base_model: str | None
    """The backbone's hub id, if it is known."""
    depth: int
    engines: tuple[str, ...]
    """Engines that read the heads, exported first where their method needs it."""
    files: tuple[Path, ...]
    """Relative to the folder."""
    run: Path
    """The folder of the training run, which may be gone."""
    layout: str | None = None
    """Of an exported folder; None: a checkpoint."""
    saved: Checkpoint | None = None
    """None: an exported folder."""

    @property
    def shown_backbone(self) -> str:
        """The backbone's name without a path."""
        return self.base_model or last_part(self.card["backbone"]) or "a backbone that is not named"


def model_card(heads: Heads, repo: str, measured: list[Measured]) -> str:
    """Return README.md for the repository ``repo``, with the backbone's licence, if it states one."""
    backbone = heads.card["backbone"]
    train = recipe_section(heads.card["provenance"], "data").get("train") or []
    data = [train] if isinstance(train, str) else [str(source) for source in train]
    license = license_of(heads.base_model or backbone) or (license_of(backbone) if heads.base_model not in (None, backbone) else None)
    name = METHODS.get(heads.method, heads.method).partition(" (")[0]
    metadata = ModelCardData(
        base_model=heads.base_model,
        license=license,
        library_name="headstart",
        tags=["speculative-decoding", heads.method.replace("_", "-"), "headstart"],
        datasets=[name for name in data if is_hub_id(name)] or None,
    )
    card = ModelCard.from_template(
        metadata,
        template_path=str(Path(__file__).with_name("model_card.md.jinja")),
        title=name[0].upper() + name[1:] + ("" if name.endswith("model") else " heads"),
        backbone=heads.shown_backbone,
        depth=heads.depth,
        adapted=heads.card["contract"].get("adapter") is not None,
        measured=measured,
        counted=any(report.counted for report in measured),
        serving=_serving(heads, repo),
        layout=heads.layout,
        repo=repo,
        gguf=heads.shown_backbone.endswith(SUFFIX),
        carried=any(file.parts[0] == "custom_generate" for file in heads.files),
        training=_training(heads, data),
    )
    return str(card) + "\n"


def _serving(heads: Heads, repo: str) -> list[tuple[str, list[str]]]:
    """Return the engines that read the heads, each with the lines that start it."""
    found = []
    for engine, entry in readers(heads.method).items():
        if engine in heads.engines:  # of one whose newest version no longer reads a layout, the layout is asked for by name
            to = engine if entry.until is None else next(layout.name for layout in layouts_of(heads.method) if engine in layout.engines)
            first, served = _served(heads, repo, to)
            found.append((f"{ENGINES[engine]}, {entry}", [*first, LINES[engine](served)]))
    return found


def _served(heads: Heads, repo: str, to: str) -> tuple[list[str], Served]:
    """Return the lines that bring the heads into the layout ``to``, if they are not in it, and what the engine then starts with."""
    adapted, own = heads.card["contract"].get("adapter") is not None, {file.parts[0] for file in heads.files}
    first, folder, backbone = [], repo, heads.shown_backbone
    if heads.layout is None and (adapted or heads.method not in UNCHANGED):
        own, folder = {BACKBONE}, "heads"  # as export writes them
        first = [f"headstart export --heads {repo} --to {to} --backbone {backbone} --out {folder}"]
    elif adapted:
        folder = "heads"
        first = [f"hf download {repo} --local-dir {folder}"]
    if adapted and BACKBONE in own:
        backbone = f"{folder}/{BACKBONE}"
    kept = f"{folder}/{ADAPTER}" if adapted and ADAPTER in own else None
    rank, config = adapter_rank(heads.folder / ADAPTER) if kept else 0, read_json(heads.folder / "config.json", "fetch the heads again")
    return first, Served(heads.method, folder, backbone, heads.depth, config, kept, rank)


def _training(heads: Heads, data: list[str]) -> dict[str, Any]:
    """Return the rows of the table; those without a value are left out."""
    given = heads.card["provenance"]
    stated = {name: value for name, value in heads.card["arguments"].items() if value and not isinstance(value, dict | list)}
    arguments = ", ".join(f"{name} {value}" for name, value in stated.items())
    counts = {name: f"{given[name]:,}" for name in ("steps", "tokens") if given.get(name) is not None}
    return {
        "method": f"{METHODS.get(heads.method, heads.method)}: {arguments}" if arguments else "",
        "backbone": heads.shown_backbone,
        "its weights": heads.card["contract"].get("precision"),
        "data": ", ".join(map(last_part, data)),
        **counts,
        "chat template": f"hash {given['chat_template']}" if given.get("chat_template") else "",
        "layout": heads.layout,
        "made with": ", ".join(f"{name} {number}" for name, number in given.get("versions", {}).items()),
        "commit of Headstart": given.get("commit"),
    }


def license_of(backbone: str) -> str | None:
    """Return the licence that the model card of a folder or hub id states, or the header of a GGUF file.

    None if it states none, or cannot be reached.
    """
    if (gguf := find_gguf(backbone)) is not None:
        return str(gguf.header.metadata.get("general.license") or "") or None
    folder = Path(resolve(backbone))
    with suppress(OSError, ValueError, HfHubHTTPError, YAMLError), reaching(backbone):  # no card, no repository, no network
        card = ModelCard.load(folder / "README.md" if folder.is_dir() else backbone, ignore_metadata_errors=True)
        return card.data.license if isinstance(card.data.license, str) else None
    return None


def bench_figures(file: Path, names: tuple[str, ...]) -> Measured:
    """Return the figures of a report of ``headstart bench --json``. Raises UserError if it is none, or has no heads of these names."""
    report = read_json(require_file("--bench", file), "measure again")
    try:
        found = [(Path(str(row["head"]).removesuffix(FIXED).removesuffix(ALONE)).name, row) for row in report["results"]]
        rows = [row for name, row in found if name in names]
        if not rows:
            measured = ", ".join(sorted({name for name, _ in found}))
            raise UserError(f"{file} has figures of {measured}, not of {names[0]}; give a report of headstart bench on these heads")
        differing = max(row["prompts_differing"] for row in rows)
        same = "Every token is that of autoregressive decoding with the same seed."
        other = f"Tokens differ from autoregressive decoding in up to {differing} prompts, by rounding in this dtype."
        about = (
            f"`headstart bench` {report['versions']['headstart']} on {last_part(report['backbone'])}, {report['dtype']},"
            f" {report['device']}, {report['threads']} threads; {report['prompts']} prompts, up to {report['max_new_tokens']} tokens each,"
            f" seed {report['seed']}. {other if differing else same}"
        )
        cells = []
        for row in rows:
            cells += [_cells(task or "all", report["tasks"][task], row, result) for task, result in row["tasks"].items()]
            cells += [_cells("all", report["prompts"], row, row)] * (len(row["tasks"]) > 1)
        return Measured(cells, about, counted=True)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        fault = f"{type(error).__name__}: {error}"
        raise UserError(f"--bench {file} is no report of this version's headstart bench --json ({fault}); measure again") from None


def training_figures(run: Path, provenance: dict[str, Any]) -> list[Measured]:
    """Return the last evaluation of a training run; nothing if there was none, or the run's log is not there."""
    tau, steps, settings = provenance.get("tau"), provenance.get("steps", 0), recipe_section(provenance, "eval")
    file = run / "log.jsonl"
    if tau is None or not file.is_file() or not SETTINGS <= settings.keys():
        return []
    lines = [line for _, line in log_lines(file) if line.get("tau") == tau and line.get("step", 0) <= steps]
    if not lines or "acceptance_per_depth" not in lines[-1]:
        return []
    most = f"at most {settings['prompts']} prompts, {settings['max_new_tokens']} tokens each"
    about = f"The evaluation of the training run at step {lines[-1]['step']} of {steps}: {most}."
    row = _cells("held out from training", settings["prompts"], settings, {"tau": tau, **lines[-1]})
    return [Measured([row], about)]


def _cells(task: str, prompts: int, setting: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """Return a row of the table: what was accepted at a setting."""
    depth = f", depth {setting['depth']}" if setting.get("depth") is not None else ""
    tree = "adaptive" if setting["nodes"] is None else f"{setting['nodes']} nodes, width {setting['width']}{depth}"
    own = [task, str(prompts), f"{setting['temperature']:g}", str(setting.get("batch", 1)), tree, f"{result['tau']:.2f}"]
    engines = [result.get("mean_acceptance_length"), result.get("speedup_vs_ar")]
    shares = " ".join(f"{share:.2f}" for share in result["acceptance_per_depth"])
    return [*own, shares, *("not measured" if value is None else f"{value:.2f}" for value in engines)]


def last_part(name: str) -> str:
    """Return a path's last part; anything that is no absolute path is left as it is."""
    if START.match(name):  # the whole is a path, with spaces perhaps
        return re.split(r"[/\\]", name.rstrip("/\\"))[-1]
    return PATH.sub(lambda match: match[1], name)


def scrubbed(value: Any, known: dict[str, str]) -> Any:
    """Return JSON with absolute paths replaced by their last parts, or as ``known`` says, and hosts by null; chat templates stay."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key in TEXTS}
        return {key: None if key in HOSTS else scrubbed(item, known) for key, item in value.items()} | kept
    if isinstance(value, list):
        return [scrubbed(item, known) for item in value]
    if isinstance(value, str):
        return known.get(value, last_part(value))
    return value
