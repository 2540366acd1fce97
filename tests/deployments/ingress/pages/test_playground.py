"""The playground: one page that needs nothing from elsewhere, run in a browser where one is."""

import hashlib
import re

import httpx
import pytest

from configs.api import ApiConfig, KeyConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from deployments.contract import AdapterInfo, AdapterStatus, ErrorKind, Failed
from deployments.ingress.generation.engine import IngressSettings
from tests.deployments.ingress.conftest import PATIENCE, Server
from tests.deployments.ingress.pages.browser import Browser
from tests.fakes import FakeDriver

ACCEPT = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
ALL_SPEAK = (
    "document.querySelector('pre') && "
    "[...document.querySelectorAll('pre')].every((one) => one.textContent)"
)
DONE = "document.querySelector('#status').textContent.endsWith('done')"
ADAPTERS = [
    AdapterInfo("org/pirate", "hub", "known"), AdapterInfo("poet", "local", "host"),
    AdapterInfo("sql", "local", "disk"), AdapterInfo("more", "local", "disk"),
]  # fmt: skip


def _texts(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.run(
        f"[...document.querySelectorAll('{selector}')].map((one) => one.textContent)"
    )
    return found


def _know(driver: FakeDriver, adapters: list[AdapterInfo]) -> None:
    driver.info.adapters[:] = adapters
    for adapter in adapters:
        driver.replies[adapter.id] = f"I am {adapter.id}."
    driver.replies[None] = "I am the <b>base</b> & more."


def test_the_page_loads_nothing_from_elsewhere(http: httpx.Client) -> None:
    reply = http.get("/playground")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"https?:|//\w|\bsrc=|\bhref=\"(?!data:)|@import|url\(", reply.text)
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy


def test_browsers_get_the_page_and_others_the_health(http: httpx.Client) -> None:
    page = http.get("/playground").text
    assert http.get("/", headers=ACCEPT).text == page
    for accept in ("*/*", "application/json"):
        assert http.get("/", headers={"accept": accept}).text == ""
    assert http.get("/health", headers=ACCEPT).text == ""


def test_base_and_three_adapters_answer(browser: Browser, server: Server) -> None:
    server.fresh_app(IngressSettings(loopback=True))  # Only operators see adapters' states.
    driver = server.driver
    _know(driver, ADAPTERS)
    pirate = AdapterReference(AdapterSource.HUB, "org/pirate")
    driver.replicas.members[0].known[pirate] = AdapterStatus(pirate, "device")
    driver.hold_after = 2
    browser.open(f"{server.url}/#run")
    # What comes later than the first token has a rate.
    browser.wait_for(ALL_SPEAK)
    driver.go_on()
    browser.wait_for(DONE)
    assert _texts(browser, "#status") == ["tiny on cpu, 4 adapters known · done"]
    assert _texts(browser, "pre") == [
        "I am the <b>base</b> & more.", "I am org/pirate.", "I am poet.", "I am sql.",
    ]  # fmt: skip
    figures = _texts(browser, "section footer")
    assert len(figures) == 4
    for line in figures:
        assert re.fullmatch(r"TTFT \d+ ms  ·  [\d.]+ tokens/s  ·  \d+ tokens  ·  \d+ in .*", line)
    states = ["base model", "device", "host", "disk"]
    assert _texts(browser, ".state") == states
    assert browser.run("document.querySelector('#add').disabled")
    # All four requests were sent at once, with the same prompt.
    assert len({tuple(request.sequences[0].prompt) for request in driver.requests}) == 1
    assert len(driver.requests) == 4
    assert browser.complaints == []
    assert all(url.startswith((server.url, "data:", "about:")) for url in browser.requested)


