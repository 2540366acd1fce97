"""Logprobs in OpenAI's two shapes: one for completions, one for chat."""

from collections.abc import Sequence
from typing import TypedDict

from configs.wire.plan import TokenLogprobs
from deployments.ingress.text.detokenizer_state import TextPiece
from deployments.ingress.text.tokenizer import ModelTokenizer

_REPLACEMENT = "\ufffd"
# The floor of OpenAI's API; JSON has no infinities.
_FLOOR = -9999.0


class CompletionLogprobs(TypedDict):
    """One entry a token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TopLogprob(TypedDict):
    """A likely token at this position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """One entry a token."""

    content: list[TokenLogprob]
    refusal: None


def finite(logprob: float) -> float:
    """The logprob, with a floor that JSON can represent."""
    return logprob if logprob > _FLOOR else _FLOOR


def sampled_logprob(piece: TextPiece) -> float:
    """The logprob of a piece's own token; 0 where the driver reported none."""
    return 0.0 if piece.logprobs is None else finite(piece.logprobs.logprob)


def completion_logprobs(
    pieces: Sequence[TextPiece], text: ModelTokenizer, num_top: int
) -> CompletionLogprobs:
    """Four lists, one entry a token; the alternatives include the sampled token.

    A token without logprobs has nulls, e.g. the first one of an echoed prompt.
    """
    tops = [_top_by_text(piece, text) for piece in pieces] if num_top else None
    return {
        "tokens": [_token_string(piece.token, text) for piece in pieces],
        "token_logprobs": [
            None if piece.logprobs is None else sampled_logprob(piece) for piece in pieces
        ],
        "top_logprobs": tops,
        "text_offset": [piece.offset for piece in pieces],
    }


def chat_logprobs(pieces: Sequence[TextPiece], text: ModelTokenizer) -> ChatLogprobs:
    """One object a token, each with its bytes and its alternatives."""
    content: list[TokenLogprob] = []
    for piece in pieces:
        alternatives = [_entry(id, logprob, text) for id, logprob in _top(piece.logprobs)]
        own = _entry(piece.token, sampled_logprob(piece), text)
        content.append({**own, "top_logprobs": alternatives})
    return {"content": content, "refusal": None}


def _top(logprobs: TokenLogprobs | None) -> list[tuple[int, float]]:
    if logprobs is None:
        return []
    return list(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))


def _top_by_text(piece: TextPiece, text: ModelTokenizer) -> dict[str, float] | None:
    if piece.logprobs is None:
        return None
    top = {_token_string(id, text): finite(logprob) for id, logprob in _top(piece.logprobs)}
    top.setdefault(_token_string(piece.token, text), sampled_logprob(piece))
    return top


def _entry(id: int, logprob: float, text: ModelTokenizer) -> TopLogprob:
    raw = text.token_bytes(id)
    return {
        "token": raw.decode("utf-8", "replace"),
        "logprob": finite(logprob),
        "bytes": list(raw),
    }


def _token_string(id: int, text: ModelTokenizer) -> str:
    """A token as a string; a part of a character as its bytes, like OpenAI's API."""
    string = text.token_text(id)
    if _REPLACEMENT not in string:
        return string
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text.token_bytes(id))
