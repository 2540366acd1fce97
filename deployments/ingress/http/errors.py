"""Errors of requests, and one table with their status and body in all HTTP dialects."""

import math
from dataclasses import dataclass
from typing import Literal, NotRequired, TypedDict

from deployments.contract import ErrorKind, Failed


class OpenAIErrorBody(TypedDict):
    """What went wrong; param: the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(TypedDict):
    """An error of OpenAI's routes."""

    error: OpenAIErrorBody


class AnthropicErrorBody(TypedDict):
    """What went wrong; details: a code for programs, as `error_code`."""

    type: str
    message: str
    details: NotRequired[dict[str, str]]


class AnthropicError(TypedDict):
    """An error of Anthropic's routes."""

    type: Literal["error"]
    error: AnthropicErrorBody


class LoraxError(TypedDict):
    """An error of LoRAX's routes; code: the kind, for programs."""

    error: str
    error_type: str
    code: NotRequired[str]


class RequestError(Exception):
    """A request that cannot be served. A `Driver` may raise it too, before any sequence exists.

    kind: selects the status. message: for the client.
    param: the field at fault, for OpenAI's dialect.
    code: instead of the table's OpenAI code.
    retry_after_s: in seconds; None if it is no use to try again.
    counted: the metrics have counted it.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        # The message may quote the client's text, which may contain half of a surrogate pair.
        self.message = message.encode("utf-8", "replace").decode()
        super().__init__(self.message)
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.counted = False

    @classmethod
    def of(cls, failed: Failed) -> "RequestError":
        """The same failure as an exception."""
        return cls(failed.kind, failed.message, retry_after_s=failed.retry_after_s)


class EngineLost(RequestError):
    """The driver replica that ran a call has died: the call may be made again."""

    def __init__(self) -> None:
        message = "the engine that ran this request is gone: send it again"
        super().__init__(ErrorKind.UNAVAILABLE, message, retry_after_s=1.0)


def invalid(message: str, param: str | None = None, code: str | None = None) -> RequestError:
    """The error for bad input."""
    return RequestError(ErrorKind.VALIDATION, message, param=param, code=code)


@dataclass(frozen=True)
class ErrorShape:
    """How an error of one kind is written.

    openai_status, openai_type, openai_code: for OpenAI's routes.
    lorax_status, lorax_type: for LoRAX's routes. lorax_text: with {} for the message.
    metric: the failure's label in LoRAX's metrics.
    """

    openai_status: int
    openai_type: str
    openai_code: str | None
    metric: str
    lorax_status: int = 424
    lorax_type: str = "generation"
    lorax_text: str = "Request failed during generation: {}"


_BAD = "invalid_request_error"
_SERVER = "server_error"
_RATE = "rate_limit_error"

ERROR_SHAPES: dict[ErrorKind, ErrorShape] = {
    ErrorKind.VALIDATION: ErrorShape(
        400, _BAD, None, "validation", 422, "validation", "Input validation error: {}"
    ),
    ErrorKind.ADAPTER_NOT_FOUND: ErrorShape(404, _BAD, "model_not_found", "download_adapter"),
    ErrorKind.ADAPTER_FORBIDDEN: ErrorShape(403, _BAD, "adapter_forbidden", "download_adapter"),
    ErrorKind.ADAPTER_UNSUPPORTED: ErrorShape(400, _BAD, "adapter_unsupported", "load_adapter"),
    ErrorKind.ADAPTER_TOO_LARGE: ErrorShape(400, _BAD, "adapter_too_large", "load_adapter"),
    ErrorKind.ADAPTER_UNAVAILABLE: ErrorShape(
        503, _SERVER, "adapter_unavailable", "download_adapter"
    ),
    ErrorKind.NOT_FOUND: ErrorShape(404, _BAD, "not_found", "validation", 404, "not_found", "{}"),
    ErrorKind.UNAUTHORIZED: ErrorShape(
        401, _BAD, "invalid_api_key", "validation", 401, "unauthorized", "{}"
    ),
    ErrorKind.FORBIDDEN: ErrorShape(403, _BAD, "forbidden", "validation", 403, "forbidden", "{}"),
    # On the type "overloaded" LoRAX's client waits and tries again.
    ErrorKind.QUOTA: ErrorShape(
        429, _RATE, "rate_limit_exceeded", "overloaded", 429, "overloaded", "{}"
    ),
    ErrorKind.OVERLOADED: ErrorShape(
        429, _RATE, "overloaded", "overloaded", 429, "overloaded", "Model is overloaded"
    ),
    ErrorKind.UNAVAILABLE: ErrorShape(
        503, _SERVER, "unavailable", "unavailable", 503, "unavailable", "Service unavailable: {}"
    ),
    ErrorKind.GENERATION: ErrorShape(500, _SERVER, "generation", "generation"),
}

_ADAPTER_KINDS = frozenset(kind for kind in ErrorKind if kind.value.startswith("adapter_"))


def openai_error(error: RequestError) -> OpenAIError:
    """The body of an error in OpenAI's dialect."""
    row = ERROR_SHAPES[error.kind]
    param = error.param or ("model" if error.kind in _ADAPTER_KINDS else None)
    return {
        "error": {
            "message": error.message,
            "type": row.openai_type,
            "param": param,
            "code": error.code or row.openai_code,
        }
    }


OVERLOADED_STATUS = 529
"""Anthropic's status of an overload, which has no name in HTTP."""

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED_STATUS: "overloaded_error",
}


def anthropic_status(kind: ErrorKind) -> int:
    """The status of an error in Anthropic's dialect: OpenAI's, but for overloads."""
    if kind is ErrorKind.OVERLOADED:
        return OVERLOADED_STATUS
    return ERROR_SHAPES[kind].openai_status


def anthropic_error(status: int, message: str, code: str | None = None) -> AnthropicError:
    """The body of an error in Anthropic's dialect."""
    other = "api_error" if status >= 500 else "invalid_request_error"
    body: AnthropicErrorBody = {"type": _ANTHROPIC_TYPES.get(status, other), "message": message}
    if code is not None:
        body["details"] = {"error_code": code}
    return {"type": "error", "error": body}


def lorax_error(error: RequestError) -> LoraxError:
    """The body of an error in LoRAX's dialect, with the kind as a machine-readable `code`."""
    row = ERROR_SHAPES[error.kind]
    return {
        "error": row.lorax_text.format(error.message),
        "error_type": row.lorax_type,
        "code": error.kind.value,
    }


def retry_headers(error: RequestError) -> dict[str, str]:
    """Retry-After in whole seconds: for overloads, and for errors that have a time."""
    seconds = error.retry_after_s
    if seconds is None and error.kind is ErrorKind.OVERLOADED:
        seconds = 1.0
    return {} if seconds is None else {"Retry-After": str(max(1, math.ceil(seconds)))}
