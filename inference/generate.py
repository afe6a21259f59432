"""The user's entry point: a model with its heads, and the callable to pass to transformers' ``generate``.

heads = headstart.load("out/qwen3-8b-eagle3", backbone=model)
model.generate(**inputs, custom_generate=heads.generate, do_sample=True, temperature=0.7)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from headstart.chat.conversation import Chat
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.hooks import Evaluation, frozen
from headstart.heads.backbone.probes import PREPARES, prepares_itself
from headstart.heads.base import Drafter, require_count
from headstart.heads.card import METADATA
from headstart.heads.checkpoint import AGAIN, chat_of, load_drafter, read_metadata, recipe_section
from headstart.inference.capture.capture import BackendName, dependencies, warn_once
from headstart.inference.decode import Decoder, output_of
from headstart.inference.engine.acceptance import Acceptance
from headstart.inference.engine.inputs import entry, handed_streamer, read_images
from headstart.inference.engine.known_processors import name_of, say_undeclared
from headstart.inference.engine.noise import row_seeds
from headstart.inference.engine.proposer import ForcedProposer, Proposer, ProposerSource, made
from headstart.inference.engine.request import read_request, require_all_rows, require_memory, require_sides, unknown_token
from headstart.inference.engine.tree import TreeShape, TreeSize
from headstart.inference.runtime import Engine, turn
from headstart.inference.steps import GenerateOutput
from headstart.support.devices import plain_arithmetic, without_autocast
from headstart.support.errors import UserError, waiting

if TYPE_CHECKING:
    from headstart.inference.beam.beam import BeamDecoder


class SpeculativeModel:
    """A backbone, a drafter trained on it, and proposers that need no training; without drafter and proposers, autoregressive decoding.

    The model stays the caller's: a call runs it in evaluation mode without gradients, and after it, or after an error, it is as it was.
    What changes between calls (weights, adapters, hooks) counts from the next one on. As a context manager, unloads the heads at its end.

    ``capture``: the backend that captures forward passes and replays them without Python's overhead (see `capture`): "auto", "trace",
    "cuda-graph", "compile" or "off".
    """

    def __init__(
        self,
        backbone: Backbone,
        drafter: Drafter | None = None,
        *,
        proposers: Sequence[Proposer | Drafter] = (),
        capture: BackendName = "auto",
    ) -> None:
        if backbone.whole and backbone.refusal is not None:
            raise UserError(backbone.refusal)
        if backbone.dependence is not None:
            warn_once(backbone.dependence)
        self.backbone, self.drafter, self.capture = backbone, drafter, capture
        self.measured: dict[bool, dict[str, Any]] = {}
        """What the drafter's drafts were worth in its training's evaluation, greedy (False) or sampled (True), as `Acceptance.to_json`."""
        self.seen_images = False
        """Whether the drafter was trained on rows with images (``data.images``)."""
        self.drafters = [source for source in (drafter, *proposers) if isinstance(source, Drafter)]
        if backbone.no_trees is not None and (drafter is not None or proposers):
            warn_once(f"{backbone.no_trees}: drafts are chains, verified a row at a time")
        for source in self.drafters if backbone.no_trees is not None else ():
            if source.uses_backbone_cache:
                raise UserError(f"{type(source).__name__} drafts in the model's KV cache; {backbone.no_trees}: leave it out")
        self.proposers = [proposer for proposer in proposers if isinstance(proposer, Proposer)]
        self.chat: Chat | None = None  # `load` sets it: makes prompts from conversations as the heads' training did
        self.limits: dict[str, Any] | None = None
        """The arguments of the last call to `limit`."""
        self._forced = ForcedProposer()
        self._forced_source = ProposerSource(self._forced)
        self._engines: dict[bool, Engine] = {}
        self._state: tuple[Any, ...] = ()
        """What the engines depend on."""
        self._loaded = True

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy or a pickle, which captures anew and has no part in a call."""
        forced = ForcedProposer()
        return vars(self) | {"_engines": {}, "_state": (), "_forced": forced, "_forced_source": ProposerSource(forced)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.unload()

    def unload(self) -> None:
        """Release what was loaded and captured, and take the heads' own adapter off the model, if they brought one."""
        self.backbone.detach()
        self._engines, self._loaded = {}, False
        self.drafter, self.drafters, self.proposers = None, [], []

    def limit(self, *, window: int | None = None, sink: int = 4, offload: bool = False) -> None:
        """Limit the drafter's KV cache for long sequences: it attends only to the first ``sink`` and the last ``window`` positions
        (None: to all), and with ``offload`` its keys and values stay in host memory between drafts.

        Tokens do not change, only how many drafts are accepted. Applies to later calls; without arguments, limits are removed.
        Raises UserError if there is no drafter or it does not support limits.
        """
        if window is not None:
            require_count("window", window, of="limit")
        require_count("sink", sink, least=0, of="limit")
        if self.drafter is None:
            raise UserError("draft windows and offloading are for trained heads, and there are none; load heads, or leave them out")
        self.drafter.limit(window, sink, offload)
        self.limits = {"window": window, "sink": sink, "offload": offload}

    def engine(self, speculate: bool) -> Engine:
        """The `Engine`, which holds captures and statistics; made anew if what captures depend on or a drafter's depth has changed."""
        modules = (self.backbone.model, *self.drafters)
        state = (*dependencies(modules), self.backbone.changes, *((drafter.depth, drafter.deepest) for drafter in self.drafters))
        if state != self._state or any(engine.outdated for engine in self._engines.values()):
            self._engines, self._state = {}, state
        if speculate not in self._engines:
            self._engines[speculate] = Engine(self, speculate)
        return self._engines[speculate]

    @entry
    @torch.no_grad()
    def generate(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        *,
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        seed: int | list[int] | None = None,
        tree: TreeSize = "auto",
        speculate: bool = True,
        batch_size: int | None = None,
        timed: bool = False,
        **model_kwargs: Any,
    ) -> GenerateOutput | Tensor:
        """Generate; called by ``model.generate(..., custom_generate=heads.generate)`` with the keyword arguments from ``seed`` on.

        ``seed``: an int (row i has seed + i), a list with one per row, or None for torch's default generator. ``tree``: "auto" adapts the
        size of the candidate trees to acceptance rates and measured latency; a `TreeShape` fixes it. ``speculate=False``: autoregressive
        decoding. ``batch_size``: the most rows decoded at once; others start as rows end. ``timed``: exact times on an accelerator.
        ``num_beams``: transformers' beam search, several steps per pass; a `TreeShape` then counts the nodes of all beams of a row.
        Calls of several threads on one model take turns (see `turn`).
        Raises UserError (a ValueError) for arguments that are not supported.
        """
        if not self._loaded:
            raise UserError("these heads were unloaded; load them again")
        self.backbone.require_same(model)
        streamer = handed_streamer(model) if streamer is None else streamer
        request = read_request(input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs)
        request = replace(request, images=read_images(self.backbone, request, model_kwargs))
        require_sides(request, self.backbone)
        if unknown := unknown_token(input_ids, self.backbone):
            raise UserError(unknown)
        if request.images and self.drafters and not self.seen_images:
            warn_once("these heads have seen no images in training: after them fewer drafts may be accepted, and the text is the same")
        if prepares_itself(model):
            warn_once(f"{type(model).__name__} has a {PREPARES} of its own, which is not asked here: what it changes is not in the text")
        if request.beams is not None and (reason := self.backbone.no_trees or self.backbone.dependence) is not None:
            raise UserError(f"beams share passes, where {reason}; allowed: num_beams=1")
        if self.backbone.dependence is not None:
            warn_once(self.backbone.dependence)
            speculate, batch_size = False, 1
        seeds_B = row_seeds(seed, len(input_ids), input_ids.device) if request.sample else None
        if batch_size is not None:
            require_count("batch_size", batch_size, of="generate")
            require_all_rows(request, batch_size)
        if tree != "auto" and not isinstance(tree, TreeShape):
            raise UserError(f"tree is 'auto' or a TreeShape; got {tree!r}")
        shape = tree if isinstance(tree, TreeShape) else None
        if speculate and shape is not None and shape.depth is not None:
            for drafter in self.drafters:
                drafter.require_depth(shape.depth)
        rows = min(batch_size or len(input_ids), len(input_ids))
        require_memory(self.backbone, rows, input_ids.shape[1], shape.nodes if shape is not None else 1)
        for processor in request.processing.unknown:
            if speculate and (self.drafters or self.proposers):
                say_undeclared(name_of(processor))
        with turn(model), self.running():
            engine = self.engine(speculate and not request.in_order and bool(self.drafters or self.proposers))
            with engine.policy.beside(self._forced_source if speculate and request.processing.forces else None):
                decoder: Decoder | BeamDecoder
                if request.beams is not None:
                    from headstart.inference.beam.beam import BeamDecoder

                    decoder = BeamDecoder(engine.reader, engine.policy, request, shape, batch_size or len(request.ids_BT))
                else:
                    decoder = Decoder(engine.reader, engine.policy, request, shape, seeds_B, batch_size or len(input_ids))
                    self._forced.texts = decoder.texts
                steps = []
                while decoder.admit():
                    step = decoder.step(timed)
                    steps += [step] if request.dictionary else []
            if request.processing.forked:
                request.processing.settle([decoder.texts.history(row) for row in decoder.texts.of])  # type: ignore[union-attr]
            if isinstance(decoder, Decoder):
                engine.spot_check.after(decoder)
                decoder.prompts.continued.fill(decoder.texts.of[0].ids_T, decoder.cache)
        if streamer is not None:
            streamer.end()
        return output_of(decoder, steps, request) if request.dictionary else decoder.sequences()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The context of a call: the model's own dtype, evaluation mode, and weights without gradients, which captures could not hold."""
        with ExitStack() as stack:
            stack.enter_context(without_autocast())
            stack.enter_context(self.backbone.evaluation())
            stack.enter_context(frozen(self.backbone.model))
            for drafter in self.drafters:
                stack.enter_context(Evaluation(drafter)())
            yield


def load(
    path: str | Path | None,
    backbone: PreTrainedModel | Backbone,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    allow_finetuned: bool = False,
    depth: int | None = None,
    proposers: str | Sequence[str | Proposer | Drafter] = (),
    draft_model: str | PreTrainedModel | None = None,
    early_exit: int | None = None,
    capture: BackendName = "auto",
) -> SpeculativeModel:
    """Load heads from a folder or hub id onto a loaded model. ``path`` None: no drafter, only what follows, or autoregressive decoding.
    ``tokenizer``: the backbone's; ``heads.chat`` then makes prompts with the chat template that the heads were trained with.

    ``proposers``: drafts that need no training, by name: "suffix", "recycling", "history", one or several. ``draft_model``: a
    smaller model of the same vocabulary, loaded or by its folder or hub id. ``early_exit``: draft with the model's own first layers.
    ``depth``: the number of depths to draft, which may exceed the trained depth where the drafter allows it. None: as in its recipe, and in
    adaptive trees up to twice as many where that pays, unless the recipe sets ``draft_depth``.
    Raises UserError if the checkpoint is missing, damaged, or of another backbone (see `load_drafter`).
    """
    with plain_arithmetic(), waiting(f"loading heads {path}" if path else "preparing the model"):
        on = backbone if isinstance(backbone, Backbone) else Backbone(backbone)
        beside: list[Proposer | Drafter] = made(proposers)
        drafter = None if path is None else load_drafter(path, on, tokenizer=tokenizer, allow_finetuned=allow_finetuned)
        if draft_model is not None:
            from headstart.heads.draft_model import DraftModel, load_draft_model  # here, as early exit, since few calls need it
        if isinstance(draft_model, str):
            beside.append(load_draft_model(draft_model, on, tokenizer=tokenizer))
        elif draft_model is not None:
            beside.append(DraftModel.of(on, draft_model))
        if early_exit is not None:
            from headstart.inference.early_exit import EarlyExit

            beside.append(EarlyExit(on, layers=early_exit))
    if drafter is not None and depth is not None:
        drafter.set_depth(depth)
    heads = SpeculativeModel(on, drafter, proposers=beside, capture=capture)
    if path is not None:
        provenance = read_metadata(path)[1]["provenance"]
        heads.measured, heads.seen_images = _measured(path, provenance), bool(recipe_section(provenance, "data").get("images"))
    heads.chat = chat_of(path, tokenizer, on)
    return heads


def _measured(path: str | Path, provenance: dict[str, Any]) -> dict[bool, dict[str, Any]]:
    """What the checkpoint keeps of its last evaluation. Raises UserError if it is damaged."""
    stored = provenance.get("acceptance")
    if stored is None:
        return {}
    try:
        Acceptance.from_json(stored)
        return {bool(stored["sampled"]): stored}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: provenance.acceptance of {METADATA} is damaged ({error}); {AGAIN}") from None
