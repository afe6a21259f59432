"""The sections of a recipe about the run: objective, training, evaluation, and servers of hidden states and answers."""

import math
import re
from functools import partial
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, AllowInfNan, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from headstart.support.config import MAX_BATCH, MAX_NODES, MAX_STEP_SEQUENCES, MAX_WIDTH, RuleError, StrictModel, Temperature
from headstart.support.errors import UserError
from headstart.training.recipe.sections import AS_LIST, Fraction, Text, or_one

TERMS = ("kl", "reverse_kl", "js", "ce", "tv", "lk_alpha", "lk", "topk_kl", "features")
Beta = Annotated[float, Ge(0), Lt(1)]
VARIABLE = re.compile("[A-Z_][A-Z0-9_]*")


class Objective(StrictModel):
    terms: Annotated[dict[str, NonNegativeFloat], Field(json_schema_extra={"propertyNames": {"enum": list(TERMS)}})] = {"kl": 1.0}
    """Term -> weight: kl, reverse_kl, js, ce, tv, lk_alpha, lk, topk_kl, features; see the table of terms."""
    lk_eta: NonNegativeFloat = 3.0
    """For ``lk``: how fast the weight of KL falls as acceptance rises; 10 suits Medusa."""
    top_k: PositiveInt = 32
    """For ``topk_kl``: number of most probable tokens that are compared one by one; all others share a bin."""
    depth_weights: Literal["expected", "geometric"] = "expected"
    """``expected``: by what each depth adds to the expected acceptance length (D-PACE); ``geometric``: by ``depth_decay``."""
    depth_decay: Annotated[float, Gt(0), Le(1)] = 0.8
    """With ``geometric``, and for on-policy drafts: depth k has this to the power k as its weight."""
    chunk_size: PositiveInt = 1024
    """Most positions whose logits are held at a time; smaller takes less memory."""
    on_policy: NonNegativeFloat = 0.0
    """Weight of the on-policy loss: drafts sampled from the drafter itself, scored by the backbone; 0: teacher-forced only."""
    on_policy_share: Annotated[float, Gt(0), Le(1)] = 0.05
    """Share of the label positions that on-policy drafts start from at a step; the loss is weighted by 1 / share."""
    on_policy_temperature: Temperature = 1.0
    """Temperature at which on-policy drafts are sampled; 0 is greedy."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in self.terms:
            if name not in TERMS:
                raise RuleError("terms", f"knows {', '.join(TERMS)}", name)
        if not any(self.terms.values()):
            raise RuleError("terms", "needs a weight above 0", self.terms)
        return self


class Train(StrictModel):
    steps: PositiveInt | None = None
    """Optimizer steps; instead of ``epochs``. On the command line either replaces the other."""
    epochs: PositiveFloat | None = None
    """Passes over the data; 1 when neither this nor ``steps`` is given."""
    batch_size: Annotated[int, Ge(1), Le(MAX_STEP_SEQUENCES)] = 8
    """Sequences of an optimizer step, over all processes and accumulation."""
    micro_batch: PositiveInt | None = None
    """Sequences of one forward on one device (per-device batch size); null: the device's whole share, without accumulation."""
    optimizer: Literal["auto", "adamw", "muon"] = "auto"
    """``muon``: Muon for hidden matrices, AdamW for vocabulary tables and vectors, at one learning rate; ``auto``: Muon if ``lr`` is auto
    too, AdamW beside a number, since published rates are AdamW's."""
    lr: PositiveFloat | Literal["auto"] = "auto"
    """Peak learning rate; ``auto``: by the width of the drafter, the tokens of a step and the number of steps (docs/defaults.md)."""
    readout_lr_ratio: PositiveFloat | Literal["auto"] = "auto"
    """Learning rate of the heads' own output layers, as a fraction of ``lr``; ``auto``: 0.3 for EAGLE-3 under Muon, 1 otherwise."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Of AdamW."""
    weight_decay: NonNegativeFloat = 0.0
    """Of matrices; under ``muon`` of hidden ones only."""
    max_grad_norm: Annotated[float, Gt(0), AllowInfNan(True)] = 1.0
    """Gradient norm that gradients are clipped to."""
    warmup_ratio: Fraction = 0.03
    """Fraction of the steps over which the learning rate rises."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Learning rate after warm-up; ``wsd`` is constant until the last ``decay_ratio`` of the steps, then falls linearly."""
    decay_ratio: Annotated[float, Gt(0), Le(1)] = 0.2
    """Fraction of the steps over which ``wsd`` falls, the last ones."""
    min_lr_ratio: Annotated[float, Ge(0), Le(1)] = 0.1
    """Learning rate at the end of the schedule, as a fraction of ``lr``."""
    ema_decay: Annotated[float, Gt(0), Lt(1)] | None = None
    """Evaluate and save an exponential moving average of the weights with this decay per step (0.999); null: the weights."""
    precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """Autocast of the drafter's forward, whose weights stay in fp32; ``auto``: bf16 if the backbone is in 16 bits, else none."""
    gradient_checkpointing: bool = False
    """Recompute activations of the drafter, and of a backbone with ``lora``, in the backward pass: less memory, same gradients."""
    compile: bool = False
    """Compile what the objective does with logits (torch.compile): fewer kernels, some seconds at the start. Not run on a GPU yet."""
    non_finite: Literal["stop", "skip"] = "stop"
    """When a loss or gradient is not finite: stop, or skip that step (and stop after ten in a row)."""

    @property
    def chosen_optimizer(self) -> Literal["adamw", "muon"]:
        """The optimizer with ``auto`` resolved."""
        return ("muon" if self.lr == "auto" else "adamw") if self.optimizer == "auto" else self.optimizer

    @property
    def peak_lr(self) -> float:
        """The learning rate as a number, once ``auto`` is resolved (training/run/start.py)."""
        assert not isinstance(self.lr, str)
        return self.lr

    @property
    def readout_ratio(self) -> float:
        """``readout_lr_ratio``, 1 where ``auto`` chose nothing else."""
        return 1.0 if isinstance(self.readout_lr_ratio, str) else self.readout_lr_ratio

    @model_validator(mode="before")
    @classmethod
    def _one_epoch(cls, values: Any) -> Any:
        unset = isinstance(values, dict) and values.get("steps") is None and values.get("epochs") is None
        return {**values, "epochs": 1.0} if unset else values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise RuleError("steps", f"and train.epochs={self.epochs} are two lengths of one run; set either to null", self.steps)
        if self.batch_size % (self.micro_batch or 1):
            raise RuleError("micro_batch", f"divides train.batch_size={self.batch_size}", self.micro_batch)
        if self.schedule == "wsd" and self.warmup_ratio + self.decay_ratio > 1:
            rule = f"is at most {1 - self.warmup_ratio:g} beside train.warmup_ratio={self.warmup_ratio:g}"
            raise RuleError("decay_ratio", rule, self.decay_ratio)
        return self


