"""POST /v1/responses: a chat whose answer is a list of items; nothing is stored."""

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from starlette.responses import Response

from configs.wire.sampling import FinishReason
from deployments.ingress.access.keys import caller as grant_of
from deployments.ingress.access.keys import hub_token
from deployments.ingress.generation.engine import EngineClient, ServedModel
from deployments.ingress.generation.replies import FinishedCall, RunningCall, stream, whole
from deployments.ingress.http.errors import RequestError, invalid
from deployments.ingress.openai.chat import ChatJob, chat
from deployments.ingress.openai.jobs import Caller, check
from deployments.ingress.openai.replies import usage_of
from deployments.ingress.openai.responses_replies import ResponseWriter
from deployments.ingress.openai.responses_schema import ResponsesBody, echoed, renamed


def routes(engine: EngineClient) -> APIRouter:
    """The route over this engine."""
    router = APIRouter(prefix="/v1")

    @router.post("/responses")
    async def responses(request: Request, body: ResponsesBody) -> Response:
        caller = Caller(hub_token(request), grant=grant_of(request))
        try:
            served = await engine.served()
            chat_job = await _chat_job(body, engine, served, caller)
        except RequestError as error:
            raise renamed(error) from error
        tokenizer = served.tokenizer if body.wants_logprobs else None
        writer = ResponseWriter(body.model, echoed(body), chat_job.tooling, tokenizer)
        return await _reply(request, engine, chat_job, writer, bool(body.stream))

    return router


async def _chat_job(
    body: ResponsesBody, engine: EngineClient, served: ServedModel, caller: Caller
) -> ChatJob:
    """The request as a chat's job."""
    as_chat = body.as_chat()
    check(as_chat, engine.settings)
    chat_job = await chat(as_chat, engine, served, caller)
    if chat_job.tooling is not None and body.wants_logprobs:
        raise invalid("logprobs cannot be combined with tools that may be called", "include")
    return chat_job


async def _reply(
    request: Request, engine: EngineClient, chat_job: ChatJob, writer: ResponseWriter, streams: bool
) -> Response:
    """Run the job and write it."""
    job = chat_job.job
    sequences = job.request.sequences

    async def chunks(running: RunningCall) -> AsyncGenerator[bytes, None]:
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
        generated = sum(detokenizer.num_tokens for detokenizer in running.detokenizers)
        yield writer.close(reason, usage_of(sequences, 1, generated, completion))

    def complete(result: FinishedCall) -> object:
        choice = result.choices[0]
        usage = usage_of(sequences, 1, choice.num_tokens, result.completion)
        return writer.whole(choice, usage)

    if streams:
        return await stream(request, engine, job, chunks, writer.failed)
    return await whole(request, engine, job, complete)
