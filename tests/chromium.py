"""Headless Chromium, driven through its DevTools pipe: pages as a phone or a desktop shows them."""

import base64
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BINARY = shutil.which("chromium") or shutil.which("google-chrome")
_PATIENCE_S = 60.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers; the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--font-render-hinting=none",
    "--remote-debugging-pipe",
)


class Page:
    """One tab. `complaints` are the texts of console messages, exceptions, blocked or failed loads since it was opened;
    `requests` the addresses that it loaded."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest, self._numbers, self._session = b"", itertools.count(1), ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def show(self, path: Path, *, width: int, height: int = 800, scheme: str = "light", scale: float = 1.0) -> None:
        """Open a file at a width, on a phone below 600 px; `scheme` is what prefers-color-scheme says."""
        self.complaints.clear()
        self.requests.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.ask("Page.navigate", url=path.absolute().as_uri())
        self._until("Page.loadEventFired")

    def value(self, expression: str) -> Any:
        """What JavaScript makes of an expression."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, *, whole: bool = False) -> bytes:
        """A PNG of what is shown, or of the whole page."""
        data = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        return base64.b64decode(data)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; DevTools knows them all."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def _until(self, method: str) -> None:
        while self._next().get("method") != method:
            pass

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium says nothing"
            data = os.read(self._from, 2**20)
            assert data, "Chromium has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._listen(message.get("method", ""), message.get("params", {}))
        return message

    def _listen(self, method: str, params: dict[str, Any]) -> None:
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed"):
            self.complaints.append(json.dumps(params))
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextmanager
def opened() -> Iterator[Page]:
    """A tab of a Chromium of its own, which is gone afterwards with all that it wrote."""
    assert BINARY is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [BINARY, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        wired = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command]
        process = subprocess.Popen(
            wired,
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": profile},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Page(ours_out, ours_in)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(ours_out)
            os.close(ours_in)
