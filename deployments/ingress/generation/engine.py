"""The engine for the routes: its description, its tokenizer, and calls to it."""

import asyncio
import logging
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakSet

from configs.adapters import PushConfig
from configs.api import ApiConfig
from configs.batches import BatchesConfig
from configs.embeddings import EmbeddingsConfig
from configs.model import ReasoningParser, ToolParser
from configs.version import VERSION
from configs.wire.adapters import AdapterSource
from deployments.contract import (
    AdapterReport,
    EngineInfo,
    ErrorKind,
    GenerateRequest,
    ReplyAddress,
    SequenceRequest,
)
from deployments.driver_interface import Driver
from deployments.engine_commands import EngineCommand
from deployments.ingress.access.quotas import Clock, Replicas, alone
from deployments.ingress.chat_templates.selection import ChatTemplates
from deployments.ingress.generation.adapter_templates import AdapterTemplates
from deployments.ingress.generation.calls import EngineCall
from deployments.ingress.generation.frames import RequestInboxes
from deployments.ingress.generation.loads import EngineLoads
from deployments.ingress.http.errors import ERROR_SHAPES, RequestError
from deployments.ingress.structured.constraints import Compiler
from deployments.ingress.text.detokenizer_state import DetokenizerState, EndCheck
from deployments.ingress.text.stops import StopStrings
from deployments.ingress.text.tokenizer import ModelTokenizer
from deployments.observability.lorax_metrics import RequestMetrics

logger = logging.getLogger("loray.ingress")

_INFO_SECONDS = 1.0
# Health checks must get a reply even if the engine does not reply.
_DESCRIBE_SECONDS = 10.0


