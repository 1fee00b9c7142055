"""Headless Chromium, told what to do over its debugging pipe; nothing but the standard library drives it."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--mute-audio",
)
AUTOPLAY = "--autoplay-policy=no-user-gesture-required"
NO_AUTOPLAY = "--autoplay-policy=document-user-activation-required"


def program() -> str:
    """Chromium's path; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("needs Chromium: apt-get install -y chromium")
    return found


class Page:
    """One tab."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.WriteTransport) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = ""
        self.problems: list[str] = []
        """Errors that the page's scripts did not handle, and violations of its policy."""

    async def receive(self) -> None:
        """Hands on what the browser says until it is gone."""
        while message := (await self._reader.readuntil(b"\0"))[:-1]:
            told = json.loads(message)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(told["params"]["exceptionDetails"])[:2000])
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["source"] == "security":
                self.problems.append(told["params"]["entry"]["text"])

    async def call(self, method: str, **parameters: Any) -> Any:
        """One command of the DevTools protocol."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        command = {"id": number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        self._writer.write(json.dumps(command).encode() + b"\0")
        told = await asyncio.wait_for(answer, 60)
        assert "error" not in told, told
        return told["result"]

    async def open(self) -> None:
        """Makes the tab."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        self._session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def go(self, url: str) -> None:
        """Opens an address."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def run(self, expression: str) -> Any:
        """The value of an expression; promises are awaited."""
        result = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, (expression, result)
        return result["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Waits until an expression is true; the value. Names that do not exist yet count as false."""
        try:
            async with asyncio.timeout(45):
                while not (
                    value := await self.run(f"(() => {{ try {{ return {condition} }} catch {{ return false }} }})()")
                ):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            told = await self.run("document.body.innerText")
            pytest.fail(f"never true: {condition}; the page says:\n{told}\nproblems: {self.problems}")
        return value

    async def resize(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """Sets the size of the window and the preferred colours."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        value = "dark" if is_dark else "light"
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    async def screenshot(self, path: Path) -> None:
        """The page as it looks, as a PNG file."""
        data = (await self.call("Page.captureScreenshot", captureBeyondViewport=True))["data"]
        path.write_bytes(base64.b64decode(data))

    async def press(self, key: str, code: int, text: str = "") -> None:
        """One stroke of a key, as a user's."""
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                **({"text": text} if text and kind == "keyDown" else {}),
            )  # fmt: skip

    async def listeners(self, selector: str) -> list[str]:
        """What the page listens to at an element."""
        found = await self.call("Runtime.evaluate", expression=f"document.querySelector({selector!r})")
        result = await self.call("DOMDebugger.getEventListeners", objectId=found["result"]["objectId"])
        return sorted(listener["type"] for listener in result["listeners"])


@asynccontextmanager
async def browser(profile: Path, autoplay: str = AUTOPLAY) -> AsyncIterator[Page]:
    """A browser with one empty tab."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # Chromium reads commands from descriptor 3 and answers on 4, whatever numbers they have here.
    shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", shell, "bash", program(), *FLAGS, "--remote-debugging-pipe", autoplay,
        f"--user-data-dir={profile}",
        pass_fds=(theirs_in, theirs_out), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    os.close(theirs_in)
    os.close(theirs_out)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**26)
    read_end, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours_in, "rb"))
    write_end, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(ours_out, "wb"))
    page = Page(reader, write_end)
    receiving = asyncio.create_task(page.receive())
    try:
        await page.open()
        yield page
    finally:
        receiving.cancel()
        process.terminate()
        await process.wait()
        read_end.close()
        write_end.close()
