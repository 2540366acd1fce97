"""How clients name adapters: an optional source before a colon, an optional revision after @."""

from configs.adapters import AdapterReference, AdapterSource
from deployments.contract import AdapterInfo, EngineInfo
from deployments.ingress.errors import invalid

_SOURCES = {source.value: source for source in AdapterSource}


def parse_reference(name: str, default_source: AdapterSource) -> AdapterReference:
    """`[hub:|local:|s3:]id[@revision]`; s3://bucket/prefix is an id of source s3."""
    head, colon, rest = name.partition(":")
    source = _SOURCES.get(head) if colon else None
    id = name if source is None or rest.startswith("//") else rest
    path, at, revision = id.rpartition("@")
    if at and path and revision:
        return AdapterReference(source or default_source, path, revision)
    if not id:
        raise invalid(f"`{name}` names no adapter", "model")
    return AdapterReference(source or default_source, id)


def parse_source(name: str) -> AdapterSource:
    """A source by its name, in any case; an unknown one is refused with the known ones."""
    source = _SOURCES.get(name.lower())
    if source is None:
        known = ", ".join(_SOURCES)
        raise invalid(f"`adapter_source` must be one of {known}. Given: {name}", "adapter_source")
    return source


def model_reference(
    model: str, info: EngineInfo, default_source: AdapterSource
) -> AdapterReference | None:
    """What OpenAI's `model` names: None for the base model, else an adapter."""
    if model in ("", info.model_name, info.model_id):
        return None
    return parse_reference(model, default_source)


def listed_name(adapter: AdapterInfo, default_source: AdapterSource) -> str:
    """The name by which a client reaches a listed adapter."""
    if adapter.source == default_source.value:
        return adapter.id
    return f"{adapter.source}:{adapter.id}"
