"""Anything at all sent to every RPC of real workers: typed answers that tell nothing of their insides, bounded memory,
no restart, and the same clips as before."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from h3stream.status import DETAILS_KEY, DOMAIN
from h3stream.v1 import status_pb2, types_pb2, workers_pb2
from tests.faults.messages import INT32, INT64, TEXT, messages
from tests.faults.worker_processes import (
    DENSE,
    TOKEN,
    WorkerAtWork,
    decoded_clip,
    decoding,
    decoding_sound,
    methods,
    opening,
    refining,
    restoring,
    sampled_clip,
    service_of,
    start_dit,
    start_vae,
    vae_opening,
    write_models,
)

TYPED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""What a caller may be told who sent nonsense."""
INSIDES = re.compile(r"Traceback|File \"|\.py\b|/tmp/|/root/|/home/|site-packages|0x[0-9a-f]{6,}|internal error")
NUM_EXAMPLES = int(os.environ.get("H3STREAM_TEST_EXAMPLES", 25))
LIMITS = settings(max_examples=NUM_EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
WORKERS = ("text_encoder", "dit", "vae")
METHODS = [(worker, name) for worker in WORKERS for name in methods(service_of(worker))]
NUM_TINY = 10_000
ROOM_BYTES = 96 << 20
"""What a worker may grow by while it is attacked: its allocator keeps some of what a clip took."""


@dataclass
class Attacked:
    """Three workers and the clips that they made before."""

    workers: dict[str, WorkerAtWork]
    artifacts: Path
    latents: bytes
    media: dict[str, bytes]

    def __getitem__(self, name: str) -> WorkerAtWork:
        return self.workers[name]

    def check(self) -> None:
        """Whether the workers still make what they made before."""
        for worker in self.workers.values():
            assert worker.process.poll() is None, worker.log.read_text()
        assert sampled_clip(self["dit"], "again") == self.latents
        assert decoded_clip(self["vae"], "again", self.artifacts / "before") == self.media


@pytest.fixture(scope="module")
def attacked(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    directory = tmp_path_factory.mktemp("attacked")
    model, artifacts = directory / "model", directory / "jobs"
    write_models(model)
    artifacts.mkdir()
    workers = {
        "text_encoder": WorkerAtWork("text_encoder", directory, "--model", str(tiny_model)),
        "dit": start_dit(model, directory),
        "vae": start_vae(model, directory, artifacts),
    }
    for worker in workers.values():
        worker.wait()
    media = decoded_clip(workers["vae"], "before", artifacts / "before")
    attacked = Attacked(workers, artifacts, sampled_clip(workers["dit"], "before"), media)
    workers["text_encoder"].enter()
    workers["dit"].ask("OpenSession", *opening("s"))
    workers["dit"].ask("OpenSession", *opening("d", DENSE))
    workers["vae"].ask("OpenSession", vae_opening("s", artifacts / "s"))
    yield attacked
    attacked.check()
    for worker in workers.values():
        assert worker.stop() == 0
        log = worker.log.read_text()
        assert "Traceback" not in log
        assert "internal error" not in log
        assert TOKEN not in log


def check_answer(worker: WorkerAtWork, method: str, requests: Any) -> grpc.RpcError | None:
    """Sends bytes; whatever the answer is, it must be one that callers may get. Returns the error."""
    try:
        worker.raw(method, requests)
    except grpc.RpcError as error:
        code, details = error.code(), error.details() or ""
        trailer = next((value for key, value in error.trailing_metadata() or () if key == DETAILS_KEY), None)
        assert trailer is not None, (code, details)
        told = status_pb2.RpcStatus.FromString(trailer)
        info = status_pb2.RpcErrorInfo.FromString(told.details[0].value)
        assert (info.domain, bool(info.reason)) == (DOMAIN, True)
        assert INSIDES.search(details + str(told)) is None, details
        # A decoder that is fed what makes no picture says so in a phase of its own.
        assert code in TYPED or info.reason == "PHASE_FAILED", (code, details)
        return error
    return None


def valid(attacked: Attacked) -> dict[str, list[Any]]:
    """Streams that would be taken, by the methods that take one."""
    return {
        "OpenSession": opening("fuzz"),
        "RestoreChunk": restoring("s", 0),
        "RefineAudio": refining(),
        "DecodeChunk": decoding("s", 0),
        "DecodeAudio": decoding_sound(attacked.artifacts / "sound"),
    }


@pytest.mark.parametrize(("worker", "method"), METHODS)
def test_any_message_is_answered_in_type(attacked: Attacked, worker: str, method: str) -> None:
    descriptor = methods(service_of(worker))[method]

    @LIMITS
    @given(st.lists(messages(descriptor.input_type), min_size=1, max_size=4 if descriptor.client_streaming else 1))
    def attack(requests: list[Message]) -> None:
        check_answer(attacked[worker], method, [request.SerializeToString() for request in requests])

    attack()


@pytest.mark.parametrize(("worker", "method"), METHODS)
def test_any_bytes_are_answered_in_type(attacked: Attacked, worker: str, method: str) -> None:
    @LIMITS
    @given(st.lists(st.binary(max_size=300), min_size=1, max_size=3))
    def attack(requests: list[bytes]) -> None:
        check_answer(attacked[worker], method, requests)

    attack()


SPOILT_TENSORS = st.builds(
    types_pb2.TensorPart,
    name=st.sampled_from(["video", "audio", "context", "token_tags", "audio_before", "exact_audio"]) | TEXT,
    data_type=st.sampled_from([0, 1, 2, 3, 99, -1]),
    shape=st.lists(INT64 | st.sampled_from([1, 2, 5, 24, 32, 64]), max_size=6),
    offset_bytes=INT64,
    data=st.binary(max_size=64),
)


@st.composite
def spoilt(draw: st.DrawFn, sound: list[Any]) -> list[Any]:
    """A stream of a method with something wrong in it, and mostly right around that."""
    made = [type(message).FromString(message.SerializeToString()) for message in sound]
    for _ in range(draw(st.integers(1, 3))):
        if not made:
            break
        place = draw(st.integers(0, len(made) - 1))
        message = made[place]
        match draw(st.sampled_from(["drop", "double", "swap", "empty", "data", "part", "header", "cut"])):
            case "drop":
                del made[place]
            case "double":
                made.insert(place, message)
            case "swap":
                made.append(made.pop(place))
            case "empty":
                made.insert(place, type(message)())
            case "part":
                made.insert(place, type(message)(tensor=draw(SPOILT_TENSORS)))
            case "cut":
                message.tensor.data = message.tensor.data[: draw(st.integers(0, 9))]
            case "data":  # all bits set: a NaN of every kind, a tag that there is not
                message.tensor.data = b"\xff" * len(message.tensor.data)
            case "header" if message.WhichOneof("payload") == "header":
                _spoil(draw, message.header)
    return made


def _spoil(draw: st.DrawFn, header: Any) -> None:
    """Puts something else into a field of a header, or of its clip."""
    target = header.clip if "clip" in header.DESCRIPTOR.fields_by_name and draw(st.booleans()) else header
    field = draw(st.sampled_from(list(target.DESCRIPTOR.fields)))
    other = draw(messages(target.DESCRIPTOR))
    target.ClearField(field.name)
    single = type(other)()
    if field.is_repeated:
        getattr(single, field.name).extend(getattr(other, field.name))
    elif field.message_type is not None:
        getattr(single, field.name).CopyFrom(getattr(other, field.name))
    else:
        setattr(single, field.name, getattr(other, field.name))
    target.MergeFrom(single)


@pytest.mark.parametrize(
    ("worker", "method"),
    [
        ("dit", "OpenSession"),
        ("dit", "RestoreChunk"),
        ("dit", "RefineAudio"),
        ("vae", "DecodeChunk"),
        ("vae", "DecodeAudio"),
    ],
)
def test_a_stream_with_something_wrong_in_it_is_answered_in_type(attacked: Attacked, worker: str, method: str) -> None:
    sound = valid(attacked)[method]

    @LIMITS
    @given(spoilt(sound))
    def attack(requests: list[Any]) -> None:
        check_answer(attacked[worker], method, [request.SerializeToString() for request in requests])
        for session_id in attacked[worker].session_ids() - {"s", "d"}:  # some are taken
            attacked[worker].ask("CloseSession", workers_pb2.DitServiceCloseSessionRequest(session_id=session_id))

    attack()


@given(worker=st.sampled_from(["dit", "vae"]), session_id=st.sampled_from(["s", "d", "ghost", ""]), index=INT32)
@settings(max_examples=2 * NUM_EXAMPLES)
def test_calls_of_any_session_and_chunk_in_any_order_are_answered_in_type(
    attacked: Attacked, worker: str, session_id: str, index: int
) -> None:
    calls: dict[str, list[tuple[str, Any]]] = {
        "dit": [
            ("CommitChunk", workers_pb2.CommitChunkRequest(session_id=session_id, chunk_index=index)),
            ("SampleChunk", workers_pb2.SampleChunkRequest(session_id=session_id, chunk_index=index)),
            ("SampleDense", workers_pb2.SampleDenseRequest(session_id=session_id)),
        ],
        "vae": [("Finish", workers_pb2.FinishRequest(session_id=session_id))],
    }
    for method, request in calls[worker]:
        check_answer(attacked[worker], method, [request.SerializeToString()])


def part(**fields: Any) -> bytes:
    """A tensor part of a chunk to restore."""
    return workers_pb2.RestoreChunkRequest(tensor=types_pb2.TensorPart(**fields)).SerializeToString()


SHAPE = (1, 24, 5, 2, 4)
NUM_BYTES = 24 * 5 * 2 * 4 * 4
FIRST = {"name": "video", "data_type": types_pb2.DATA_TYPE_FLOAT32, "shape": SHAPE}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([part(**FIRST | {"shape": (1, 24, 2**40, 2**20, 4)}, data=b"x")], "expected torch.float32"),
        ([part(**FIRST | {"shape": (2**62,) * 5}, data=b"x")], "expected torch.float32"),
        ([part(**FIRST | {"shape": (1,) * 100_000}, data=b"x")], "expected torch.float32"),
        ([part(**FIRST | {"shape": (-1, -24, 5, 2, 4)}, data=b"x")], "expected torch.float32"),
        ([part(**FIRST, offset_bytes=2**62, data=b"x")], "expected byte 0"),
        ([part(**FIRST, offset_bytes=-1, data=b"x")], "expected byte 0"),
        ([part(**FIRST, data=bytes(NUM_BYTES + 1))], f"expected byte 0 of {NUM_BYTES}"),
        ([part(**FIRST, data=bytes(8)), part(name="video", offset_bytes=4, data=bytes(8))], "expected byte 8"),
        ([part(**FIRST, data=bytes(8)), part(name="video", offset_bytes=12, data=bytes(8))], "expected byte 8"),
        ([part(**FIRST, data=bytes(8)), part(**FIRST, offset_bytes=8, data=bytes(8))], "states its type"),
        ([part(**FIRST)], "a part holds no bytes"),
        ([part(**FIRST, data=bytes(8)), part(name="video", offset_bytes=8)] , "a part holds no bytes"),
        ([part(**FIRST, data=bytes(NUM_BYTES)), part(name="video", offset_bytes=NUM_BYTES, data=b"x")], "at byte"),
        ([part(**FIRST | {"name": "v" * 500_000}, data=b"x")], "is not expected"),
        ([part(**FIRST | {"data_type": types_pb2.DATA_TYPE_INT64}, data=b"x")], "expected torch.float32"),
        ([part(**FIRST, data=bytes(8))], f"ends at byte 8 of {NUM_BYTES}"),
    ],
)  # fmt: skip
def test_a_tensor_that_lies_about_itself_is_refused_and_costs_no_memory(
    attacked: Attacked, parts: list[bytes], message: str
) -> None:
    dit = attacked["dit"]
    before = dit.resident_bytes()
    header = restoring("s", 0)[0].SerializeToString()
    error = check_answer(dit, "RestoreChunk", [header, *parts])
    assert error is not None
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in error.details()
    assert dit.resident_bytes() - before < ROOM_BYTES


