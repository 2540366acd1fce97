"""Errors about a chat's fields, with the names that another dialect has for them."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from deployments.ingress.http.errors import RequestError, invalid
from deployments.ingress.http.malformed import validation_message


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """An error with the dialect's name of the chat's field; names: the dialect's, by the chat's."""
    name = names.get(error.param or "")
    if name is None:
        return error
    message = error.message.replace(f"`{error.param}`", f"`{name}`")
    return RequestError(
        error.kind, message, param=name, code=error.code, retry_after_s=error.retry_after_s
    )


def malformed_chat(
    fault: ValidationError, chat: Mapping[str, Any], names: Mapping[str, str]
) -> RequestError:
    """The error about a field of a chat that was made from another dialect's body."""
    error = validation_message(fault.errors(), chat)
    assert error.param, "a chat is an object"
    head, *rest = error.param.split(".")
    name = ".".join([names.get(head, head), *rest])
    return invalid(error.message.replace(f"`{error.param}`", f"`{name}`"), name)
