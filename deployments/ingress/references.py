"""How clients name adapters: an optional source before a colon, an optional revision after @."""

from configs.adapters import AdapterReference, AdapterSource, parse_reference
from deployments.contract import AdapterInfo, EngineInfo
from deployments.ingress.errors import invalid

_SOURCES = {source.value: source for source in AdapterSource}


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
    try:
        return parse_reference(model, default_source)
    except ValueError as error:
        raise invalid(str(error), "model") from error


def listed_name(adapter: AdapterInfo, default_source: AdapterSource) -> str:
    """The name by which a client reaches a listed adapter."""
    if adapter.source == default_source.value:
        return adapter.id
    return f"{adapter.source}:{adapter.id}"
