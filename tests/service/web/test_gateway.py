"""The HTTP gateway over real sockets, in front of a service whose clips play."""

from __future__ import annotations

import asyncio
import base64
import http.client
import io
import json
import re
import shlex
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import grpc
import pytest

from h3stream.adapters import AdapterChoice
from h3stream.errors import (
    IdempotencyKeyError,
    OverloadedError,
    PermissionDeniedError,
    QuotaExceededError,
    RateLimitedError,
)
from h3stream.refine import FrozenCacheSpec, RefineSpec, TimeRange
from h3stream.request import Branch
from tests.service.certificates import Authority
from tests.web_service import LiveService, make_media, running_gateway, serve_live

GUIDE = (Path(__file__).parents[3] / "docs" / "web.md").read_text()
CLIP = {"prompt": "a fox", "num_frames": 39, "width": 64, "height": 64}


class Http:
    """Calls to the gateway, away from the event loop."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def __call__(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} if body is not None else {}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        return await asyncio.to_thread(self._call, method, path, data, sent)

    def _call(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Any:
        connection = http.client.HTTPConnection(self.address, timeout=30)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    async def json(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        status, _, data = await self(method, path, body, **headers)
        return status, json.loads(data)

    async def create(self, **fields: Any) -> str:
        status, answer = await self.json("POST", "/api/jobs", {**CLIP, **fields})
        assert status == 201, answer
        return str(answer["job_id"])


def messages(data: bytes) -> list[dict[str, Any]]:
    """The messages of an event stream."""
    result = []
    for block in data.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        if "data" in fields:
            result.append({**fields, "data": json.loads(fields["data"])})
    return result


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():
        await asyncio.sleep(0.02)


@dataclass
class LoggedGateway:
    """A gateway whose log is read once it has stopped."""

    http_call: Http
    log: str = ""


@asynccontextmanager
async def logged_gateway(server: str) -> AsyncIterator[LoggedGateway]:
    """A gateway in front of a server, told to stop at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "web.gateway", "--server", server, "--listen", "127.0.0.1:0",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    address = (await process.stdout.readline()).decode().strip().removeprefix("listening on http://")
    gateway = LoggedGateway(Http(address))
    try:
        yield gateway
    finally:
        process.terminate()
        gateway.log = (await process.communicate())[1].decode()
    assert process.returncode == 0, gateway.log


async def cut_short(reading: Awaitable[Any]) -> bytes:
    """What has come of a body whose transfer is not complete."""
    with pytest.raises(http.client.IncompleteRead) as cut:
        await reading
    return cut.value.partial


@pytest.fixture
def service() -> LiveService:
    return LiveService()


@pytest.fixture
async def http_call(service: LiveService) -> AsyncIterator[Http]:
    async with serve_live(service) as address, running_gateway(address) as gateway:
        yield Http(gateway)


async def test_a_job_is_made_followed_and_fetched(http_call: Http, service: LiveService) -> None:
    job_id = await http_call.create(seed=2**63, adapters=[{"name": "turbo", "strength": 0.5}])
    assert service.jobs[job_id].request.seed == 2**63
    assert service.jobs[job_id].request.adapters[0].strength == 0.5
    _, headers, data = await http_call("GET", f"/api/jobs/{job_id}/events")
    assert headers["Content-Type"].startswith("text/event-stream")
    told = messages(data)
    numbers = [int(message["id"]) for message in told[:-1]]
    assert numbers == list(range(len(service.jobs[job_id].events)))
    assert told[0]["event"] == "accepted"
    assert told[-2]["event"] == "completed"
    assert told[-1]["event"] == "ended"
    assert told[-1]["data"] == {"state": "succeeded", "error": None}

    media = make_media(39, 64, 64)
    still = next(message["data"] for message in told if message["event"] == "preview")
    assert base64.b64decode(still["data"]) == media.stills[0]
    pieces = [message for message in told if message["event"] in ("init_segment", "fragment")]
    assert all("data" not in piece["data"] for piece in pieces)
    fetched = [await http_call("GET", f"/api/jobs/{job_id}/media/{piece['id']}.mp4") for piece in pieces]
    assert b"".join(data for _, _, data in fetched) == media.stream
    assert "immutable" in fetched[0][1]["Cache-Control"]
    assert (await http_call("GET", f"/api/jobs/{job_id}/media/0.mp4"))[0] == 404

    _, headers, whole = await http_call("GET", f"/api/jobs/{job_id}/stream.mp4")
    assert headers["Content-Type"] == "video/mp4"
    assert whole == media.stream
    status, job = await http_call.json("GET", f"/api/jobs/{job_id}")
    assert (status, job["state"], job["num_frames_emitted"]) == (200, "succeeded", 39)


