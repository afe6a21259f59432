"""MTP modules inside a copy of the backbone's checkpoint, the only place where engines look for them."""

from __future__ import annotations

from pathlib import Path

from headstart.heads.backbone.weight_files import weight_files
from headstart.heads.checkpoint import read_drafter
from headstart.heads.mtp import Mtp
from headstart.heads.native_mtp import write_back
from headstart.inference.serving.formats.format import Format
from headstart.inference.serving.layout import Layout, require_finite
from headstart.inference.serving.trained import Dtype, Trained
from headstart.support.errors import UserError

SERVED = {("mimo", "mimo"), ("qwen3_5", "qwen3_5"), ("qwen3_5", "qwen3_5_text")}
"""Layout of the modules and type of the backbone for which engines have a class of dense MTP modules."""


class MtpStitchFormat(Format):
    """The copy has the backbone's own dtype; of its files only safetensors, configuration and tokenizer."""

    methods = ("mtp",)
    engines = ("vllm", "sglang")

    def lay_out(self, trained: Trained, dtype: Dtype) -> Layout:
        raise AssertionError("a stitched backbone is written by its files, not held in memory")

    def write(self, trained: Trained, dtype: Dtype, folder: Path) -> None:
        if dtype != "auto":
            raise UserError(f"--dtype {dtype} is not for mtp-stitch, which writes the dtype of the backbone's checkpoint; leave it out")
        if trained.adapter is not None:
            raise UserError(f"{trained.path} was trained with an adapter, which a copy of the backbone lacks: merge it and train on that")
        drafter = read_drafter(trained.path, trained.folder, trained.card, trained.load_backbone())
        assert isinstance(drafter, Mtp)
        require_finite(drafter.tensors())
        write_back(drafter, folder)
        assert drafter.tensors().keys() <= weight_files(folder).keys()

    def unread(self, trained: Trained) -> dict[str, str]:
        layout, kind = str(trained.card["arguments"]["layout"]), str(trained.card["contract"]["model_type"])
        reason = f"it is not known to read {layout} modules of dense layers in a model of type {kind}; it reads MiMo's and Qwen3.5's"
        return {} if (layout, kind) in SERVED else dict.fromkeys(self.engines, reason)

    def notes(self, trained: Trained) -> list[str]:
        return [f"a copy of {trained.backbone} with the modules' weights"]
