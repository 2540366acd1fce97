"""LoRAX's native routes: /, /generate, /generate_stream, /tokenize, /info, /health."""

import secrets
import time
import uuid
from collections.abc import AsyncGenerator

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from configs.adapters import AdapterReference
from configs.sampling import FinishReason, Stopping
from deployments.contract import EngineInfo, GenerateRequest, SequenceRequest
from deployments.ingress.authorization import bearer_token
from deployments.ingress.engine import Engine, Job, stop_ids
from deployments.ingress.errors import RequestError, lorax_error
from deployments.ingress.logprobs import sampled_logprob
from deployments.ingress.lorax_schema import (
    CompatGenerateBody,
    GenerateParameters,
    GenerateRequestBody,
    TokenizeBody,
    check,
    check_lengths,
    sampled,
    sampling,
)
from deployments.ingress.references import parse_reference, parse_source
from deployments.ingress.replies import Running, Whole, json_response, stream, whole
from deployments.ingress.sse import data
from deployments.ingress.text import Text
from deployments.ingress.transcript import Piece


class Token(msgspec.Struct):
    """One generated token as LoRAX shows it."""

    id: int
    text: str
    logprob: float
    special: bool
    skipped: bool = False


class StreamDetails(msgspec.Struct):
    """Details of the last event of a stream."""

    finish_reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    seed: int | None
    skipped_tokens: int = 0


class Details(StreamDetails, kw_only=True):
    """Details of a whole reply."""

    tokens: list[Token]
    prefill: list[Token] = []


class StreamEvent(msgspec.Struct):
    """One event of a stream; the last one bears the whole text."""

    token: Token
    generated_text: str | None = None
    details: StreamDetails | None = None


def routes(engine: Engine) -> APIRouter:
    """All native routes over this engine."""
    router = APIRouter()

    @router.post("/")
    async def compat_generate(request: Request, body: CompatGenerateBody) -> Response:
        return await Generation(engine, request, body).reply(body.stream, listed=True)

    @router.post("/generate")
    async def generate(request: Request, body: GenerateRequestBody) -> Response:
        return await Generation(engine, request, body).reply(streams=False)

    @router.post("/generate_stream")
    async def generate_stream(request: Request, body: GenerateRequestBody) -> Response:
        return await Generation(engine, request, body).reply(streams=True)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        text = (await engine.served()).text
        slices = await text.slices(body.inputs, body.add_special_tokens)
        return json_response([token._asdict() for token in slices])

    @router.get("/info")
    async def info() -> Response:
        return json_response(_info(await engine.info(), engine))

    @router.get("/")
    @router.get("/health")
    async def health() -> Response:
        if await _healthy(engine):
            return Response()
        return json_response({"error": "unhealthy", "error_type": "healthcheck"}, 503)

    return router


