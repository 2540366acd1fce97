"""Which file reads which architecture's config.json."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from configs.architectures import (
    classifiers,
    encoders,
    generic,
    outer_tokens,
    padded,
    sentence_transformers,
    text_stack,
)
from configs.architectures.base import (
    ArchitectureError,
    ModelArchitecture,
    refuse_many_layers,
    refuse_quantised,
)
from configs.architectures.files import read_config
from configs.architectures.quantisation import parse_quantisation
from configs.architectures.rope import RotaryArchitecture
from configs.base import faults
from configs.quantisation import WeightFormat
from configs.wire.sampling import Pooling
from configs.wire.tasks import ModelTask, TaskKind

FAMILIES: dict[str, str] = {
    "GPT2LMHeadModel": "configs.architectures.gpt2",
    "GPTNeoXForCausalLM": "configs.architectures.gpt_neox",
    "LlamaForCausalLM": "configs.architectures.llama",
    "MistralForCausalLM": "configs.architectures.llama",
    "Qwen2ForCausalLM": "configs.architectures.llama",
    "Qwen3ForCausalLM": "configs.architectures.llama",
    "GraniteForCausalLM": "configs.architectures.llama",
    "Phi3ForCausalLM": "configs.architectures.llama",
    "SolarForCausalLM": "configs.architectures.llama",
    "OPTForCausalLM": "configs.architectures.opt",
}
"""Architecture to the module with the `parse(name, config)` that makes its frozen spec."""

MODEL_TYPES: dict[str, str] = {
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gpt_neox",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GraniteForCausalLM": "granite",
    "Phi3ForCausalLM": "phi3",
    "SolarForCausalLM": "solar",
    "OPTForCausalLM": "opt",
}
"""What transformers goes by, where config.json says both."""


def load_architecture(folder: Path) -> ModelArchitecture:
    """Read `folder`/config.json; ArchitectureError says what is missing or not supported."""
    config = _read(folder)
    found = parse_architecture(config)
    if isinstance(found, encoders.EncoderArchitecture):
        # A start refuses what requests would be refused for.
        model_task(folder)
        longest = found.max_position_embeddings
        own = sentence_transformers.longest_input(folder) or longest
        return found.model_copy(update={"max_position_embeddings": min(own, longest)})
    if isinstance(found, RotaryArchitecture) and not _keeps_keys(folder, config):
        return found.model_copy(update={"rope_recompute": True})
    return found


def load_padded(folder: Path) -> padded.PaddedArchitecture:
    """Read `folder`/config.json for the padded model, which serves known families too."""
    config = _read(folder)
    names = _names(config)
    name = next((n for n in names if padded.is_causal(n)), None)
    if name is None:
        raise _unsupported(names)
    return padded.parse(name, config)


def parse_architecture(config: Mapping[str, Any]) -> ModelArchitecture:
    """Normalise a config.json; ArchitectureError for settings that are not served.

    A causal language model of no family here is a GenericArchitecture, or a PaddedArchitecture.
    """
    config = generic.known_names(config)
    refuse_many_layers(config)
    try:
        quantisation = parse_quantisation(config)
        found = _parse({key: config[key] for key in config if key != "quantization_config"})
    except ArchitectureError:
        raise
    except ValueError as error:
        raise ArchitectureError(f"config.json: {'; '.join(faults(error))}") from error
    except (TypeError, AttributeError, KeyError, ArithmeticError) as error:
        raise ArchitectureError(f"config.json holds another kind of value: {error!r}") from error
    if isinstance(found, padded.PaddedArchitecture):
        refuse_quantised(config)
    if quantisation is None:
        return found
    if quantisation.format is WeightFormat.MXFP4 and config.get("model_type") != "gpt_oss":
        raise ArchitectureError("quantization_config (mxfp4): gpt-oss alone is served so")
    if quantisation.others and found.is_text_stack:
        raise ArchitectureError(
            f"quantization_config ({quantisation.method}): several schemes, which name modules by "
            "their paths, are not supported in models that read more than text: take a checkpoint "
            "of one scheme"
        )
    return found.model_copy(update={"quantisation": quantisation})


def _parse(config: Mapping[str, Any]) -> ModelArchitecture:
    """Normalise what config.json says, but for quantised weights."""
    names, kind = _names(config), config.get("model_type")
    for name in names:
        # Some types are built as a family's class by transformers alone (EXAONE 3 as Llama).
        if name in FAMILIES and kind not in generic.BUILT_AS.get(name, ()):
            if kind not in (None, MODEL_TYPES[name]):
                raise ArchitectureError(
                    f"architectures names {name}, but model_type is {kind!r} and "
                    f"not {MODEL_TYPES[name]!r}: correct the one that is wrong"
                )
            parsed: ModelArchitecture = import_module(FAMILIES[name]).parse(name, config)
            return parsed
    for name in names:
        if encoders.is_encoder(name, config):
            return encoders.parse(name, config)
        if text_stack.is_text_stack(name, config):
            return _text_stack(name, config)
        if padded.is_causal(name):
            return generic.parse(name, config)
        if classifiers.is_classifier(name):
            return _classifier(name, config)
    raise _unsupported(names)


def _text_stack(name: str, config: Mapping[str, Any]) -> ModelArchitecture:
    """Read the decoder of a larger model; ArchitectureError for one that is not paged."""
    found = parse_architecture(text_stack.text_config(name, config))
    if isinstance(found, padded.PaddedArchitecture):
        raise ArchitectureError(f"{name} is served for text by its decoder alone: {found.reason}")
    larger_type = text_stack.writing_part(config).get("model_type", "")
    update: dict[str, Any] = {"larger_type": larger_type}
    if isinstance(found, generic.GenericArchitecture):
        padded_tokens, pad_token = text_stack.padding_of(name, config)
        update |= {"padded_tokens": padded_tokens, "pad_token": pad_token}
        update["outer_tokens"] = outer_tokens.outer_tokens(name, config, found.vocab_size)
    return found.model_copy(update=update)


def _classifier(name: str, config: Mapping[str, Any]) -> ModelArchitecture:
    """Read a sequence classifier; its decoder is the causal model's."""
    if name in classifiers.OWN_HEADS:
        raise ArchitectureError(
            f"{name}: its classification head is more than one linear map, which is not served"
        )
    found = parse_architecture(classifiers.causal_config(name, config))
    if isinstance(found, padded.PaddedArchitecture):
        raise ArchitectureError(f"{name} is served paged or not at all: {found.reason}")
    return found.model_copy(update={"num_labels": len(classifiers.labels_of(config))})


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the tokens that end an answer: generation_config.json's, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        found = _of_decoder(folder / name, "eos_token_id")
        if found is not None:
            return (found,) if isinstance(found, int) else tuple(found)
    return ()


