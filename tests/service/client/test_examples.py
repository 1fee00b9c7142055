"""The examples work as they stand."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from h3stream import Fragment, GenerateRequest
from tests.fakes import FakeVideoService, Script, events_of, media_of, plan_of

EXAMPLES = Path(__file__).parents[3] / "client" / "examples"
A_SCREEN = 40  # lines
PLAN = plan_of(GenerateRequest("a fox"))


async def run(name: str, *arguments: str, cwd: Path, path: str = os.environ["PATH"]) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLES / name), *arguments,
        cwd=cwd, env={**os.environ, "PATH": path}, stdout=PIPE, stderr=PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def put_player(directory: Path, script: str) -> str:
    """A PATH whose `ffplay` is a shell script."""
    player = directory / "ffplay"
    player.write_text(f"#!/bin/sh\n{script}\n")
    player.chmod(0o755)
    return f"{directory}{os.pathsep}{os.environ['PATH']}"


async def test_save_mp4_saves_the_stream(address: str, tmp_path: Path) -> None:
    status, out, err = await run("save_mp4.py", "a fox", "fox.mp4", address, cwd=tmp_path)
    assert (status, err) == (0, "")
    assert (tmp_path / "fox.mp4").read_bytes() == media_of(PLAN)
    assert out == "fox.mp4 in 0.3 s, latents abababababab\n"


async def test_save_mp4_says_in_a_line_why_it_failed(tmp_path: Path) -> None:
    status, _, err = await run("save_mp4.py", "a fox", "fox.mp4", "127.0.0.1:1", cwd=tmp_path)
    assert status == 1
    assert err.startswith("NOT_READY: ")
    assert len(err.splitlines()) == 1


async def test_print_timing_shows_frames_between_the_phases(address: str, tmp_path: Path) -> None:
    status, out, err = await run("print_timing.py", "a fox", address, cwd=tmp_path)
    assert (status, err) == (0, "")
    texts = [line[11:].rstrip() for line in out.splitlines()]
    assert texts[0] == "accepted: 5 chunks, 73 frames"
    assert texts.index("    frames 0 to 16 are here") < texts.index("denoise 2")
    assert texts[-1] == "completed; 51 frames were out before sampling ended"


async def test_play_hands_the_stream_to_the_player(address: str, tmp_path: Path) -> None:
    path = put_player(tmp_path, "cat > played")
    status, out, err = await run("play.py", "a fox", address, cwd=tmp_path, path=path)
    assert (status, out, err) == (0, "", "")
    assert (tmp_path / "played").read_bytes() == media_of(PLAN)


async def test_closing_the_player_ends_the_call(address: str, service: FakeVideoService, tmp_path: Path) -> None:
    first = next(event for event in events_of(PLAN) if isinstance(event, Fragment))
    service.script = Script(stall_at=first.seq)
    path = put_player(tmp_path, "head -c 1 > /dev/null; touch closed")
    playing = asyncio.create_task(run("play.py", "a fox", address, cwd=tmp_path, path=path))
    while not (tmp_path / "closed").exists():
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)  # the shell ends, and with it the last reader of the pipe
    service.script.stall_at = -1
    status, out, err = await playing
    assert (status, out, err) == (0, "the player was closed; the job is cancelled\n", "")
    assert service.requests[0].cancel_on_disconnect


def test_each_example_fits_a_screen() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= A_SCREEN, path.name