def test_the_keyboard_is_enough(browser: Browser, server: Server, driver: FakeDriver) -> None:
    _know(driver, ADAPTERS[:1])
    browser.open(f"{server.url}/playground")
    browser.wait_for("document.querySelectorAll('section').length === 2")
    browser.run("document.querySelector('#add').focus()")
    browser.press("Enter")
    browser.type("local:new")
    assert _texts(browser, ".state")[-1] == "loads at its first request"
    browser.press("Enter", modifiers=2)
    browser.wait_for(DONE)
    assert len(driver.requests) == 3
    assert {request.adapter.id for request in driver.requests if request.adapter} == {
        "org/pirate", "new",
    }  # fmt: skip
    focused = "document.activeElement.getAttribute('aria-label')"
    assert browser.run(focused) == "adapter 2"
    browser.press("Tab")
    assert browser.run(focused) == "remove adapter 2"
    browser.press("Enter")
    assert browser.run("document.querySelectorAll('section').length") == 2
    unlabelled = browser.run(
        "[...document.querySelectorAll('input, select, textarea')].filter("
        "(one) => !one.labels?.length && !one.ariaLabel).length"
    )
    assert unlabelled == 0


def test_parameters_are_sent(browser: Browser, server: Server, driver: FakeDriver) -> None:
    _know(driver, [])
    browser.open(f"{server.url}/playground")
    browser.wait_for("document.querySelectorAll('section').length === 2")
    values = {"temperature": 0.5, "max_tokens": 7, "top_p": 0.9, "top_k": 5, "seed": 3,
              "repetition_penalty": 1.5, "stop_string": "END",
              "route": "v1/completions"}  # fmt: skip
    for field, value in values.items():
        browser.run(f"document.querySelector('#{field}').value = {value!r}")
    browser.run("document.querySelector('#go').click()")
    browser.wait_for(DONE)
    [request] = driver.requests
    [sequence] = request.sequences
    sampling = sequence.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.seed, sampling.repetition_penalty) == (3, 1.5)
    assert sequence.stopping.max_new_tokens == 7


def test_failures_are_visible_and_others_continue(
    browser: Browser, server: Server, driver: FakeDriver
) -> None:
    _know(driver, ADAPTERS[:2])
    driver.faults["org/pirate"] = Failed(ErrorKind.ADAPTER_NOT_FOUND, "no <such> adapter")
    browser.open(f"{server.url}/#run")
    browser.wait_for(DONE)
    assert _texts(browser, "pre.error") == ["no <such> adapter"]
    assert _texts(browser, "pre:not(.error)") == ["I am the <b>base</b> & more.", "I am poet."]
    browser.complaints.clear()


def test_escape_stops_all(browser: Browser, server: Server, driver: FakeDriver) -> None:
    driver.info.adapters[:] = ADAPTERS[:1]
    driver.hold_after = 3
    browser.open(f"{server.url}/#run")
    browser.wait_for(ALL_SPEAK)
    browser.press("Escape")
    browser.wait_for(DONE)
    assert all(line.startswith("stopped  TTFT") for line in _texts(browser, "section footer"))
    assert driver.cancelled.wait(PATIENCE)


def test_a_key_can_be_entered(browser: Browser, server: Server) -> None:
    key = KeyConfig(name="a", sha256=hashlib.sha256(b"sesame").hexdigest())
    server.fresh_app(IngressSettings(api=ApiConfig(keys=(key,))))
    server.driver.replies[None] = "Open."
    browser.open(f"{server.url}/")
    browser.wait_for("document.querySelector('#status').className === 'error'")
    assert "no valid API key" in _texts(browser, "#status")[0]
    browser.wait_for("document.querySelector('details').open")
    browser.run("document.querySelector('#key').focus()")
    browser.type("sesame")
    browser.press("Enter")
    browser.wait_for(DONE)
    assert _texts(browser, "pre")[0] == "Open."
    browser.complaints.clear()


@pytest.mark.parametrize(("width", "columns"), [(1280, 4), (800, 2), (375, 1)])
def test_it_fits_the_window(
    browser: Browser, server: Server, driver: FakeDriver, width: int, columns: int
) -> None:
    _know(driver, ADAPTERS)
    driver.replies[None] = "Pneumonoultramicroscopicsilicovolcanoconiosis" * 10
    browser.open(f"{server.url}/#run", width=width, height=800)
    browser.wait_for(DONE)
    sections = "[...document.querySelectorAll('section')]"
    lefts = browser.run(f"{sections}.map((one) => Math.round(one.getBoundingClientRect().left))")
    assert len(set(lefts)) == columns
    assert browser.run("document.documentElement.scrollWidth") <= width
    small = (
        "Math.min(...[...document.querySelectorAll('main input')].map((one) => one.offsetWidth))"
    )
    assert browser.run(small) >= 60
