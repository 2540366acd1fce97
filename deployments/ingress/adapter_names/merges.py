"""Merges of adapters in requests: LoRAX's `merged_adapters`, on every route."""

from typing import Annotated

from pydantic import ConfigDict, Field

from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.merging import MergeRule, MergeStrategy, SignMethod
from deployments.contract import EngineInfo
from deployments.ingress.adapter_names.references import model_reference, parse_source
from deployments.ingress.http.body_lists import Items
from deployments.ingress.http.body_values import Typed
from deployments.ingress.http.errors import invalid
from deployments.ingress.http.unicode import Unicode

_PARAM = "merged_adapters"
_MAX_PARTS = 32
_MAX_NAME = 2048
"""Characters of all ids together; they are sent back in a header."""


class MergedAdapters(Typed):
    """A merge; density: the fraction of each adapter's values that ties and dare_… keep."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, extra="ignore")

    ids: Items[Annotated[Unicode, Field(max_length=1024)]] = Field([], max_length=_MAX_PARTS)
    weights: Items[float] = Field([], max_length=_MAX_PARTS)
    merge_strategy: MergeStrategy | None = Field(None, strict=False)
    density: float | None = None
    majority_sign_method: SignMethod | None = Field(None, strict=False)


def check_merge(merged: MergedAdapters | None) -> None:
    """Refuse an invalid merge, with LoRAX's messages as far as it has them."""
    if merged is None:
        return
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
    name: str,
    source: str | None,
    merged: MergedAdapters | None,
    info: EngineInfo,
    default_source: AdapterSource,
) -> AdapterReference | None:
    """The adapter or the merge that a request names; None for the base model.

    source: the request's `adapter_source`. merged: has passed `check_merge`.
    """
    if source is not None:
        default_source = parse_source(source)
    single = model_reference(name, info, default_source)
    if merged is None:
        return single
    if single is not None:
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
        raise invalid(
            f"`{id}` in `ids` names no adapter: a merge always has the base model", _PARAM
        )
    return part


def _rule(merged: MergedAdapters) -> MergeRule:
    return MergeRule(
        tuple(merged.weights),
        merged.merge_strategy or MergeStrategy.LINEAR,
        merged.density or 0.0,
        merged.majority_sign_method or SignMethod.TOTAL,
    ).normalised()
