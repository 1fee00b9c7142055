"""Streams played by a real browser through Media Source Extensions.

Headless Chromium opens a page from a local server; the page appends the init segment and the fragments one by one,
plays them and posts what it saw back, so nothing but the standard library drives the browser.
"""

from __future__ import annotations

import http.server
import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.geometry import num_samples
from tests.unit.services.vae.harness import MuxedClip, mux_clip

PAGE = Path(__file__).with_name("player.html")
CHROMIUM_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--autoplay-policy=no-user-gesture-required",
    "--mute-audio",
)
IMPULSE = 12_345


@contextmanager
def served(clip: MuxedClip) -> Iterator[tuple[str, queue.Queue[dict[str, Any]]]]:
    """A server with the page and the clip; yields its address and the reports that arrive."""
    reports: queue.Queue[dict[str, Any]] = queue.Queue()
    files = {
        "/": PAGE.read_bytes(),
        "/clip.json": json.dumps({"mimeType": clip.mime_type, "numFragments": len(clip.fragments)}).encode(),
        "/init": clip.init_segment,
        "/whole": clip.stream,
        **{f"/fragment/{i}": data for i, data in enumerate(clip.fragments)},
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = files.get(self.path)
            self.send_response(200 if data is not None else 404)
            self.send_header("Content-Type", "text/html" if self.path == "/" else "application/octet-stream")
            self.end_headers()
            self.wfile.write(data or b"")

        def do_POST(self) -> None:
            reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/", reports
        finally:
            server.shutdown()
            thread.join()


def play(clip: MuxedClip, profile: Path) -> dict[str, Any]:
    """What a browser reports after playing the clip to its end."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("needs Chromium: apt-get install -y chromium")
    with served(clip) as (address, reports):
        command = [program, *CHROMIUM_FLAGS, f"--user-data-dir={profile}", address]
        browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return reports.get(timeout=120)
        finally:
            browser.terminate()
            browser.wait(timeout=30)


@pytest.mark.parametrize(("num_frames", "width", "height"), [(22, 64, 64), (39, 96, 64), (73, 256, 160)])
def test_a_browser_plays_every_frame(tmp_path: Path, num_frames: int, width: int, height: int) -> None:
    rng = np.random.default_rng(0)
    pcm = np.zeros((2, num_samples(num_frames)), np.float32)
    pcm[:, IMPULSE] = 0.9
    clip = mux_clip(
        num_frames, width, height, lambda i: rng.integers(0, 256, (height, width, 3), np.uint8), pcm, tmp_path / "clip"
    )
    report = play(clip, tmp_path / "profile")
    print(report)
    assert "error" not in report, report
    assert report["isSupported"]
    assert report["size"] == [width, height]
    assert report["totalFrames"] == num_frames
    assert report["corruptedFrames"] == 0
    # Both tracks are there from the first instant, without a gap, up to the end of each chunk's pictures.
    assert report["bufferedRanges"] == 1
    assert report["bufferedStart"] == pytest.approx(0, abs=1e-3)
    ends = [17 * (i + 1) / 24 for i in range(len(clip.fragments) - 1)]
    assert report["bufferedEnds"][:-1] == pytest.approx(ends, abs=2e-3)
    assert report["declaredDuration"] == pytest.approx(max(num_frames / 24, num_samples(num_frames) / 32_000), abs=1e-3)
    # Pictures come at their own times; which of them the compositor shows depends on the machine's load.
    frames = [time * 24 for time in report["mediaTimes"]]
    assert frames == pytest.approx([round(frame) for frame in frames], abs=1e-2)
    assert report["decodedAudioBytes"] > 0
    assert abs(report["loudestSample"] - IMPULSE) <= 32
