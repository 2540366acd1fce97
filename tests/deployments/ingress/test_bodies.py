from collections.abc import Iterator

import httpx
import pytest

from tests.fakes import FakeDriver

LONG = b'{"model": "tiny", "prompt": "' + b"a" * (8 * 2**20) + b'"}'


def _pieces() -> Iterator[bytes]:
    """Sent in chunks, a body announces no length."""
    for start in range(0, len(LONG), 2**20):
        yield LONG[start : start + 2**20]


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_long(
    http: httpx.Client, driver: FakeDriver, path: str, announced: bool
) -> None:
    headers = {"content-type": "application/json"}
    reply = http.post(path, content=LONG if announced else _pieces(), headers=headers)
    assert reply.status_code == 413
    assert "longer than 8388608 bytes" in str(reply.json()["error"])
    assert driver.requests == []
