"""The sections of a recipe about what a run reads and writes: the backbone, the data, cached features, checkpoints, the log."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Lt, MinLen
from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, field_serializer, model_validator

from headstart.support.config import RuleError, StrictModel

Text = Annotated[str, MinLen(1)]
Fraction = Annotated[float, Ge(0), Lt(1)]


class Lora(StrictModel):
    rank: PositiveInt = 32
    """Rank of the adapter's matrices."""
    alpha: PositiveFloat = 16.0
    """The adapter's output is scaled by ``alpha / rank``."""
    dropout: Fraction = 0.05
    """Dropout before the adapter, in training."""
    target_modules: Text | list[Text] = "all-linear"
    """Layers to adapt, as in PEFT: ``all-linear`` (but the output layer), a regular expression, or a list of module names."""
    use_dora: bool = False
    """Train magnitudes and directions of the weights apart (DoRA, 2402.09353); slower, in decoding too."""
    lr_ratio: PositiveFloat = 0.25
    """Learning rate of the adapter as a fraction of ``train.lr``."""
    lm_weight: Annotated[float, Ge(0)] = 5.0
    """Weight of the backbone's own next-token cross-entropy beside the heads' objective."""
    kl_weight: Annotated[float, Ge(0)] = 0.0
    """Weight of the KL divergence of the adapted backbone from the original one; above 0 it costs a second forward pass of the backbone."""
    warmup_ratio: Fraction = 0.0
    """Fraction of the steps, the first ones, that train the heads alone: the backbone is still the original one."""
    ramp_ratio: Fraction = 0.0
    """Fraction of the steps, after those, over which the heads' weight in the loss and the adapter's learning rate rise from 0."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.warmup_ratio + self.ramp_ratio > 1:
            rule = f"is at most {1 - self.warmup_ratio:g} beside backbone.lora.warmup_ratio={self.warmup_ratio:g}"
            raise RuleError("ramp_ratio", rule, self.ramp_ratio)
        return self


class Backbone(StrictModel):
    path: str
    """Causal language model: hub id, folder, GGUF file, or ``embedded`` for the small one that ships with the project."""
    gguf_file: Text | None = None
    """A GGUF file in that folder or hub repository; it becomes part of ``path``. Its weights are dequantized."""
    dtype: Literal["auto", "fp32", "bf16", "fp16", "int8", "int4"] = "auto"
    """Dtype of its weights; ``auto``: as saved, on a CPU fp32 or the bf16 that it computes; ``int8``, ``int4``: linear layers quantized."""
    trust_remote_code: bool = False
    """Run code from the model's repository."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation; ``auto``: sdpa, or eager, which is slower, for models without it (Gemma-2, gpt-oss)."""
    shard: bool = False
    """Shard its layers over the processes (FSDP2), gathering each while it runs: for a model that does not fit one device."""
    adapter: Text | None = None
    """PEFT adapter (LoRA, DoRA) that the backbone carries, frozen: a folder or hub id. Heads are trained on and saved with it."""
    lora: Lora | None = None
    """Train a LoRA adapter on the backbone together with the heads (Medusa-2, 2401.10774); null: the backbone is frozen."""

    @model_validator(mode="before")
    @classmethod
    def _join(cls, values: Any) -> Any:
        """One name for a GGUF file, which heads store and commands take: its path."""
        if not isinstance(values, dict) or not all(isinstance(values.get(key), str) for key in ("path", "gguf_file")):
            return values
        if not values["gguf_file"].lower().endswith(".gguf"):
            raise RuleError("gguf_file", "ends in .gguf", values["gguf_file"])
        return {**values, "path": f"{values['path'].rstrip('/')}/{values['gguf_file']}", "gguf_file": None}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key, used in (("lora", self.lora is not None), ("adapter", self.adapter is not None)):
            if self.shard and used:
                raise RuleError("shard", f"cannot be combined with backbone.{key}; set either back", True)
        if self.adapter is not None and self.lora is not None:
            rule = "stays frozen, and backbone.lora trains another; merge it into the backbone with PEFT first, or set either to null"
            raise RuleError("adapter", rule, self.adapter)
        if self.shard and self.dtype in ("int8", "int4"):
            raise RuleError("shard", f"needs weights of one dtype, which backbone.dtype={self.dtype} has not; set either back", True)
        return self


