"""Several adapters merged into one for a request: LoRAX's `merged_adapters`, on every route."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.merging import MergeRule, MergeStrategy, SignMethod
from deployments.contract import EngineInfo
from deployments.ingress.adapter_names.references import model_reference
from deployments.ingress.http.errors import invalid
from deployments.ingress.http.unicode import Unicode

_PARAM = "merged_adapters"
_MAX_PARTS = 32
_MAX_NAME = 2048
"""Characters of all ids together: a header repeats them."""


class MergedAdapters(BaseModel):
    """A recipe: density is the fraction of each adapter's values that ties and dare_… keep."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, extra="ignore")

    ids: list[Annotated[Unicode, Field(max_length=1024)]] = Field([], max_length=_MAX_PARTS)
    weights: list[float] = Field([], max_length=_MAX_PARTS)
    merge_strategy: MergeStrategy | None = None
    density: float | None = None
    majority_sign_method: SignMethod | None = None


def check_merge(merged: MergedAdapters) -> None:
    """Refuse a recipe that means nothing, in LoRAX's words where it has any."""
    if not merged.ids:
        raise invalid("at least one adapter ID must be provided when setting `adapters`", _PARAM)
    if len(merged.ids) != len(merged.weights):
        raise invalid("number of adapter IDs must match number of adapter weights", _PARAM)
    density, rule = merged.density, _rule(merged)
    if density is not None and not 0 <= density <= 1:
        raise invalid(f"`density` must be >= 0.0 and <= 1.0. Given: {density:g}", _PARAM)
    if rule.prunes and not rule.density:
        raise invalid(
            f"`density` must be > 0.0 and <= 1.0 with `merge_strategy` {rule.strategy.value}: it "
            "is the fraction of each adapter's values that is kept",
            _PARAM,
        )
    if sum(map(len, merged.ids)) > _MAX_NAME:
        raise invalid(f"the `ids` are longer than {_MAX_NAME} characters together", _PARAM)


def requested_adapter(
    model: str, merged: MergedAdapters | None, info: EngineInfo, default_source: AdapterSource
) -> AdapterReference | None:
    """What a request names: an adapter, a merge of some, or None for the base model."""
    alone = model_reference(model, info, default_source)
    if merged is None:
        return alone
    check_merge(merged)
    if alone is not None:
        raise invalid(
            "at most one of `model` and `merged_adapters` may name adapters: let `model` be the "
            "base model",
            _PARAM,
        )
    return AdapterReference(
        default_source,
        ",".join(merged.ids),
        parts=tuple(_part(id, info, default_source) for id in merged.ids),
        rule=_rule(merged),
    )


def _part(id: str, info: EngineInfo, default_source: AdapterSource) -> AdapterReference:
    part = model_reference(id, info, default_source)
    if part is None:
        raise invalid(f"`{id}` in `ids` names no adapter: the base model is always there", _PARAM)
    return part


def _rule(merged: MergedAdapters) -> MergeRule:
    return MergeRule(
        tuple(merged.weights),
        merged.merge_strategy or MergeStrategy.LINEAR,
        merged.density or 0.0,
        merged.majority_sign_method or SignMethod.TOTAL,
    ).normalised()
