"""A real Chromium, driven over its DevTools protocol: open a page, wait for what it shows, hear its complaints."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-default-apps", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
START_S = 60.0


def find_browser() -> str | None:
    """A Chromium on this machine, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """One page of the browser. `complaints` are its console errors, exceptions and policy violations."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._next = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._listening = asyncio.create_task(self._listen())

    async def call(self, method: str, **params: Any) -> Any:
        self._next += 1
        answer = self._answers[self._next] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._next, "method": method, "params": params})
        return await answer

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until("document.body")

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"])
        return found["result"].get("value")

    async def until(self, script: str, *, within_s: float = 20.0) -> None:
        """Wait until an expression is true; what the page shows instead is in the error."""
        holds = f"(() => {{ try {{ return Boolean({script}) }} catch {{ return false }} }})()"
        try:
            async with asyncio.timeout(within_s):
                while not await self.run(holds):  # noqa: ASYNC110  a page wakes nobody
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            text = await self.run("document.body.innerText.slice(0, 600)")
            raise AssertionError(
                f"not within {within_s} s: {script}; complaints {self.complaints}; shown: {text}"
            ) from error

    async def picture(self, path: Path, *, width: int, height: int, dark: bool, whole: bool = False) -> None:
        await self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
        ])  # fmt: skip
        await self.resize(width, height)
        if whole:
            await self.resize(width, min(9000, await self.run("document.documentElement.scrollHeight")))
        await asyncio.sleep(0.4)
        shot = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    async def resize(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    async def close(self) -> None:
        self._listening.cancel()
        await self._socket.close()

    async def _listen(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                answer = self._answers.pop(said["id"])
                if not answer.done():
                    answer.set_result(said.get("result", {"error": said.get("error")}))
            else:
                self._hear(said["method"], said["params"])

    def _hear(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"])[:500])


@asynccontextmanager
async def browser_tab(profile: Path) -> AsyncIterator[Tab]:
    """A browser of its own with one empty tab."""
    command = [str(find_browser()), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(START_S):
            port = await _port(profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                pages = await response.json(content_type=None)
            url = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
            tab = Tab(await session.ws_connect(url, max_msg_size=64 << 20))
            yield tab
            await tab.close()
    finally:
        process.terminate()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _port(path: Path) -> int:
    while True:
        try:
            return int(path.read_text().splitlines()[0])
        except (OSError, ValueError, IndexError):
            await asyncio.sleep(0.05)