class Columns(StrictModel):
    prompt: Text
    """Column of what is asked: text, or a list of turns."""
    completion: Text | None = None
    """Column of the answer; `headstart regenerate` needs none."""


class Dataset(StrictModel):
    """An entry of ``data.train``. Its null keys have the value of the same key of ``data``."""

    path: Text
    """A file, or the name of a dataset, as ``data.train``."""
    weight: PositiveFloat | None = None
    """Share of the samples that steps read from this dataset, relative to the other weights; null in all: by their sizes."""
    split: str | None = None
    """Split of a named dataset."""
    subset: str | None = None
    """Configuration of a named dataset."""
    format: Literal["auto", "tokens", "messages", "conversations", "text"] | None = None
    """How its rows hold text."""
    column: str | None = None
    """Column that holds it."""
    columns: Columns | None = None
    """Two columns that hold it, a prompt and its completion."""
    limit: PositiveInt | None = None
    """Read at most this many of its rows."""


NAME = {"type": "string", "minLength": 1}


def or_one(schema: dict[str, Any]) -> None:
    """Let the JSON schema of a list of one or more allow a single name too."""
    schema["anyOf"] = [NAME, {"type": "array", "minItems": 1, "items": schema.pop("items")}]
    for key in ("type", "minItems"):
        schema.pop(key, None)


AS_LIST = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


def _jinja(template: str) -> str:
    if template and "{" not in template:
        raise ValueError("is the text of a Jinja template, with {{ }} or {% %} in it, and no name")
    return template


def _datasets(value: Any) -> Any:
    """One name as a list of one entry, and names in a list as entries."""
    if not isinstance(value, str | list) or not value:
        raise ValueError("is a file or the name of a dataset, or a list of such names or of {path: NAME, weight: NUMBER, ...}")
    return [{"path": dataset} if isinstance(dataset, str) else dataset for dataset in ([value] if isinstance(value, str) else value)]


def _or_name(schema: dict[str, Any]) -> None:
    """The JSON schema of ``data.train``: a name, or a list of names and entries."""
    schema["items"] = {"anyOf": [NAME, schema["items"]]}
    or_one(schema)


Datasets = Annotated[list[Dataset], BeforeValidator(_datasets), Field(json_schema_extra=_or_name)]


def _instant(text: str) -> str:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("is an instant in ISO 8601, as '2026-11-26T09:00:00', or null") from None
    return text


