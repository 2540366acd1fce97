"""Error messages for invalid bodies, with the field names of the client."""

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.ingress.http.errors import RequestError, invalid

_NO_OBJECT = "a valid dictionary or object to extract fields from"
_SHOULD_BE = "Input should be "
_NO_JSON = "the body is not valid JSON"
_ABSENT = object()


def not_json(fault: Mapping[str, Any] | None = None) -> RequestError:
    """The error for a body that is not JSON; fault: the parser's, if it has one."""
    if fault is None:
        return invalid(_NO_JSON)
    *_, position = fault["loc"]
    return invalid(f"{_NO_JSON}: {fault['ctx']['error']} (character {position})")


def validation_message(faults: Sequence[Mapping[str, Any]], sent: object) -> RequestError:
    """The error for a body that does not fit its schema: its first wrong field, and why.

    faults: pydantic's, with locations in the body `sent`. For a field with several possible forms
    pydantic reports a fault for each; the deepest one is about the form that the client meant.
    """
    found = [(_path(fault, sent), fault) for fault in faults]
    first, _ = found[0]
    same = [(path, fault) for path, fault in found if path[:1] == first[:1]]
    deepest = max((path for path, _ in same), key=len)
    field = ".".join(map(str, deepest))
    reasons = [_reason(fault) for path, fault in same if path == deepest]
    if not field:
        return invalid("the body must be a JSON object")
    return invalid(f"`{field}`: {_joined(reasons)}", field)


def _path(fault: Mapping[str, Any], sent: object) -> tuple[str | int, ...]:
    """The location of a fault in the body, without pydantic's names of union members."""
    location = fault["loc"]
    path = []
    for depth, part in enumerate(location, 1):
        inner = _inner(sent, part)
        if inner is not _ABSENT:
            sent = inner
        elif fault["type"] != "missing" or depth < len(location):
            continue
        path.append(part)
    return tuple(path)


def _inner(sent: object, part: str | int) -> object:
    if isinstance(sent, Mapping):
        return sent.get(part, _ABSENT)
    if isinstance(sent, list) and isinstance(part, int) and part < len(sent):
        return sent[part]
    return _ABSENT


def _reason(fault: Mapping[str, Any]) -> str:
    reason = str(fault["msg"]).removeprefix("Value error, ")
    return reason.replace(_NO_OBJECT, "a JSON object")


def _joined(reasons: Sequence[str]) -> str:
    """Several reasons about one field as one sentence, each once."""
    head, *rest = dict.fromkeys(reasons)
    return " or ".join([head, *(reason.removeprefix(_SHOULD_BE) for reason in rest)])
