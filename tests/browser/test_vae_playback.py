"""Streams played by a real browser through Media Source Extensions.

Headless Chromium opens a page from a local server; the page appends the init segment and the fragments one by one,
plays them, from the start and as late viewers do, and posts what it saw back, so nothing but the standard library
drives the browser.
"""

from __future__ import annotations

import http.server
import json
import queue
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.geometry import num_samples
from tests.browser.chromium import AUTOPLAY, FLAGS, program
from tests.unit.services.vae.harness import MuxedClip, mux_clip, mux_sound

PAGE = Path(__file__).with_name("player.html")
IMPULSE = 12_345


@contextmanager
def served(clip: MuxedClip, first_fragments: list[int]) -> Iterator[tuple[str, queue.Queue[dict[str, Any]]]]:
    """A server with the page and the clip; yields its address and the reports that arrive."""
    reports: queue.Queue[dict[str, Any]] = queue.Queue()
    told = {
        "mimeType": clip.mime_type,
        "numFragments": len(clip.fragments),
        "firstFragments": first_fragments,
        "playbackRate": 4,
    }
    files = {
        "/": PAGE.read_bytes(),
        "/clip.json": json.dumps(told).encode(),
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


def play(clip: MuxedClip, first_fragments: list[int], profile: Path) -> dict[str, Any]:
    """What a browser reports after playing the clip to its end, from each of these fragments."""
    with served(clip, first_fragments) as (address, reports):
        command = [program(), *FLAGS, AUTOPLAY, f"--user-data-dir={profile}", address]
        browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return reports.get(timeout=120)
        finally:
            browser.terminate()
            browser.wait(timeout=30)


@pytest.mark.parametrize(
    ("num_frames", "width", "height", "first_fragments"),
    [(22, 32, 32, [0, 1]), (39, 96, 416, [0]), (73, 256, 160, [0, 1, 2, 3, 4]), (362, 32, 32, [0, 21])],
    ids=["smallest canvas", "odd aspect", "late at each chunk", "longest clip"],
)
def test_a_browser_plays_every_frame(
    tmp_path: Path, num_frames: int, width: int, height: int, first_fragments: list[int]
) -> None:
    rng = np.random.default_rng(0)
    pcm = np.zeros((2, num_samples(num_frames)), np.float32)
    pcm[:, IMPULSE] = 0.9
    clip = mux_clip(
        num_frames, width, height, lambda i: rng.integers(0, 256, (height, width, 3), np.uint8), pcm, tmp_path / "clip"
    )
    report = play(clip, first_fragments, tmp_path / "profile")
    print(report)
    assert "error" not in report, report
    assert report["isSupported"]
    assert abs(report["loudestSample"] - IMPULSE) <= 32
    assert [played["first"] for played in report["plays"]] == first_fragments
    for played in report["plays"]:
        first = 17 * played["first"]
        assert played["size"] == [width, height]
        # Chromium may restart its decoder after the seek of a late start, and then counts its first pictures again.
        assert played["totalFrames"] == num_frames if first == 0 else played["totalFrames"] >= num_frames - first
        assert played["corruptedFrames"] == 0
        # Both tracks are there from the first instant (a late start has its sound from the next AAC frame on), without
        # a gap, up to the end of each chunk's pictures.
        assert played["bufferedRanges"] == 1
        assert -1e-3 < played["bufferedStart"] - first / 24 < (1e-3 if first == 0 else 1024 / 32_000)
        ends = [17 * (i + 1) / 24 for i in range(played["first"], len(clip.fragments) - 1)]
        assert played["bufferedEnds"][:-1] == pytest.approx(ends, abs=2e-3)
        duration = max(num_frames / 24, num_samples(num_frames) / 32_000)
        assert played["declaredDuration"] == pytest.approx(duration, abs=1e-3)
        # Pictures come at their own times; which of them the compositor shows depends on the machine's load.
        frames = [time * 24 for time in played["mediaTimes"]]
        assert frames == pytest.approx([round(frame) for frame in frames], abs=1e-2)
        assert frames == sorted(frames)
        assert first <= round(frames[0]) <= round(frames[-1]) < num_frames
        assert played["decodedAudioBytes"] > 0


def test_a_browser_plays_the_sound_alone(tmp_path: Path) -> None:
    pcm = np.zeros((2, num_samples(39)), np.float32)
    pcm[:, IMPULSE] = 0.9
    clip = mux_sound(39, pcm)
    report = play(clip, [0, 1], tmp_path / "profile")
    print(report)
    assert "error" not in report, report
    assert report["isSupported"]
    assert abs(report["loudestSample"] - IMPULSE) <= 32
    for played in report["plays"]:
        first = 17 * played["first"]
        assert played["bufferedRanges"] == 1
        assert -1e-3 < played["bufferedStart"] - first / 24 < (1e-3 if first == 0 else 1024 / 32_000)
        assert played["declaredDuration"] == pytest.approx(num_samples(39) / 32_000, abs=1e-3)
        assert played["bufferedEnds"][-1] == pytest.approx(num_samples(39) / 32_000, abs=1024 / 32_000)
        assert played["decodedAudioBytes"] > 0
