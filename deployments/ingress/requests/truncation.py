"""Prompts that are cut to a number of tokens (`truncate_prompt_tokens`)."""

from deployments.contract import EngineInfo
from deployments.ingress.generation.engine import ServedModel
from deployments.ingress.http.errors import invalid
from deployments.ingress.requests.jobs import Body, prompt_limit, requested_tokens

_FEW_CHARACTERS = 65_536
_CHARACTERS_A_TOKEN = 16
_FIELD = "truncate_prompt_tokens"
# The tokenizers library reads no larger number; no prompt is as long.
_MOST_TOKENS = 2**31 - 1


async def encoded(
    text: str, body: Body, served: ServedModel, add_special_tokens: bool, param: str
) -> list[int]:
    """The tokens of a prompt; cut to the requested number, special tokens included.

    As in transformers, the special tokens that the tokenizer adds are never cut.
    """
    info, tokenizer = served
    if body.truncate_prompt_tokens is None:
        return await tokenizer.encode(text, add_special_tokens, prompt_limit(info, param))
    most = max(_FEW_CHARACTERS, _CHARACTERS_A_TOKEN * info.max_total_tokens)
    if len(text) > most:
        message = f"`{param}` must have at most {most} characters to be cut, got {len(text)}"
        raise invalid(message, param, "context_length_exceeded")
    num_kept = num_tokens(body, info)
    added = tokenizer.num_special_tokens if add_special_tokens else 0
    if num_kept <= added:
        message = f"`{_FIELD}` must be more than {added}: so many special tokens are added"
        raise invalid(message, _FIELD)
    return await tokenizer.encode_cut(text, add_special_tokens, num_kept, side(body))


def cut(ids: list[int], body: Body, info: EngineInfo) -> list[int]:
    """A prompt of tokens, cut to the requested number."""
    if body.truncate_prompt_tokens is None:
        return ids
    kept = num_tokens(body, info)
    return ids[:kept] if side(body) == "right" else ids[-kept:]


def side(body: Body) -> str:
    """The side on which a prompt is cut."""
    return body.truncation_side or "left"


def num_tokens(body: Body, info: EngineInfo) -> int:
    """The most tokens of a prompt; for -1 as many as leave room for the answer."""
    given = body.truncate_prompt_tokens
    assert given is not None, "the prompt is not cut"
    if given > 0:
        return min(given, _MOST_TOKENS)
    return max(1, min(info.max_input_tokens, info.max_total_tokens - (requested_tokens(body) or 1)))
