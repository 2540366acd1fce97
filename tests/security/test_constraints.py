"""What the ingress admits is what a rank pays: tried under limits, in a process of its own."""

import asyncio
import os
import signal

import httpx
import pytest

from benchmarks.attack.constraints import COSTLY, FAIR
from deployments.contract import ErrorKind
from deployments.ingress.http.errors import RequestError
from deployments.ingress.structured.compile_pool import CompilePool
from deployments.ingress.structured.compile_process import CompileResult, CompileTask
from tests.deployments.ingress.openai.openai_http import CHAT, HELLO, post, refused
from tests.fakes import FakeDriver

pytest.importorskip("llguidance")

CPU_SECONDS = 1.0
"""Far more than PLAIN takes, and far less than LONG does."""

PLAIN = CompileTask('start: "a"')
LARGE = CompileTask('{"type": "integer", "multipleOf": 999983}')
LONG = CompileTask(str(COSTLY["many rules in GBNF"]["guided_grammar"]), foreign=True)


@pytest.fixture
def pool(driver: FakeDriver) -> CompilePool:
    return CompilePool(driver.info.tokenizer, driver.info.vocab_size, CPU_SECONDS)


@pytest.mark.parametrize("name", COSTLY)
def test_what_costs_too_much_is_refused_before_the_driver(
    http: httpx.Client, driver: FakeDriver, name: str
) -> None:
    error = refused(http, CHAT, 400, messages=HELLO, **COSTLY[name])
    assert "is not supported" in error["message"]
    assert error["param"] in COSTLY[name]
    assert driver.requests == []


def test_what_only_looks_costly_is_served(http: httpx.Client, driver: FakeDriver) -> None:
    for body in FAIR.values():
        post(http, CHAT, messages=HELLO, **body)
    assert len(driver.requests) == len(FAIR)


def test_the_process_lives_on_after_what_it_had_to_end(pool: CompilePool) -> None:
    async def ask() -> tuple[CompileResult, int, int]:
        assert await pool.check(PLAIN) == CompileResult(PLAIN.text)
        [before] = pool.pids
        found = await pool.check(LONG)
        assert await pool.check(PLAIN) == CompileResult(PLAIN.text)
        [after] = pool.pids
        await pool.close()
        return found, before, after

    found, before, after = asyncio.run(ask())
    assert found == CompileResult(fault=f"it takes over {CPU_SECONDS:g} s to compile")
    assert before == after


def test_a_process_that_was_killed_is_replaced(pool: CompilePool) -> None:
    async def ask() -> None:
        await pool.check(PLAIN)
        [pid] = pool.pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RequestError, match="the compiler") as raised:
            await pool.check(PLAIN)
        assert raised.value.kind is ErrorKind.UNAVAILABLE
        assert await pool.check(PLAIN) == CompileResult(PLAIN.text)
        await pool.close()

    asyncio.run(ask())


def test_more_than_may_wait_are_told_to_come_again(pool: CompilePool) -> None:
    async def ask() -> list[object]:
        tasks = [CompileTask(f'start: "{place}"') for place in range(40)]
        tried = await asyncio.gather(*map(pool.check, tasks), return_exceptions=True)
        await pool.close()
        return list(tried)

    answers = asyncio.run(ask())
    assert [isinstance(answer, CompileResult) for answer in answers] == [True] * 34 + [False] * 6
    for refusal in answers[34:]:
        assert isinstance(refusal, RequestError)
        assert refusal.kind is ErrorKind.OVERLOADED


def test_memory_has_a_bound_too(driver: FakeDriver) -> None:
    """What needs more than a constraint may add ends its fork, and nothing else."""

    async def ask() -> CompileResult:
        patient = CompilePool(driver.info.tokenizer, driver.info.vocab_size, 60.0)
        found = await patient.check(LARGE)
        await patient.close()
        return found

    assert asyncio.run(ask()) == CompileResult(fault="it takes too much memory")


def test_a_tokenizer_that_cannot_guide_is_named(driver: FakeDriver) -> None:
    async def ask() -> CompileResult:
        narrow = CompilePool(driver.info.tokenizer, 7)
        found = await narrow.check(PLAIN)
        await narrow.close()
        return found

    assert asyncio.run(ask()).fault.startswith(
        "this model's tokenizer does not support constraints: "
    )