class Eval(StrictModel):
    every: NonNegativeInt = 0
    """Steps between evaluations, each of which decodes held-out prompts; 0 evaluates at the end only."""
    prompts: PositiveInt = 20
    """Held-out prompts to decode."""
    prompt_tokens: PositiveInt = 64
    """Tokens of a plain text that are the prompt; the prompt of a conversation ends before its last answer."""
    max_new_tokens: PositiveInt = 64
    """Tokens to generate after each prompt."""
    temperature: Temperature = 0.0
    """0 is greedy."""
    nodes: Annotated[int, Ge(1), Le(MAX_NODES)] = 24
    """Size of the candidate tree, root included, that a forward pass verifies."""
    width: Annotated[int, Ge(1), Le(MAX_WIDTH)] = 8
    """Beam width: nodes expanded per draft level."""
    max_seconds: PositiveFloat = 300.0
    """Seconds after which an evaluation ends with what has been decoded until then; the log says so."""


def address(section: str, text: str) -> str:
    """Check ``section.endpoint``, an address without anything secret."""
    try:
        parts = urlsplit(text)
        if parts.username is not None or parts.password is not None or parts.query:  # it would stand in logs and cards
            fault = f"{section}.endpoint is an address without user, password and query (what was given is not shown)"
            raise UserError(f"{fault}; name the environment variable with the server's key in {section}.api_key")
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return text
    except UserError:
        raise
    except ValueError:  # a port that is no number
        pass
    raise ValueError("is an http(s) address, or null")


def variable(section: str, name: str) -> str:
    """Check ``section.api_key``, the name of an environment variable."""
    if VARIABLE.fullmatch(name):
        return name
    rule = f"{section}.api_key is the name of an environment variable in capitals, as SERVER_KEY, or null"
    raise UserError(f"{rule}; what was given, perhaps the key itself, is not shown")


Address = Annotated[str, AfterValidator(partial(address, "features"))]
Addresses = Annotated[list[Address], MinLen(1), AS_LIST, Field(json_schema_extra=or_one)]


