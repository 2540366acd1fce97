"""Routes of classification and scores: LoRAX's /classify, vLLM's and Jina's others."""

import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import chain

from fastapi import APIRouter, Request
from starlette.responses import Response

from configs.wire.sampling import Pooling
from configs.wire.tasks import ModelTask, TaskKind
from deployments.contract import Completion
from deployments.ingress.embeddings import Embedder, Vector
from deployments.ingress.generation.engine import EngineClient
from deployments.ingress.generation.replies import FinishedCall, whole
from deployments.ingress.http.errors import invalid
from deployments.ingress.prompts import (
    EncodedPrompt,
    PromptBody,
    PromptRequest,
    characters_of,
    check_body,
    encoded,
    encoded_pairs,
    prompt_request,
)
from deployments.ingress.requests.request_fields import REFUSED_SCORES
from deployments.ingress.scores.bodies import (
    ClassifyBatchBody,
    ClassifyBody,
    EitherClassifyBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from deployments.ingress.scores.replies import (
    ClassifyReply,
    PoolingReply,
    RerankReply,
    ScoreReply,
    classifications,
    entities,
    label_scores,
    now,
    pair_scores,
    ranked,
    reply_id,
    usage_of,
)

Reply = Callable[[Sequence[float], int], object]
"""From scores and the number of tokens to a route's reply."""


def routes(engine: EngineClient) -> APIRouter:
    """All routes over this engine."""
    router, scorer = APIRouter(), _Scorer(engine)

    @router.post("/classify")
    async def classify(request: Request, body: EitherClassifyBody) -> Response:
        if isinstance(body, ClassifyBody):
            return await scorer.classify(request, body)
        batch = ClassifyBatchBody(inputs=[body.inputs], parameters=body.parameters)
        return await scorer.entities(request, batch, is_single=True)

    @router.post("/classify_batch")
    async def classify_batch(request: Request, body: ClassifyBatchBody) -> Response:
        return await scorer.entities(request, body, is_single=False)

    @router.post("/v1/classify")
    async def classify_v1(request: Request, body: ClassifyBody) -> Response:
        return await scorer.classify(request, body)

    @router.post("/pooling")
    async def pooling(request: Request, body: PoolingBody) -> Response:
        return await scorer.pool(request, body)

    @router.post("/v1/score")
    @router.post("/score")
    async def score(request: Request, body: ScoreBody) -> Response:
        return await scorer.score(request, body)

    @router.post("/v1/rerank")
    @router.post("/v2/rerank")
    @router.post("/rerank")
    async def rerank(request: Request, body: RerankBody) -> Response:
        return await scorer.rerank(request, body)

    return router


class _Scorer:
    """Runs the requests of one ingress."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    async def classify(self, request: Request, body: ClassifyBody) -> Response:
        """The classes of each input, in vLLM's form."""
        parsed, task = await self._parsed(
            request, body, partial(encoded, body.input, self._engine), body.input
        )

        def complete(result: FinishedCall) -> ClassifyReply:
            scores = label_scores(result.completion, task, body.activates)
            return {
                "id": reply_id("classify"),
                "object": "list",
                "created": now(),
                "model": body.model,
                "data": classifications(scores, task),
                "usage": usage_of(parsed.num_tokens),
            }

        return await self._whole(request, parsed, Pooling.SCORE, complete)

    async def entities(
        self, request: Request, body: ClassifyBatchBody, is_single: bool
    ) -> Response:
        """The classes of each text, in LoRAX's form; is_single: the reply is the only text's."""
        named = PromptBody.model_validate({"parameters": body.parameters})
        prompts = partial(encoded, body.inputs, self._engine, "inputs")
        parsed, task = await self._parsed(request, named, prompts, body.inputs)

        def complete(result: FinishedCall) -> object:
            scores = label_scores(result.completion, task, activates=True)
            found = [entities(*own, task) for own in zip(body.inputs, scores, strict=True)]
            return found[0] if is_single else found

        return await self._whole(request, parsed, Pooling.SCORE, complete)

    async def pool(self, request: Request, body: PoolingBody) -> Response:
        """The embedding or the label scores of each input."""
        parsed, task = await self._parsed(
            request, body, partial(encoded, body.input, self._engine), body.input
        )
        embedder = Embedder.of((await self._engine.served()).info, self._engine.settings.embeddings)
        if body.normalize is not None:
            embedder = Embedder(embedder.pooling, body.normalize)
        embeds = body.task == "embed" or (body.task is None and task.task is not TaskKind.CLASSIFY)

        def vectors(completion: Completion) -> list[Vector]:
            if embeds:
                return embedder.vectors(completion)
            return label_scores(completion, task, body.activates)

        def complete(result: FinishedCall) -> PoolingReply:
            return {
                "id": reply_id("pool"),
                "object": "list",
                "created": now(),
                "model": body.model,
                "data": [
                    {"index": index, "object": "pooling", "data": vector}
                    for index, vector in enumerate(vectors(result.completion))
                ],
                "usage": usage_of(parsed.num_tokens),
            }

        pooling = embedder.pooling if embeds else Pooling.SCORE
        return await self._whole(request, parsed, pooling, complete)

    async def score(self, request: Request, body: ScoreBody) -> Response:
        """The score of each pair."""
        firsts, seconds = ([t] if isinstance(t, str) else t for t in (body.text_1, body.text_2))
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        if len(firsts) != len(seconds) or not firsts:
            message = (
                f"`text_1` has {len(firsts)} entries and `text_2` {len(seconds)}: send as many, "
                "or one `text_1`"
            )
            raise invalid(message, "text_2")
        pairs = list(zip(firsts, seconds, strict=True))

        def reply(scores: Sequence[float], num_tokens: int) -> ScoreReply:
            return {
                "id": reply_id("score"),
                "object": "list",
                "created": now(),
                "model": body.model,
                "data": [
                    {"index": index, "object": "score", "score": score}
                    for index, score in enumerate(scores)
                ],
                "usage": usage_of(num_tokens),
            }

        return await self._pairs(request, body, pairs, "text_2", reply)

    async def rerank(self, request: Request, body: RerankBody) -> Response:
        """The documents by their scores with the query."""
        pairs = [(body.query, text) for text in body.texts]
        for name, given in (("query", body.query), ("documents", pairs)):
            if not given:
                raise invalid(f"`{name}` cannot be empty", name)

        def reply(scores: Sequence[float], num_tokens: int) -> RerankReply:
            return {
                "id": reply_id("rerank"),
                "model": body.model,
                "usage": usage_of(num_tokens),
                "results": ranked(body, scores),
            }

        return await self._pairs(request, body, pairs, "documents", reply)

    async def _pairs(
        self,
        request: Request,
        body: ScoreBody | RerankBody,
        pairs: Sequence[tuple[str, str]],
        param: str,
        reply: Reply,
    ) -> Response:
        """Score pairs: by a classification head, or by the cosine of their embeddings."""
        task = (await self._engine.served()).info.task
        if task.task is TaskKind.EMBED:
            return await self._cosines(request, body, pairs, param, reply)
        texts = [text for pair in pairs for text in pair]
        prompts = partial(encoded_pairs, pairs, self._engine, param)
        parsed, task = await self._parsed(request, body, prompts, texts)

        def complete(result: FinishedCall) -> object:
            scores = pair_scores(result.completion, task, body.activates)
            return reply(scores, parsed.num_tokens)

        return await self._whole(request, parsed, Pooling.SCORE, complete)

    async def _cosines(
        self,
        request: Request,
        body: ScoreBody | RerankBody,
        pairs: Sequence[tuple[str, str]],
        param: str,
        reply: Reply,
    ) -> Response:
        """Score pairs by the cosine of their embeddings; equal texts are computed once."""
        index_of = {text: index for index, text in enumerate(dict.fromkeys(chain(*pairs)))}
        prompts = partial(encoded, list(index_of), self._engine, param, count=len(pairs))
        parsed, _ = await self._parsed(request, body, prompts, list(index_of))
        own = Embedder.of((await self._engine.served()).info, self._engine.settings.embeddings)
        embedder = Embedder(own.pooling, normalize=True)

        def complete(result: FinishedCall) -> object:
            vectors = embedder.vectors(result.completion)
            pairs_at = [(index_of[one], index_of[other]) for one, other in pairs]
            scores = [
                math.fsum(a * b for a, b in zip(vectors[i], vectors[j], strict=True))
                for i, j in pairs_at
            ]
            return reply(scores, parsed.num_tokens)

        return await self._whole(request, parsed, embedder.pooling, complete)

    async def _parsed(
        self,
        request: Request,
        body: PromptBody,
        prompts: Callable[[], Awaitable[Sequence[EncodedPrompt]]],
        texts: Sequence[str | list[int]],
    ) -> tuple[PromptRequest, ModelTask]:
        """The request, and what its base model is for. prompts: of these texts."""
        check_body(body, REFUSED_SCORES)
        parsed = await prompt_request(request, body, self._engine, prompts, characters_of(texts))
        return parsed, (await self._engine.served()).info.task

    async def _whole(
        self,
        request: Request,
        parsed: PromptRequest,
        pooling: Pooling,
        complete: Callable[[FinishedCall], object],
    ) -> Response:
        """Run the request to its end."""
        pad = (await self._engine.served()).info.task.pad_token_id
        job = parsed.job(pooling, "pool", pad)
        return await whole(request, self._engine, job, complete)
