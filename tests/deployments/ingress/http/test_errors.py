import msgspec
import pytest

from deployments.contract import ErrorKind, Failed
from deployments.ingress.http.errors import (
    ERROR_SHAPES,
    RequestError,
    invalid,
    lorax_error,
    openai_error,
    retry_headers,
)


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_every_kind_has_both_dialects(kind: ErrorKind) -> None:
    row = ERROR_SHAPES[kind]
    assert 400 <= row.openai_status < 600
    assert 400 <= row.lorax_status < 600
    error = RequestError.of(Failed(kind, "why"))
    assert lorax_error(error)["code"] == kind.value
    assert "why" in str(openai_error(error))


def test_the_fields_own_code_and_param_go_first() -> None:
    body = openai_error(invalid("too long", "prompt", "context_length_exceeded"))
    assert body == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "prompt",
            "code": "context_length_exceeded",
        }
    }


@pytest.mark.parametrize(
    ("kind", "seconds", "expected"),
    [
        (ErrorKind.OVERLOADED, None, {"Retry-After": "1"}),
        (ErrorKind.OVERLOADED, 2.1, {"Retry-After": "3"}),
        (ErrorKind.UNAVAILABLE, 0.0, {"Retry-After": "1"}),
        (ErrorKind.UNAVAILABLE, None, {}),
        (ErrorKind.VALIDATION, None, {}),
    ],
)
def test_retry_after(kind: ErrorKind, seconds: float | None, expected: dict[str, str]) -> None:
    assert retry_headers(RequestError(kind, "x", retry_after_s=seconds)) == expected


def test_messages_can_always_be_written() -> None:
    error = invalid("half \ud800 {0} a pair")
    for body in (openai_error(error), lorax_error(error)):
        assert b"half ?" in msgspec.json.encode(body)
