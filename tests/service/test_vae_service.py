"""The VAE worker over its real gRPC service, on a unix socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import torch
from grpc import aio

from h3stream.channel import MAX_MESSAGE_BYTES
from h3stream.codec import clip_spec_to_proto
from h3stream.v1 import types_pb2, workers_pb2, workers_pb2_grpc
from services.common.process import WorkerProcess
from services.common.rpc import connect
from services.common.tensors import to_parts
from services.vae.config import VaeConfig
from tests.tools.check_fmp4 import violations
from tests.unit.services.vae.harness import make_clip
from tests.vae_model import write_model_directory

CLIP = make_clip(39, 96, 64)
SHAPES = (((1, 24, 5, 4, 6), (1, 32, 2, 29)), ((1, 24, 5, 4, 6), (1, 32, 2, 28)), ((1, 24, 2, 4, 6), (1, 32, 2, 8)))


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_directory(tmp_path_factory.mktemp("vae_model"))


@pytest.fixture
async def channel(model_directory: Path, tmp_path: Path) -> AsyncIterator[aio.Channel]:
    process = WorkerProcess("services.vae", VaeConfig(model_directory, device="cpu", threads=1))
    address = await process.start(f"unix:{tmp_path}/vae.sock")
    async with connect(address) as made:
        yield made
    await process.stop()


def requests(chunk_index: int, session_id: str = "s") -> Iterator[workers_pb2.DecodeChunkRequest]:
    yield workers_pb2.DecodeChunkRequest(
        header=workers_pb2.DecodeChunkHeader(session_id=session_id, chunk_index=chunk_index)
    )
    generator = torch.Generator().manual_seed(chunk_index)
    for name, shape in zip(("video", "audio"), SHAPES[chunk_index], strict=True):
        for part in to_parts(name, torch.randn(shape, generator=generator)):
            yield workers_pb2.DecodeChunkRequest(tensor=part)


async def open_session(vae: workers_pb2_grpc.VaeServiceAsyncStub, directory: str = "") -> None:
    await vae.OpenSession(
        workers_pb2.VaeServiceOpenSessionRequest(
            session_id="s", clip=clip_spec_to_proto(CLIP), artifact_directory=directory, artifacts=["final.mp4"]
        )
    )


async def test_a_clip_goes_through_the_service(channel: aio.Channel, tmp_path: Path) -> None:
    vae, shared = workers_pb2_grpc.VaeServiceStub(channel), workers_pb2_grpc.WorkerServiceStub(channel)
    await open_session(vae, str(tmp_path / "artifacts"))
    media, sizes, fragments = b"", [], []
    for chunk_index in range(3):
        await shared.EnterPhase(workers_pb2.EnterPhaseRequest())
        async for response in vae.DecodeChunk(requests(chunk_index)):
            kind = response.WhichOneof("payload")
            assert (kind == "init_segment") == (not media)
            media += getattr(response, kind).data
            sizes.append(response.ByteSize())
            if kind == "fragment":
                fragments.append(response.fragment)
        assert (await shared.LeavePhase(workers_pb2.LeavePhaseRequest())).device_weight_bytes == 0
    assert violations(media, frames=39, samples=52_000) == []
    assert max(sizes) < MAX_MESSAGE_BYTES
    assert [(f.fragment_index, f.chunk_index, f.first_frame, f.num_frames) for f in fragments] == [
        (0, 1, 0, 17),
        (1, 2, 17, 17),
        (2, 2, 34, 5),
    ]
    assert [(f.start_ticks, f.duration_ticks) for f in fragments] == [(0, 68_000), (68_000, 68_000), (136_000, 20_000)]
    assert fragments[-1].num_samples_total == 52_000

    finished = await vae.Finish(workers_pb2.FinishRequest(session_id="s"))
    (artifact,) = finished.artifacts
    assert (artifact.name, artifact.relative_path, artifact.media_type) == ("final.mp4", "final.mp4", "video/mp4")
    assert artifact.size_bytes == (tmp_path / "artifacts" / artifact.relative_path).stat().st_size
    assert list(finished.failures) == []
    assert 0 < finished.audio_health.std < finished.audio_health.peak <= 1
    assert finished.audio_health.normalisation_divisor >= 1
    assert (await vae.CloseSession(workers_pb2.VaeServiceCloseSessionRequest(session_id="s"))).was_open
    assert not (await vae.CloseSession(workers_pb2.VaeServiceCloseSessionRequest(session_id="s"))).was_open


async def test_the_worker_says_what_it_is(channel: aio.Channel) -> None:
    vae, shared = workers_pb2_grpc.VaeServiceStub(channel), workers_pb2_grpc.WorkerServiceStub(channel)
    await open_session(vae)
    told = await shared.Describe(workers_pb2.DescribeRequest())
    assert (told.worker, told.device, list(told.session_ids)) == ("vae", "cpu", ["s"])
    assert told.device_weight_bytes == 0 < told.weight_bytes
    assert set(told.library_versions) == {"torch", "diffusers", "av", "safetensors"}


@pytest.mark.parametrize(
    ("messages", "code", "words"),
    [
        ([], grpc.StatusCode.INVALID_ARGUMENT, "one header, first; the stream was empty"),
        (list(requests(0))[1:], grpc.StatusCode.INVALID_ARGUMENT, "one header, first"),
        (list(requests(0))[:2], grpc.StatusCode.INVALID_ARGUMENT, "tensor 'audio' is missing"),
        ([*list(requests(0))[:1], *list(requests(2))[1:]], grpc.StatusCode.INVALID_ARGUMENT, "expected torch.float32"),
        (
            [*list(requests(0))[:1], *list(requests(0))],
            grpc.StatusCode.INVALID_ARGUMENT,
            "and then only tensors",
        ),
        (list(requests(1)), grpc.StatusCode.FAILED_PRECONDITION, "out of order"),
        (list(requests(0)), grpc.StatusCode.FAILED_PRECONDITION, "enter the phase first"),
        (list(requests(0, "other")), grpc.StatusCode.FAILED_PRECONDITION, "session 'other' is not open"),
    ],
)
async def test_wrong_calls_are_refused_with_their_reason(
    channel: aio.Channel, messages: list[workers_pb2.DecodeChunkRequest], code: grpc.StatusCode, words: str
) -> None:
    vae = workers_pb2_grpc.VaeServiceStub(channel)
    await open_session(vae)
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in vae.DecodeChunk(iter(messages)):
            pass
    assert caught.value.code() == code
    assert words in (caught.value.details() or "")


async def test_a_wrong_clip_is_refused(channel: aio.Channel) -> None:
    vae = workers_pb2_grpc.VaeServiceStub(channel)
    wrong = types_pb2.ClipSpec(num_frames=23, width=64, height=64)
    with pytest.raises(aio.AioRpcError) as caught:
        await vae.OpenSession(workers_pb2.VaeServiceOpenSessionRequest(session_id="s", clip=wrong))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_an_abandoned_call_leaves_the_worker_free(channel: aio.Channel) -> None:
    vae, shared = workers_pb2_grpc.VaeServiceStub(channel), workers_pb2_grpc.WorkerServiceStub(channel)
    await open_session(vae)
    await shared.EnterPhase(workers_pb2.EnterPhaseRequest())
    async for _ in vae.DecodeChunk(requests(0)):
        pass
    call = vae.DecodeChunk(requests(1))
    call.cancel()
    await vae.CloseSession(workers_pb2.VaeServiceCloseSessionRequest(session_id="s"))
    await open_session(vae)
    assert [response.WhichOneof("payload") async for response in vae.DecodeChunk(requests(0))] == ["init_segment"]


SOUND_SHAPE = (1, 32, 2, 65)


def sound_requests(
    directory: str = "",
    artifacts: tuple[str, ...] = (),
    names: tuple[str, ...] = ("audio", "audio_before"),
    **files: str,
) -> Iterator[workers_pb2.DecodeAudioRequest]:
    yield workers_pb2.DecodeAudioRequest(
        header=workers_pb2.DecodeAudioHeader(
            clip=clip_spec_to_proto(CLIP), artifact_directory=directory, artifacts=artifacts, **files
        )
    )
    for seed, name in enumerate(names):
        for part in to_parts(name, torch.randn(SOUND_SHAPE, generator=torch.Generator().manual_seed(seed))):
            yield workers_pb2.DecodeAudioRequest(tensor=part)


async def test_a_refined_sound_goes_through_the_service(channel: aio.Channel, tmp_path: Path) -> None:
    vae, shared = workers_pb2_grpc.VaeServiceStub(channel), workers_pb2_grpc.WorkerServiceStub(channel)
    await shared.EnterPhase(workers_pb2.EnterPhaseRequest())
    wanted = ("refined.mp4", "refined.flac", "refine-compare.png")
    names = ("audio", "audio_before", "exact_audio")
    call = sound_requests(str(tmp_path / "made"), wanted, names, video_file=str(tmp_path / "final.mp4"))
    responses = [response async for response in vae.DecodeAudio(call)]
    assert [r.WhichOneof("payload") for r in responses] == [
        "init_segment",
        "fragment",
        "fragment",
        "fragment",
        "finished",
    ]
    start, *fragments = (getattr(r, r.WhichOneof("payload")) for r in responses[:-1])
    assert (start.mime_type, start.video_encoder, start.audio_encoder) == ('audio/mp4; codecs="mp4a.40.2"', "", "aac")
    assert violations(start.data + b"".join(f.data for f in fragments), frames=0, samples=52_000) == []
    assert [(f.fragment_index, f.chunk_index, f.num_frames, f.is_keyframe) for f in fragments] == [
        (0, -1, 0, True), (1, -1, 0, True), (2, -1, 0, True)
    ]  # fmt: skip
    assert [f.start_ticks for f in fragments[1:]] == [3 * f.num_samples_total for f in fragments[:-1]]
    assert sum(f.duration_ticks for f in fragments) == 3 * 52_000

    finished = responses[-1].finished
    assert [(a.name, a.relative_path, a.media_type) for a in finished.artifacts] == [
        ("refined.flac", "refined.flac", "audio/flac"), ("refine-compare.png", "refine-compare.png", "image/png")
    ]  # fmt: skip
    assert [(f.name, f.message) for f in finished.failures] == [
        ("refined.mp4", "final.mp4 cannot be read: No such file or directory")
    ]
    assert finished.stream_failure == ""
    for health in (finished.audio_health, finished.audio_health_before):
        assert 0 < health.std < health.peak <= 1 <= health.normalisation_divisor
    assert finished.audio_health != finished.audio_health_before
    for distance in (finished.change, finished.against_exact):
        assert distance.log_mel_db > 0 < distance.rms_ratio
    assert finished.change != finished.against_exact

    without = [response async for response in vae.DecodeAudio(sound_requests())][-1].finished
    assert not without.HasField("against_exact")
    assert (without.change, list(without.artifacts)) == (finished.change, [])


def wrong_sounds() -> Iterator[tuple[list[workers_pb2.DecodeAudioRequest], grpc.StatusCode, str]]:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    header, *parts = sound_requests()
    yield [], invalid, "DecodeAudio takes one header, first; the stream was empty"
    yield parts, invalid, "one header, first"
    yield [header, header], invalid, "and then only tensors"
    yield [header, parts[0]], invalid, "tensor 'audio_before' is missing"
    long = next(to_parts("audio", torch.zeros(1, 32, 2, 66)))
    yield [header, workers_pb2.DecodeAudioRequest(tensor=long)], invalid, "expected torch.float32"
    yield [header, *list(sound_requests(names=("video",)))[1:]], invalid, "tensor 'video' is not expected"
    nan = next(to_parts("audio", torch.full(SOUND_SHAPE, torch.nan)))
    yield [header, workers_pb2.DecodeAudioRequest(tensor=nan), parts[1]], invalid, "audio holds values that are not"
    yield list(sound_requests(artifacts=("refined.mp4",))), invalid, "video_file is empty"
    wrong = workers_pb2.DecodeAudioHeader(clip=types_pb2.ClipSpec(num_frames=23, width=64, height=64))
    yield [workers_pb2.DecodeAudioRequest(header=wrong)], invalid, "num_frames is 23"
    yield [header, *parts], grpc.StatusCode.FAILED_PRECONDITION, "enter the phase first"


async def test_wrong_sounds_are_refused_with_their_reason(channel: aio.Channel) -> None:
    vae = workers_pb2_grpc.VaeServiceStub(channel)
    for messages, code, words in wrong_sounds():
        with pytest.raises(aio.AioRpcError) as caught:
            async for _ in vae.DecodeAudio(iter(messages)):
                pass
        assert caught.value.code() == code, words
        assert words in (caught.value.details() or "")


async def test_an_abandoned_sound_leaves_no_file_and_the_worker_free(channel: aio.Channel, tmp_path: Path) -> None:
    vae, shared = workers_pb2_grpc.VaeServiceStub(channel), workers_pb2_grpc.WorkerServiceStub(channel)
    await shared.EnterPhase(workers_pb2.EnterPhaseRequest())
    call = vae.DecodeAudio(sound_requests(str(tmp_path / "made"), ("refined.flac", "refine-compare.png")))
    async for response in call:
        if response.WhichOneof("payload") == "fragment":
            call.cancel()
            break
    # The next call waits for the one before.
    assert (await shared.LeavePhase(workers_pb2.LeavePhaseRequest())).device_weight_bytes == 0
    assert list((tmp_path / "made").iterdir()) == []
