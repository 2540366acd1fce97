"""Names that stand for adapters: those of the operator's config, and those given by a command."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from configs.wire.adapters import AdapterError, AdapterReference, AdapterRefusal, allows


class Aliases:
    """What each name stands for; a name of the operator's config goes before a given one.

    configured: the config's names and their adapters. given: the names that commands gave, which
    last as long as the replica.
    """

    def __init__(self) -> None:
        self.configured: Mapping[AdapterReference, AdapterReference] = {}
        self.given: dict[AdapterReference, AdapterReference] = {}

    @property
    def all(self) -> dict[AdapterReference, AdapterReference]:
        """Every name and the adapter that it stands for."""
        return {**self.given, **self.configured}

    def resolve(
        self, reference: AdapterReference, allowed: Sequence[str] | None = None
    ) -> AdapterReference:
        """The adapter that a client means by a name, or by the names of a merge.

        allowed: patterns of the adapters that the client may use, None for all; AdapterError for
        a name of another adapter.
        """
        if reference.parts:
            parts = tuple(self.resolve(part, allowed) for part in reference.parts)
            return replace(reference, parts=parts)
        target = self.configured.get(reference) or self.given.get(reference, reference)
        if not allows(allowed, target.source.value, target.id):
            name = f"{reference.source.value}:{reference.id}"
            message = f"this API key may not use the adapter '{name}'"
            raise AdapterError(AdapterRefusal.DENIED, message)
        return target
