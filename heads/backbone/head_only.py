"""A backbone without its layers: the embedding, the final norm and the output layer, which is what heads need in training besides the
hidden states of a cache or a server.

The model is built on the meta device, and the weights of these three are read by name from the checkpoint's files. Fresh heads that start
as one of the backbone's layers read that layer's weights in the same way and keep nothing of it.

Shape suffixes: B batch, T positions, D width.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming, rename_source_key

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.backbone.hooks import replaced_forward
from headstart.heads.backbone.model_config import INTEGERS, empty_model, load_config, loaded_dtype, quantizing, rope_switch
from headstart.heads.backbone.probes import UNTRIED, decoder_of, find_postprocessing, layer_kinds, width_of
from headstart.heads.backbone.weight_files import WeightFiles
from headstart.support.devices import find_accelerator
from headstart.support.errors import UserError
from headstart.support.hub import reaching, resolve

LOGIT = 20.0
"""The largest logit of the states that show how logits are made."""
Reader = Callable[[Tensor, tuple[int, ...]], Features]
"""The features of tokens ``[1, T]``, with these taps."""


class HeadOnlyBackbone(Backbone):
    """`embed`, `norm` and `readout` of a backbone, without its layers. It computes no features; `reader` may give those of a few tokens."""

    whole = False

    def __init__(self, model: PreTrainedModel, files: WeightFiles | None = None) -> None:
        self.files = files
        self.reader: Reader | None = None
        """What `read` returns, for the start values of fresh heads."""
        super().__init__(model, trees=False)
        self.norm = final_norm(self.model)

    def _probe(self) -> None:
        """Find out how logits are made: the layers have no part in that, and other states stand in for theirs."""
        self.rope_limit, self.rope_switches_once = rope_switch(self.config)
        self.windows, self.recurrent, self.no_trees = layer_kinds(self.model, self.layers)
        self.refusal = None if self.no_trees is None else f"{self.no_trees}; {UNTRIED}"
        rows_TD = self.unembed.weight[1:3].float()  # so that some logits are large, and a cap on them is seen
        hidden_1TD = (LOGIT * rows_TD / rows_TD.square().sum(-1, keepdim=True).clamp(min=1e-6))[None].to(self.dtype)

        def states(*args: Any, **kwargs: Any) -> _Output:
            return _Output((hidden_1TD,))

        try:
            with replaced_forward(self.base, states), replaced_forward(decoder_of(self.model), states):  # OPT calls the latter
                self.postprocess = find_postprocessing(self.model)
        except (LookupError, AttributeError):  # as ProphetNet, which predicts several tokens
            raise UserError(f"{self.name} makes its logits of more than its final hidden states; load it whole (cache.dir=null)") from None

    @property
    def parts(self) -> list[nn.Module]:
        """The modules that are in memory."""
        return [self.embed, self.unembed, *([] if self.norm is None else [self.norm])]

    @property
    def weights(self) -> list[Tensor]:
        return [tensor for part in self.parts for tensor in (*part.parameters(), *part.buffers())]

    def read(
        self,
        tokens_BT: Tensor,
        cache: Any = None,
        positions_BT: Tensor | None = None,
        attention_mask: dict[str, Tensor] | None = None,
        taps: tuple[int, ...] = (),
        images: Any = None,
    ) -> Features:
        """Return what `reader` does. Raises UserError without one, and for anything but a few tokens alone."""
        if self.reader is None or cache is not None or attention_mask is not None:
            raise UserError(f"only the embedding and the output layer of {self.name} are here, which cannot read text; load it whole")
        return self.reader(tokens_BT, taps)

    def layer(self, index: int, names: Iterable[str]) -> dict[str, Tensor] | None:
        """Read weights of a layer in the dtype of the others; None if the checkpoint lacks one of them."""
        assert self.files is not None
        prefix, weights = next(name for name, module in self.model.named_modules() if module is self.layers[index]), {}
        for name in sorted(names):
            weight = self.files.read(f"{prefix}.{name}")
            if weight is None:
                return None
            weights[name] = weight.to(self.device, self.dtype)
        return weights


class _Output(tuple[Tensor]):
    """What a decoder returns: the final hidden states, and None for all else."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def load_head_only(
    path: str, *, dtype: str = "auto", trust_remote_code: bool = False, device: str | torch.device | None = None
) -> HeadOnlyBackbone:
    """Load the embedding, final norm and output layer of a backbone from a folder or hub id with safetensors, or ``embedded``.

    ``dtype`` as for `load_backbone`; int8 and int4 leave these three in the model's dtype. Raises UserError.
    """
    on = torch.device(device) if device is not None else find_accelerator() or torch.device("cpu")
    if find_gguf(path) is not None:
        raise UserError(f"backbone {path} is a GGUF file, which is loaded whole: give the model's folder or hub id with safetensors")
    config = load_config(path, trust_remote_code=trust_remote_code)
    model = empty_model(config, path, trust_remote_code=trust_remote_code)
    width_of(model)  # refuses what is no backbone
    settings = config.to_dict().get("quantization_config") or config.get_text_config().to_dict().get("quantization_config")
    files = WeightFiles(path, settings if isinstance(settings, dict) else None)
    files.rename = _renaming(model)
    chosen, stored = loaded_dtype(dtype, config, on), config.get_text_config().dtype
    _fill(model, files, next((dtype for dtype in (chosen, stored) if isinstance(dtype, torch.dtype)), None), on)
    model.config.name_or_path = resolve(path)
    if dtype in INTEGERS:
        model.config.quantization_config = quantizing(dtype, gguf=False)
    model.generation_config = _generation_config(path, config)
    return HeadOnlyBackbone(model.eval().requires_grad_(False), files)


