"""The lines of batches: requests in, results out."""

import secrets
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import msgspec

from deployments.ingress.batches.records import LineFault

ENDPOINTS = frozenset({
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses",
})  # fmt: skip
"""The routes that a batch may call."""

_MAX_ID = 512
_PIECE_BYTES = 1 << 16
_encode = msgspec.json.Encoder().encode


class BatchLine(NamedTuple):
    """One request of a batch; number: of its line, from 1."""

    number: int
    custom_id: str
    url: str
    body: bytes


class _Written(msgspec.Struct):
    """A line as a client writes it."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


_decode = msgspec.json.Decoder(_Written).decode


def raw_lines(stream: IO[bytes], max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers; one over max_bytes is cut there.

    Reads a piece at a time, so that no line takes more memory than that.
    """
    number, too_long = 1, False
    parts: list[bytes] = []
    piece = stream.read(len(BOM_UTF8)).removeprefix(BOM_UTF8) + stream.read(_PIECE_BYTES)
    while piece:
        *ends, rest = piece.split(b"\n")
        for end in ends:
            line, parts = b"".join((*parts, end)), []
            if line.strip() and not too_long:
                yield number, line
            too_long = False
            number += 1
        parts.append(rest)
        if sum(map(len, parts)) > max_bytes:
            if not too_long:
                yield number, b"".join(parts)
            parts, too_long = [], True
        piece = stream.read(_PIECE_BYTES)
    if (line := b"".join(parts)).strip() and not too_long:
        yield number, line


def read_line(
    number: int, line: bytes, max_bytes: int, endpoint: str | None = None
) -> BatchLine | LineFault:
    """The request of a line, or what is wrong with it; endpoint: the batch's, None for any."""
    if len(line) > max_bytes:
        return LineFault("line_too_long", f"a line has at most {max_bytes} bytes", number)
    try:
        written = _decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        return LineFault("invalid_json_line", f"the line is no request: {fault}", number)
    if not 0 < len(written.custom_id) <= _MAX_ID:
        message = f"`custom_id` must have 1 to {_MAX_ID} characters"
        return LineFault("invalid_custom_id", message, number, "custom_id")
    if written.method != "POST":
        return LineFault("invalid_method", "`method` must be POST", number, "method")
    if written.url not in (ENDPOINTS if endpoint is None else (endpoint,)):
        message = f"`url` must be {endpoint or 'one of ' + ', '.join(sorted(ENDPOINTS))}"
        return LineFault("mismatched_endpoint", message, number, "url")
    body = bytes(written.body)
    if not body.lstrip().startswith(b"{"):
        return LineFault("invalid_body", "`body` must be an object", number, "body")
    return BatchLine(number, written.custom_id, written.url, body)


def result_of(line: BatchLine, status: int, body: bytes) -> tuple[bool, bytes]:
    """Whether a request succeeded, and its line of the output."""
    if status == 200 and not body.startswith(b"{"):
        status, body = 400, b'{"error":{"message":"batches cannot stream"}}'
    response = {"status_code": status, "request_id": f"req_{secrets.token_hex(12)}",
                "body": msgspec.Raw(body)}  # fmt: skip
    return status == 200, _line(line.custom_id, response, None)


def unanswered_line(custom_id: str, code: str, message: str) -> bytes:
    """The line of a request that got no reply."""
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: object, error: object) -> bytes:
    id = f"batch_req_{secrets.token_hex(12)}"
    line: dict[str, Any] = {"id": id, "custom_id": custom_id, "response": response, "error": error}
    return _encode(line) + b"\n"
