"""schemathesis: requests that fit the document, and others, have documented replies."""

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from deployments.ingress.openapi.document import operations
from tests.deployments.ingress.conftest import PATIENCE, Server
from tests.sweeps import swept

FEW, MANY = 4, 15
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def schema(_server: Server) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{_server.url}/openapi.json")


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as one:
        yield one


def _stories() -> list[tuple[str, str, GenerationMode]]:
    """Requests that fit, and for routes that take a body some that do not."""
    stories = []
    for route, row in sorted(operations().items()):
        method, _, path = route.partition(" ")
        stories.append((method, path, GenerationMode.POSITIVE))
        if row.request:
            stories.append((method, path, GenerationMode.NEGATIVE))
    return stories


@pytest.mark.parametrize("examples", swept([FEW, MANY], lambda examples: examples == FEW))
@pytest.mark.parametrize(("method", "path", "mode"), _stories())
def test_replies_keep_to_the_document(
    server: Server,
    schema: BaseSchema,
    session: requests.Session,
    method: str,
    path: str,
    mode: GenerationMode,
    examples: int,
) -> None:
    strategy = schema[path][method.upper()].as_strategy(generation_mode=mode)

    @seed(20)
    @settings(
        max_examples=examples, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def exchange(case: Case[Any]) -> None:
        case.call_and_validate(
            base_url=server.url, session=session, checks=CHECKS, timeout=PATIENCE
        )

    exchange()
