"""Fields of a request that need the tokenizer: tokens to use or not, and what becomes text."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from configs.wire.sampling import MAX_BAD_TOKENS
from deployments.contract import SequenceRequest
from deployments.ingress.generation.engine import GenerationJob, ServedModel
from deployments.ingress.http.errors import invalid
from deployments.ingress.requests.jobs import Body, check_known
from deployments.ingress.text.tokenizer import ModelTokenizer

_Words = tuple[tuple[int, ...], ...]


async def restricted(job: GenerationJob, body: Body, served: ServedModel) -> GenerationJob:
    """The job with the request's bad words, allowed tokens, and visible special tokens."""
    if body.skip_special_tokens is False:
        job = replace(job, visible_special_tokens=served.tokenizer.special_ids)
    allowed = tuple(dict.fromkeys(body.allowed_token_ids or ()))
    check_known("allowed_token_ids", allowed, served.info)
    words = await _bad_words(body.bad_words or (), served)
    if not (allowed or words):
        return job
    sequences = [_restricted(sequence, allowed, words) for sequence in job.request.sequences]
    return replace(job, request=msgspec.structs.replace(job.request, sequences=sequences))


def _restricted(
    sequence: SequenceRequest, allowed: tuple[int, ...], words: _Words
) -> SequenceRequest:
    name = "allowed_token_ids" if allowed else "bad_words"
    if sequence.sampling.constraint:
        raise invalid(f"`{name}` cannot be combined with a schema, a grammar or forced tools", name)
    excluded = {*sequence.sampling.masked_ids, *(word[-1] for word in words)}
    if allowed and excluded.issuperset(allowed):
        raise invalid("`allowed_token_ids` leaves no token that may be sampled", name)
    sampling = msgspec.structs.replace(sequence.sampling, allowed_ids=allowed, bad_words=words)
    return msgspec.structs.replace(sequence, sampling=sampling)


async def _bad_words(words: Sequence[str], served: ServedModel) -> _Words:
    """The tokens of each word, at the start of a text and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            found[await _tokens(text, served.tokenizer)] = None
    # A word that ends the answer is not a word; transformers leaves it out too.
    ends = {(), *((id,) for id in served.info.stop_token_ids)}
    kept = tuple(word for word in found if word not in ends)
    if sum(map(len, kept)) > MAX_BAD_TOKENS:
        message = f"`bad_words` must have at most {MAX_BAD_TOKENS} tokens, in both spellings"
        raise invalid(message, "bad_words")
    return kept


async def _tokens(text: str, tokenizer: ModelTokenizer) -> tuple[int, ...]:
    return tuple(await tokenizer.encode(text, add_special_tokens=False))
