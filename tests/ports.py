"""Ports for tests."""

import socket


def free_port() -> int:
    """A port that the system gives to no other process as long as this process lives.

    What holds it does not listen, so a server that sets SO_REUSEADDR, as all do, may bind it.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port: int = holder.getsockname()[1]
    holder.detach()
    return port
