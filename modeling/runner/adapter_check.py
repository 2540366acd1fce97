"""Every reason why an adapter's folder would not be served, found without a server.

It runs the reader that serves adapters (`peft/folder.py`), so that both always agree.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from configs.adapters import AdaptersConfig
from configs.architectures.base import ModelArchitecture
from configs.architectures.encoders import EncoderArchitecture
from configs.architectures.generic import GenericArchitecture
from configs.architectures.select import load_architecture, padded_reason
from configs.engine import Device, EngineConfig
from configs.reading import DamagedFile
from configs.wire.adapters import AdapterError
from modeling.adapters.host_pages import PAGE_ROWS
from modeling.adapters.output_rows import output_rows, page_counts
from modeling.adapters.peft.adapter import PeftAdapter
from modeling.adapters.peft.config_file import read_config
from modeling.adapters.peft.folder import FACTOR, open_adapter
from modeling.adapters.peft.kinds import kind_name
from modeling.adapters.peft.names import WEIGHTS_NAME
from modeling.adapters.peft.tokens import ROWS_SUFFIX
from modeling.adapters.projection import (
    ROUTED_KINDS,
    WHOLE_KINDS,
    BaseRows,
    Projection,
    ProjectionKind,
)
from modeling.adapters.ranges import ranged_matrices, ranged_stacks
from modeling.models.select import build_model
from modeling.runner.loading import adapters_heads, find_dtype, load_model, with_other_models
from sharding.checkpoint import DummySource
from sharding.group import SingleRank
from sharding.loader import Weights
from sharding.tensor_file import TensorFile
from sources.files import is_mlx
from sources.mlx import convert
from sources.model import fetch_model, fetch_model_config

if TYPE_CHECKING:
    from modeling.models.causal_lm import CausalLM
    from modeling.models.encoder import Encoder

META = torch.device("meta")
CPU = torch.device("cpu")
_ITEM_BYTES = 2


@dataclass(frozen=True)
class AdapterCost:
    """What a served adapter costs on one rank.

    pages: in the pools of all projections together. expert_pages: the least setting of that name
    with which its pages of experts fit.
    page_bytes: of those pages, in a type of 16 bits, on the device and again in host memory.
    expert_bytes: of the pages on experts among them.
    share: its multiplications for a token, by those of the base in all modules that adapters may
    change.
    """

    pages: int
    page_bytes: int
    share: float
    expert_pages: int = 0
    expert_bytes: int = 0


@dataclass(frozen=True)
class AdapterVerdict:
    """Whether an adapter would be served.

    reasons: why it would be refused; empty if it is served.
    num_modules: how many modules it adapts.
    rank: the largest of its matrices.
    num_labels: of the classification head that it brings; 0: it brings none.
    num_tokens: rows of tokens that it sets, of embedding and head together.
    num_norms: norms of which it brings weight or bias.
    num_whole: whole linear maps that it brings.
    kind: what its config says that it is; "" where that cannot be read.
    unread: fields of its config that no release of PEFT reads.
    cost: None for an adapter that is refused.
    """

    reasons: tuple[str, ...]
    num_modules: int = 0
    rank: int = 0
    num_labels: int = 0
    num_tokens: int = 0
    num_norms: int = 0
    num_whole: int = 0
    kind: str = field(default="", compare=False)
    unread: tuple[str, ...] = field(default=(), compare=False)
    cost: AdapterCost | None = field(default=None, compare=False)


def adaptable(
    config: EngineConfig, base: Mapping[str, BaseRows] = MappingProxyType({})
) -> tuple[Projection, ...]:
    """What adapters may change of the model, on one rank.

    Weights are read only where they decide: for models of transformers' modules, which are run once
    to see what they compute. base: what copies of embedding and head are compared with; may be
    empty for an adapter that holds none.
    """
    architecture = load_architecture(fetch_model_config(config.model))
    if padded_reason(architecture) is not None:
        return _padded(config, architecture).projections
    if isinstance(architecture, GenericArchitecture):
        fetch_model(config.model)
        model = load_model(config, SingleRank(), CPU).model
        # It is read on a CPU here: what GPUs do not adapt is left out by the config alone.
        on_gpus = getattr(model, "adapts_experts_on_gpus", True)
        left_out = config.device is Device.CUDA and not on_gpus
        return tuple(p for p in model.projections if not (left_out and p.kind in ROUTED_KINDS))
    weights = Weights(DummySource(META, torch.float32), SingleRank(), torch.float32, META)
    model = build_model(architecture, weights)
    if config.adapters.adapts_vocabulary:
        model.adapt_vocabulary(whole_ends=config.adapters.vocabulary_copies > 0)
    found = with_other_models(model, architecture, config.adapters.whole_linears)
    found = (*found, *adapters_heads(config, model.width))
    return tuple(_with_base(p, base) for p in found)


def _with_base(projection: Projection, base: Mapping[str, BaseRows]) -> Projection:
    """Return an embedding or a head with its weight, if that was read."""
    found = base.get(f"{projection.module}.weight") if projection.kind in WHOLE_KINDS else None
    return projection if found is None else replace(projection, base=found.rows)


def model_dtype(config: EngineConfig) -> torch.dtype:
    """The model's type; float32 where its weights alone say it, which may not be here yet."""
    architecture = load_architecture(fetch_model_config(config.model))
    return find_dtype(config.model.dtype, architecture, torch.float32)