def test_a_text_of_more_tokens_than_a_prompt_can_have_is_refused_before_it_is_taken(attacked: Attacked) -> None:
    header = opening("fuzz")[0].SerializeToString()
    shape = (2**40, 64)
    announced = types_pb2.TensorPart(
        name="context", data_type=types_pb2.DATA_TYPE_FLOAT32, shape=shape, data=bytes(1024)
    )
    first = workers_pb2.DitServiceOpenSessionRequest(tensor=announced).SerializeToString()
    error = check_answer(attacked["dit"], "OpenSession", [header, first])
    assert error is not None
    assert "expected torch.float32 or torch.bfloat16 [1 to 49152, 64]" in error.details()


def test_thousands_of_tiny_parts_cost_no_memory(attacked: Attacked) -> None:
    dit = attacked["dit"]
    header = restoring("s", 0)[0].SerializeToString()
    before = peak = dit.resident_bytes()

    def pieces(data: bytes) -> Iterator[bytes]:
        nonlocal peak
        yield header
        yield part(**FIRST, data=b"\0")
        for number in range(1, NUM_TINY):
            if number % 1_000 == 0:
                peak = max(peak, dit.resident_bytes())
            yield part(name="video", offset_bytes=number * len(data), data=data)

    for data, message in ((b"\0", f"expected byte {NUM_BYTES}"), (b"", "a part holds no bytes")):
        error = check_answer(dit, "RestoreChunk", pieces(data))
        assert error is not None
        assert message in error.details()
    assert peak - before < ROOM_BYTES


