"""Persisted admin commands in the key-value store of Ray's head."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ray.exceptions import RayError
from ray.experimental import internal_kv

from deployments.admin_commands import AdminStoreError

_NAMESPACE = b"loray"
_TIMEOUT_SECONDS = 10.0


class RayAdminStore:
    """The `AdminStore` of one application; its entries last as long as Ray's head.

    Ray's own libraries keep their registries in this store, which has no public name; an actor
    would be one more process, and forget everything with its node.
    """

    def __init__(self, application: str, kind: str = "orders") -> None:
        """All methods may be called from any thread of a process that is connected to Ray.

        kind: a part of the keys, different for each use. Stored keys have it: it must not change.
        """
        self._prefix = f"{application}/{kind}/".encode()

    def put(self, key: str, value: bytes) -> None:
        """Write or replace the entry of a key."""
        with _faults():
            internal_kv._internal_kv_put(self._prefix + key.encode(), value, namespace=_NAMESPACE)

    def remove(self, key: str) -> None:
        """Delete an entry, if it exists."""
        with _faults():
            internal_kv._internal_kv_del(self._prefix + key.encode(), namespace=_NAMESPACE)

    def read(self) -> Mapping[str, bytes]:
        """All entries, in two calls of Ray's."""
        with _faults():
            keys = internal_kv._internal_kv_list(self._prefix, namespace=_NAMESPACE)
            client = internal_kv.internal_kv_get_gcs_client()
            found = client.internal_kv_multi_get(keys, _NAMESPACE, _TIMEOUT_SECONDS)
        start = len(self._prefix)
        return {key[start:].decode(): value for key, value in found.items()}


def store_name(application: str, base: str) -> str:
    """The store of one of several base models of an application; "" where there is only one."""
    return f"{application}/{base}" if base else application


@contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except RayError as error:
        raise AdminStoreError(f"Ray's key-value store did not answer ({error})") from error
