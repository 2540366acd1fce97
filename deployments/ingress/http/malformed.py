"""What is wrong with a body, told by the names that its author wrote."""

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.ingress.http.errors import RequestError, invalid

_NO_OBJECT = "a valid dictionary or object to extract fields from"
_SHOULD_BE = "Input should be "
_NO_JSON = "the body is not valid JSON"
_ABSENT = object()


def not_json(fault: Mapping[str, Any] | None = None) -> RequestError:
    """For a body that is no JSON; `fault` is what the parser said, where it said anything."""
    if fault is None:
        return invalid(_NO_JSON)
    *_, place = fault["loc"]
    return invalid(f"{_NO_JSON}: {fault['ctx']['error']} (character {place})")


def validation_message(faults: Sequence[Mapping[str, Any]], sent: object) -> RequestError:
    """For a body that does not fit its schema: the first field at fault, and why.

    faults: pydantic's, with locations from the body `sent` on. Of a field that may have several
    forms the fault that lies deepest is told: the others are about forms that nobody meant.
    """
    found = [(_path(fault, sent), fault) for fault in faults]
    first, _ = found[0]
    same = [(path, fault) for path, fault in found if path[:1] == first[:1]]
    deepest = max((path for path, _ in same), key=len)
    field = ".".join(map(str, deepest))
    words = _joined([_words(fault) for path, fault in same if path == deepest])
    if not field:
        return invalid("the body must be a JSON object")
    return invalid(f"`{field}`: {words}", field)


def _path(fault: Mapping[str, Any], sent: object) -> tuple[str | int, ...]:
    """Where the fault lies, without the names that validation has for its own branches."""
    location = fault["loc"]
    path = []
    for place, part in enumerate(location, 1):
        inner = _inner(sent, part)
        if inner is not _ABSENT:
            sent = inner
        elif fault["type"] != "missing" or place < len(location):
            continue
        path.append(part)
    return tuple(path)


def _inner(sent: object, part: str | int) -> object:
    if isinstance(sent, Mapping):
        return sent.get(part, _ABSENT)
    if isinstance(sent, list) and isinstance(part, int) and part < len(sent):
        return sent[part]
    return _ABSENT


def _words(fault: Mapping[str, Any]) -> str:
    words = str(fault["msg"]).removeprefix("Value error, ")
    return words.replace(_NO_OBJECT, "a JSON object")


def _joined(words: Sequence[str]) -> str:
    """Several words about one field as one sentence, each once."""
    head, *rest = dict.fromkeys(words)
    return " or ".join([head, *(word.removeprefix(_SHOULD_BE) for word in rest)])
