"""Token counts of a reply, in OpenAI's form; other dialects rename them."""

from collections.abc import Sequence
from typing import NotRequired, TypedDict

from deployments.contract import Completion, SequenceRequest


class CachedTokens(TypedDict):
    """Prompt tokens from the prefix cache."""

    cached_tokens: int


class CompletionTokens(TypedDict):
    """Tokens of the answers' reasoning, among the completion tokens."""

    reasoning_tokens: int


class UsageReply(TypedDict):
    """Token counts; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[CompletionTokens]


def usage_of(
    sequences: Sequence[SequenceRequest], choices: int, generated: int, completion: Completion
) -> UsageReply:
    """Token counts; a prompt counts once, however many choices it has."""
    prompt = sum(len(sequence.prompt) for sequence in sequences[::choices])
    cached = sum(outcome.cached_tokens for outcome in completion.sequences[::choices])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
