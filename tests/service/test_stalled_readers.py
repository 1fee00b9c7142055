"""Viewers that read nothing cost the server next to nothing, and do not keep the others waiting."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from grpc import aio

from h3stream.channel import CHANNEL_OPTIONS
from h3stream.v1 import video_pb2, video_pb2_grpc
from tests.service.big_job_server import FRAGMENT_BYTES, JOB_ID, NUM_FRAGMENTS

NUM_STALLED = 50
MAX_BYTES_EACH = 3_000_000
"""An event that is being sent, and what gRPC keeps for a connection; the job has 32 MB."""


BURST = 120
"""Messages of 250 kB, 30 MB in all."""


@pytest.fixture
async def big_job(tmp_path: Path) -> AsyncIterator[tuple[str, Callable[[], Awaitable[int]]]]:
    """Address of the server, and a call that tells its resident bytes."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.service.big_job_server",
        str(tmp_path),
        cwd=Path(__file__).parents[2],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    async def resident_bytes() -> int:
        stdin.write(b"\n")
        return int(await stdout.readline())

    yield (await stdout.readline()).decode().strip(), resident_bytes
    stdin.close()
    assert await process.wait() == 0


def attach(channel: aio.Channel) -> aio.UnaryStreamCall:
    return video_pb2_grpc.VideoServiceStub(channel).Attach(video_pb2.AttachRequest(job_id=JOB_ID))


async def test_stalled_viewers_cost_little_memory_and_hold_nobody_up(
    big_job: tuple[str, Callable[[], Awaitable[int]]],
) -> None:
    address, resident_bytes = big_job
    own_connection = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    channels = [aio.insecure_channel(address, options=own_connection) for _ in range(NUM_STALLED + 1)]
    reader = attach(channels[0])
    assert len([response async for response in reader]) == NUM_FRAGMENTS + 3
    before = await resident_bytes()
    viewers = [aiter(attach(channel)) for channel in channels[1:]]
    for viewer in viewers:
        assert (await anext(viewer)).event.HasField("accepted")
    used = 0
    for _ in range(100):  # until nothing more moves
        await asyncio.sleep(0.1)
        last, used = used, await resident_bytes() - before
        if abs(used - last) < 100_000:
            break
    assert used < NUM_STALLED * MAX_BYTES_EACH

    seen = [response.event async for response in attach(channels[0])]
    assert [len(event.fragment.data) for event in seen[2:-1]] == [FRAGMENT_BYTES] * NUM_FRAGMENTS
    assert seen[-1].HasField("completed")
    for viewer in viewers[:3]:  # and who reads on gets the rest
        assert len([response async for response in viewer]) == NUM_FRAGMENTS + 2
    for channel in channels:
        await channel.close()


async def test_what_a_stalled_reader_holds_is_bounded_however_fast_it_has_read_before() -> None:
    num_written = [0, 0]
    is_full = asyncio.Event()

    async def burst(request: bytes, context: aio.ServicerContext[bytes, bytes]) -> None:
        for _ in range(BURST):
            writing = asyncio.ensure_future(context.write(bytes(250_000)))  # returns once the window has room for it
            await asyncio.wait([writing], timeout=2.0)
            if not writing.done():
                is_full.set()
            await writing
            num_written[int(request)] += 1

    server = aio.server(options=[("grpc.max_send_message_length", 1 << 20)])
    handlers = {"Burst": grpc.unary_stream_rpc_method_handler(burst)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        call = channel.unary_stream("/test.Service/Burst")
        assert len([message async for message in call(b"0")]) == BURST
        stalled = call(b"1")
        await stalled.read()
        await asyncio.wait_for(is_full.wait(), 60)
        assert num_written[1] * 250_000 < 2_000_000
        stalled.cancel()
    await server.stop(0)
