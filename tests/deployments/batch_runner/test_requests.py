"""How long one request is sent again, where no batch's end bounds it."""

import asyncio
from collections.abc import Iterator

import pytest

from deployments.batch_runner import requests
from deployments.batch_runner.requests import LineReply, send_until_done


def answered(replies: Iterator[int]) -> int:
    """The status of the reply that a request is left with."""

    async def send(path: str, body: bytes) -> LineReply:
        return LineReply(next(replies), b"{}", 0.01)

    return asyncio.run(send_until_done(send, "/v1/completions", b"{}")).status


def test_an_adapter_that_cannot_be_had_is_a_result_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert answered(iter([503] * 20 + [200])) == 200
    monkeypatch.setattr(requests, "LONGEST_OUTAGE_S", 0.05)
    assert answered(iter([503] * 20 + [200])) == 503
    # A busy server has room some time.
    assert answered(iter([429] * 20 + [200])) == 200