async def test_events_resume_after_the_last_one_seen(http_call: Http) -> None:
    job_id = await http_call.create()
    whole = messages((await http_call("GET", f"/api/jobs/{job_id}/events"))[2])
    rest = messages((await http_call("GET", f"/api/jobs/{job_id}/events", Last_Event_ID="4"))[2])
    assert rest == whole[5:]
    assert messages((await http_call("GET", f"/api/jobs/{job_id}/events?last_event_id=4"))[2]) == rest
    end = len(whole) - 2
    after_all = messages((await http_call("GET", f"/api/jobs/{job_id}/events?last_event_id={end}"))[2])
    assert [message["event"] for message in after_all] == ["ended"]
    for wrong in ("9999", "9" * 5000, "-1", "four"):
        status, answer = await http_call.json("GET", f"/api/jobs/{job_id}/events?last_event_id={wrong}")
        assert (status, answer["error"]["violations"][0]["field"]) == (400, "last_event_id"), wrong
        status, answer = await http_call.json("GET", f"/api/jobs/{job_id}/events", Last_Event_ID=wrong)
        assert (status, answer["error"]["reason"]) == (400, "INVALID_REQUEST"), wrong


async def test_a_cancelled_job_tells_how_it_ended(http_call: Http, service: LiveService) -> None:
    service.allow(1)
    job_id = await http_call.create()
    following = asyncio.create_task(http_call("GET", f"/api/jobs/{job_id}/events"))
    playing = asyncio.create_task(http_call("GET", f"/api/jobs/{job_id}/stream.mp4"))
    while service.num_attached < 2:
        await asyncio.sleep(0.01)
    status, headers, data = await http_call("HEAD", f"/api/jobs/{job_id}/stream.mp4")  # answers while the job runs
    assert (status, headers["Content-Type"], data) == (200, "video/mp4", b"")
    status, job = await http_call.json("DELETE", f"/api/jobs/{job_id}")
    assert (status, job["state"]) == (200, "cancelled")
    last = messages((await following)[2])[-1]
    assert last["event"] == "ended"
    assert last["data"]["state"] == "cancelled"
    assert last["data"]["error"]["reason"] == "JOB_CANCELLED"
    there_is = await cut_short(playing)
    assert make_media(39, 64, 64).stream.startswith(there_is)
    assert service.num_attached == 0
    # So for all who come later, but for those who ask for a part.
    assert await cut_short(http_call("GET", f"/api/jobs/{job_id}/stream.mp4")) == there_is
    status, headers, data = await http_call("GET", f"/api/jobs/{job_id}/stream.mp4?partial=true")
    assert (status, headers["Content-Disposition"], data) == (200, 'inline; filename="partial.mp4"', there_is)
    status, answer = await http_call.json("GET", f"/api/jobs/{job_id}/stream.mp4?partial=yes")
    assert (status, answer["error"]["violations"][0]["field"]) == (400, "partial")


async def test_a_stream_ends_where_it_is_whole(http_call: Http, service: LiveService) -> None:
    service.refine_steps_allowed = 0
    job_id = await http_call.create(refine_audio={})
    assert (await http_call("GET", f"/api/jobs/{job_id}/stream.mp4"))[2] == make_media(39, 64, 64).stream
    assert service.jobs[job_id].state == "running"
    assert (await http_call("GET", f"/api/jobs/{job_id}/hls/index.m3u8"))[2].endswith(b"#EXT-X-ENDLIST\n")
    await http_call("DELETE", f"/api/jobs/{job_id}")  # which leaves the clip
    assert (await http_call("GET", f"/api/jobs/{job_id}/stream.mp4"))[2] == make_media(39, 64, 64).stream
    assert (await http_call("GET", f"/api/jobs/{job_id}/hls/index.m3u8"))[0] == 200