@dataclass(frozen=True)
class IngressSettings:
    """Settings of the ingress.

    default_source: of adapters that are named without a source.
    max_stop_sequences: stop strings of a request.
    max_stop_length: characters of a stop string; the time to search one grows with its length.
    max_best_of: LoRAX's `best_of`.
    max_choices: OpenAI's `n` and `best_of`.
    max_sequences: prompts times choices of one request.
    max_logprobs: alternatives of each token.
    embeddings, api, batches, tool_parser, reasoning_parser, push, max_file_bytes: of the
    configuration.
    keep_alive_seconds: how long a stream may be silent.
    version: of this server.
    replicas: returns the number of ingress replicas.
    clock: in seconds, for quotas and caches.
    loopback: whether the server can be reached from its own machine only.
    read_text: reads the tokenizer in a folder.
    model_folder: the model's files, where they are here before a driver names them.
    bases: the names of all base models behind this address, if there are several.
    """

    default_source: AdapterSource = AdapterSource.HUB
    max_stop_sequences: int = 4
    max_stop_length: int = 1024
    max_best_of: int = 2
    max_choices: int = 16
    max_sequences: int = 256
    max_logprobs: int = 20
    embeddings: EmbeddingsConfig = field(default_factory=EmbeddingsConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
    push: PushConfig = field(default_factory=PushConfig)
    max_file_bytes: int = 8 * 2**30
    batches: BatchesConfig = field(default_factory=BatchesConfig)
    keep_alive_seconds: float = 15.0
    tool_parser: ToolParser = ToolParser.AUTO
    reasoning_parser: ReasoningParser = ReasoningParser.AUTO
    version: str = VERSION
    replicas: Replicas = alone
    clock: Clock = time.monotonic
    loopback: bool = False
    read_text: Callable[[str], ModelTokenizer] = ModelTokenizer.load
    model_folder: str | None = None
    bases: frozenset[str] = frozenset()


class ServedModel(NamedTuple):
    """The description of the driver, and its model's tokenizer."""

    info: EngineInfo
    tokenizer: ModelTokenizer


@dataclass(frozen=True)
class GenerationJob:
    """A checked request: its part for the driver, and how its tokens become text.

    request: for the driver.
    stops: stop strings. keep_stops: the matched one stays in the text.
    per_token: the reply lists single tokens.
    characters: of the prompts, for the reply's headers.
    choices: sequences of each prompt; with best_of, more than the reply has.
    visible_special_tokens: ids of special tokens whose text is part of the answer.
    visible_stop_ids: tokens that end the answer and have a text nevertheless.
    detokenize: false: the answer has no text.
    end_check: makes a check for one sequence that may end its text; None if only stops do.
    cache_salt: of the request, "" without one.
    started: when it arrived, in seconds of a monotonic clock.
    """

    request: GenerateRequest
    stops: Sequence[str]
    keep_stops: bool
    per_token: bool
    characters: int
    choices: int = 1
    visible_special_tokens: frozenset[int] = frozenset()
    visible_stop_ids: frozenset[int] = frozenset()
    detokenize: bool = True
    end_check: Callable[[], EndCheck] | None = None
    cache_salt: str = ""
    started: float = field(default_factory=time.monotonic)

    @property
    def ends_by_text(self) -> bool:
        """Whether the text may end a sequence, which the driver does not see."""
        return bool(self.stops) or self.end_check is not None

    def detokenizers(self, text: ModelTokenizer) -> list[DetokenizerState]:
        """A detokenizer for each sequence."""
        return [self._detokenizer(text, sequence) for sequence in self.request.sequences]

    def _detokenizer(self, text: ModelTokenizer, sequence: SequenceRequest) -> DetokenizerState:
        silent = frozenset(sequence.stopping.stop_token_ids) - self.visible_stop_ids
        hidden = text.hidden(self.stops, silent, self.visible_special_tokens)
        return DetokenizerState(
            text.stream(silent, self.visible_special_tokens, mute=not self.detokenize),
            StopStrings(self.stops, self.keep_stops, hidden.values()),
            per_token=self.per_token or self.ends_by_text,
            hidden=hidden,
            end_check=self.end_check() if self.end_check is not None else None,
            min_tokens=sequence.stopping.min_new_tokens,
        )


class EngineClient:
    """The driver for the routes. Its description is fetched once a second at most."""

    def __init__(
        self,
        driver: Driver,
        inboxes: RequestInboxes,
        reply_to: Callable[[], ReplyAddress],
        settings: IngressSettings,
        metrics: RequestMetrics | None = None,
    ) -> None:
        """reply_to: called for each call of the driver, as the socket is bound later.

        metrics: of all bases.
        """
        self.settings = settings
        self.metrics = RequestMetrics(metrics)
        self.metrics.begin({row.metric for row in ERROR_SHAPES.values()})
        self.compiler = Compiler()
        self.templates = ChatTemplates(settings.clock)
        self.adapter_templates = AdapterTemplates(driver, settings.clock)
        self.loads = EngineLoads(driver, settings.clock)
        self._driver = driver
        self._inboxes = inboxes
        self._reply_to = reply_to
        self._refreshing = asyncio.Lock()
        self._refreshed_at = float("-inf")
        self._num_refreshes = 0
        self._num_commands = self._known_commands = 0
        self._served: ServedModel | None = None
        self._failure: RequestError | None = None
        # Weak: a call ends with its request, which need not report that here.
        self._calls: WeakSet[EngineCall] = WeakSet()
        self._ended: Callable[[], RequestError] | None = None
        self._unreadable: str | None = None
        self._reading: dict[str, asyncio.Task[ModelTokenizer]] = {}

    def read_ahead(self) -> None:
        """Begin to read the tokenizer, which takes seconds, while the driver starts."""
        if self.settings.model_folder is not None:
            self._read(self.settings.model_folder)

    @property
    def latest(self) -> EngineInfo | None:
        """The last known description, however old; None before the first."""
        return None if self._served is None else self._served.info

    @property
    def changed(self) -> bool:
        """Whether an admin command has run here since the last description was fetched."""
        return self._known_commands != self._num_commands

    async def served(self) -> ServedModel:
        """The last known description, however old, and the tokenizer."""
        return self._served or await self._refresh()

    async def info(self) -> EngineInfo:
        """The description; at most a second old."""
        return (await self._refresh()).info

    def call(self, job: GenerationJob, frames: bool) -> EngineCall:
        """A call of the driver, not started yet; frames: tokens are read as they come."""
        if self._ended is not None:
            raise self._ended()
        # A whole reply needs frames only to find where its text ends before the last token.
        frames = frames or job.ends_by_text
        call = EngineCall(self._driver, self._inboxes, self._reply_to(), job.request, frames)
        self._calls.add(call)
        return call

    def end_calls(self, error: Callable[[], RequestError]) -> None:
        """End all running calls with this error, and refuse new ones with it."""
        self._ended = error
        for call in self._calls:
            call.fail(error())

    async def adapters(self, command: EngineCommand) -> list[AdapterReport]:
        """Execute an admin command on every driver replica."""
        try:
            return await self._driver.adapters(command)
        finally:
            self._num_commands += 1

    async def sleeping(self) -> bool:
        """Whether the ranks of all driver replicas sleep; RequestError if none answers."""
        loads = await self._driver.loads()
        if not loads:
            raise RequestError(ErrorKind.UNAVAILABLE, "no driver answers now: try again")
        return all(load.asleep for load in loads)

    async def _refresh(self) -> ServedModel:
        num_before = self._num_refreshes
        async with self._refreshing:
            age = self.settings.clock() - self._refreshed_at
            stale = self._failure is not None or age > _INFO_SECONDS or self.changed
            # Callers that waited for the lock share the result of the one that had it, also if it
            # failed; else each of them would wait for a dead driver, one after another.
            if stale and self._num_refreshes == num_before:
                await self._request_info()
            if self._failure is not None:
                raise self._failure
            assert self._served is not None
            return self._served

    async def _request_info(self) -> None:
        num_commands = self._num_commands
        try:
            info = await self._describe()
            self._served = ServedModel(info, await self._tokenizer_of(info))
            self._failure = None
        except RequestError as failure:
            self._failure = failure
        self._refreshed_at = self.settings.clock()
        self._num_refreshes += 1
        # A command that ended meanwhile is not in this description.
        self._known_commands = num_commands

    async def _describe(self) -> EngineInfo:
        try:
            async with asyncio.timeout(_DESCRIBE_SECONDS):
                return await self._driver.describe()
        except Exception as fault:
            message = f"the engine did not answer ({type(fault).__name__})"
            raise RequestError(ErrorKind.UNAVAILABLE, message) from fault

    async def _tokenizer_of(self, info: EngineInfo) -> ModelTokenizer:
        if self._served is not None:
            return self._served.tokenizer
        if self._unreadable is None:
            try:
                # A caller that leaves must not make the next one begin anew.
                return await asyncio.shield(self._read(info.tokenizer))
            except (OSError, ValueError, subprocess.TimeoutExpired) as fault:
                logger.exception("the tokenizer cannot be read: no text can be served")
                self._unreadable = str(fault)
        # Not read again for each request: the files do not change.
        raise RequestError(ErrorKind.UNAVAILABLE, self._unreadable)

    def _read(self, folder: str) -> asyncio.Task[ModelTokenizer]:
        if folder not in self._reading:
            work = asyncio.to_thread(self.settings.read_text, folder)
            self._reading[folder] = asyncio.create_task(work)
        return self._reading[folder]


def stop_ids(info: EngineInfo, ignored: bool | None) -> tuple[int, ...]:
    """The tokens that end a sequence; none if the client ignores them."""
    return () if ignored else info.stop_token_ids
