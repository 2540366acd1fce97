"""Find the base model's files in a folder on this node, or fetch them from the hub or from S3."""

import os
from pathlib import Path

from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from configs.model import ModelConfig
from sources.base import CONFIG_NAME as ADAPTER_CONFIG
from sources.base import PACKAGE_ROOT, HTTPError
from sources.s3_model import SCHEME, S3Model

_MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken",
                "merges.txt", "vocab.txt"]  # fmt: skip
_PICKLED_FILES = ["pytorch_model*.bin"]
_CODE_FILES = ["*.py"]
_CONFIG = "config.json"

_FAULTS = (HTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ImportError)


class ModelNotFound(ValueError):
    """The base model's id is no folder, and its source does not serve it."""


def fetch_model(config: ModelConfig) -> Path:
    """Return the base model's folder: a path, a path beside the package, or a download."""
    folder = local_folder(config)
    if folder is not None:
        return folder
    patterns = _patterns(config)
    try:
        if _is_in_s3(config):
            return S3Model(config, patterns).fetch(patterns)
        # Its import takes 0.3 s of each rank's start, and most models are folders.
        from huggingface_hub import snapshot_download

        found = snapshot_download(
            config.id, revision=config.revision, allow_patterns=patterns, etag_timeout=10
        )
    except _FAULTS as error:
        raise _not_found(config, error) from error
    return Path(found)


def fetch_model_config(config: ModelConfig) -> Path:
    """Return a folder with the base model's config.json, and perhaps nothing else."""
    folder = local_folder(config)
    if folder is not None:
        return folder
    try:
        if _is_in_s3(config):
            return S3Model(config, _patterns(config)).fetch([_CONFIG])
        from huggingface_hub import hf_hub_download

        found = hf_hub_download(config.id, _CONFIG, revision=config.revision, etag_timeout=10)
    except _FAULTS as error:
        raise _not_found(config, error) from error
    return Path(found).parent


def _patterns(config: ModelConfig) -> list[str]:
    """Return the patterns of the names of the model's files."""
    return [
        *_MODEL_FILES,
        *(_PICKLED_FILES if config.allow_pickle else []),
        *(_CODE_FILES if config.trust_remote_code else []),
    ]


def _is_in_s3(config: ModelConfig) -> bool:
    return config.id.startswith(SCHEME)


def local_folder(config: ModelConfig) -> Path | None:
    """Return the folder that the base model's id names on this node, if it is one."""
    for folder in (Path(os.path.expanduser(config.id)), PACKAGE_ROOT / config.id):
        if (folder / _CONFIG).is_file():
            return folder.resolve()
    return None


def _not_found(config: ModelConfig, error: Exception) -> ModelNotFound:
    reason = str(error).rstrip(".")
    if _is_in_s3(config):
        return ModelNotFound(f"model {config.id!r} could not be read from s3: {reason}")
    if (Path(os.path.expanduser(config.id)) / ADAPTER_CONFIG).is_file():
        return ModelNotFound(
            f"{config.id!r} is an adapter: give the base model that its {ADAPTER_CONFIG} names "
            "(base_model_name_or_path), and the folder that it lies in as the adapters'"
        )
    if isinstance(error, HFValidationError):
        return ModelNotFound(
            f"model {config.id!r} is neither a folder with a config.json here nor a hub id: give "
            "the one or the other"
        )
    return ModelNotFound(
        f"model {config.id!r} is not a folder with a config.json and could not be downloaded "
        f"from the hub: {reason}. Give a folder's path, or a hub id that this machine can reach"
    )