class Data(StrictModel):
    train: Datasets
    """A file (.jsonl, .ndjson, .json, .csv, .tsv, each also with .gz or .zst, or .parquet), a pattern of files (``data/*.jsonl``),
    ``quickstart:FILE`` (shipped), a folder of ``Dataset.save_to_disk``, or the name of a dataset; or a list of these, each a name or a
    mapping of ``path``, ``weight`` and other keys."""
    split: str = "train"
    """Split of a named dataset; a file has none."""
    subset: str | None = None
    """Configuration of a named dataset, where it has several."""
    eval: str | None = None
    """Held-out rows, named like ``train``; null holds out ``eval_rows`` rows of ``train`` instead."""
    eval_split: str = "test"
    """Split of ``eval``, where that is a named dataset."""
    eval_rows: NonNegativeInt = 64
    """Rows to hold out, or the most to read from ``eval``; 0 trains on every row and evaluates nothing."""
    format: Literal["auto", "tokens", "messages", "conversations", "text"] = "auto"
    """Token ids (``input_ids`` with ``loss_mask``), turns of role and content, turns of from and value (ShareGPT), or plain text; ``auto``
    looks at the rows."""
    column: str | None = None
    """Column that holds it, if not one named like the format."""
    columns: Columns | None = None
    """Two columns that hold it, a prompt and its completion, if not named as usual (``prompt`` and ``completion``, ``instruction`` and
    ``output``, ``question`` and ``answer``, ...); with ``format: text`` they are plain text, without the chat template."""
    images: bool = False
    """Turns may have images (``{type: image, image: FILE}``, a local file or data: URL), which the model's processor reads."""
    chat_template: Annotated[str, AfterValidator(_jinja)] | None = None
    """A Jinja chat template for a tokenizer that has none, or instead of its own; saved with the heads."""
    template_kwargs: dict[str, Any] = {}
    """Further variables of the chat template, as ``enable_thinking: false``; ``tools`` for rows without a column ``tools``."""
    template_time: Annotated[str, AfterValidator(_instant)] | None = None
    """The instant whose date a chat template prints, in ISO 8601; null: when the run, the cache or the file of answers was begun."""
    max_length: Annotated[int, Ge(4)] = 2048
    """Most tokens of a sample, and of a packed row."""
    packing: bool = False
    """Pack as many samples into a row as fit ``max_length``, each attending to itself only; ``train.batch_size`` then counts rows."""
    overlong: Literal["auto", "truncate", "split", "skip", "error"] = "auto"
    """Samples over ``max_length``: ``auto`` splits them when packing, else truncates; their number is reported."""
    on_bad_row: Literal["skip", "error"] = "skip"
    """Rows that cannot be read, as an unknown speaker: ``skip`` names the first and leaves them out where they are fewer than 1 % of a
    file, or a single one of at least 20; ``error`` ends at the first."""
    processes: PositiveInt | None = None
    """Processes that tokenise, on Linux, from 2,048 rows on (each has at least 1,024); null: one for each CPU, at most 16."""
    limit: PositiveInt | None = None
    """Read at most this many rows of ``train``, of each dataset if there are several."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Tokens with loss: the assistant's turns, or every token; all tokens of plain text have loss."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        weights = [dataset.weight for dataset in self.train]
        if None in weights and any(weights):
            raise RuleError(f"train[{weights.index(None)}].weight", "is a number above 0, as other entries of data.train have one", None)
        for one in self.per_dataset():
            if one.columns is not None and (one.column is not None or one.format not in ("auto", "text")):
                rule = "stands in place of data.column, with data.format auto or text; set the others back"
                raise RuleError("columns", rule, one.train[0].path)
        return self

    @field_serializer("train")
    def _as_written(self, train: list[Dataset]) -> Any:
        entries = [dataset.path if (given := dataset.model_dump(exclude_none=True)).keys() == {"path"} else given for dataset in train]
        return entries[0] if len(entries) == 1 and isinstance(entries[0], str) else entries

    @property
    def name(self) -> str:
        """The datasets' paths."""
        return ", ".join(dataset.path for dataset in self.train)

    def held_out(self) -> list[Data]:
        """Return the settings of ``eval`` as if it were the only dataset, if any of its rows are read."""
        own = {"train": [Dataset(path=self.eval)], "split": self.eval_split, "limit": self.eval_rows} if self.eval is not None else {}
        return [self.model_copy(update=own)] if own and self.eval_rows else []

    def per_dataset(self) -> list[Data]:
        """Return, for each dataset, the settings as if it were the only one."""
        own = ("path", "weight")
        given = [{key: value for key, value in dataset if value is not None and key not in own} for dataset in self.train]
        alone = [Dataset(path=dataset.path) for dataset in self.train]
        return [self.model_copy(update={"train": [dataset], **keys}) for dataset, keys in zip(alone, given, strict=True)]

    @property
    def splits_long(self) -> bool:
        """Whether a sample over ``max_length`` becomes several."""
        return self.overlong == "split" or (self.overlong == "auto" and self.packing and not self.images)


class Cache(StrictModel):
    dir: Text | None = None
    """Folder of cached features that training reads instead of running the backbone; null runs it at every step."""
    dtype: Literal["int8", "bf16", "exact"] = "int8"
    """Stored hidden states: 8 bits with scales per channel and token, bf16, or the backbone's own dtype."""
    between_epochs: bool = True
    """On a CPU, without ``dir``: keep the features of the first epoch for the next ones, in ``save.dir``, until the run ends."""
    shard_mb: PositiveInt = 256
    """Size of a file; a killed writer loses at most one."""


class Save(StrictModel):
    dir: Text
    """Folder of the trained heads, the log and the state to resume from."""
    every: NonNegativeInt = 0
    """Steps between checkpoints; 0 saves at the end only."""
    keep: PositiveInt = 2
    """Checkpoints to keep on disk."""
    resume: bool = True
    """Resume from the last checkpoint in ``dir``, if there is one."""


class Log(StrictModel):
    wandb: Literal["off", "online", "offline"] = "off"
    """Log to Weights & Biases too; a JSONL log is always written."""
    tensorboard: bool = False
    """Write TensorBoard files too, in ``save.dir/tensorboard``."""
    project: str = "headstart"
    """Project in Weights & Biases."""
    name: str | None = None
    """Name of the run there; null lets it choose."""
    every: PositiveInt = 10
    """Steps between lines."""