async def test_a_clip_whose_stream_failed_has_no_whole_stream(http_call: Http, service: LiveService) -> None:
    service.has_stream = False
    job_id = await http_call.create()
    await http_call("GET", f"/api/jobs/{job_id}/events")
    assert service.jobs[job_id].state == "succeeded"
    assert await cut_short(http_call("GET", f"/api/jobs/{job_id}/stream.mp4")) == b""
    assert (await http_call("GET", f"/api/jobs/{job_id}/stream.mp4?partial=true"))[0] == 200
    assert (await http_call("GET", f"/api/jobs/{job_id}/hls/index.m3u8"))[0] == 410


async def test_the_playlist_of_a_clip_that_will_not_be_whole_is_gone(http_call: Http, service: LiveService) -> None:
    service.allow(3)
    job_id = await http_call.create(num_frames=90)
    path = f"/api/jobs/{job_id}/hls/index.m3u8"

    async def has_two_fragments() -> bool:
        return (await http_call("GET", path))[2].count(b"#EXTINF") == 2

    await until(has_two_fragments)
    has_begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def frames() -> int:
        with av.open(f"http://{http_call.address}{path}") as container:
            loop.call_soon_threadsafe(has_begun.set)
            return sum(1 for _ in container.decode(video=0))

    playing = asyncio.create_task(asyncio.to_thread(frames))
    await has_begun.wait()
    await http_call("DELETE", f"/api/jobs/{job_id}")
    assert await playing == 34  # and the player asks no more
    status, answer = await http_call.json("GET", path)
    assert (status, answer["error"]["reason"], answer["error"]["job_id"]) == (410, "STREAM_INCOMPLETE", job_id)
    assert "cancelled" in answer["error"]["message"]


async def test_a_reader_that_goes_is_let_go(http_call: Http, service: LiveService) -> None:
    service.allow(1)
    job_id = await http_call.create()
    connections = []
    for path in ("events", "stream.mp4"):
        connection = http.client.HTTPConnection(http_call.address)
        connection.request("GET", f"/api/jobs/{job_id}/{path}")
        connections.append(connection)
    while service.num_attached < 2:
        await asyncio.sleep(0.01)
    for connection in connections:
        connection.close()
    while service.num_attached:
        await asyncio.sleep(0.01)
    service.allow(99)
    await http_call("GET", f"/api/jobs/{job_id}/events")  # the job itself went on
    assert service.jobs[job_id].state == "succeeded"


async def test_the_playlist_grows_and_ends(http_call: Http, service: LiveService) -> None:
    service.allow(2)
    job_id = await http_call.create(num_frames=56)

    async def has_a_fragment() -> bool:
        return service.jobs[job_id].num_frames > 0

    await until(has_a_fragment)
    path = f"/api/jobs/{job_id}/hls/index.m3u8"
    _, headers, data = await http_call("GET", path)
    assert headers["Content-Type"] == "application/vnd.apple.mpegurl"
    early = data.decode()
    assert early.count("#EXTINF") == 1
    assert "#EXT-X-PLAYLIST-TYPE:EVENT" in early
    assert "#EXT-X-ENDLIST" not in early
    service.allow(99)
    await http_call("GET", f"/api/jobs/{job_id}/events")
    late = (await http_call("GET", path))[2].decode()
    assert late.startswith(early)
    assert late.endswith("#EXT-X-ENDLIST\n")
    assert late.count("#EXTINF") == len(make_media(56, 64, 64).fragments)

    # What a player takes from it is the clip.
    def frames() -> int:
        with av.open(f"http://{http_call.address}{path}") as container:
            return sum(1 for _ in container.decode(video=0))

    assert await asyncio.to_thread(frames) == 56


