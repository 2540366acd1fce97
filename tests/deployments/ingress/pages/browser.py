"""A headless Chromium, driven by its DevTools protocol over a web socket."""

import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

_SECONDS = 300.0


class Browser:
    """One page of a browser; records its requests and its log."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._calls = 0
        self.requested: list[str] = []
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """One command and its result."""
        self._calls += 1
        call = self._calls
        self._socket.send(json.dumps({"id": call, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=_SECONDS))
            if message.get("id") == call:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        given = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requested.append(given["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(given["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.complaints.append(given["entry"]["text"])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true; it may fail before."""
        deadline = time.monotonic() + _SECONDS
        while not self.run(
            f"(() => {{ try {{ return {condition} }} catch {{ return false }} }})()"
        ):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.02)

    def open(self, url: str, width: int = 1280, height: int = 900) -> None:
        """Go to an address in a window of that size; phones below 600 pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        # The same address twice would not load the page again.
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        here = f"location.href === {json.dumps(url)}"
        self.wait_for(f"{here} && document.readyState === 'complete'")

    def press(self, key: str, modifiers: int = 0) -> None:
        """One key, as a keyboard sends it; modifiers: 2 is control."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        text = "\r" if key == "Enter" and not modifiers else ""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        pressed = {**common, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **pressed)
        self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.call("Input.insertText", text=text)


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile that is gone afterwards."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", "--disable-component-update",
        "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        with connect(_page_of(process), max_size=2**26, proxy=None) as socket:
            yield Browser(socket)
    finally:
        process.terminate()
        process.wait(_SECONDS)
        assert process.stderr is not None
        process.stderr.close()


def _page_of(process: "subprocess.Popen[bytes]") -> str:
    """The socket of the first page, when the browser has printed its port."""
    assert process.stderr is not None
    stop = threading.Timer(_SECONDS, process.kill)
    stop.start()
    for line in process.stderr:
        if found := re.search(rb"DevTools listening on (ws://\S+)", line):
            break
    else:
        raise AssertionError("chromium ended before it listened")
    stop.cancel()
    # Its later output is not needed, but a full pipe would stop it.
    threading.Thread(target=process.stderr.read, daemon=True).start()
    address = found[1].decode()
    looking = {"id": 1, "method": "Target.setDiscoverTargets", "params": {"discover": True}}
    page = None
    with connect(address, proxy=None) as socket:
        socket.send(json.dumps(looking))
        while page is None:  # It lists existing pages, then new ones.
            target = json.loads(socket.recv(_SECONDS)).get("params", {}).get("targetInfo", {})
            page = target["targetId"] if target.get("type") == "page" else None
    host = address.split("/devtools/")[0]
    return f"{host}/devtools/page/{page}"
