"""Where ranks meet: the store listens where it should and nowhere else."""

import socket
from datetime import timedelta

import pytest

from deployments.rank.host import join_store, open_store

TIMEOUT_S = 60.0


def test_the_store_listens_on_the_nodes_address_alone() -> None:
    """It has no secret."""
    store, address = open_store("127.0.0.1", 2, TIMEOUT_S)
    other = join_store(address, TIMEOUT_S)
    store.set("key", "value")
    other.wait(["key"], timedelta(seconds=TIMEOUT_S))
    assert other.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", address.port), TIMEOUT_S)
