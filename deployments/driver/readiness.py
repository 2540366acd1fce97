"""Before admission, off the loop: an adapter's name becomes files on disk and a key.

The key stands for the content's digest, so two names of the same bytes share pages and prefix
cache, and changed bytes under an old name never meet what the old ones computed.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from configs.adapters import AdapterKey, AdapterReference, FetchedAdapter
from deployments.contract import AdapterInfo
from sharding.sources import AdapterFolder, AdapterSources, Fingerprint, content_digest

_FETCH_THREADS = 8


class AdapterDirectory:
    """Every adapter that was asked for and found; lives on the replica's event loop."""

    def __init__(self, sources: AdapterSources) -> None:
        """Nothing is known at first; keys count from 1."""
        self._sources = sources
        self._threads = ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="fetch")
        self._next_key = count(1)
        self._keys: dict[str, AdapterKey] = {}
        self._digests: dict[Path, tuple[Fingerprint, str]] = {}
        self._fetched: dict[AdapterKey, FetchedAdapter] = {}
        self._references: dict[AdapterReference, AdapterKey] = {}
        self._pending: dict[
            tuple[AdapterReference, str | bool], asyncio.Future[tuple[AdapterFolder, str]]
        ] = {}

    async def resolve(self, reference: AdapterReference, api_token: str | bool) -> AdapterKey:
        """Fetch the adapter, or find that it is here; AdapterError when it cannot be had.

        api_token: the caller's, False for none, True for the server's own.

        Callers that ask for the same thing at once share one download; a caller that leaves
        does not end it for the others.
        """
        wanted = (reference, api_token)
        pending = self._pending.get(wanted)
        if pending is None:
            loop = asyncio.get_running_loop()
            pending = loop.run_in_executor(self._threads, self._fetch, reference, api_token)
            self._pending[wanted] = pending
            pending.add_done_callback(lambda _: self._pending.pop(wanted))
        folder, digest = await asyncio.shield(pending)
        return self._register(reference, folder, digest)

    def fetched(self, key: AdapterKey) -> FetchedAdapter:
        """The files behind a key; callable from any thread."""
        return self._fetched[key]

    def name(self, key: AdapterKey) -> str:
        """What clients call the adapter."""
        return self._fetched[key].name

    def listing(self) -> list[AdapterInfo]:
        """Known adapters, and those under the local roots that nobody asked for yet."""
        known = {reference.id: reference for reference in self._references}
        rows = [AdapterInfo(name, ref.source.value, "known") for name, ref in known.items()]
        rows += [
            AdapterInfo(name, "local", "on disk")
            for name in self._sources.known_local()
            if name not in known
        ]
        return sorted(rows, key=lambda row: row.id)

    def close(self) -> None:
        """Let running downloads go; their callers are leaving too."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fetch(
        self, reference: AdapterReference, api_token: str | bool
    ) -> tuple[AdapterFolder, str]:
        folder = self._sources.fetch(reference, api_token)
        # Hashing is skipped while no file's size or time has changed.
        known = self._digests.get(folder.folder)
        if known is None or known[0] != folder.fingerprint:
            known = self._digests[folder.folder] = (folder.fingerprint, content_digest(folder))
        return folder, known[1]

    def _register(
        self, reference: AdapterReference, folder: AdapterFolder, digest: str
    ) -> AdapterKey:
        key = self._keys.get(digest)
        if key is None:
            key = self._keys[digest] = AdapterKey(next(self._next_key))
        # Names may share content: the folder to read is the one that was verified last.
        self._fetched[key] = FetchedAdapter(
            key, reference.id, str(folder.folder), digest, folder.fingerprint
        )
        self._references[reference] = key
        return key
