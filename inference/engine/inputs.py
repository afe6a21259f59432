"""What a call of ``generate`` gives beside tokens and mask: images, positions, the streamer, and the cache of a conversation.

Such a `DynamicCache` holds the text read so far; what heads need of it is kept beside it (`Continued`). Of the next prompt, tokens after
the longest common prefix are read (templates drop earlier thoughts), or all if something else has filled or changed the cache.

transformers 5.23 drops the streamer, and the tokenizer before it makes the criteria of stop strings, which need it. Both are found in the
frames of the call, since the model is the user's: nothing of it, or of its class, is patched.

Shape suffixes: B batch, T positions, X axes of positions.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import ENCODED, KINDS, Features, Images, join_features, size_of, split_rows
from headstart.heads.backbone.model_config import CACHE, NAMES
from headstart.heads.layers.ragged_cache import RaggedCache
from headstart.inference.capture.capture import version
from headstart.inference.engine.processing import common_prefix
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.request import Request
from headstart.support.errors import UserError
from headstart.support.pytree import map_tensors

NO_EFFECT = (
    "attention_mask", "position_ids", *NAMES, "use_cache", "logits_to_keep", "output_attentions", "output_hidden_states",
    "output_router_logits",
)  # fmt: skip
"""Arguments of the model's forward that are read elsewhere or change no token."""