def base_tensors(config: EngineConfig, folder: Path) -> Mapping[str, BaseRows]:
    """What the adapter of `folder` may hold copies of; read only if it holds more than factors."""
    try:
        with TensorFile(folder / WEIGHTS_NAME) as file:
            if all(FACTOR in key or key.endswith(ROWS_SUFFIX) for key in file.keys()):  # noqa: SIM118
                return {}
    except (DamagedFile, OSError):
        return {}
    architecture = load_architecture(fetch_model(config.model))
    if padded_reason(architecture) is not None:
        return _padded(config, architecture).base_tensors()
    return load_model(config, SingleRank(), CPU).base_tensors()


def _padded(config: EngineConfig, architecture: ModelArchitecture) -> "CausalLM | Encoder":
    """Load a model that runs in transformers' own code."""
    # Here, not above: paged models do without transformers.
    from modeling.runner.encoder_loading import load_encoder_weights
    from modeling.runner.padded_loading import load_causal_lm

    if isinstance(architecture, EncoderArchitecture):
        return load_encoder_weights(config.model, CPU).model
    return load_causal_lm(config.model, CPU, False).model


def judge(
    folder: Path,
    projections: Sequence[Projection],
    config: AdaptersConfig,
    progress: Callable[[int, int], None],
    base: Mapping[str, BaseRows] = MappingProxyType({}),
    dtype: torch.dtype = torch.float32,
) -> AdapterVerdict:
    """Read all of the files; `progress` is called with (modules read, all modules).

    dtype: the model's, which must hold the adapter's numbers.
    """
    try:
        adapter = open_adapter(folder, projections, config.max_rank, base)
        head = adapter.score
        rows = {at: len(each.ids) for each in adapter.tokens for at in each.positions}
        norms = adapter.norms
        others = {
            *rows,
            norms.position,
            *adapter.whole.positions,
            *(() if head is None else [head.position]),
        }
        ranks = [rank for position, rank in adapter.ranks.items() if position not in others]
        stacks = ranged_stacks(adapter, projections, dtype)
        for done, _ in enumerate((each for stack in stacks for each in stack.layers), start=1):
            progress(done, len(ranks) + len(rows))
        for _ in ranged_matrices(adapter, projections, dtype):
            pass
    except AdapterError as error:
        return AdapterVerdict(error.reasons, kind=_kind(folder))
    return AdapterVerdict(
        (),
        num_modules=len(ranks),
        rank=max(ranks, default=0),
        num_labels=0 if head is None else head.num_labels,
        num_tokens=sum(rows.values()),
        num_whole=len(adapter.whole.modules),
        num_norms=len({vector.modules for vector in norms.vectors.values()}),
        kind=_kind(folder),
        unread=adapter.plan.unread,
        cost=_cost(adapter, projections),
    )


@contextmanager
def as_peft(folder: Path) -> Iterator[Path]:
    """Yield a folder with the adapter as PEFT saves it: a copy of one that the server converts.

    Raises AdapterError for one that cannot be converted.
    """
    if not is_mlx(folder):
        yield folder
        return
    with TemporaryDirectory() as made:
        convert(folder, Path(made), folder.name)
        yield Path(made)


def _kind(folder: Path) -> str:
    try:
        return kind_name(read_config(folder)[1])
    except AdapterError:
        return ""


def _cost(adapter: PeftAdapter, projections: Sequence[Projection]) -> AdapterCost:
    pages = page_bytes = experts = expert_bytes = 0
    products = 0.0
    ranks: list[list[int]] = [[0] for _ in projections]
    for at, rank in adapter.ranks.items():
        ranks[at.projection].append(rank)
    most = [*map(max, ranks)]
    rows = output_rows(projections, most, adapter.is_scaled, adapter.is_biased)
    counts = page_counts(most, rows, adapter.expert_pages)
    for projection, own, count in zip(projections, ranks, counts, strict=True):
        width = projection.local_inputs + projection.local_outputs
        pages += count
        taken = count * PAGE_ROWS * projection.page_layers * width * _ITEM_BYTES
        page_bytes += taken
        if projection.experts is not None:
            experts = max(experts, -(-count // projection.experts.most))
            expert_bytes += taken
        if projection.kind.has_factors or projection.kind is ProjectionKind.EXPERTS:
            products += sum(own) * width * _active(projection)
    kinds = (ProjectionKind.LINEAR, ProjectionKind.EXPERTS)
    linear = [p for p in projections if p.kind in kinds]
    base = sum(p.num_layers * p.local_inputs * p.local_outputs * _active(p) for p in linear)
    share = products / base if base else 0.0
    return AdapterCost(pages, page_bytes, share, experts, expert_bytes)


def _active(projection: Projection) -> float:
    """Return the share of a projection's matrices that a token is multiplied with."""
    experts = projection.experts
    return 1.0 if experts is None else experts.active / experts.count