def model_task(folder: Path) -> ModelTask:
    """Return what the model of a folder is for."""
    config = _read(folder)
    names = _names(config)
    is_encoder = any(encoders.is_encoder(name, config) for name in names)
    pad = None if is_encoder else classifiers.pad_token(config)
    if not any(classifiers.is_classifier(name) for name in names):
        pooling, normalize = sentence_transformers.pooling_of(folder)
        embeds = is_encoder or pooling is not Pooling.NONE
        kind = TaskKind.EMBED if embeds else TaskKind.GENERATE
        return ModelTask(kind, pad_token_id=pad, pooling=pooling, normalize=normalize)
    return ModelTask(
        TaskKind.CLASSIFY,
        classifiers.labels_of(config),
        config.get("problem_type"),
        pair_activation=sentence_transformers.pair_activation(folder, config),
        pad_token_id=pad,
    )


def vocab_size(folder: Path) -> int:
    """Return how many token ids the model of a folder knows."""
    own = _of_decoder(folder / "config.json", "vocab_size")
    # Larger models may leave unsaid what transformers knows of their decoders.
    return load_architecture(folder).vocab_size if own is None else int(own)


def _of_decoder(path: Path, key: str) -> Any:
    """Return what a file says of the model, or of its decoder; None for nothing."""
    fields = text_stack.writing_part(read_config(path) if path.is_file() else {})
    own = fields.get(key)
    return (fields.get("text_config") or {}).get(key) if own is None else own


def padded_reason(architecture: ModelArchitecture) -> str | None:
    """Why a model runs in transformers' padded code; None for one that is paged."""
    if isinstance(architecture, padded.PaddedArchitecture):
        return architecture.reason
    return None


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ArchitectureError(f"{folder} holds no config.json: is this a model's folder?")
    config = read_config(path)
    beside = folder / "hf_quant_config.json"
    if not config.get("quantization_config") and beside.is_file():
        # Older exports of ModelOpt say it here alone.
        own = read_config(beside).get("quantization")
        if not isinstance(own, dict):
            raise ArchitectureError(f"{beside} does not say how weights are quantised: remove it")
        config["quantization_config"] = {"quant_method": "modelopt", **own}
    return config


def _keeps_keys(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether the model's own `generate` keeps keys from token to token, or reads all anew."""
    path = folder / "generation_config.json"
    settings = read_config(path) if path.is_file() else config
    return settings.get("use_cache") is not False


def _names(config: Mapping[str, Any]) -> list[str]:
    """The architectures that config.json names, or the one that its model_type stands for.

    transformers' AutoModelForCausalLM goes by model_type alone, so files without the former load
    there, and so do those with a name of a tool's own (PeftModelForCausalLM), unless code beside
    them makes that class. What a type of no family here is built as, it says when it is built.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ArchitectureError(f"architectures ({names!r:.80}) must be a list of classes' names")
    kind = config.get("model_type")
    known = [name for name, own in MODEL_TYPES.items() if own == kind]
    if not isinstance(kind, str) or (names and (not known or "auto_map" in config)):
        return names
    if not names:
        return known or [f"{kind}{padded.AUTO_SUFFIX}"]
    is_own = names[0] not in FAMILIES and padded.is_causal(names[0])
    return known if is_own else names


def _unsupported(names: Sequence[str]) -> ArchitectureError:
    return ArchitectureError(
        f"architecture {', '.join(map(str, names)) or '(none named)'} is not supported; "
        f"known: {', '.join(sorted(FAMILIES))}, and any other causal language model "
        "(...ForCausalLM, ...LMHeadModel) of transformers"
    )
