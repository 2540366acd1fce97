"""Every reason why an adapter's folder would not be served, found without a server.

The reader that serves adapters (`peft.py`) is asked, so that both always agree; it stops at the
first thing wrong, and here it is asked about one thing after the other.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from configs.adapters import AdapterError
from configs.architectures.select import load_architecture, padded_reason
from configs.engine import AdaptersConfig, EngineConfig
from modeling.adapters.peft import open_adapter
from modeling.adapters.peft_config import (
    CONFIG_NAME,
    SERVED,
    LoraPlan,
    parse_config,
    read_config,
)
from modeling.adapters.projection import Projection
from modeling.loading import load_model
from modeling.models.select import build_model
from sharding.group import SingleRank
from sharding.loader import Weights
from sharding.slicing import Segments, width
from sharding.sources.model import fetch_model, fetch_model_config


@dataclass(frozen=True)
class Verdict:
    """reasons: why it would be refused; none: it is served. rank: the largest of its matrices."""

    reasons: tuple[str, ...]
    num_modules: int = 0
    rank: int = 0


class _Shapes:
    """A source of weights that have sizes and no values: what a model is made of costs nothing."""

    bytes_read = 0

    def names(self) -> None:
        """Any name will do."""

    def read(self, name: str, shape: tuple[int, ...], cut: tuple[Segments, ...]) -> Tensor:
        """As large as asked for, and empty."""
        return torch.empty([width(segments) for segments in cut], device="meta")


def adaptable(config: EngineConfig) -> tuple[Projection, ...]:
    """What adapters may change of the model, on one rank.

    Weights are read only where they decide: for models in transformers' own code, and where
    adapters may bring copies of embedding or head, which are compared with the base model's.
    """
    architecture = load_architecture(fetch_model_config(config.model))
    cpu = torch.device("cpu")
    if padded_reason(architecture, config.model.quantize) is not None:
        # Here, not above: paged models do without transformers.
        from modeling.models.causal_lm_loading import load_causal_lm

        return load_causal_lm(config.model, cpu, False).model.projections
    if config.adapters.vocabulary:
        fetch_model(config.model)
        return load_model(config, SingleRank(), cpu).model.projections
    weights = Weights(_Shapes(), SingleRank(), torch.float32, torch.device("meta"))
    return build_model(architecture, weights).projections


def judge(
    folder: Path,
    projections: Sequence[Projection],
    config: AdaptersConfig,
    progress: Callable[[int, int], None],
) -> Verdict:
    """Read all of the files; `progress` is told of modules read and of all that there are."""
    reasons, plan = _judge_config(folder)
    if plan is None:
        return Verdict(tuple(reasons))
    ranks: list[int] = []
    try:
        adapter = open_adapter(folder, projections, config.max_rank, plan)
        ranks = list(adapter.ranks.values())
        for done, _ in enumerate(adapter.read(), start=1):
            progress(done, len(ranks))
        for _ in adapter.read_matrices():
            pass
    except AdapterError as error:
        reasons.append(error.message)
    return Verdict(tuple(reasons), len(ranks), max(ranks, default=0))


def _judge_config(folder: Path) -> tuple[list[str], LoraPlan | None]:
    """What is wrong with adapter_config.json, and the plan by the fields that are served."""
    try:
        return [], read_config(folder)
    except AdapterError as first:
        fields = _fields(folder)
        if fields is None:
            return [first.message], None
        reasons = _reasons(fields) or [first.message]
        kept = {name: fields[name] for name in fields if name in SERVED}
        return reasons, _plan({**kept, "init_lora_weights": True})


def _fields(folder: Path) -> dict[str, object] | None:
    try:
        fields = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return fields if isinstance(fields, dict) else None


def _reasons(fields: Mapping[str, object]) -> list[str]:
    """Each field judged by itself."""
    if fields.get("peft_type") != "LORA":
        return []
    reasons = []
    for name in fields:
        try:
            parse_config({"peft_type": "LORA", name: fields[name]})
        except AdapterError as error:
            reasons.append(error.message)
    return reasons


def _plan(fields: Mapping[str, object]) -> LoraPlan | None:
    """None where even the fields that are served say nothing."""
    try:
        return parse_config(fields)
    except AdapterError:
        return None