async def test_artifacts_are_sent_whole_and_in_part(http_call: Http) -> None:
    job_id = await http_call.create()
    await http_call("GET", f"/api/jobs/{job_id}/events")
    path = f"/api/jobs/{job_id}/artifacts/final.mp4"
    media = make_media(39, 64, 64).stream
    status, headers, data = await http_call("GET", path)
    assert (status, data) == (200, media)
    assert headers["Accept-Ranges"] == "bytes"
    with av.open(io.BytesIO(data)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 39
    size = len(media)
    for asked, start, stop in (("100-199", 100, 200), ("-5", size - 5, size), ("11000-", 11_000, size)):
        status, part, data = await http_call("GET", path, Range=f"bytes={asked}")
        assert (status, data) == (206, media[start:stop]), asked
        assert part["Content-Range"] == f"bytes {start}-{stop - 1}/{size}"
    assert (await http_call("GET", path, Range=f"bytes={size}-"))[0] == 416
    assert (await http_call("GET", path, Range="bytes=1-2", If_Range='"other"'))[0] == 200
    assert (await http_call("GET", path, If_None_Match=headers["ETag"]))[0] == 304
    status, head, data = await http_call("HEAD", path)
    assert (status, head["Content-Length"], data) == (200, str(size), b"")
    status, answer = await http_call.json("GET", f"/api/jobs/{job_id}/artifacts/nothing.mp4")
    assert (status, answer["error"]["reason"], answer["error"]["job_id"]) == (404, "ARTIFACT_NOT_FOUND", job_id)
    assert answer["error"]["message"].endswith("it has final.mp4, stream.mp4, latents.safetensors")
    status, answer = await http_call.json("GET", f"/api/jobs/{job_id}/artifacts/audio.flac")
    assert (status, answer["error"]["reason"], answer["error"]["job_id"]) == (410, "ARTIFACT_REMOVED", job_id)
    assert "older than 7 days" in answer["error"]["message"]


async def test_media_that_an_event_has_not_are_told_apart_from_an_unknown_job(http_call: Http) -> None:
    job_id = await http_call.create()
    await http_call("GET", f"/api/jobs/{job_id}/events")
    for seq, told in ((0, "event 0 (accepted) of job job-0 has no media"), (9999, "has not come yet; there are")):
        status, answer = await http_call.json("GET", f"/api/jobs/{job_id}/media/{seq}.mp4")
        assert (status, answer["error"]["reason"]) == (404, "ARTIFACT_NOT_FOUND")
        assert told in answer["error"]["message"]
    for wrong in ("9" * 5000, "1.5", "first"):
        status, answer = await http_call.json("GET", f"/api/jobs/{job_id}/media/{wrong}.mp4")
        assert (status, answer["error"]["violations"][0]["field"]) == (400, "SEQ"), wrong


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (b"{", {"body"}),
        (b"[]", {"body"}),
        ({}, {"prompt"}),
        ({"prompt": 5, "steps": "four"}, {"prompt", "steps"}),
        ({"prompt": "a", "fps": 24, "cancel_on_disconnect": True}, {"fps", "cancel_on_disconnect"}),
        ({"prompt": "a", "adapters": "turbo"}, {"adapters"}),
        ({"prompt": "a", "adapters": {}}, {"adapters"}),
        (b'{"prompt": "a", "\\ud800": 1}', {"\ud800"}),
        ({"prompt": "a", "adapters": [{"title": "turbo"}], "preview": 3}, {"adapters", "preview"}),
        ({"prompt": "a", "num_frames": 40}, {"num_frames"}),
    ],
)
async def test_what_is_wrong_is_told_field_by_field(http_call: Http, body: Any, fields: set[str]) -> None:
    status, answer = await http_call.json("POST", "/api/jobs", body)
    assert status == 400
    assert {violation["field"] for violation in answer["error"]["violations"]} == fields


async def test_errors_have_their_status(http_call: Http, service: LiveService) -> None:
    for path in ("", "/events", "/stream.mp4", "/hls/index.m3u8", "/media/1.mp4", "/artifacts/final.mp4"):
        status, answer = await http_call.json("GET", f"/api/jobs/nothing{path}")
        assert (status, answer["error"]["reason"]) == (404, "JOB_NOT_FOUND"), path
    service.refuse_with = OverloadedError("the queue is full", retry_after_s=3.5)
    status, headers, data = await http_call("POST", "/api/jobs", CLIP)
    assert (status, headers["Retry-After"], json.loads(data)["error"]["retry_after_s"]) == (429, "4", 3.5)


async def test_other_sites_reach_nothing(http_call: Http) -> None:
    assert (await http_call("GET", "/api/info", Host="evil.example:8080"))[0] == 421
    assert (await http_call("GET", "/api/info", Host="localhost:1"))[0] == 200
    status, _, _ = await http_call("POST", "/api/jobs", CLIP, Content_Type="text/plain")
    assert status == 415
    assert (await http_call("POST", "/api/jobs", b" " * 1_100_000))[0] == 413
    status, headers, page = await http_call("GET", "/")
    assert status == 200
    assert "default-src 'none'; script-src 'self'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert b"<script>" not in page
    assert b"style=" not in page
    assert (await http_call("GET", "/../wire.py"))[0] == 404


