"""Logprobs of prompts' tokens in three forms: LoRAX's, OpenAI's and vLLM's."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from configs.wire.plan import TokenLogprobs
from configs.wire.sampling import Sampling
from deployments.contract import SequenceRequest
from deployments.ingress.generation.replies import Choice
from deployments.ingress.text.detokenizer_state import DetokenizerState, TextPiece
from deployments.ingress.text.logprobs import finite
from deployments.ingress.text.stops import StopStrings
from deployments.ingress.text.tokenizer import ModelTokenizer, Slice


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    text: "" for a prompt of ids, if it is not needed.
    ids: its tokens.
    starts: where in the text each token begins; None if it is not needed, or for a prompt of ids.
    """

    text: str
    ids: list[int]
    starts: list[int] | None = None


class PrefillToken(msgspec.Struct):
    """One token of the prompt in LoRAX's form; the first one has no logprob."""

    id: int
    text: str
    logprob: float | None


def with_prompt_logprobs(sequence: SequenceRequest, num_top: int) -> SequenceRequest:
    """The sequence with logprobs of its prompt's tokens, and num_top alternatives each."""
    sampling: Sampling = msgspec.structs.replace(sequence.sampling, prompt_logprobs=num_top)
    return msgspec.structs.replace(sequence, sampling=sampling)


def prefill(choice: Choice, text: ModelTokenizer) -> list[PrefillToken]:
    """LoRAX's `details.prefill`; empty if it is not requested."""
    if choice.prompt_logprobs is None:
        return []
    values = [None, *(finite(found.logprob) for found in choice.prompt_logprobs)]
    return [
        PrefillToken(id, text.token_text(id), value)
        for id, value in zip(choice.prompt, values, strict=True)
    ]


def starts_of(slices: Iterable[Slice]) -> list[int]:
    """Where in its text each token begins; one that the tokenizer adds, where those before end."""
    starts, end = [], 0
    for each in slices:
        starts.append(each.start if each.stop else end)
        end = max(end, each.stop)
    return starts


def echoed(prompt: Prompt, choice: Choice, num_top: int, text: ModelTokenizer) -> list[TextPiece]:
    """The pieces of the prompt and of the answer, for OpenAI's `echo` with `logprobs`."""
    assert choice.prompt_logprobs is not None, "requested by the job"
    cut = [
        TokenLogprobs(found.logprob, found.top_ids[:num_top], found.top_logprobs[:num_top])
        for found in choice.prompt_logprobs
    ]
    starts = prompt.starts
    if starts is None:
        decoded = DetokenizerState(text.stream(), StopStrings((), keep=False), per_token=True)
        starts = [piece.offset for piece in decoded.feed(prompt.ids)]
    own = [
        TextPiece(id, "", start, found)
        for id, start, found in zip(prompt.ids, starts, [None, *cut], strict=True)
    ]
    after = len(prompt.text)
    return own + [piece._replace(offset=after + piece.offset) for piece in choice.pieces]


def prompt_logprobs_by_id(
    choice: Choice, num_top: int, text: ModelTokenizer
) -> list[dict[str, object] | None]:
    """vLLM's `prompt_logprobs`: for each token the candidates by id, null for the first."""
    assert choice.prompt_logprobs is not None, "requested by the job"
    entries_by_token: list[dict[str, object] | None] = [None]
    for id, found in zip(choice.prompt[1:], choice.prompt_logprobs, strict=True):
        pairs = zip(found.top_ids[:num_top], found.top_logprobs[:num_top], strict=True)
        entries: dict[str, object] = {
            str(top): _candidate(top, value, rank, text)
            for rank, (top, value) in enumerate(pairs, 1)
        }
        entries.setdefault(str(id), _candidate(id, found.logprob, None, text))
        entries_by_token.append(entries)
    return entries_by_token


def _candidate(
    id: int, logprob: float, rank: int | None, text: ModelTokenizer
) -> dict[str, object]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": text.token_text(id)}
