"""Every error of the tree over a real connection: read by our SDK, and by the standard google.rpc packages."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status.rpc_status import aio as rpc_status

from h3stream import AsyncClient, errors
from h3stream.errors import FieldViolation, GenerationError, InvalidRequestError, OverloadedError
from h3stream.status import MAX_TEXT_BYTES, STATUS_OF, from_rpc_error
from h3stream.v1 import video_pb2, video_pb2_grpc
from tests.fakes import FakeVideoService, Script

VIOLATIONS = (
    FieldViolation("num_frames", "40 is not 17k + 5; the nearest are 39 and 56", "FRAMES_OFF_GRID"),
    FieldViolation("width", "65 ≠ a multiple of 32", "CANVAS"),
)


def example(cls: type[GenerationError]) -> GenerationError:
    """An error of a class with everything in it that it can carry."""
    facts = {"job_id": "job-3", "phase": "decode", "chunk_index": 0}
    if issubclass(cls, InvalidRequestError):
        return cls("what went wrong", violations=VIOLATIONS, **facts)
    if issubclass(cls, OverloadedError):
        return cls("what went wrong", retry_after_s=2.25, **facts)
    return cls("what went wrong", **facts)


def test_the_table_covers_the_whole_tree() -> None:
    def below(cls: type[GenerationError]) -> set[type[GenerationError]]:
        return {cls}.union(*(below(child) for child in cls.__subclasses__()))

    assert set(STATUS_OF) == below(GenerationError)
    assert len({cls.reason for cls in STATUS_OF}) == len(STATUS_OF)


@pytest.mark.parametrize("cls", STATUS_OF, ids=lambda cls: cls.__name__)
async def test_the_sdk_raises_what_the_server_raised(
    cls: type[GenerationError], address: str, service: FakeVideoService
) -> None:
    service.script = Script(refuse_with=example(cls))
    async with AsyncClient(address) as client:
        for call in (lambda: client.job("job-3"), lambda: anext(client.generate("a fox", reconnect_s=0))):
            with pytest.raises(GenerationError) as caught:
                await call()
            assert type(caught.value) is cls
            assert {**vars(caught.value)} == {**vars(example(cls))}
            assert isinstance(caught.value.__cause__, grpc.RpcError)
            assert caught.value.__cause__.code() == STATUS_OF[cls]


@pytest.mark.parametrize("cls", STATUS_OF, ids=lambda cls: cls.__name__)
async def test_any_grpc_library_reads_the_standard_details(
    cls: type[GenerationError], address: str, service: FakeVideoService
) -> None:
    service.script = Script(refuse_with=example(cls))
    async with aio.insecure_channel(address) as channel:
        call = video_pb2_grpc.VideoServiceStub(channel).GetJob(video_pb2.GetJobRequest(job_id="job-3"))
        with pytest.raises(aio.AioRpcError) as caught:
            await call
        status = await rpc_status.from_call(call)
    assert status is not None
    assert (status.code, status.message) == (STATUS_OF[cls].value[0], "what went wrong")
    assert caught.value.details() == "what went wrong"
    found = {detail.type_url: detail for detail in status.details}

    info = error_details_pb2.ErrorInfo()
    assert found.pop("type.googleapis.com/google.rpc.ErrorInfo").Unpack(info)
    assert (info.reason, info.domain) == (cls.reason, "h3stream")
    assert dict(info.metadata) == {"job_id": "job-3", "phase": "decode", "chunk_index": "0"}
    if issubclass(cls, InvalidRequestError):
        bad_request = error_details_pb2.BadRequest()
        assert found.pop("type.googleapis.com/google.rpc.BadRequest").Unpack(bad_request)
        read = tuple(FieldViolation(v.field, v.description, v.reason) for v in bad_request.field_violations)
        assert read == VIOLATIONS
    if issubclass(cls, OverloadedError):
        retry = error_details_pb2.RetryInfo()
        assert found.pop("type.googleapis.com/google.rpc.RetryInfo").Unpack(retry)
        assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (2, 250_000_000)
    assert found == {}


async def test_texts_too_long_for_a_trailer_are_cut_and_the_error_still_arrives(
    address: str, service: FakeVideoService
) -> None:
    violations = tuple(FieldViolation(f"field {n}", "ß" * 400) for n in range(50))
    service.script = Script(refuse_with=InvalidRequestError("ü" * 5000, violations=violations))
    async with AsyncClient(address) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await client.job("job-3")
    assert caught.value.message.endswith("ü…")
    assert MAX_TEXT_BYTES - 2 <= len(caught.value.message.encode()) <= MAX_TEXT_BYTES
    assert caught.value.violations[0] == violations[0]
    assert caught.value.violations[-1].description == "this and 47 more fields are wrong too"


async def test_an_unknown_field_of_the_request_is_refused_by_number(address: str) -> None:
    request = video_pb2.GenerateRequest(prompt="a fox")
    request.MergeFromString(b"\xf8\x07\x01")  # field 127, a varint
    async with aio.insecure_channel(address) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await video_pb2_grpc.VideoServiceStub(channel).Generate(request).read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "no field number 127" in (caught.value.details() or "")


async def test_a_call_that_an_older_server_does_not_know_is_told_as_that() -> None:
    server = aio.server()
    older = grpc.method_handlers_generic_handler("h3stream.v1.VideoService", {})
    server.add_generic_rpc_handlers((older,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        with pytest.raises(errors.UnsupportedError, match="may be older than this client"):
            await client.adapters()
    await server.stop(0)


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequestError),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.UnsupportedError),
        (grpc.StatusCode.UNIMPLEMENTED, errors.UnsupportedError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.OverloadedError),
        (grpc.StatusCode.UNAVAILABLE, errors.NotReadyError),
        (grpc.StatusCode.NOT_FOUND, errors.JobNotFoundError),
        (grpc.StatusCode.CANCELLED, errors.JobCancelledError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineError),
        (grpc.StatusCode.DATA_LOSS, errors.BrokenStreamError),
        (grpc.StatusCode.INTERNAL, errors.PhaseError),
        (grpc.StatusCode.OUT_OF_RANGE, errors.GenerationError),
        (grpc.StatusCode.UNKNOWN, errors.GenerationError),
    ],
    ids=str,
)
@pytest.mark.parametrize("trailer", [b"", b"\xff\xffnot a status"], ids=["bare", "damaged"])
async def test_a_status_without_a_readable_reason_still_has_a_class(
    code: grpc.StatusCode, cls: type[GenerationError], trailer: bytes
) -> None:
    class Foreign(video_pb2_grpc.VideoServiceServicer):
        async def GetJob(self, request: video_pb2.GetJobRequest, context: aio.ServicerContext) -> None:  # type: ignore[override]
            await context.abort(code, "of another server", (("grpc-status-details-bin", trailer),) if trailer else ())

    server = aio.server()
    video_pb2_grpc.add_VideoServiceServicer_to_server(Foreign(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        with pytest.raises(GenerationError, match="of another server") as caught:
            await client.job("job-3")
    await server.stop(0)
    assert type(caught.value) is cls


async def test_a_call_that_a_busy_server_ends_unread_is_no_cancelled_job() -> None:
    options = [("grpc.server.max_pending_requests", 1), ("grpc.server.max_pending_requests_hard_limit", 1)]
    released = asyncio.Event()

    class Busy(video_pb2_grpc.VideoServiceServicer):
        async def GetJob(self, request: video_pb2.GetJobRequest, context: aio.ServicerContext) -> None:  # type: ignore[override]
            await released.wait()
            await context.abort(grpc.StatusCode.NOT_FOUND, "answered")

    server = aio.server(options=options, maximum_concurrent_rpcs=None)
    video_pb2_grpc.add_VideoServiceServicer_to_server(Busy(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        calls = [asyncio.ensure_future(client.job("job-3")) for _ in range(300)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        released.set()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    await server.stop(0)
    kinds = {type(outcome) for outcome in outcomes}
    assert kinds == {errors.NotReadyError, errors.JobNotFoundError}
    assert {str(o) for o in outcomes if isinstance(o, errors.NotReadyError)} == {
        "the server has too much to do to read the call; try again"
    }


@pytest.mark.parametrize(
    ("details", "told"),
    [
        ("failed to connect to all addresses; last error: UNKNOWN: ...", "nothing answers at here:1; is a server"),
        ("DNS resolution failed for here:1: ...", "there is no host of that name: here:1"),
        ("errors resolving here:1: [field:hostname lookup error:...]", "there is no host of that name: here:1"),
        ("Socket closed", "Socket closed"),
    ],
)
def test_a_server_that_cannot_be_reached_is_told_in_words_and_the_rest_is_for_the_log(
    details: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "h3stream.status")
    lost = aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), details)
    error = from_rpc_error(lost, "here:1")
    assert isinstance(error, errors.NotReadyError)
    assert error.message.startswith(told)
    assert caplog.messages == [f"here:1: {details}"]
