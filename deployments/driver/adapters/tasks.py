"""Whether a request asks for what its model and adapter are made for; the refusal if it does not.

An adapter's task is in its adapter_config.json: SEQ_CLS adapters bring a classification head.
"""

from functools import cached_property, partial
from pathlib import Path

from configs.architectures.select import model_task
from configs.reading import read_object
from configs.wire.adapters import AdapterError, AdapterKey
from configs.wire.sampling import Pooling
from configs.wire.tasks import TaskKind
from deployments.contract import GenerateRequest
from deployments.driver.adapters.directory import AdapterDirectory
from sources.base import CONFIG_NAME, MAX_CONFIG_BYTES

_MAX_KNOWN = 1 << 16
_CLASSIFIES = "SEQ_CLS"
_NO_HEAD = (
    "name an adapter with a classification head (PEFT's task_type SEQ_CLS), or serve a checkpoint "
    "of a ...ForSequenceClassification"
)
# The first sentences are LoRAX's.
_NOT_CLASSIFIED = {
    TaskKind.GENERATE: f"Text generation models don't support classification: {_NO_HEAD}",
    TaskKind.EMBED: f"Embedding models don't support classification: {_NO_HEAD}",
}
_NOT_GENERATED = {
    TaskKind.CLASSIFY: "Classify models don't support text generation: "
    "send the text to /classify, /v1/score or /v1/rerank",
    TaskKind.EMBED: "Embedding models don't support text generation: "
    "send the text to /v1/embeddings, /v1/score or /v1/rerank",
}


class AdapterTasks:
    """The tasks of one engine's base model and adapters; lives on the replica's event loop."""

    def __init__(self, folder: Path, directory: AdapterDirectory) -> None:
        """folder: the base model's."""
        self._folder = folder
        self._directory = directory
        self._known: dict[AdapterKey, bool] = {}

    @cached_property
    def _base(self) -> TaskKind:
        return model_task(self._folder).task

    def base_fault(self, request: GenerateRequest) -> str | None:
        """Why the base model by itself cannot do what is requested; None if it can."""
        pooling = request.sequences[0].sampling.pooling
        faults = {Pooling.NONE: _NOT_GENERATED, Pooling.SCORE: _NOT_CLASSIFIED}
        return faults.get(pooling, {}).get(self._base)

    async def fault(self, request: GenerateRequest, key: AdapterKey) -> str | None:
        """Why the model with an adapter, which the caller holds, cannot do what is requested."""
        pooling = request.sequences[0].sampling.pooling
        has_head = await self._has_head(key)
        if pooling is Pooling.NONE and has_head:
            assert request.adapter is not None
            return (
                f"adapter {request.adapter.id!r} classifies (task_type {_CLASSIFIES}) and does not "
                "generate: send the text to /classify, /v1/score or /v1/rerank"
            )
        return None if pooling is Pooling.SCORE and has_head else self.base_fault(request)

    async def _has_head(self, key: AdapterKey) -> bool:
        """Whether an adapter brings a classification head; read once, off the event loop."""
        if key not in self._known:
            adapter = self._directory.fetched(key)
            read = partial(_classifies, adapter.folder)
            try:
                found = await self._directory.lookups.read_local(("task", key), read)
            except AdapterError:
                return False  # The ranks say what is wrong with the files.
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[key] = found
        return self._known[key]


def _classifies(folder: str) -> bool:
    try:
        config = read_object(Path(folder) / CONFIG_NAME, MAX_CONFIG_BYTES)
        return bool(config.get("task_type") == _CLASSIFIES)
    except (OSError, ValueError):
        return False
