"""What a model keeps from call to call: what was captured, and what was learned of drafts and of times."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from headstart.inference.adaptive.acceptance import Acceptance
from headstart.inference.capture.capture import Capturer
from headstart.inference.capture.watch import HOOKED, hooks, sample_of
from headstart.inference.engine.reader import Reader
from headstart.inference.sources.drafter_source import DrafterSource
from headstart.inference.sources.proposer_source import ProposerSource
from headstart.inference.sources.source import Source
from headstart.inference.speculation.speculation import Speculation
from headstart.inference.spot_check import SpotCheck

if TYPE_CHECKING:
    from headstart.inference.beam.beam import Beams
    from headstart.inference.generate import SpeculativeModel

logger = logging.getLogger(__name__)


class Engine:
    """The reader and the draft sources, kept from call to call."""

    def __init__(self, heads: SpeculativeModel, speculate: bool) -> None:
        drafters, proposers = (heads.drafters, heads.proposers) if speculate else ([], [])
        self.modules = (heads.backbone.model, *drafters)
        hooked = bool(hooks(self.modules))
        self.capturer = Capturer("off" if hooked else heads.capture, heads.backbone.device)
        if hooked:
            self.capturer.reason = HOOKED
            logger.warning(f"passes are not captured, which makes small models slower: {HOOKED}")
        copies = heads.backbone.device.type == "cpu"  # elsewhere captures read the weights themselves
        self._sample = sample_of(self.modules) if copies else None
        sources: list[Source] = [ProposerSource(proposer) for proposer in proposers]  # first: a drafter may rest where they are sure
        sources += [DrafterSource(f"{i} {type(one).__name__}", one, self.capturer) for i, one in enumerate(drafters)]
        self.speculation = Speculation(sources, self.capturer.fixed)
        for source in sources if heads.drafter is not None else []:
            if isinstance(source, DrafterSource) and source.drafter is heads.drafter:
                source.by_mode |= {sampled: Acceptance.from_json(stored) for sampled, stored in heads.measured.items()}
        if heads.tuned is not None:
            self.speculation.cost_model = heads.tuned.cost_model()
            for source in sources:
                for sampled, acceptance in source.by_mode.items():
                    acceptance.calibration = heads.tuned.calibration_of(source.name, sampled)
        self.spot_check = SpotCheck(heads.backbone, self.capturer)
        self.reader = Reader(heads.backbone, tuple(sorted({tap for drafter in drafters for tap in drafter.taps})), self.capturer)
        self._beams: Beams | None = None

    @property
    def beams(self) -> Beams:
        """The `Beams`, made when first asked for."""
        if self._beams is None:
            from headstart.inference.beam.beam import Beams

            self._beams = Beams(self.reader, self.speculation)
        return self._beams

    @property
    def outdated(self) -> bool:
        """True if something was captured of weights that have other values now."""
        if self._sample is None or not any(one.captures_made for one in self.capturer.functions):
            return False
        return not torch.equal(self._sample, sample_of(self.modules))
