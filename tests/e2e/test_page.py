"""The page in front of the whole service: a real browser plays what the tiny model makes while it is being made."""

from __future__ import annotations

from pathlib import Path

from tests.browser.chromium import browser
from tests.e2e.conftest import Server
from tests.web_service import running_gateway


async def test_a_browser_plays_a_clip_while_it_is_sampled(server: Server, tmp_path: Path) -> None:
    async with running_gateway(server.address) as gateway, browser(tmp_path / "profile") as page:
        await page.go(f"http://{gateway}/")
        await page.until("num_frames.options.length > 0")
        await page.run(
            "document.getElementById('prompt').value = 'a fox'; num_frames.value = '56'; form.requestSubmit()"
        )
        await page.until("!still.hidden && still.naturalWidth > 0")
        await page.until("video.currentTime > 0.2 && phase.textContent.startsWith('Sampling')")
        await page.until("phase.textContent === 'Done' && artifacts.childElementCount > 0")
        await page.until("video.currentSrc.endsWith('/artifacts/final.mp4') && video.duration > 2.3")
        assert await page.run("document.getElementById('problem').textContent") == ""
        assert page.problems == []