async def test_the_table_of_the_gateway_s_own_reasons_is_the_truth(http_call: Http, service: LiveService) -> None:
    service.has_stream = False
    job_id = await http_call.create()
    await http_call("GET", f"/api/jobs/{job_id}/events")
    job = f"/api/jobs/{job_id}"
    answers = [
        await http_call.json("GET", "/api/nothing"),
        await http_call.json("PUT", job),
        await http_call.json("GET", f"{job}/artifacts/audio.flac"),
        await http_call.json("GET", f"{job}/hls/index.m3u8"),
        await http_call.json("POST", "/api/jobs", b" " * 1_100_000),
        await http_call.json("POST", "/api/jobs", CLIP, Content_Type="text/plain"),
        await http_call.json("GET", "/api/info", Host="evil.example"),
    ]
    service.has_stream = True
    job_id = await http_call.create()
    await http_call("GET", f"/api/jobs/{job_id}/events")
    answers.append(await http_call.json("GET", f"/api/jobs/{job_id}/artifacts/final.mp4", Range="bytes=999999999-"))
    rows = re.findall(r"^\| (\d{3}) \| `([A-Z_]+)` \|", GUIDE, re.MULTILINE)
    assert [(int(status), reason) for status, reason in rows] == sorted(
        (status, answer["error"]["reason"]) for status, answer in answers
    )


async def test_the_guide_s_calls_work(http_call: Http, service: LiveService) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    job_id = await http_call.create()
    commands = re.findall(r"^curl .*$", GUIDE, re.MULTILINE)
    assert len(commands) > 3
    for command in commands:
        words = shlex.split(command.partition(" | ")[0].replace("JOB", job_id))
        words[1:1] = ["--fail", "--max-time", "30"]
        words = [word.replace("127.0.0.1:8080", http_call.address) for word in words]
        process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
        said, _ = await process.communicate()
        assert process.returncode == 0, (command, said)
        assert said, command
        while service.jobs[job_id].state == "running":
            await asyncio.sleep(0.01)


async def test_a_server_that_is_away_is_told() -> None:
    async with running_gateway("127.0.0.1:1") as gateway:
        status, answer = await Http(gateway).json("GET", "/api/info")
    assert (status, answer["error"]["reason"]) == (503, "NOT_READY")


async def test_a_server_that_dies_cuts_its_streams_without_an_alarm(service: LiveService) -> None:
    service.allow(1)
    async with (
        AsyncExitStack() as server,
        logged_gateway(await server.enter_async_context(serve_live(service))) as gateway,
    ):
        job_id = await gateway.http_call.create()
        paths = ("stream.mp4", "events")
        reading = [asyncio.create_task(gateway.http_call("GET", f"/api/jobs/{job_id}/{path}")) for path in paths]
        while service.num_attached < 2:
            await asyncio.sleep(0.01)
        await server.aclose()
        for each in reading:
            await cut_short(each)
    assert gateway.log.count("a response is cut short") == 2
    assert "ERROR" not in gateway.log


async def test_a_caller_that_goes_in_the_middle_of_its_body_is_no_alarm(service: LiveService) -> None:
    async with serve_live(service) as address, logged_gateway(address) as gateway:
        host, _, port = gateway.http_call.address.rpartition(":")
        head = "POST /api/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"{head}Content-Length: 100\r\nExpect: 100-continue\r\n\r\n".encode())
            assert (await asyncio.to_thread(connection.recv, 100)).startswith(b"HTTP/1.1 100")  # it waits for the body
            connection.sendall(b'{"prompt": ')
        assert (await gateway.http_call("GET", "/api/info"))[0] == 200
    assert "ERROR" not in gateway.log
    assert "Traceback" not in gateway.log


async def test_a_taken_port_is_told_in_one_line(http_call: Http) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "web.gateway", "--listen", http_call.address, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 1
    (line,) = said.decode().splitlines()
    assert line.startswith(f"h3stream: nothing can listen at {http_call.address}: Address already in use")


