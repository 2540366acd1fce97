"""The ingress's own fixtures: attacks go in by its door."""

from tests.deployments.ingress.conftest import _server, driver, http, server

__all__ = ["_server", "driver", "http", "server"]
