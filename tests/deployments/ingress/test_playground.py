"""The playground: one page that needs nothing from elsewhere, run in a browser where one is."""

import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from deployments.contract import ErrorKind, Failed
from tests.deployments.ingress.conftest import Server
from tests.fakes import FakeDriver

CHROMIUM = shutil.which("chromium")


def rendered(url: str, profile: Path) -> str:
    """The page's document once its scripts had time to run."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={profile}", "--virtual-time-budget=5000", "--dump-dom", url,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    return done.stdout.decode()


def test_the_page_loads_nothing_from_elsewhere(http: httpx.Client) -> None:
    reply = http.get("/playground")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"https?:|//\w|\b(src|href)=|@import|url\(", reply.text)
    assert http.get("/").text == ""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_both_sides_answer(server: Server, driver: FakeDriver, tmp_path: Path) -> None:
    driver.replies[None] = "I am the base."
    driver.replies["org/pirate"] = "Arr & <b>ahoy</b>!"
    page = rendered(f"{server.url}/playground#run", tmp_path)
    assert "tiny, 2 adapters known" in page
    assert "I am the base." in page
    assert "Arr &amp; &lt;b&gt;ahoy&lt;/b&gt;!" in page
    assert len(re.findall(r"TTFT \d+ ms .* tokens", page)) == 2


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_failures_are_shown(server: Server, driver: FakeDriver, tmp_path: Path) -> None:
    driver.faults["org/pirate"] = Failed(ErrorKind.ADAPTER_NOT_FOUND, "no such adapter")
    page = rendered(f"{server.url}/playground#run", tmp_path)
    assert '<pre class="error">no such adapter</pre>' in page
