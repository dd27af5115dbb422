"""This module drives headless Chromium over its own protocol: a page to open, to click in, to wait for and to look
at.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
AXE = Path(__file__).parent / "vendor" / "axe.min.js"
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0",
)  # fmt: skip


@functools.cache
def problem() -> str:
    """Why no Chromium can be used, "" if one can."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        return f"none of {', '.join(NAMES)} is installed"
    try:
        with browser():
            return ""
    except (OSError, RuntimeError) as error:
        return f"{found} does not start: {error}"


def needed() -> None:
    """Skip a test that finds no Chromium; in CI it fails."""
    from tests.lacks import lacks

    if why := problem():
        lacks(f"a headless Chromium: {why}")


@contextlib.contextmanager
def browser() -> Iterator[str]:
    """Start a Chromium of its own; yield the address that it is driven by."""
    program = next(filter(None, map(shutil.which, NAMES)))
    with tempfile.TemporaryDirectory(prefix="view-chromium-", ignore_cleanup_errors=True) as home:
        environment = {"HOME": home, "PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8"}
        process = subprocess.Popen(
            [program, *_FLAGS, f"--user-data-dir={home}/data"], env=environment, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            assert process.stderr is not None
            said = []
            for text in process.stderr:
                said.append(text)
                if match := re.search(r"DevTools listening on (ws://\S+)", text):
                    yield match[1]
                    return
            raise RuntimeError("".join(said)[-500:])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stderr.close()  # ty: ignore


class Tab:
    """A tab of the browser. ``problems``: exceptions, refused content and failed requests since it was opened."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._session = ""
        self._loaded = asyncio.Event()
        self.problems: list[str] = []
        self.asked: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self._socket.send_json(message | ({"sessionId": self._session} if self._session else {}))
        return await asyncio.wait_for(self._waiting[number], 60)

    async def listen(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if waiting := self._waiting.pop(told.get("id", 0), None):
                if "error" in told:
                    waiting.set_exception(RuntimeError(str(told["error"])))
                else:
                    waiting.set_result(told["result"])
                continue
            match told.get("method"), told.get("params", {}):
                case "Page.loadEventFired", _:
                    self._loaded.set()
                case "Runtime.exceptionThrown", params:
                    self.problems.append(json.dumps(params["exceptionDetails"])[:600])
                case "Log.entryAdded", params:
                    self.problems.append(params["entry"]["text"])
                case "Network.requestWillBeSent", params:
                    self.asked.append(params["request"]["url"])

    async def open(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.size(1400, 900)

    async def size(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def dark(self, dark: bool) -> None:
        value = "dark" if dark else "light"
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    async def goto(self, address: str) -> None:
        self._loaded.clear()
        await self.call("Page.navigate", url=address)
        await self.loaded()

    async def loaded(self) -> None:
        """Wait for the load event that follows a navigation; a change of the hash alone has none."""
        await asyncio.wait_for(self._loaded.wait(), 60)

    async def js(self, code: str) -> Any:
        """Return the value of an expression; a promise is awaited."""
        told = await self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            raise AssertionError(json.dumps(told["exceptionDetails"])[:800])
        return told["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until an expression is true; the browser looks at each frame. Fails after 20 s."""
        code = f"""new Promise((done, no) => {{ const end = performance.now() + 20000; const look = () => {{
          let found; try {{ found = ({condition}); }} catch {{ found = false; }}
          if (found) done(true); else if (performance.now() > end) no(new Error({json.dumps(condition)}));
          else setTimeout(look, 20); }}; look(); }})"""
        await self.js(code)

    async def find(self, text: str) -> None:
        """Write into the field of an episode's page that finds."""
        field = "document.querySelector('#find')"
        await self.js(f"{field}.value = {json.dumps(text)}, {field}.dispatchEvent(new Event('input')), 1")

    async def click(self, selector: str) -> None:
        self._loaded.clear()
        event = "new MouseEvent('click', {bubbles: true, cancelable: true})"
        await self.js(f"document.querySelector({json.dumps(selector)}).dispatchEvent({event})")

    async def key(self, key: str) -> None:
        self._loaded.clear()
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if kind == "keyDown" and len(key) == 1 else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    async def picture(self, path: Path, whole: bool = False) -> None:
        told = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))

    async def axe(self) -> list[str]:
        """Return what axe finds that is serious or critical: a line per rule with the first places."""
        await self.js(AXE.read_text() + "; 1")
        found = await self.js("axe.run(document, {resultTypes: ['violations']}).then((r) => r.violations)")
        return [
            f"{one['id']} ({one['impact']}): {one['help']}: {[node['html'][:160] for node in one['nodes'][:4]]}"
            for one in found
            if one["impact"] in ("serious", "critical")
        ]


@contextlib.asynccontextmanager
async def tab(address: str) -> AsyncIterator[Tab]:
    """Open a tab in a browser that was started with ``browser``."""
    async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
        made = Tab(socket)
        listening = asyncio.create_task(made.listen())
        try:
            await made.open()
            yield made
            made._session, target = "", made._session
            with contextlib.suppress(RuntimeError):
                await made.call("Target.detachFromTarget", sessionId=target)
        finally:
            listening.cancel()
