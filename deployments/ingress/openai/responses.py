"""POST /v1/responses: a chat whose answer is a list of items. Responses are not stored."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from deployments.ingress.generation.engine import EngineClient, ServedModel
from deployments.ingress.http.errors import RequestError, invalid
from deployments.ingress.openai.responses_replies import ResponseWriter
from deployments.ingress.openai.responses_schema import NAMES, ResponsesBody, echoed
from deployments.ingress.requests.answers import answer
from deployments.ingress.requests.chat import ChatJob, chat
from deployments.ingress.requests.jobs import Caller, check
from deployments.ingress.requests.renaming import renamed


def routes(engine: EngineClient) -> APIRouter:
    """The route over this engine."""
    router = APIRouter(prefix="/v1")

    @router.post("/responses")
    async def responses(request: Request, body: ResponsesBody) -> Response:
        caller = Caller.of(request)
        try:
            served = await engine.served()
            chat_job = await _chat_job(body, engine, served, caller)
        except RequestError as error:
            raise renamed(error, NAMES) from error
        tokenizer = served.tokenizer if body.wants_logprobs else None
        writer = ResponseWriter(body.model, echoed(body, served.info), chat_job.answers, tokenizer)
        return await answer(request, engine, chat_job.job, writer, bool(body.stream))

    return router


async def _chat_job(
    body: ResponsesBody, engine: EngineClient, served: ServedModel, caller: Caller
) -> ChatJob:
    """The job of the same request as a chat."""
    as_chat = body.as_chat()
    check(as_chat, engine.settings)
    chat_job = await chat(as_chat, engine, served, caller)
    if chat_job.answers.tooling is not None and body.wants_logprobs:
        raise invalid("logprobs cannot be combined with tools that may be called", "include")
    return chat_job
