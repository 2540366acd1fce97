"""Find the base model's files in a folder on this node, or fetch them from the hub."""

from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from configs.model import ModelConfig
from sources.base import PACKAGE_ROOT, HTTPError

_MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken",
                "merges.txt", "vocab.txt"]  # fmt: skip
_PICKLED_FILES = ["pytorch_model*.bin"]
_CODE_FILES = ["*.py"]


class ModelNotFound(ValueError):
    """The base model's id is neither a folder nor a repository that the hub serves."""


def fetch_model(config: ModelConfig) -> Path:
    """Return the base model's folder: a path, a path beside the package, or a download."""
    folder = _local_folder(config)
    if folder is not None:
        return folder
    patterns = [
        *_MODEL_FILES,
        *(_PICKLED_FILES if config.allow_pickle else []),
        *(_CODE_FILES if config.trust_remote_code else []),
    ]
    try:
        found = snapshot_download(
            config.id, revision=config.revision, allow_patterns=patterns, etag_timeout=10
        )
    except (HTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise _not_found(config, error) from error
    return Path(found)


def fetch_model_config(config: ModelConfig) -> Path:
    """Return a folder with the base model's config.json, and perhaps nothing else."""
    folder = _local_folder(config)
    if folder is not None:
        return folder
    try:
        found = hf_hub_download(config.id, "config.json", revision=config.revision, etag_timeout=10)
    except (HTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise _not_found(config, error) from error
    return Path(found).parent


def _local_folder(config: ModelConfig) -> Path | None:
    for folder in (Path(config.id), PACKAGE_ROOT / config.id):
        if (folder / "config.json").is_file():
            return folder.resolve()
    return None


def _not_found(config: ModelConfig, error: Exception) -> ModelNotFound:
    reason = str(error).rstrip(".")
    return ModelNotFound(
        f"model {config.id!r} is not a folder with a config.json and could not be downloaded "
        f"from the hub: {reason}. Give a folder's path, or a hub id that this machine can reach"
    )
