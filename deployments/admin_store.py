"""The Ray shell of standing orders: a ledger in the cluster's own key-value store."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ray.exceptions import RayError
from ray.experimental import internal_kv

from deployments.admin_commands import AdminStoreError

_NAMESPACE = b"loray"
_TIMEOUT_SECONDS = 10.0


class RayAdminStore:
    """`orders.Ledger` of one application; it lasts as long as Ray's head, and with it only.

    Ray's own libraries keep their registries in this store, which has no public name; an actor
    would be one more process, and forget everything with its node.
    """

    def __init__(self, application: str, shelf: str = "orders") -> None:
        """Nothing is asked of Ray yet; any thread of a process that is connected may call.

        shelf: what is kept together, apart from the application's other entries.
        """
        self._prefix = f"{application}/{shelf}/".encode()

    def put(self, key: str, order: bytes) -> None:
        """Write an order, over an older one of that key."""
        with _faults():
            internal_kv._internal_kv_put(self._prefix + key.encode(), order, namespace=_NAMESPACE)

    def remove(self, key: str) -> None:
        """Take an order out, if it is there."""
        with _faults():
            internal_kv._internal_kv_del(self._prefix + key.encode(), namespace=_NAMESPACE)

    def read(self) -> Mapping[str, bytes]:
        """All orders, in two questions however many there are."""
        with _faults():
            keys = internal_kv._internal_kv_list(self._prefix, namespace=_NAMESPACE)
            client = internal_kv.internal_kv_get_gcs_client()
            found = client.internal_kv_multi_get(keys, _NAMESPACE, _TIMEOUT_SECONDS)
        start = len(self._prefix)
        return {key[start:].decode(): order for key, order in found.items()}


@contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except RayError as error:
        raise AdminStoreError(f"Ray's key-value store did not answer ({error})") from error
