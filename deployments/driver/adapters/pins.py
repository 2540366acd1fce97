"""Pinned names: their adapters stay on the device. The config or a command pins them."""

from collections.abc import Mapping

from configs.wire.adapters import AdapterKey, AdapterReference
from deployments.driver.adapters.directory import AdapterDirectory
from deployments.driver.loop_handle import LoopHandle
from scheduler.events import AdapterPinned


class Pins:
    """The adapter key of each pinned name; lives on the replica's event loop.

    Every pin holds its key in the directory. A key is pinned on the device while any name pins
    it. `preload` counts as a command.
    """

    def __init__(self, directory: AdapterDirectory, handle: LoopHandle) -> None:
        self._directory = directory
        self._handle = handle
        self._configured: dict[AdapterReference, AdapterKey] = {}
        self._commanded: dict[AdapterReference, AdapterKey] = {}

    @property
    def names(self) -> list[AdapterReference]:
        """All pinned names."""
        return [*self._configured, *self._commanded]

    def is_pinned(self, key: AdapterKey) -> bool:
        """Whether any name pins the key."""
        return key in self._keys

    def is_configured(self, reference: AdapterReference) -> bool:
        """Whether the operator's config pins the name."""
        return reference in self._configured

    def is_commanded(self, reference: AdapterReference) -> bool:
        """Whether a command pinned the name."""
        return reference in self._commanded

    def configure(self, pins: Mapping[AdapterReference, AdapterKey]) -> None:
        """Replace the config's pins. The caller's hold of each key passes to the pin."""
        before, self._configured = self._configured, dict(pins)
        for key in set(before.values()) - self._keys:
            self._set(key, False)
        for key in set(pins.values()) - set(before.values()):
            self._set(key, True)
        for key in before.values():
            self._release(key)

    def add(self, reference: AdapterReference, key: AdapterKey) -> None:
        """Pin a name by a command. The caller's hold of the key passes to the pin."""
        before = self._commanded.get(reference)
        self._commanded[reference] = key
        if key != before:
            self._set(key, True)
        if before is not None:
            self._unpin_unless_needed(before)

    def remove(self, reference: AdapterReference) -> None:
        """Remove a command's pin, if there is one; the config may still pin the name."""
        key = self._commanded.pop(reference, None)
        if key is not None:
            self._unpin_unless_needed(key)

    def move(self, reference: AdapterReference, old: AdapterKey, new: AdapterKey) -> None:
        """Pins follow their name to its new version."""
        for pins in (self._configured, self._commanded):
            if pins.get(reference) == old and self._directory.hold(new):
                pins[reference] = new
                self._set(new, True)
                self._unpin_unless_needed(old)

    @property
    def _keys(self) -> set[AdapterKey]:
        return {*self._configured.values(), *self._commanded.values()}

    def _unpin_unless_needed(self, key: AdapterKey) -> None:
        if key not in self._keys:
            self._set(key, False)
        self._release(key)

    def _set(self, key: AdapterKey, pinned: bool) -> None:
        self._handle.post(
            lambda scheduler, now: scheduler.handle_adapter_event(AdapterPinned(key, pinned))
        )

    def _release(self, key: AdapterKey) -> None:
        # The scheduler must not name a key that the directory has forgotten.
        self._handle.after_posted(self._directory.release, key)
