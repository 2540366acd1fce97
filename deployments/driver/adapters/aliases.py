"""Aliases of adapters, from the operator's config and from admin commands."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from configs.wire.adapters import AdapterError, AdapterReference, AdapterRefusal, allows
from deployments.contract import AdapterInfo


class Aliases:
    """The adapter that each alias stands for; the operator's config comes before commands.

    configured: aliases of the config. given: aliases from commands; they last as long as the
    replica.
    """

    def __init__(self) -> None:
        self.configured: Mapping[AdapterReference, AdapterReference] = {}
        self.given: dict[AdapterReference, AdapterReference] = {}

    @property
    def all(self) -> dict[AdapterReference, AdapterReference]:
        """Every alias and its adapter."""
        return {**self.given, **self.configured}

    def listed(self, adapters: Sequence[AdapterInfo]) -> list[AdapterInfo]:
        """Adapters by their own names, then the names that stand for others.

        An own name that stands for another is listed as such alone.
        """
        given = {
            (name.id, name.source.value): f"{target.source.value}:{target.id}"
            for name, target in sorted(self.all.items(), key=lambda each: each[0].id)
        }
        own = [each for each in adapters if (each.id, each.source) not in given]
        taken = {each.id for each in own}
        return own + [
            AdapterInfo(id, source, "name", target)
            for (id, source), target in given.items()
            if id not in taken
        ]

    def resolve(
        self, reference: AdapterReference, allowed: Sequence[str] | None = None
    ) -> AdapterReference:
        """The adapter of a client's reference; in a merge, the adapter of each part.

        allowed: patterns of the adapters that the client may use, None for all. AdapterError if
        an adapter is not among them.
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
