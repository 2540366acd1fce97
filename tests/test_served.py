"""Tests of the server that tests use."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI

from tests.served import served


@asynccontextmanager
async def failing(app: FastAPI) -> AsyncIterator[None]:
    raise ValueError("no weights are here")
    yield


def test_a_server_that_does_not_start_says_why_at_once() -> None:
    with (
        pytest.raises(AssertionError, match="did not start") as failed,
        served(FastAPI(lifespan=failing)),
    ):
        pytest.fail("it was served")
    assert str(failed.value.__cause__) == "no weights are here"