class Generation:
    """One native request on its way from body to reply."""

    def __init__(self, engine: Engine, request: Request, body: GenerateRequestBody) -> None:
        """Nothing is checked yet."""
        self._started = time.monotonic()
        self._engine = engine
        self._request = request
        self._inputs = body.inputs
        self._given: GenerateParameters = body.settled
        seed = self._given.seed
        self._seed = secrets.randbits(63) if seed is None else seed
        self._num_input = 0
        self._stopping = Stopping(max_new_tokens=1)

    async def reply(self, streams: bool, listed: bool = False) -> Response:
        """Check, run, answer; `listed` wraps a whole reply in a list of one."""
        job = await self._job(streams)
        text = (await self._engine.served()).text
        if streams:
            return await stream(self._request, self._engine, job, self._chunks, lorax_error)

        def body(result: Whole) -> object:
            reply = self._body(result, text)
            return [reply] if listed else reply

        return await whole(self._request, self._engine, job, body)

    async def _job(self, streams: bool) -> Job:
        given = self._given
        check(self._inputs, given, self._engine.settings, streams)
        info, text = await self._engine.served()
        ids = await text.encode(self._inputs)
        self._num_input = len(ids)
        self._stopping = Stopping(
            max_new_tokens=check_lengths(len(ids), given.max_new_tokens, info),
            stop_token_ids=stop_ids(info, given.ignore_eos_token),
        )
        told_apart = streams or given.details
        sequence = SequenceRequest(ids, sampling(given, self._seed, told_apart), self._stopping)
        request = GenerateRequest(
            id=f"gen-{uuid.uuid4().hex}",
            sequences=[sequence],
            adapter=self._adapter(info),
            api_token=given.api_token or bearer_token(self._request),
        )
        return Job(request, given.stop, True, told_apart, len(self._inputs), self._started)

    def _adapter(self, info: EngineInfo) -> AdapterReference | None:
        name, source = self._given.adapter_id, self._given.adapter_source
        default = self._engine.settings.default_source
        if source is not None:
            default = parse_source(source)
        if not name or name in (info.model_id, info.model_name):
            return None
        return parse_reference(name, default)

    def _body(self, result: Whole, text: Text) -> dict[str, object]:
        choice = result.choices[0]
        reply: dict[str, object] = {"generated_text": self._shown(choice.text)}
        if self._given.details:
            rest = choice.text[sum(len(piece.text) for piece in choice.pieces) :]
            reply["details"] = Details(
                finish_reason=choice.reason,
                prompt_tokens=self._num_input,
                generated_tokens=choice.num_tokens,
                seed=self._reported_seed,
                tokens=_tokens(choice.pieces, rest, text),
            )
        return reply

    async def _chunks(self, running: Running) -> AsyncGenerator[bytes, None]:
        """One event a token; a token that may be the last waits for its sequence's end."""
        text = running.text
        held: list[Piece] = []
        shown: list[str] = []
        async for batch in running.events():
            [event] = batch
            pieces = held + event.pieces
            shown.append(event.text)
            if event.reason is None:
                sendable = len(pieces) - self._may_end(running, pieces[-1])
                pieces, held = pieces[:sendable], pieces[sendable:]
                if pieces:
                    yield b"".join([data(StreamEvent(_token(p, text))) for p in pieces])
                continue
            *others, last = _tokens(pieces, event.rest, text) or [_NO_TOKEN]
            ending = self._ending(last, "".join(shown), event.reason, running)
            yield b"".join([data(StreamEvent(token)) for token in others]) + data(ending)

    def _may_end(self, running: Running, piece: Piece) -> bool:
        """Whether the driver may end the sequence with this token."""
        return (
            piece.token in self._stopping.stop_token_ids
            or running.transcripts[0].num_tokens >= self._stopping.max_new_tokens
        )

    def _ending(
        self, token: Token, text: str, reason: FinishReason, running: Running
    ) -> StreamEvent:
        details = StreamDetails(
            finish_reason=reason,
            prompt_tokens=self._num_input,
            generated_tokens=running.transcripts[0].num_tokens,
            seed=self._reported_seed,
        )
        return StreamEvent(token, self._shown(text), details if self._given.details else None)

    def _shown(self, text: str) -> str:
        return self._inputs + text if self._given.return_full_text else text

    @property
    def _reported_seed(self) -> int | None:
        return self._seed if sampled(self._given) else None


# Stands for a last token that is out already when its sequence turns out to have ended.
_NO_TOKEN = Token(id=0, text="", logprob=0.0, special=True)


def _token(piece: Piece, text: Text) -> Token:
    special = piece.token in text.special_ids
    shown = text.token_text(piece.token) if special else piece.text
    return Token(piece.token, shown, sampled_logprob(piece), special)


def _tokens(pieces: list[Piece], rest: str, text: Text) -> list[Token]:
    """All tokens; text that came only with the end belongs to the last that has text."""
    tokens = [_token(piece, text) for piece in pieces]
    if rest:
        owner = next((token for token in reversed(tokens) if not token.special), None)
        if owner is not None:
            owner.text += rest
    return tokens


async def _healthy(engine: Engine) -> bool:
    try:
        return (await engine.info()).healthy
    except RequestError:
        return False


def _info(info: EngineInfo, engine: Engine) -> dict[str, object]:
    """LoRAX's fields by LoRAX's names, and what this server adds to them."""
    settings = engine.settings
    return {
        "model_id": info.model_id,
        "model_sha": info.model_revision,
        "model_dtype": info.dtype,
        "model_device_type": info.device,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": info.max_running + info.max_queued,
        "max_best_of": settings.max_best_of,
        "max_stop_sequences": settings.max_stop_sequences,
        "max_input_length": info.max_input_tokens,
        "max_total_tokens": info.max_total_tokens,
        "max_batch_total_tokens": info.max_batch_total_tokens,
        "version": settings.version,
        "model_name": info.model_name,
        "chosen": info.chosen,
        "adapters": [msgspec.to_builtins(adapter) for adapter in info.adapters],
    }
