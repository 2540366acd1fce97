"""POST /v1/responses: a chat whose answer is a list of items; nothing is stored."""

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from starlette.responses import Response

from configs.sampling import FinishReason
from deployments.ingress.authorization import bearer_token
from deployments.ingress.engine import Engine, Served
from deployments.ingress.errors import RequestError, invalid
from deployments.ingress.keys import caller as grant_of
from deployments.ingress.openai_chat import Chat, chat
from deployments.ingress.openai_jobs import Caller, check
from deployments.ingress.openai_replies import usage_of
from deployments.ingress.replies import Running, Whole, stream, whole
from deployments.ingress.responses_replies import ResponseWriter
from deployments.ingress.responses_schema import ResponsesBody, echoed, renamed


def routes(engine: Engine) -> APIRouter:
    """The route over this engine."""
    router = APIRouter(prefix="/v1")

    @router.post("/responses")
    async def responses(request: Request, body: ResponsesBody) -> Response:
        caller = Caller(bearer_token(request), grant=grant_of(request))
        try:
            served = await engine.served()
            asked = await _asked(body, engine, served, caller)
        except RequestError as error:
            raise renamed(error) from error
        spelling = served.text if body.wants_logprobs else None
        writer = ResponseWriter(body.model, echoed(body), asked.tooling, spelling)
        return await _reply(request, engine, asked, writer, bool(body.stream))

    return router


async def _asked(body: ResponsesBody, engine: Engine, served: Served, caller: Caller) -> Chat:
    """What the driver is asked."""
    as_chat = body.as_chat()
    check(as_chat, engine.settings)
    asked = await chat(as_chat, engine, served, caller)
    if asked.tooling is not None and body.wants_logprobs:
        raise invalid("logprobs cannot be combined with tools that may be called", "include")
    return asked


async def _reply(
    request: Request, engine: Engine, asked: Chat, writer: ResponseWriter, streams: bool
) -> Response:
    """Run the job and write it."""
    job = asked.job
    sequences = job.request.sequences

    async def chunks(running: Running) -> AsyncGenerator[bytes, None]:
        opening = writer.opening()
        reason = FinishReason.LENGTH
        async for batch in running.events():
            written = opening + b"".join([writer.grow(event) for event in batch])
            opening = b""
            reason = batch[-1].reason or reason
            if written:
                yield written
        completion = running.call.completion
        assert completion is not None, "the events ended before the call"
        generated = sum(transcript.num_tokens for transcript in running.transcripts)
        yield writer.close(reason, usage_of(sequences, 1, generated, completion))

    def complete(result: Whole) -> object:
        choice = result.choices[0]
        usage = usage_of(sequences, 1, choice.num_tokens, result.completion)
        return writer.whole(choice, usage)

    if streams:
        return await stream(request, engine, job, chunks, writer.failed)
    return await whole(request, engine, job, complete)
