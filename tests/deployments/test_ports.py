"""Which ports are in use, and by which process."""

import os
import socket

import pytest

from deployments.ports import Port, conflicts


@pytest.mark.parametrize("host", ["127.0.0.1", "", "::1"])
def test_a_conflict_names_the_process(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host or "0.0.0.0", 0), family=family)
    except OSError:
        pytest.skip("no IPv6 here")
    with listener:
        port = Port(host, listener.getsockname()[1], "THE_VARIABLE")
        [reply] = conflicts([port, Port(host, 0, "NONE")])
    assert f"port {port.number} is in use by process {os.getpid()} (" in reply
    assert reply.endswith("set THE_VARIABLE")
    assert conflicts([port]) == []


def test_all_interfaces_conflict_with_one_of_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert conflicts([Port("", listener.getsockname()[1], "X")])


@pytest.mark.parametrize("host", ["no such host", "192.0.2.1"])
def test_a_host_that_is_not_here_is_named_once(host: str) -> None:
    [reply] = conflicts([Port(host, 0, "X"), Port(host, 0, "Y")])
    assert reply == f"{host} is no address of this machine: set http_options.host"


def test_one_port_for_two_servers_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    [reply] = conflicts([Port("127.0.0.1", free, "X"), Port("", free, "Y")])
    assert reply == f"port {free} would be bound twice: change X or Y"


def test_a_port_that_is_held_without_listening_can_be_bound() -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        assert conflicts([Port("127.0.0.1", holder.getsockname()[1], "X")]) == []
