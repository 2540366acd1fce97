"""A model's share from its folder: architecture, type, weights, and what they took."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from configs.architectures.base import ModelArchitecture
from configs.architectures.medusa import load_medusa
from configs.architectures.select import load_architecture
from configs.architectures.text_stack import outer_paths
from configs.engine import CacheDType, CudaGraphs, Device, EngineConfig, SpeculationKind
from configs.model import DType, LoadFormat
from modeling.adapters.linear import biased_projections
from modeling.adapters.norms import norm_projection
from modeling.adapters.peft.heads import heads_projection
from modeling.adapters.peft.score import score_projection
from modeling.adapters.projection import ROUTED_KINDS, BaseRows, Projection, ProjectionKind
from modeling.adapters.whole_linears import whole_projections
from modeling.attention.kv_cache import FP8, CacheScales
from modeling.attention.scales import stored_scales
from modeling.models.base import PagedModel
from modeling.models.draft_layer import DraftLayer
from modeling.models.eagle3 import load_eagle3_heads
from modeling.models.generic.stored_experts import StoredMatrices
from modeling.models.medusa import MedusaHeads, load_heads
from modeling.models.select import build_model
from modeling.quantisation.formats import format_of_dummies, linear_format
from modeling.runner.fitting import too_large
from modeling.runner.memory import device_memory
from sharding.checkpoint import Checkpoint, DummySource, open_checkpoint
from sharding.group import TensorParallel
from sharding.linear_weight import LinearWeight
from sharding.loader import LinearFormat, Weights
from sharding.progress import timed
from sources.model import fetch_model

LAUNCHED_ON: tuple[str, ...] = ("cpu",)
"""Types of devices on which a layer that guesses pays without CUDA graphs. On a GPU each guess is
some fifty launches, and waits for the step's samples on the host."""


@dataclass(frozen=True)
class LoadedWeights:
    """What loading a rank's share of a model took.

    dtype: of the weights as they are computed with.
    bytes_read: from the checkpoint's files.
    bytes_resident: on the device.
    """

    dtype: torch.dtype
    bytes_read: int
    bytes_resident: int


@dataclass(frozen=True)
class LoadedModel(LoadedWeights):
    """A rank's share of a paged model.

    weight_forms: the bytes of weights in each form.
    cache_scales: each layer's, where an fp8 cache is configured and the checkpoint has them.
    """

    model: PagedModel
    architecture: ModelArchitecture
    weight_forms: Mapping[str, int]
    cache_scales: tuple[CacheScales, ...] | None = None

    def base_tensors(self) -> Mapping[str, BaseRows]:
        """Return what adapters may hold copies of, by the names of a larger model's too."""
        own = self.model.base_tensors()
        if not self.architecture.is_text_stack:
            return own
        return {name: rows for path, rows in own.items() for name in (path, *outer_paths(path))}


def pick_device(wanted: Device) -> torch.device:
    """Return what AUTO means here; ValueError when CUDA is requested and there is none."""
    has_cuda = torch.cuda.is_available()
    if wanted is Device.CUDA and not has_cuda:
        raise ValueError("device: cuda is requested, but this machine has none; use cpu or auto")
    if wanted is Device.CPU or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@timed("weights")
def load_model(config: EngineConfig, group: TensorParallel, device: torch.device) -> LoadedModel:
    """Read this rank's share of the model that `config.model` names."""
    folder = fetch_model(config.model)
    architecture = load_architecture(folder).with_rope_length(config.model.dynamic_rope_length)
    architecture = architecture.with_expert_parallel(config.expert_parallel)
    source, form = _source(config, folder, architecture, device)
    dtype = find_dtype(config.model.dtype, architecture, stored_dtype(source, folder))
    scales = None
    if config.cache.dtype is CacheDType.FP8 and isinstance(source, Checkpoint):
        scales = stored_scales(source, architecture.num_layers)
    free = device_memory(device).free if device.type == "cuda" else 0
    try:
        model = build_model(architecture, Weights(source, group, dtype, device, form))
    except torch.OutOfMemoryError as error:
        raise too_large(architecture, group, dtype, free, form is not None) from error
    if config.adapters.enabled and config.adapters.adapts_vocabulary:
        model.adapt_vocabulary(whole_ends=config.adapters.vocabulary_copies > 0)
    if config.adapters.enabled:
        whole = config.adapters.whole_linears
        others = with_other_models(model, architecture, whole)
        model.projections = (*others, *adapters_heads(config, model.width))
    # A tied head shares its tensor with the embedding; parameters() yields it once.
    resident = sum(p.nbytes for p in cast(nn.Module, model).parameters())
    return LoadedModel(
        model.dtype,
        source.bytes_read,
        resident,
        model,
        architecture,
        bytes_by_form(cast(nn.Module, model)),
        scales,
    )


