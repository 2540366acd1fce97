"""Replies of /classify, /pooling, /score and /rerank."""

import math
import time
import uuid
from collections.abc import Sequence
from typing import Literal, NotRequired, TypedDict

from configs.wire.tasks import ModelTask, ScoreActivation
from deployments.contract import Completion
from deployments.ingress.embeddings import Vector, numbers
from deployments.ingress.http.errors import invalid
from deployments.ingress.scores.bodies import RerankBody


class ScoreUsage(TypedDict):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


class Classification(TypedDict):
    """One input's classes. label: the likeliest one. probs: of all labels, in their order."""

    index: int
    label: str
    probs: Vector
    num_classes: int


class ClassifyReply(TypedDict):
    """vLLM's reply of /classify, in the order of the inputs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: ScoreUsage


class Entity(TypedDict):
    """LoRAX's form of a class: what part of the text it is of, in characters.

    A sequence's classes are of the whole text.
    """

    entity_group: str
    score: float
    word: str
    start: int
    end: int


class Pooled(TypedDict):
    """One input's embedding, or the scores of its labels."""

    index: int
    object: Literal["pooling"]
    data: Vector


class PoolingReply(TypedDict):
    """vLLM's reply of /pooling."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Pooled]
    usage: ScoreUsage


class PairScore(TypedDict):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreReply(TypedDict):
    """vLLM's reply of /score, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: ScoreUsage


class RankedText(TypedDict):
    """A document."""

    text: str


class Ranked(TypedDict):
    """One document's score. index: among the request's documents."""

    index: int
    relevance_score: float
    document: NotRequired[RankedText]


class RerankReply(TypedDict):
    """Jina's and vLLM's reply of /rerank, best first; of Cohere's it has all but `meta`."""

    id: str
    model: str
    usage: ScoreUsage
    results: list[Ranked]


def logits_of(completion: Completion) -> list[Vector]:
    """Each sequence's logits; refuses a model and adapter without a classification head."""
    found = [numbers(outcome.embedding) for outcome in completion.sequences]
    if not all(found):
        raise invalid(
            "neither the base model nor the adapter has a classification head: name an adapter "
            "that brings one (PEFT's task_type SEQ_CLS with modules_to_save)",
            "model",
        )
    return found


def activated(logits: Vector, activation: ScoreActivation) -> Vector:
    """Scores of logits."""
    if activation is ScoreActivation.NONE:
        return logits
    if activation is ScoreActivation.SIGMOID:
        return tuple(_sigmoid(value) for value in logits)
    most = max(logits)
    powers = [math.exp(value - most) for value in logits]
    total = math.fsum(powers)
    return tuple(power / total for power in powers)


def _sigmoid(value: float) -> float:
    # Of a large negative number exp would overflow.
    if value < 0:
        return math.exp(value) / (1 + math.exp(value))
    return 1 / (1 + math.exp(-value))


def label_scores(completion: Completion, task: ModelTask, activates: bool) -> list[Vector]:
    """Each sequence's scores of all labels."""
    return [
        activated(logits, task.activation(len(logits))) if activates else logits
        for logits in logits_of(completion)
    ]


def pair_scores(completion: Completion, task: ModelTask, activates: bool) -> list[float]:
    """Each pair's score; refuses a head with more labels than one."""
    scores: list[float] = []
    for logits in logits_of(completion):
        if len(logits) != 1:
            raise invalid(
                f"the classification head has {len(logits)} labels, a score needs a head with one: "
                "use /classify",
                "model",
            )
        activation = task.pair_activation or ScoreActivation.SIGMOID
        scores += activated(logits, activation) if activates else logits
    return scores


def classifications(scores: Sequence[Vector], task: ModelTask) -> list[Classification]:
    """vLLM's form."""
    return [
        {
            "index": index,
            "label": task.label(max(range(len(own)), key=own.__getitem__), len(own)),
            "probs": own,
            "num_classes": len(own),
        }
        for index, own in enumerate(scores)
    ]


def entities(text: str, scores: Vector, task: ModelTask) -> list[Entity]:
    """LoRAX's form: all labels of the whole text, the likeliest first."""
    order = sorted(range(len(scores)), key=lambda label: -scores[label])
    return [
        {
            "entity_group": task.label(label, len(scores)),
            "score": scores[label],
            "word": text,
            "start": 0,
            "end": len(text),
        }
        for label in order
    ]


def ranked(body: RerankBody, scores: Sequence[float]) -> list[Ranked]:
    """The best documents; equal ones stay in the request's order."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    texts, found = body.texts, list[Ranked]()
    for index in order[: body.top_n or len(order)]:
        one: Ranked = {"index": index, "relevance_score": scores[index]}
        if body.return_documents:
            one["document"] = {"text": texts[index]}
        found.append(one)
    return found


def usage_of(num_tokens: int) -> ScoreUsage:
    """Token counts of prompts."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}


def reply_id(kind: str) -> str:
    """A new id."""
    return f"{kind}-{uuid.uuid4().hex}"


def now() -> int:
    """Seconds since the epoch."""
    return int(time.time())
