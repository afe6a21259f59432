"""Conversations that continue: a `DynamicCache` that the caller gives to call after call holds the text read so far.

What heads need of that text is kept beside it. Of the next prompt, the tokens that follow the longest common prefix are read; a template
may have dropped something in between. A cache that something else has filled or changed is not relied on: the prompt is read anew.

Shape suffixes: T positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from headstart.heads.backbone.features import Features, join_features
from headstart.heads.kv.ragged_cache import RaggedCache
from headstart.inference.engine.processing import common_prefix
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.request import Request
from headstart.support.pytree import map_tensors


@dataclass(frozen=True)
class Earlier:
    """The text in a cache."""

    ids: list[int]
    features: Features
    offset: int
    """The position of the token after it, less its length (`RaggedCache`)."""
    keys: Tensor
    """The keys of its first layer: others there mean that something else has changed it."""
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
        if self.cache is None or earlier is None or earlier.reader() is not self.reader or _keys(self.cache) is not earlier.keys:
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
        _earlier[self.cache] = Earlier(ids_T[:-1].tolist(), features, read.offsets[0], layers[0].keys, ref(self.reader))


def _keys(cache: DynamicCache) -> Tensor | None:
    keys: Tensor | None = cache.layers[0].keys if cache.layers else None
    return keys
