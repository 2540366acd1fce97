"""Which files that a config names are missing or cannot be served, on this machine."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from configs.adapters import AdaptersConfig
from configs.architectures.base import ArchitectureError
from configs.architectures.select import load_architecture
from configs.base import Config
from configs.engine import EngineConfig, SpeculationConfig
from configs.model import LoadFormat, ModelConfig
from configs.reading import has_tokenizer
from configs.wire.adapters import AdapterError, AdapterSource, parse_reference
from sources.local import LocalSource
from sources.model import ModelNotFound, fetch_model_config, local_folder

Part = TypeVar("Part", bound=Config)

_WEIGHTS, _PICKLED = "*.safetensors", "*.bin"


def engine_faults(arguments: Any) -> Iterator[str]:
    """Why the files of one base model cannot be served, whatever else is wrong with its args."""
    model = part(arguments, ModelConfig, "model")
    fault = None if model is None else model_fault(model)
    if fault is not None:
        yield fault
    elif model is not None:
        yield from _fit_faults(model, arguments["engine"])
    kernels = arguments["engine"].get("kernel_cache") if model is not None else None
    if isinstance(kernels, str) and not Path(kernels).is_dir():
        yield f"engine.kernel_cache: {kernels} is no folder: fill one with `loray warm`"
    speculation = part(arguments, SpeculationConfig, "speculation")
    if speculation is not None and speculation.model is not None:
        yield from _heads_faults(speculation.model, speculation.revision)
    adapters = part(arguments, AdaptersConfig, "adapters")
    if adapters is not None and adapters.enabled:
        yield from _adapter_faults(adapters)


def model_fault(model: ModelConfig) -> str | None:
    """Why the base model cannot be served, by its config.json and the names of its files."""
    try:
        load_architecture(fetch_model_config(model))
    except (ModelNotFound, ArchitectureError, OSError, ValueError) as error:
        return f"engine.model.id: {error}"
    folder = local_folder(model)
    if folder is None:
        return None
    if model.revision is not None:
        return f"engine.model.revision: {folder} is a folder, which has no revisions: remove it"
    if not has_tokenizer(folder):
        return f"engine.model.id: {folder} has no tokenizer: save the model's own into it"
    if model.load_format is LoadFormat.DUMMY:
        return None
    patterns = [_WEIGHTS, _PICKLED] if model.allow_pickle else [_WEIGHTS]
    if not any(path for pattern in patterns for path in folder.glob(pattern)):
        pickled = "" if model.allow_pickle else ", and engine.model.allow_pickle is not set"
        return f"engine.model.id: {folder} has no weights: no {_WEIGHTS} is in it{pickled}"
    return None


def missing_adapters(adapters: AdaptersConfig, names: Iterable[Any]) -> Iterator[str]:
    """Why each of these adapters is not found under the local roots."""
    try:
        local = LocalSource(adapters.local_roots, adapters.max_file_bytes)
    except ValueError:
        return  # `engine_faults` names the root.
    for text in names:
        try:
            reference = parse_reference(str(text), adapters.default_source)
            if reference.source is AdapterSource.LOCAL:
                local.resolve(reference)
        except (AdapterError, ValueError, OSError) as error:
            yield str(error)


def part(arguments: Any, kind: type[Part], name: str) -> Part | None:
    """One part of the engine's settings, whatever the others are; None if it is not valid."""
    try:
        return kind.model_validate(arguments["engine"].get(name) or {})
    except (KeyError, TypeError, AttributeError, ValueError):
        return None


def _fit_faults(model: ModelConfig, engine: Mapping[str, Any]) -> Iterator[str]:
    """Settings that this model cannot have; its config.json has been read before."""
    architecture = load_architecture(fetch_model_config(model))
    try:
        architecture.with_rope_length(model.dynamic_rope_length)
    except ValueError as error:
        yield f"engine.{error}"
    try:
        wanted = EngineConfig.model_validate({**engine}).expert_parallel
        architecture.with_expert_parallel(wanted)
    except ArchitectureError as error:
        yield f"engine.{error}"
    except ValueError:
        pass  # The engine's own faults are in the list already.


def _heads_faults(model: str, revision: str | None) -> Iterator[str]:
    heads = ModelConfig(id=model, revision=revision)
    if revision is not None and local_folder(heads) is not None:
        yield f"engine.speculation.revision: {model} is a folder, which has none: remove it"
        return
    try:
        fetch_model_config(heads)
    except (ModelNotFound, OSError, ValueError) as error:
        yield f"engine.speculation.model: {error}"


def _adapter_faults(adapters: AdaptersConfig) -> Iterator[str]:
    try:
        LocalSource(adapters.local_roots, adapters.max_file_bytes)
    except ValueError as error:
        yield f"engine.{error}"
    for fault in missing_adapters(adapters, adapters.preload):
        yield f"engine.adapters.preload: {fault}"
