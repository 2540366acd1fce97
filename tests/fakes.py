"""Fakes with behaviour: a driver that answers from a small automaton, and a real tiny tokenizer."""

import asyncio
import json
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from configs.wire.adapters import AdapterReference, allows
from configs.wire.plan import TokenLogprobs
from configs.wire.sampling import FinishReason, Pooling
from configs.wire.templates import TemplateSource
from deployments.contract import (
    AdapterInfo,
    AdapterReport,
    Completion,
    EngineInfo,
    EngineLoad,
    ErrorKind,
    Failed,
    Finished,
    GenerateRequest,
    ReplyAddress,
    SequenceOutcome,
    SequenceRequest,
    TokenFrame,
    TokenRun,
)
from deployments.engine_commands import EngineCommand
from deployments.ingress.http.errors import EngineLost
from tests.fakes_adapters import Replicas

TALE = "The naïve fox 🦊 jumps over 東京 tower, über-lazy dogs watch; café END! 👩‍🚀 flies. "
BOS, EOS, USER, ASSISTANT = "<s>", "</s>", "<|user|>", "<|assistant|>"
SPECIALS = [BOS, EOS, USER, ASSISTANT]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

ORIGIN = "tiny"
_PATIENCE_S = 600.0


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE with a few merges; it puts BOS before raw prompts."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TALE, " END! END! END!", "the fox the dog"] * 4, trainer)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, token_id(tokenizer, BOS))]
    )
    # An added token that is not special is text like any other.
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that exists."""
    id = tokenizer.token_to_id(token)
    assert id is not None, f"{token} is no token"
    return id


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Tokenizer:
    """Save the tokenizer as a model's folder has it."""
    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {
        "bos_token": BOS,
        "eos_token": {"__type": "AddedToken", "content": EOS},
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return tokenizer


def engine_info(folder: Path, tokenizer: Tokenizer) -> EngineInfo:
    """A small engine over that tokenizer."""
    return EngineInfo(
        model_id="org/tiny-base",
        model_name="tiny",
        model_revision="abc123",
        tokenizer=str(folder),
        dtype="float32",
        device="cpu",
        vocab_size=tokenizer.get_vocab_size(),
        stop_token_ids=(token_id(tokenizer, EOS),),
        max_total_tokens=512,
        max_input_tokens=500,
        max_batch_total_tokens=4096,
        max_running=8,
        max_queued=16,
        startup_info={"attention": "sdpa"},
        adapters=[
            AdapterInfo("org/pirate", "hub", "device"),
            AdapterInfo("poet", "local", "host"),
        ],
        healthy=True,
    )


def reliable(frame: TokenFrame) -> list[TokenFrame]:
    """A link that loses nothing."""
    return [frame]


def deaf(frame: TokenFrame) -> list[TokenFrame]:
    """A link that loses everything."""
    return []


class Unreliable:
    """Loses, doubles and swaps frames in rotation, never the first."""

    def __init__(self) -> None:
        self._count = 0
        self._late: list[TokenFrame] = []

    def __call__(self, frame: TokenFrame) -> list[TokenFrame]:
        self._count += 1
        if self._count % 5 == 2:
            return [frame, frame]
        if self._count % 5 == 3:
            self._late.append(frame)
            return []
        if self._count == 9:
            return []
        late, self._late = self._late, []
        return [frame, *late]


class FakeDriver:
    """Answers each sequence with a walk through TALE that depends on prompt and adapter.

    replies: texts that some adapters answer instead (None: the base), with EOS at the end.
    faults: adapters that fail, after `fail_after` tokens. hold_after: tokens after which
    nothing comes any more until `go_on` or until the call is cancelled. link: what becomes of
    frames. broken: an exception that generate raises.
    deaths: how many tokens the next calls generate before their driver is lost.
    """

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.deliver: Callable[[TokenFrame], None] = lambda frame: None
        self.replies: dict[str | None, str] = {}
        self.templates: dict[str, TemplateSource | Failed] = {}
        self.template_tokens: list[str | None] = []
        self.template_payers: list[str] = []
        self.faults: dict[str | None, Failed] = {}
        self.fail_after = 0
        self.hold_after: int | None = None
        self.link: Callable[[TokenFrame], list[TokenFrame]] = reliable
        self.broken: Exception | None = None
        self.deaths: list[int] = []
        self.requests: list[GenerateRequest] = []
        self.finishes: list[tuple[int, int]] = []
        self.descriptions = 0
        self.engine_loads: list[EngineLoad] = []
        self.num_looks = 0
        self.replicas = Replicas()
        self.arrived = threading.Event()
        self.cancelled = threading.Event()
        self._kept: dict[tuple[str, int], int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._released = asyncio.Event()

    async def generate(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        assert reply_to.secret == "hush"
        named = () if request.adapter is None else request.adapter.members
        if not all(allows(request.allowed, one.source.value, one.id) for one in named):
            denied = Failed(ErrorKind.FORBIDDEN, "not for this key")
            return Completion([SequenceOutcome([], denied) for _ in request.sequences])
        self.requests.append(request)
        self._loop = asyncio.get_running_loop()
        self.arrived.set()
        if self.broken is not None:
            raise self.broken
        try:
            return await self._generate(request)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def go_on(self) -> None:
        """Let come what is held, once a call has arrived; from another thread."""
        assert self.arrived.wait(_PATIENCE_S)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._released.set)

    async def finish(self, request_id: str, index: int, at: int) -> None:
        self.finishes.append((index, at))
        self._kept[request_id, index] = at

    async def adapters(self, command: EngineCommand) -> list[AdapterReport]:
        return self.replicas.run(command)

    async def chat_template(
        self,
        adapter: AdapterReference,
        api_token: str | None,
        allowed: tuple[str, ...] | None = None,
        payer: str = "",
    ) -> TemplateSource | Failed:
        self.template_tokens.append(api_token)
        self.template_payers.append(payer)
        return self.templates.get(adapter.id, TemplateSource())

    async def loads(self) -> list[EngineLoad]:
        self.num_looks += 1
        if self.broken is not None:
            raise self.broken
        return self.engine_loads

    async def describe(self) -> EngineInfo:
        self.descriptions += 1
        if self.broken is not None:
            raise self.broken
        return self.info

    def answer(self, sequence: SequenceRequest, adapter: AdapterReference | None) -> list[int]:
        """All tokens of one sequence, were it not stopped by a stop string."""
        name = adapter.id if adapter else None
        limit = sequence.stopping.max_new_tokens
        tale = self.tokenizer.encode(self.replies.get(name, TALE), add_special_tokens=False).ids
        if name in self.replies:
            return [*tale, token_id(self.tokenizer, EOS)][:limit]
        seed = sequence.sampling.seed if sequence.sampling.temperature else 0
        start = zlib.crc32(repr((name, sequence.prompt, seed)).encode()) % len(tale)
        return [tale[(start + at) % len(tale)] for at in range(limit)]

    async def _generate(self, request: GenerateRequest) -> Completion:
        name = request.adapter.id if request.adapter else None
        fault = self.faults.get(name)
        answers = [self.answer(sequence, request.adapter) for sequence in request.sequences]
        longest = max(len(answer) for answer in answers) if fault is None else self.fail_after
        death = self.deaths.pop(0) if self.deaths else None
        first = min(len(sequence.generated) for sequence in request.sequences)
        check_continued(request, answers)
        for step in range(first, longest):
            if death is not None and step >= first + death:
                raise EngineLost
            await self._hold(step)
            self._push(request, answers, step)
            await asyncio.sleep(0)
        await self._hold(longest)
        outcomes = [
            self._outcome(request, index, answer, fault) for index, answer in enumerate(answers)
        ]
        return Completion(outcomes)

    async def _hold(self, step: int) -> None:
        if step == self.hold_after:
            await self._released.wait()

    def _push(self, request: GenerateRequest, answers: list[list[int]], step: int) -> None:
        runs = []
        for index, answer in enumerate(answers):
            if step < len(request.sequences[index].generated):
                continue
            if step < len(answer) and step < self._kept.get((request.id, index), step + 1):
                logprobs = self._logprobs(request.sequences[index], [answer[step]])
                origin = "" if step else ORIGIN
                runs.append(TokenRun(request.id, index, step, [answer[step]], logprobs, origin))
        for frame in self.link(TokenFrame(runs)):
            self.deliver(frame)

    def _outcome(
        self, request: GenerateRequest, index: int, answer: list[int], fault: Failed | None
    ) -> SequenceOutcome:
        if fault is not None:
            return SequenceOutcome(answer[: self.fail_after], fault)
        sequence = request.sequences[index]
        kept = self._kept.get((request.id, index))
        tokens = answer[:kept]
        if kept is not None:
            reason = FinishReason.STOP_STRING
        elif tokens and tokens[-1] in sequence.stopping.stop_token_ids:
            reason = FinishReason.STOP_TOKEN
        else:
            reason = FinishReason.LENGTH
        return SequenceOutcome(
            tokens=tokens,
            ending=Finished(reason),
            logprobs=self._logprobs(sequence, tokens),
            cached_tokens=min(4, len(sequence.prompt)),
            queue_seconds=0.25,
            first_token_seconds=0.5,
            prompt_logprobs=prompt_logprobs(sequence),
            embedding=embedding(sequence, request.adapter),
        )

    def _logprobs(self, sequence: SequenceRequest, tokens: list[int]) -> list[TokenLogprobs] | None:
        wanted = sequence.sampling.logprobs
        return None if wanted < 0 else [token_logprobs(token, wanted) for token in tokens]


def check_continued(request: GenerateRequest, answers: list[list[int]]) -> None:
    """What a request brings is the beginning of its answers, with its origin."""
    for sequence, answer in zip(request.sequences, answers, strict=True):
        given, scored = sequence.generated, sequence.sampling.logprobs
        assert given == answer[: len(given)]
        scores = [token_logprobs(token, scored) for token in given] if scored >= 0 else []
        assert sequence.logprobs == scores
        assert request.resubmissions or not given
    some = any(sequence.generated for sequence in request.sequences)
    assert request.origin == (ORIGIN if some else "")


def prompt_logprobs(sequence: SequenceRequest) -> list[TokenLogprobs] | None:
    """The logprobs and embedding of a prompt in the fake model."""
    wanted = sequence.sampling.prompt_logprobs
    return None if wanted < 0 else [token_logprobs(id, wanted) for id in sequence.prompt[1:]]


def embedding(sequence: SequenceRequest, adapter: AdapterReference | None) -> bytes:
    """Eight numbers that depend on the prompt, the adapter and the pooling; one from `judge`."""
    pooling = sequence.sampling.pooling
    if pooling is Pooling.NONE:
        return b""
    seen = (sequence.prompt, adapter.id if adapter else None, pooling.value)
    seed = zlib.crc32(repr(seen).encode())
    size = 1 if seen[1] == "judge" else 8
    return np.random.default_rng(seed).standard_normal(size).astype("<f4").tobytes()


def token_logprobs(token: int, num_top: int) -> TokenLogprobs:
    """What the fake model thinks of a token and of its neighbours in the vocabulary."""
    top = [token + at for at in range(num_top)]
    return TokenLogprobs(-(token % 8) / 4, top, [-(token % 8) / 4 - at for at in range(num_top)])