class Features(StrictModel):
    endpoint: Addresses | None = None
    """One or several vLLM servers of hidden states (``headstart serve-features``), as http://host:8000; null: the backbone runs here."""
    folder: Text = "/dev/shm/headstart-features"
    """Folder that the servers write hidden states to and this machine reads and deletes them from: in memory, or on a shared disk."""
    model: str | None = None
    """The backbone's name on the servers; null: the one that ``headstart serve-features`` gives it, which names the layers."""
    api_key: Annotated[str, AfterValidator(partial(variable, "features"))] | None = None
    """Name of the environment variable that holds the servers' key; null sends none."""
    concurrency: PositiveInt = 16
    """Requests in flight at once, over all servers."""
    prefetch: NonNegativeInt = 2
    """Steps whose hidden states are asked for while earlier steps compute."""
    check_every: PositiveInt = 100
    """Of how many samples one is checked against the server's own log-probabilities, after the first eight."""
    timeout: PositiveFloat = 600.0
    """Seconds to wait for one sample's hidden states."""
    patience: PositiveFloat = 900.0
    """Seconds that all servers may be away or failing before the run ends, saved."""


def _jsonl(name: str) -> str:
    if not name.endswith(".jsonl") or name == ".jsonl":
        raise ValueError("is the name of a .jsonl file, or null")
    return name


class Regenerate(StrictModel):
    out: Annotated[str, AfterValidator(_jsonl)] | None = None
    """The .jsonl file that ``headstart regenerate`` writes: the prompts of ``data.train`` with the backbone's own answers."""
    limit: PositiveInt | None = None
    """Maximum number of rows to answer; null: as many as ``data.limit`` allows."""
    hours: Annotated[float, Gt(0)] | None = None
    """Ask no more rows after this time, and write what was answered; rows are then asked in random order. Each start has it anew."""
    samples: PositiveInt = 1
    """Answers to each row, each sampled with a seed of its own: for few prompts. Above 1 every temperature is above 0."""
    temperature: Temperature | Annotated[tuple[Temperature, ...], MinLen(1)] = (0.0, 1.0)
    """0 is greedy; above it answers are sampled, each row with a seed of its own. Of several, each row takes one, for all its turns."""
    top_k: NonNegativeInt = 0
    """Sample from this many most probable tokens; 0: from all."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Sample from the most probable tokens that reach this probability together (nucleus sampling)."""
    max_new_tokens: PositiveInt = 1024
    """Most tokens of an answer; plain text is continued by at most as many."""
    unfinished: Literal["drop", "keep"] = "drop"
    """What becomes of an answer that does not end within them: dropped, or kept cut off, as the last one of its conversation."""
    prompt_tokens: PositiveInt = 64
    """Tokens of a plain text that are kept and continued (half of a shorter one)."""
    batch_size: Annotated[int, Ge(1), Le(MAX_BATCH)] = 8
    """Rows decoded at once; changes the speed only, as do ``heads``."""
    heads: str | None = None
    """Trained heads to decode faster with, a folder or hub id; null drafts from n-grams of the text and earlier answers."""
    endpoint: Annotated[str, AfterValidator(partial(address, "regenerate"))] | None = None
    """Ask this OpenAI-compatible server, as http://localhost:8000/v1, instead of loading the backbone."""
    model: str | None = None
    """The backbone's name on that server; null: ``backbone.path``."""
    api_key: Annotated[str, AfterValidator(partial(variable, "regenerate"))] | None = None
    """Name of the environment variable that holds the server's key; null sends none."""
    concurrency: PositiveInt = 16
    """Requests in flight at once."""
    retries: NonNegativeInt = 6
    """Times a request is repeated when the server is busy, broken or silent, after longer and longer waits."""
    timeout: PositiveFloat = 600.0
    """Seconds to wait for an answer."""

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Those that rows take."""
        return self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)

    @property
    def seconds(self) -> float:
        """``hours`` in seconds; infinite without them."""
        return math.inf if self.hours is None else 3600 * self.hours

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.heads is not None and self.endpoint is not None:
            rule = f"and regenerate.endpoint={self.endpoint!r} are two ways to answer: heads draft in this process; set either to null"
            raise RuleError("heads", rule, self.heads)
        if self.samples > 1 and 0 in self.temperatures:
            rule = "needs regenerate.temperature above 0, at which answers to a row differ; name temperatures without 0"
            raise RuleError("samples", rule, self.samples)
        return self