@pytest.mark.parametrize("missing", ["uvicorn", "starlette"])
async def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    run = f"import runpy, sys; sys.modules[{missing!r}] = None; runpy.run_module('web.gateway', run_name='__main__')"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", run, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    assert process.returncode == 1
    (line,) = said.decode().splitlines()
    assert line.startswith(f"h3stream: the gateway needs {missing}, of the extra `web`: pip install ")


async def test_it_stops_at_once_though_streams_are_open(service: LiveService) -> None:
    service.allow(1)
    async with serve_live(service) as address, logged_gateway(address) as gateway:
        job_id = await gateway.http_call.create()
        connection = http.client.HTTPConnection(gateway.http_call.address)
        connection.request("GET", f"/api/jobs/{job_id}/events")
        while not service.num_attached:
            await asyncio.sleep(0.01)
    connection.close()
    assert "Traceback" not in gateway.log


async def test_beyond_loopback_only_when_told_so() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "web.gateway", "--listen", "0.0.0.0:0", stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 1
    assert b"set insecure" in said


async def test_a_sound_is_refined_behind_its_clip(http_call: Http, service: LiveService) -> None:
    wish = {"steps": 3, "audio_range": {"start_s": 0.5, "end_s": 1}, "cache": {"precision": "fp8"}}
    job_id = await http_call.create(refine_audio={**wish, "adapters": [{"name": "style", "strength": 0.5}]})
    spec = service.jobs[job_id].request.refine_audio
    assert spec == RefineSpec(
        steps=3, audio_range=TimeRange(0.5, 1), cache=FrozenCacheSpec(precision="fp8"),
        adapters=(AdapterChoice("style", 0.5),),
    )  # fmt: skip
    told = messages((await http_call("GET", f"/api/jobs/{job_id}/events"))[2])
    names = [message["event"] for message in told]
    assert [name for name in names if name.startswith("refine")] == [
        "refine_started", *["refine_progress"] * 3, "refined_init_segment", "refined_fragment", "refined_audio",
    ]  # fmt: skip
    refined = [message for message in told if message["event"] in ("refined_init_segment", "refined_fragment")]
    assert all("data" not in message["data"] for message in refined)
    pieces = [(await http_call("GET", f"/api/jobs/{job_id}/media/{message['id']}.mp4"))[2] for message in refined]
    assert pieces == [b"refined init", b"refined" * 100]
    audio = next(message["data"] for message in told if message["event"] == "refined_audio")
    assert audio["audio_health"]["std"] > audio["audio_health_before"]["std"]
    # The stream is the clip's alone.
    assert (await http_call("GET", f"/api/jobs/{job_id}/stream.mp4"))[2] == make_media(39, 64, 64).stream
    assert "refined" not in (await http_call("GET", f"/api/jobs/{job_id}/hls/index.m3u8"))[2].decode()


async def test_the_sound_of_a_job_is_refined_as_a_job_of_its_own(http_call: Http, service: LiveService) -> None:
    job_id = await http_call.create()
    await http_call("GET", f"/api/jobs/{job_id}/events")
    status, answer = await http_call.json("POST", f"/api/jobs/{job_id}/refine", {"steps": 2, "audio_denoise": 0.3})
    assert status == 201, answer
    refined = answer["job_id"]
    assert service.jobs[refined].request.refine_audio == RefineSpec(steps=2, audio_denoise=0.3)
    told = messages((await http_call("GET", f"/api/jobs/{refined}/events"))[2])
    assert (told[0]["event"], told[-1]["data"]["state"]) == ("accepted", "succeeded")
    _, job = await http_call.json("GET", f"/api/jobs/{refined}")
    assert (job["source_job_id"], [a["name"] for a in job["artifacts"]]) == (job_id, ["refined.mp4", "refined.flac"])
    _, _, data = await http_call("GET", f"/api/jobs/{refined}/artifacts/refined.mp4")
    assert data == make_media(39, 64, 64, 0.2).stream