def test_sessions_are_opened_up_to_a_number_and_names_up_to_a_length(attacked: Attacked) -> None:
    vae = attacked["vae"]
    errors = []
    for number in range(20):
        request = vae_opening(f"many-{number}", attacked.artifacts / "many")
        errors.append(check_answer(vae, "OpenSession", [request.SerializeToString()]))
    refused = [error for error in errors if error is not None]
    assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert len(refused) >= 4
    for number in range(20):
        vae.ask("CloseSession", workers_pb2.VaeServiceCloseSessionRequest(session_id=f"many-{number}"))
    error = check_answer(vae, "OpenSession", [vae_opening("n" * 500_000, attacked.artifacts).SerializeToString()])
    assert error is not None
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("place", ["/etc", "../..", "/proc/self/root", "a\0b", "~", "x" * 5_000, "/tmp"])
def test_no_place_outside_of_the_root_is_written_and_nothing_is_told_of_it(attacked: Attacked, place: str) -> None:
    error = check_answer(attacked["vae"], "OpenSession", [vae_opening("out", Path(place)).SerializeToString()])
    assert error is not None
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert place not in error.details()
    header, *parts = decoding_sound(attacked.artifacts)
    header.header.video_file = f"{attacked.artifacts}/../{place}"
    sent = [message.SerializeToString() for message in (header, *parts)]
    error = check_answer(attacked["vae"], "DecodeAudio", sent)
    assert error is not None
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("worker", WORKERS)
def test_nobody_without_the_token_is_answered(attacked: Attacked, worker: str) -> None:
    with grpc.insecure_channel(attacked[worker].address) as channel:
        for method in ("Describe", "EnterPhase"):
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary(f"/h3stream.v1.WorkerService/{method}")(b"", timeout=60)
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("worker", WORKERS)
def test_no_command_line_shows_the_token_and_no_other_user_reaches_the_socket(attacked: Attacked, worker: str) -> None:
    assert TOKEN not in " ".join(psutil.Process(attacked[worker].process.pid).cmdline())
    assert stat.S_IMODE(Path(attacked[worker].address.removeprefix("unix:")).stat().st_mode) == 0o600


def test_the_same_clips_are_made_in_between(attacked: Attacked) -> None:
    attacked.check()
