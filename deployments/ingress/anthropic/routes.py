"""Anthropic's routes: /v1/messages and /v1/messages/count_tokens."""

from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from deployments.ingress.anthropic.fields import NAMES
from deployments.ingress.anthropic.replies import MessageWriter
from deployments.ingress.anthropic.reply_types import TokenCount
from deployments.ingress.anthropic.schema import CountTokensBody, MessagesBody
from deployments.ingress.generation.engine import EngineClient
from deployments.ingress.http.errors import RequestError
from deployments.ingress.http.responses import json_response
from deployments.ingress.requests.answers import answer
from deployments.ingress.requests.chat import ChatJob, chat
from deployments.ingress.requests.jobs import Caller, check
from deployments.ingress.requests.renaming import renamed


def routes(engine: EngineClient) -> APIRouter:
    """The routes over this engine."""
    router = APIRouter(prefix="/v1/messages")

    @router.post("")
    async def messages(request: Request, body: MessagesBody) -> Response:
        chat_job = await _chat_job(request, body, engine)
        [sequence] = chat_job.job.request.sequences
        answers = replace(chat_job.answers, shows_reasoning=body.shows_thinking)
        cut = sequence.stopping.max_new_tokens < body.max_tokens
        writer = MessageWriter(body.model, len(sequence.prompt), answers, cut)
        return await answer(request, engine, chat_job.job, writer, bool(body.stream))

    @router.post("/count_tokens")
    async def count_tokens(request: Request, body: CountTokensBody) -> Response:
        chat_job = await _chat_job(request, body, engine)
        [sequence] = chat_job.job.request.sequences
        count: TokenCount = {"input_tokens": len(sequence.prompt)}
        return json_response(count)

    return router


async def _chat_job(request: Request, body: CountTokensBody, engine: EngineClient) -> ChatJob:
    """The job of the same request as a chat."""
    caller = Caller.of(request)
    try:
        served = await engine.served()
        as_chat = body.as_chat()
        check(as_chat, engine.settings)
        return await chat(as_chat, engine, served, caller)
    except RequestError as error:
        raise renamed(error, NAMES) from error