async def test_a_refinement_that_cannot_be_is_refused_field_by_field(http_call: Http) -> None:
    job_id = await http_call.create()
    wish = {"steps": 0.5, "step": 4, "cache": {"kind": "kv"}, "audio_range": [3, 5], "adapters": "style"}
    status, answer = await http_call.json("POST", f"/api/jobs/{job_id}/refine", wish)
    assert status == 400
    fields = [violation["field"] for violation in answer["error"]["violations"]]
    assert sorted(fields) == ["adapters", "audio_range", "cache", "step", "steps"]
    status, answer = await http_call.json("POST", "/api/jobs", {**CLIP, "refine_audio": wish})
    assert status == 400
    assert [v["field"] for v in answer["error"]["violations"]] == [f"refine_audio.{field}" for field in fields]
    for wrong in (True, [], "yes"):
        status, answer = await http_call.json("POST", "/api/jobs", {**CLIP, "refine_audio": wrong})
        assert (status, answer["error"]["violations"][0]["field"]) == (400, "refine_audio")
    for path, body, expected in (("job-9/refine", {}, 404), (f"{job_id}/refine", [], 400), ("job-9/refine", b"", 415)):
        headers = {"Content_Type": "text/plain"} if expected == 415 else {}
        assert (await http_call("POST", f"/api/jobs/{path}", body, **headers))[0] == expected


KEY, OTHER_KEY = "h3s_k1_" + "s3cret" * 7, "h3s_k2_other"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_each_caller_is_known_to_the_server_by_its_own_key(http_call: Http, service: LiveService) -> None:
    service.api_keys = (KEY, OTHER_KEY)
    status, headers, data = await http_call("GET", "/api/info")
    assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
    assert json.loads(data)["error"]["reason"] == "UNAUTHENTICATED"
    assert (await http_call("POST", "/api/jobs", CLIP))[0] == 401
    status, answer = await http_call.json("POST", "/api/jobs", CLIP, **bearer(KEY))
    assert status == 201
    job = f"/api/jobs/{answer['job_id']}"
    await http_call("GET", f"{job}/events", **bearer(KEY))
    paths = ("", "/events", "/media/1.mp4", "/stream.mp4", "/hls/index.m3u8", "/artifacts/final.mp4")
    for path in paths:
        assert [(await http_call("GET", job + path, **bearer(key)))[0] for key in (OTHER_KEY, "nobody")] == [404, 401]
    assert [(await http_call("GET", job + path, **bearer(KEY)))[0] for path in paths if "media" not in path] == [
        200
    ] * 5
    assert (await http_call("DELETE", job, **bearer(OTHER_KEY)))[0] == 404
    assert (await http_call("POST", f"{job}/refine", {}, **bearer(OTHER_KEY)))[0] == 404
    for malformed in ("Bearer ", "Bearer two words", "Basic dXNlcjpwYXNz"):
        status, answer = await http_call.json("GET", job, Authorization=malformed)
        assert (status, answer["error"]["reason"]) == (401, "UNAUTHENTICATED")
        assert "words" not in answer["error"]["message"]


async def test_a_session_s_cookie_reads_and_changes_nothing(http_call: Http, service: LiveService) -> None:
    service.api_keys = (KEY,)
    assert (await http_call("POST", "/api/session"))[0] == 401
    assert (await http_call("POST", "/api/session", **bearer("nobody")))[0] == 401
    status, headers, data = await http_call("POST", "/api/session", **bearer(KEY))
    assert (status, data) == (204, b"")
    cookie, *attributes = (part.strip() for part in headers["Set-Cookie"].split(";"))
    assert {attribute.lower() for attribute in attributes} == {"httponly", "path=/", "samesite=strict"}
    _, answer = await http_call.json("POST", "/api/jobs", CLIP, **bearer(KEY))
    job = f"/api/jobs/{answer['job_id']}"
    told = messages((await http_call("GET", f"{job}/events", Cookie=cookie))[2])
    assert told[-1]["event"] == "ended"
    assert (await http_call("GET", f"{job}/artifacts/final.mp4", Cookie=cookie))[0] == 200
    assert (await http_call("POST", "/api/jobs", CLIP, Cookie=cookie))[0] == 401
    assert (await http_call("DELETE", job, Cookie=cookie))[0] == 401
    assert (await http_call("POST", "/api/session", Cookie=cookie))[0] == 401
    status, headers, _ = await http_call("DELETE", "/api/session", Cookie=cookie)
    assert (status, "Max-Age=0" in headers["Set-Cookie"]) == (204, True)