def _source(
    config: EngineConfig, folder: Path, architecture: ModelArchitecture, device: torch.device
) -> tuple[Checkpoint | DummySource, LinearFormat | None]:
    """Return the model's tensors, and how those of linear maps are stored."""
    if config.model.load_format is LoadFormat.DUMMY:
        dtype = find_dtype(config.model.dtype, architecture, torch.float32)
        form = format_of_dummies(architecture.quantisation, config.model.quantize)
        return DummySource(device, dtype), form
    source = open_checkpoint(folder, config.model.allow_pickle)
    if architecture.larger_type is not None:
        # Here, not above: other models start without transformers.
        from modeling.models.larger_names import decoder_names

        source.keep_part(decoder_names(architecture.larger_type, architecture.outer_parts))
    return source, linear_format(architecture.quantisation, config.model.quantize)


def read_heads(
    config: EngineConfig, model: PagedModel, group: TensorParallel
) -> MedusaHeads | None:
    """Return this rank's part of the heads that `config.speculation` names; None without."""
    folder = _heads_folder(config)
    if folder is None or config.speculation.kind is not SpeculationKind.MEDUSA:
        return None
    return load_heads(folder, model, group)


def read_draft_layer(
    config: EngineConfig, loaded: LoadedModel, group: TensorParallel
) -> DraftLayer | None:
    """Return this rank's part of the layer that guesses, if one is configured.

    ValueError where it does not run: on GPUs without captured steps, and beside layers of which
    states cannot be read.
    """
    kind, model = config.speculation.kind, loaded.model
    if not kind.is_layer:
        return None
    other = "set engine.speculation.kind to prompt_lookup or none"
    is_captured = config.cuda_graphs is not CudaGraphs.NONE and model.capturable
    if model.device.type not in LAUNCHED_ON and not is_captured:
        raise ValueError(
            f"engine.speculation.kind {kind.value} costs more than it brings where steps are not "
            "captured: set engine.cuda_graphs to decode or all, if this model's steps can be, or "
            f"{other}"
        )
    if kind is SpeculationKind.MTP:
        return _read_mtp(config, loaded, group)
    if len(model.decoder_layers) != model.num_layers:
        raise ValueError(f"EAGLE-3 heads cannot read the states of this model's layers: {other}")
    folder = _heads_folder(config)
    assert folder is not None, "such a config names one"
    return load_eagle3_heads(folder, model, group, config.model.allow_pickle)


def _read_mtp(config: EngineConfig, loaded: LoadedModel, group: TensorParallel) -> DraftLayer:
    # Here, not above: other models start without transformers.
    from modeling.models.generic.mtp import load_mtp

    folder, architecture = fetch_model(config.model), loaded.architecture
    source, form = _source(config, folder, architecture, loaded.model.device)
    return load_mtp(loaded.model, architecture, source, group, form)


def adapters_heads(config: EngineConfig, width: int) -> tuple[Projection, ...]:
    """Return the heads that adapters bring, as a projection; width: of what they read."""
    copies, folder = config.adapters.draft_heads, _heads_folder(config)
    if folder is None or not copies:
        return ()
    return (heads_projection(width, load_medusa(folder).num_heads, copies),)


def _heads_folder(config: EngineConfig) -> Path | None:
    wanted = {"id": config.speculation.model, "revision": config.speculation.revision}
    if wanted["id"] is None:
        return None
    return fetch_model(config.model.model_copy(update=wanted))