def read_images(backbone: Backbone, request: Request, model_kwargs: Mapping[str, Any]) -> tuple[Images | None, ...]:
    """Return the images of each row of a call; empty: none has any. Raises UserError for what cannot be read, or does not fit."""
    ids_BT, pads, cached = request.ids_BT, request.pads_B, request.cache is not None and request.cache.get_seq_length() > 0
    given = {name: value for name, value in model_kwargs.items() if name not in NO_EFFECT and value is not None and value is not False}
    encoded = {what: output for what, output in (given.pop(ENCODED, None) or {}).items() if output is not None}
    tokens = backbone.placeholders
    known = {name for part in (backbone.base, backbone.model) for name in inspect.signature(part.forward).parameters} if tokens else set()
    if unknown := [name for name in given if name not in known]:
        images = "images, " if tokens else ""
        raise UserError(f"{unknown[0]} is not supported: heads decode from {images}input_ids and attention_mask alone; leave it out")
    kinds = {name: value for name, value in given.items() if name.endswith(KINDS)}
    pixels = {name: value for name, value in given.items() if name not in kinds}
    if not pixels and not encoded:
        _require_usual(model_kwargs.get("position_ids"), ids_BT, pads, cached)
        return ()
    name, beams = type(backbone.model).__name__, request.beams is not None
    if beams or backbone.rope_limit is not None:
        why = "in a beam search" if beams else f"by {name}, which changes its rotary frequencies with the length of a text"
        raise UserError(f"images are not read {why}; leave them out")
    if cached:
        raise UserError(f"images are not read after what a {CACHE} holds; give them with an empty one, and later turns without")
    if pixels and len(pads) > 1:
        raise UserError(f"{name} takes {' and '.join(pixels)} of all rows together, which cannot be told apart; give one row at a time")
    counts = {what: (ids_BT == token).sum(1).tolist() for what, token in tokens.items()}
    sizes = {what: size_of(output) // backbone.dim for what, output in encoded.items()}  # 0: not known
    places = {what: sum(rows) for what, rows in counts.items()}
    if not any(places.values()) or any(size not in (0, places.get(what)) for what, size in sizes.items()):
        raise UserError(f"the prompt has places for {places} features, the images {sizes or 'others'}; let the processor write it")
    if any((ids_BT[:, -1] == token).any() for token in tokens.values()):
        raise UserError("the prompt ends with an image, after which no position is usual; let text follow it")
    split = {what: split_rows(output, counts[what]) if len(pads) > 1 else [output] for what, output in encoded.items()}
    positions, places_1T = model_kwargs.get("position_ids"), torch.arange(ids_BT.shape[1], device=ids_BT.device)[None]
    rows: list[Images | None] = []
    for b, pad in enumerate(pads):
        own = {what: outputs[b] for what, outputs in split.items() if outputs[b] is not None}
        arguments = pixels | {name: value[b : b + 1, pad:] for name, value in kinds.items()} | ({ENCODED: own} if own else {})
        at = places_1T[:, : len(ids_BT[b]) - pad] if positions is None else positions[..., b : b + 1, pad:]
        rows.append(Images(arguments, at) if pixels or own else None)
    return tuple(rows)


def require_text(backbone: Backbone, ids_T: Tensor) -> None:
    """Raise UserError if a prompt without images has places for them."""
    for what, token in backbone.placeholders.items():
        if count := int((ids_T == token).sum()):
            raise UserError(f"the prompt has {count} tokens {token}, places for {what} input that is not given; give it, or leave them out")


def _require_usual(position_ids: Tensor | None, ids_BT: Tensor, pads: list[int], continued: bool) -> None:
    """Raise UserError for positions other than transformers', behind images of a cache (``continued``) shifted; padding does not matter."""
    if position_ids is None:
        return
    T, rows = ids_BT.shape[1], len(pads)
    if position_ids.shape[-1] != T:
        raise UserError(f"position_ids or attention_mask are for {position_ids.shape[-1]} tokens, input_ids has {T}; give as many")
    usual_BT = torch.arange(T) - torch.tensor(pads)[:, None]
    given_XBT = position_ids.reshape(-1, *position_ids.shape[-2:]).cpu()  # some models have several positions for each token
    given_XBT = given_XBT[:, :: max(given_XBT.shape[1] // rows, 1)]  # of beams, the first
    if continued:
        given_XBT = given_XBT - (given_XBT[..., -1:] - usual_BT[:, -1:])
    if bool(((given_XBT != usual_BT) & (usual_BT >= 0)).any()):
        raise UserError(
            "position_ids other than 0, 1, 2, ... from each row's first token on are not supported: drafts have positions of their own; "
            "leave position_ids out"
        )


@dataclass(frozen=True)
class Earlier:
    """The text in a cache."""

    ids: list[int]
    features: Features
    offset: int
    """The position of the token after it, less its length (`RaggedCache`)."""
    held: tuple[list[Tensor], list[Any]]
    """Its layers' keys and values, and which they are, as they were: others there mean that something else has changed it."""
    reader: ref[Reader]
    """What has read it, which is made anew when the weights change."""


_earlier: WeakKeyDictionary[DynamicCache, Earlier] = WeakKeyDictionary()


class Continued:
    """The text of one call, if it continues what is in a cache or will be continued; otherwise nothing is done."""

    def __init__(self, request: Request, reader: Reader) -> None:
        self.reader, backbone = reader, reader.backbone
        alone = len(request.ids_BT) == 1 and not request.pads_B[0] and request.beams is None
        possible = alone and backbone.recurrent is None and backbone.no_trees is None and backbone.rope_limit is None
        self.cache = request.cache if possible else None
        self._placeholders = {*backbone.placeholders.values()}
        self._parts: list[Features] = []

    def prefill(self, ids_T: Tensor) -> tuple[Features, RaggedCache] | None:
        """The features and the cache of a prompt ``[T]`` of which some is known; None: nothing is."""
        earlier = None if self.cache is None else _earlier.get(self.cache)
        if self.cache is None or earlier is None or earlier.reader() is not self.reader or _held(self.cache)[1] != earlier.held[1]:
            return None
        ids = ids_T.tolist()[:-1]  # the logits after the last token are needed
        common = common_prefix(earlier.ids, ids)
        if not common or not self._placeholders.isdisjoint(earlier.ids[common:]):  # an offset is that after all images
            return None
        layers = [(layer.keys[..., :common, :], layer.values[..., :common, :]) for layer in self.cache.layers]
        before: Features = map_tensors(lambda value_1T: value_1T[:, :common], earlier.features)
        return self.reader.continued(layers, before, ids_T[None, common:], earlier.offset)

    def note(self, features: Features) -> None:
        """Note the features of the next tokens."""
        if self.cache is not None:
            self._parts.append(features)

    def fill(self, ids_T: Tensor, read: RaggedCache) -> None:
        """Put the text ``[T]`` into the caller's cache, without its last token, as transformers does; ``read`` may have more."""
        if self.cache is None:
            return
        T = len(ids_T) - 1
        layers = []
        for number in sorted(number for group in read.groups for number in group):  # Gemma-4's last layers have those of earlier ones
            layer = DynamicLayer()
            keys, values = (side[:1, :, :T] for side in read.layer(number))
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = (keys, values) if read.memory is None else (keys.clone(), values.clone())
            layers.append(layer)
        self.cache.layers[:] = layers
        features: Features = map_tensors(lambda value_1T: value_1T[:, :T], join_features(self._parts))
        features = Features(features.tokens_BT, features.hidden_BTD, features.taps)
        _earlier[self.cache] = Earlier(ids_T[:-1].tolist(), features, read.offsets[0], _held(self.cache), ref(self.reader))


def _held(cache: DynamicCache) -> tuple[list[Tensor], list[Any]]:
    sides = [side for layer in cache.layers for side in (layer.keys, layer.values)]
    return sides, [side if side is None else (id(side), version(side)) for side in sides]


GENERATE: CodeType = inspect.unwrap(GenerationMixin.generate).__code__
EXTRACT: CodeType = GenerationMixin._extract_generation_mode_kwargs.__code__
"""Where ``generate`` takes out of its arguments what is not the generation config's, and reads the callable's signature."""


class Entry(functools.partial):
    """A method as a callable for ``custom_generate``; transformers reads its signature in the middle of ``generate``."""

    @property
    def __signature__(self) -> inspect.Signature:
        frame = _frame(lambda frame: frame.f_code is EXTRACT)
        if frame is not None:  # give back what was taken out; what is not ours, transformers then refuses
            given = frame.f_locals
            taken = {name: given["generation_mode_kwargs"].get(name) for name in ("tokenizer", "assistant_tokenizer")}
            given["kwargs"].update({name: value for name, value in taken.items() if value is not None})
        return inspect.signature(self.func)


class entry:  # noqa: N801  (used as a decorator)
    """Make a method an `Entry` of the object it is called on."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, owner: object | None, kind: type | None = None) -> Any:
        return self.function if owner is None else functools.update_wrapper(Entry(MethodType(self.function, owner)), self.function)


def handed_streamer(model: PreTrainedModel) -> BaseStreamer | None:
    """Return the streamer of the call of ``generate`` in progress on this model; None if it has none, or no call is in progress.

    Raises UserError for other arguments that are not passed on and that heads cannot honour.
    """

    def calls(frame: FrameType) -> bool:
        return frame.f_code is GENERATE and frame.f_locals["self"] is model and frame.f_locals["custom_generate"] is not None

    if (frame := _frame(calls)) is None:
        return None
    given = frame.f_locals
    if given["assistant_model"] is not None:
        raise UserError("assistant_model and heads both draft; leave assistant_model out")
    if given["synced_gpus"]:
        raise UserError("synced_gpus=True is not supported: rows take different numbers of passes in each process; leave it out")
    streamer: BaseStreamer | None = given["streamer"]
    return streamer


def _frame(wanted: Callable[[FrameType], bool]) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not wanted(frame):
        frame = frame.f_back
    return frame