def _renaming(model: PreTrainedModel) -> Callable[[str], str]:
    """Return what transformers makes of the names in a checkpoint of this model, as of DeepSeek-V4's."""
    mapping = get_model_conversion_mapping(model)
    renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
    several = [step for step in mapping if isinstance(step, WeightConverter) and step.source_patterns == sorted(step.source_patterns)]
    joined = [step for step in several if all(isinstance(part, Concatenate) and part.dim == 0 for part in step.operations)]
    return lambda name: str(rename_source_key(name, renamings, joined)[0])


def _generation_config(path: str, config: PretrainedConfig) -> GenerationConfig:
    """Return what `from_pretrained` would give the model."""
    try:
        with reaching(path):
            return GenerationConfig.from_pretrained(resolve(path))
    except (OSError, ValueError, TypeError):  # there is none, or one that transformers cannot read
        return GenerationConfig.from_model_config(config)


def _fill(model: PreTrainedModel, files: WeightFiles, dtype: torch.dtype | None, device: torch.device) -> None:
    """Read the weights of the three modules. Raises UserError if the files lack one."""
    names = {module: name for name, module in model.named_modules()}
    embed, unembed = model.get_input_embeddings(), model.get_output_embeddings()
    one_matrix, parts = unembed.weight is embed.weight, [part for part in (embed, final_norm(model), unembed) if part is not None]
    read: dict[tuple[nn.Module, str], Tensor | None] = {}
    for module in parts:
        if any(True for _ in module.buffers()):  # as the scale of Gemma's embedding, which no file holds
            module.to_empty(device="cpu")
            # Of the innermost model: PaliGemma's own function does not know the embedding of its Gemma.
            [one for one in model.modules() if isinstance(one, PreTrainedModel) and module in {*one.modules()}][-1]._init_weights(module)
        for name, parameter in module.named_parameters():
            weight = files.read(f"{names[module]}.{name}")
            if weight is not None and weight.shape != parameter.shape:
                found, expected = list(weight.shape), list(parameter.shape)
                raise UserError(f"{names[module]}.{name} of {files.path} is {found}, by its configuration {expected}; fetch it again")
            if weight is not None:
                dtype = dtype or (weight.dtype if weight.dtype.itemsize > 1 else torch.float32)
                weight = weight.to(device, dtype)
            read[module, name] = weight
    table, readout = read[embed, "weight"], read[unembed, "weight"]
    one_matrix = one_matrix and (table is None or readout is None or torch.equal(table, readout))  # as transformers decides it
    if one_matrix:
        read[embed, "weight"] = read[unembed, "weight"] = table if table is not None else readout
    for (module, name), weight in read.items():
        if weight is None:
            raise UserError(f"{files.path!r} lacks {names[module]}.{name}, so it cannot train heads; fetch it again, or load it whole")
        owner = module.get_submodule(name.rpartition(".")[0])  # Inkling's embedding has a norm within it
        owner.register_parameter(name.rpartition(".")[2], nn.Parameter(weight, requires_grad=False))
    for module in parts:
        module.to(device)  # its buffers
    if one_matrix:
        unembed.weight = embed.weight


def final_norm(model: PreTrainedModel) -> nn.Module | None:
    """Return the norm after the last layer: ``norm``, or the last one that stands beside the layers; None if none can be found."""
    children = dict(decoder_of(model).named_children())
    norms = [name for name, child in children.items() if "norm" in f"{name} {type(child).__name__}".lower() or name == "ln_f"]
    norms = [name for name in norms if name not in ("layernorm_embedding", "embeddings_layer_norm")]  # of BART's kin and ProphetNet
    return children["norm" if "norm" in norms else norms[-1]] if norms else None
