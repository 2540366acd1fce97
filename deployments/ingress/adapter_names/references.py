"""Names of adapters in requests and replies: `[source:]id[@revision]`."""

from configs.wire.adapters import AdapterReference, AdapterSource, parse_reference
from deployments.contract import AdapterInfo, EngineInfo
from deployments.ingress.http.errors import invalid

_SOURCES = {source.value: source for source in AdapterSource}


def parse_source(name: str) -> AdapterSource:
    """The source with this name, in any case; refuses an unknown one, with a list of the known."""
    source = _SOURCES.get(name.lower())
    if source is None:
        known = ", ".join(_SOURCES)
        raise invalid(f"`adapter_source` must be one of {known}. Given: {name}", "adapter_source")
    return source


def model_reference(
    model: str, info: EngineInfo, default_source: AdapterSource
) -> AdapterReference | None:
    """The adapter that OpenAI's `model` names; None for the base model."""
    if model in ("", info.model_name, info.model_id):
        return None
    try:
        reference = parse_reference(model, default_source)
    except ValueError as error:
        raise invalid(str(error), "model") from error
    if "://" in reference.id and reference.source is not AdapterSource.S3:
        raise invalid(f"`{model}` is an address: adapters are named by source and id", "model")
    return reference


def listed_name(adapter: AdapterInfo, default_source: AdapterSource) -> str:
    """The name of a listed adapter; clients name a pushed one as it was pushed."""
    if adapter.source == AdapterSource.PUSHED.value:
        return adapter.id
    return _name(adapter.source, adapter.id, default_source)


def listed_reference(adapter: AdapterReference, default_source: AdapterSource) -> str:
    """The name of a requested adapter, without its revision."""
    return _name(adapter.source.value, adapter.id, default_source)


def full_name(adapter: AdapterReference, default_source: AdapterSource) -> str:
    """The name of exactly this revision."""
    name = listed_reference(adapter, default_source)
    return name if adapter.revision is None else f"{name}@{adapter.revision}"


def _name(source: str, id: str, default_source: AdapterSource) -> str:
    return id if source == default_source.value else f"{source}:{id}"
