"""Adapters as values: a client's reference, what it resolves to, its size, refusals."""

from collections.abc import Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import NewType, TypeGuard

import msgspec

from configs.wire.merging import MergeRule

AdapterKey = NewType("AdapterKey", int)
"""The driver's short name for one content digest; 0 is never used."""


class AdapterSource(StrEnum):
    """Where an adapter's files come from."""

    HUB = "hub"
    LOCAL = "local"
    S3 = "s3"
    PUSHED = "pushed"


class AdapterReference(msgspec.Struct, frozen=True):
    """A client's name for an adapter: (source, id, revision), or for a merge of several.

    revision: a commit, branch or tag; None: the source's default.
    parts, rule: of a merge; its source and id are for display only.
    """

    source: AdapterSource
    id: str
    revision: str | None = None
    parts: tuple["AdapterReference", ...] = ()
    rule: MergeRule | None = None

    @property
    def members(self) -> tuple["AdapterReference", ...]:
        """All adapters that are named: itself, or the parts of the merge."""
        return self.parts or (self,)


def parse_reference(text: str, default_source: AdapterSource) -> AdapterReference:
    """Read "[hub:|local:|s3:|pushed:]id[@revision]", e.g. "local:pirate" or "acme/sql@v2".

    An unknown prefix is part of the id; s3://bucket/prefix is an id of source s3. Raises
    ValueError for an empty id.
    """
    head, colon, rest = text.partition(":")
    known = bool(colon) and head.lower() in {source.value for source in AdapterSource}
    source = AdapterSource(head.lower()) if known else default_source
    name = rest if known and not rest.startswith("//") else text
    path, _, revision = name.rpartition("@")
    if not path or not revision:
        path, revision = name, ""
    if not path.strip():
        raise ValueError(f"`{text}` names no adapter: it needs a name")
    return AdapterReference(source, path, revision or None)


def parse_pattern(text: str, default_source: AdapterSource) -> str:
    """Read "[source:]id" with `*` and `?`, as `allows` compares it; ValueError for a revision."""
    head, colon, _ = text.partition(":")
    if colon and any(mark in head for mark in "*?"):
        return text
    reference = parse_reference(text, default_source)
    if reference.revision is not None:
        raise ValueError(
            f"`{text}` names a revision, and all revisions of an adapter are open to a key or "
            f"none: leave `@{reference.revision}` out"
        )
    return f"{reference.source.value}:{reference.id}"


def allows(patterns: Sequence[str] | None, source: str, id: str) -> bool:
    """Whether "source:id" matches one of the patterns (`*`, `?`); None matches all."""
    return patterns is None or any(fnmatchcase(f"{source}:{id}", one) for one in patterns)


MAX_INVOCATION = 256
"""Most tokens of an activated adapter's invocation; published ones have a dozen."""

_LONG = 2**63


def are_tokens(value: object) -> TypeGuard[list[int]]:
    """Whether a value is a list of numbers that a tensor of tokens, as PEFT makes it, holds."""
    return isinstance(value, list) and all(
        type(each) is int and -_LONG <= each < _LONG for each in value
    )


NEVER_ACTIVE = 2**62
"""A position that no request reaches."""


def active_from(prompt: Sequence[int], invocation: Sequence[int]) -> int:
    """The first position that an activated adapter changes: its last invocation in the prompt.

    0 for an adapter without an invocation; NEVER_ACTIVE if the prompt does not invoke it.
    """
    if not invocation:
        return 0
    tokens, length = list(invocation), len(invocation)
    for at in range(len(prompt) - length, -1, -1):
        if prompt[at] == tokens[0] and list(prompt[at : at + length]) == tokens:
            return at
    return NEVER_ACTIVE


class FetchedAdapter(msgspec.Struct, frozen=True):
    """An adapter with its files in `folder` on this node.

    name: for messages.
    digest: of the content of its files; of a merge, that of the recipe.
    fingerprint: name, size in bytes and modification time in ns of the files that were digested;
    a reader compares it, so that other bytes are never served under this key. () is not compared.
    parts, rule: of a merge, which has no folder of its own.
    root: the folder, links resolved, that its files must be in; "" is not compared.
    invocation: the tokens from which on an activated adapter (aLoRA) is used; () for others.
    row_sums: what the ranks found by `AdapterNeedsSums`, added; b"" before they were.
    """

    key: AdapterKey
    name: str
    folder: str
    digest: str
    fingerprint: tuple[tuple[str, int, int], ...] = ()
    parts: tuple["FetchedAdapter", ...] = ()
    rule: MergeRule | None = None
    root: str = ""
    invocation: tuple[int, ...] = ()
    row_sums: bytes = b""

    @property
    def members(self) -> tuple["FetchedAdapter", ...]:
        """Every adapter that has its files read: itself, or the parts of the merge."""
        return self.parts or (self,)


class AdapterShape(msgspec.Struct, frozen=True):
    """The memory of a staged adapter.

    num_pages: pages of 8 LoRA rank rows, for each of the model's projections in the model's order;
    of routed experts a page is one expert's.
    host_bytes: bytes of this rank's slices in the host tier.
    """

    num_pages: tuple[int, ...]
    host_bytes: int


class AdapterRefusal(StrEnum):
    """Why an adapter is not served.

    FORBIDDEN: the source refuses the caller's token, or a file lies outside the allowed folders.
    DENIED: this server's rules refuse the caller. QUOTA: the caller downloaded too much.
    """

    NOT_FOUND = "adapter_not_found"
    FORBIDDEN = "adapter_forbidden"
    DENIED = "forbidden"
    QUOTA = "quota"
    UNSUPPORTED = "adapter_unsupported"
    TOO_LARGE = "adapter_too_large"
    UNAVAILABLE = "adapter_unavailable"


class AdapterError(Exception):
    """The adapter cannot be served exactly; `message` says why and what to do.

    reasons: all faults that were found; () stands for the message alone.
    What a message quotes of an adapter's files may be no Unicode, and is escaped: it could not be
    sent.
    """

    def __init__(
        self, refusal: AdapterRefusal, message: str, reasons: tuple[str, ...] = ()
    ) -> None:
        self.refusal = refusal
        self.message = _escaped(message)
        self.reasons = tuple(map(_escaped, reasons)) or (self.message,)
        super().__init__(self.message)


def _escaped(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


class AdapterDeferred(Exception):
    """A rank's host tier has no room for an adapter now; `shape` is what the adapter needs."""

    def __init__(self, shape: AdapterShape) -> None:
        super().__init__(f"no room for {shape.host_bytes} bytes in the host tier now")
        self.shape = shape


class AdapterNeedsSums(Exception):
    """A DoRA adapter needs row norms of weights of which each rank has some columns.

    part: this rank's squared sums, float32. Stage the adapter again with the sum over all ranks.
    """

    def __init__(self, part: bytes) -> None:
        super().__init__("its row norms must be summed over the ranks")
        self.part = part