def bytes_by_form(model: nn.Module) -> dict[str, int]:
    """Return the bytes of weights in each form, those outside of linear layers by their type."""
    forms: dict[str, int] = {}
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, LinearWeight | StoredMatrices):
            own = [p for p in module.parameters() if id(p) not in inside]
            inside.update(map(id, own))
            if own:
                forms[module.form] = forms.get(module.form, 0) + sum(p.nbytes for p in own)
    for parameter in model.parameters():
        if id(parameter) not in inside:
            name = str(parameter.dtype).removeprefix("torch.")
            forms[name] = forms.get(name, 0) + parameter.nbytes
    return forms


def with_other_models(
    model: PagedModel, architecture: ModelArchitecture, whole_linears: Mapping[str, int]
) -> tuple[Projection, ...]:
    """Return a model's projections with what adapters of other models over its decoder have.

    Any may replace tokens' rows. Those that classify bring a head; those of a model without any
    head (FEATURE_EXTRACTION) name its modules without the decoder's own name, those of a larger
    model with more.

    whole_linears: how many adapters may bring a whole linear map, by its name.
    """
    named, biased = [], biased_projections(cast(nn.Module, model))
    for index, each in enumerate((*model.projections, *model.token_projections())):
        others: tuple[str, ...] = ()
        if architecture.is_text_stack:
            others += outer_paths(each.module)
        if each.kind in (ProjectionKind.LINEAR, ProjectionKind.EMBEDDING_TOKENS, *ROUTED_KINDS):
            others += (each.module.partition(".")[2],)
        named.append(
            replace(
                each,
                aliases=(*each.aliases, *others),
                has_bias=each.has_bias or index in biased,
                outer_parts=architecture.outer_parts,
                idle_layers=architecture.idle_layers,
                idle_modules=architecture.idle_modules,
            )
        )
    whole = whole_projections(model.projections, whole_linears)
    norms = norm_projection(model.norms(), model.width)
    named += [*whole, score_projection(model.width)]
    if norms is None:
        return tuple(named)
    vectors = (replace(v, names=_all_names(v.names[0], architecture)) for v in norms.vectors)
    norms = replace(norms, vectors=tuple(vectors))
    return (*named, norms)


def _all_names(name: str, architecture: ModelArchitecture) -> tuple[str, ...]:
    """Return a tensor's names: as a larger model has it, and one without a head (see above)."""
    outer = outer_paths(name) if architecture.is_text_stack else ()
    return (name, *outer, name.partition(".")[2])


def total_tokens(config: EngineConfig, architecture: ModelArchitecture) -> int:
    """Return the longest sequence; ValueError when the model is made for shorter ones."""
    longest = architecture.max_total_tokens
    wanted = config.limits.max_total_tokens
    if wanted is not None and wanted > longest and not architecture.stretches:
        is_own = longest == architecture.max_position_embeddings
        name = "the model's own max_position_embeddings" if is_own else "model.dynamic_rope_length"
        raise ValueError(
            f"limits.max_total_tokens ({wanted}) is above {name} ({longest}): "
            f"{architecture.longer_advice}"
        )
    return wanted or longest


def find_dtype(wanted: DType, architecture: ModelArchitecture, stored: torch.dtype) -> torch.dtype:
    """Return what AUTO means: the config's type, else that of the tensors."""
    name = architecture.checkpoint_dtype if wanted is DType.AUTO else wanted.value
    return stored if name is None else torch_dtype(name)


def stored_dtype(source: Checkpoint | DummySource, folder: Path) -> torch.dtype:
    """Return the type of the checkpoint's first tensor, but for those that are quantised.

    Tensors that are made are of float32, where nothing names a type.
    """
    if isinstance(source, DummySource):
        return torch.float32
    names = sorted(source.names())
    if not names:
        raise ValueError(f"{folder}: the checkpoint holds no tensors")
    return source.dtype(next((name for name in names if source.is_float(name)), names[0]))


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch type of that name."""
    dtypes = {
        "float32": torch.float32,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "fp8": FP8,
    }
    return dtypes[name]