async def test_a_cookie_is_for_https_alone_where_the_page_is(service: LiveService) -> None:
    service.api_keys = (KEY,)
    async with serve_live(service) as address, running_gateway(address) as gateway:
        headers = bearer(KEY) | {"X_Forwarded_Proto": "https"}
        _, answer, _ = await Http(gateway)("POST", "/api/session", **headers)
    assert "Secure" in answer["Set-Cookie"]


async def test_a_gateway_s_own_key_is_for_callers_without_one(service: LiveService, tmp_path: Path) -> None:
    service.api_keys = (KEY, OTHER_KEY)
    (tmp_path / "key").write_text(f"{KEY}\n")
    async with (
        serve_live(service) as address,
        running_gateway(address, "--api-key-file", str(tmp_path / "key")) as gateway,
    ):
        call = Http(gateway)
        job_id = await call.create()
        assert service.jobs[job_id].owner == KEY
        assert (await call("GET", f"/api/jobs/{job_id}", **bearer(OTHER_KEY)))[0] == 404
        assert (await call("GET", f"/api/jobs/{job_id}"))[0] == 200


async def test_a_gateway_speaks_tls_to_its_server(service: LiveService, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    authority = Authority(tmp_path, "authority")
    cert, key = authority.issue("server", "IP:127.0.0.1")
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    async with (
        serve_live(service, credentials) as address,
        running_gateway(address, "--tls-ca", str(authority.cert)) as gateway,
    ):
        assert (await Http(gateway).json("GET", "/api/info"))[1]["model_name"] == "fake"
        assert (await Http(gateway)("GET", "/readyz"))[0] == 200


async def test_a_key_or_a_file_that_does_not_do_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("two s3cret words")
    for arguments, words in (
        (("--api-key-file", str(tmp_path / "key")), "the API key is empty or holds a space"),
        (("--tls-ca", "missing.pem"), "TLS ca missing.pem cannot be read: No such file or directory"),
    ):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "web.gateway", "--listen", "127.0.0.1:0", *arguments, stderr=asyncio.subprocess.PIPE
        )
        _, said = await process.communicate()
        (line,) = said.decode().splitlines()
        assert (process.returncode, words in line, "s3cret" in line) == (1, True, False), line


async def test_a_gateway_that_lives_need_not_be_ready(service: LiveService) -> None:
    async with AsyncExitStack() as server:
        address = await server.enter_async_context(serve_live(service))
        async with running_gateway(address) as gateway:
            call = Http(gateway)
            assert [(await call("GET", path))[0] for path in ("/healthz", "/readyz")] == [200, 200]
            await server.aclose()
            assert [(await call("GET", path))[0] for path in ("/healthz", "/readyz")] == [200, 503]


async def test_what_a_key_does_not_allow_and_a_full_tenant_have_their_status(
    http_call: Http, service: LiveService
) -> None:
    for error, expected in (
        (PermissionDeniedError("that needs a key with the scope generate; this one allows read_own"), 403),
        (QuotaExceededError("2 jobs of studio wait already", retry_after_s=7), 429),
        (RateLimitedError("too many calls", retry_after_s=2), 429),
        (IdempotencyKeyError("my-fox has named another request"), 409),
    ):
        service.refuse_with = error
        status, answer = await http_call.json("POST", "/api/jobs", CLIP)
        assert (status, answer["error"]["reason"], answer["error"]["message"]) == (
            expected, error.reason, error.message,
        )  # fmt: skip


async def test_a_clip_goes_on_from_a_chunk_of_another(http_call: Http, service: LiveService) -> None:
    source = await http_call.create()
    branch = {"job_id": source, "from_chunk": 1, "prompt": "snow", "seed": 7}
    status, answer = await http_call.json("POST", "/api/jobs", {"branch": branch, "priority": "high"})
    assert status == 201, answer
    request = service.jobs[answer["job_id"]].request
    assert (request.branch, request.priority) == (Branch(source, 1, "snow", 7), "high")
    for wrong in ({"job_id": source}, {**branch, "chunk": 1}, "job-0", {**branch, "from_chunk": "one"}):
        status, answer = await http_call.json("POST", "/api/jobs", {"branch": wrong})
        assert status == 400, wrong
        assert answer["error"]["violations"][0]["field"].partition(".")[0] == "branch"
