"""What is refused, and how: before anything is queued, with every violation named."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from h3stream.errors import InvalidRequestError
from h3stream.status import from_rpc_error
from h3stream.v1 import types_pb2, video_pb2, video_pb2_grpc
from orchestrator.config import Settings
from orchestrator.scheduler import Scheduler
from services.common.ledger import read_ledger
from services.common.rpc import connect
from tests.service.conftest import MODEL, Service, serving


async def refusal(service: Service, request: video_pb2.GenerateRequest) -> dict[str, str]:
    """Field to description, as a standard gRPC client reads it."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        [_ async for _ in service.stub.Generate(request)]
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(refused.value)
    bad_request = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad_request) for detail in status.details)
    return {v.field: v.description for v in bad_request.field_violations}


@pytest.mark.parametrize(
    ("fields", "field", "parts"),
    [
        ({"num_frames": 40}, "num_frames", ["40", "17k + 5", "39", "56"]),
        ({"num_frames": 5}, "num_frames", ["5", "22"]),
        ({"num_frames": 379}, "num_frames", ["379", "362"]),
        ({"width": 100}, "width", ["100", "32", "96", "128"]),
        ({"height": 0}, "height", ["0", "32"]),
        ({"width": 1408, "height": 768}, "width", ["1408", "768", "1056768"]),
        ({"steps": 0}, "steps", ["0", "1", "100"]),
        ({"video_shift": float("nan")}, "video_shift", ["nan"]),
        ({"audio_shift": -1.0}, "audio_shift", ["-1", "0.01"]),
        ({"sink": 0}, "sink", ["0", "1", "64"]),
        ({"window": 65}, "window", ["65", "64"]),
        ({"prompt": ""}, "prompt", []),
        ({"prompt": "a <|image_pad|> b"}, "prompt", ["<|image_pad|>"]),
        ({"prompt": "x" * 16_385}, "prompt", ["16385", "16384"]),
        ({"kv_storage": 9}, "kv_storage", ["9"]),
        ({"unlimited_window": False}, "unlimited_window", []),
        ({"mode": 9}, "mode", ["9", "SAMPLING_MODE_DENSE"]),
        ({"mode": 2, "sink": 2}, "sink", ["2", "dense", "left out"]),
        ({"mode": 2, "unlimited_window": True}, "window", ["dense", "left out"]),
        ({"mode": 2, "kv_storage": 1}, "kv_storage", ["gpu", "dense", "left out"]),
        ({"adapters": [types_pb2.AdapterChoice(name="styl")]}, "adapters[0].name", ["styl", "the nearest is style"]),
        (
            {"adapters": [types_pb2.AdapterChoice(name="raven", strength=2)]},
            "adapters[0].strength",
            ["2.0", "must be 1"],
        ),
    ],
)
async def test_a_bad_field_is_named_with_value_rule_and_nearest(
    service: Service, fields: dict[str, object], field: str, parts: list[str]
) -> None:
    request = video_pb2.GenerateRequest(**{"prompt": "a fox", **fields})
    violations = await refusal(service, request)
    assert field in violations, violations
    assert all(part in violations[field] for part in parts), violations[field]
    assert service.jobs() == []
    assert not service.host.ledger.exists(), read_ledger(service.host.ledger)


async def test_every_violation_is_told_at_once(service: Service) -> None:
    violations = await refusal(service, video_pb2.GenerateRequest(prompt="", num_frames=23, width=33, steps=101))
    assert set(violations) == {"prompt", "num_frames", "width", "steps"}


async def test_an_unknown_field_is_refused_and_not_dropped(service: Service) -> None:
    request = video_pb2.GenerateRequest(prompt="a fox")
    request.MergeFromString(bytes([0xFA, 0x07, 0x03]) + b"abc")  # field 127, of a future version
    violations = await refusal(service, request)
    assert any("127" in text for text in (*violations, *violations.values()))


async def test_a_plan_tells_what_generate_would_make_and_makes_nothing(service: Service) -> None:
    request = video_pb2.GenerateRequest(prompt="a fox", num_frames=192, unlimited_window=True)
    plan = (await service.stub.PlanGeneration(video_pb2.PlanGenerationRequest(generation=request))).plan
    assert (plan.num_noise_forwards, plan.num_clean_forwards) == (2 * 12, 11)
    assert [c.num_frames_emitted for c in plan.chunks] == [*range(0, 171, 17), 192]
    assert not plan.clip.HasField("window")
    assert service.jobs() == []


async def test_a_clip_is_planned_with_the_adapters_named(service: Service) -> None:
    adapters = [types_pb2.AdapterChoice(name=name) for name in ("raven", "turbo")]
    request = video_pb2.GenerateRequest(prompt="a fox", adapters=adapters)
    plan = (await service.stub.PlanGeneration(video_pb2.PlanGenerationRequest(generation=request))).plan
    assert [(use.name, use.strength) for use in plan.clip.adapters] == [("turbo", 0.5)]
    assert [w.reason for w in plan.warnings] == ["ADAPTER_SCHEDULE_MISMATCH", "MODEL_NOTICE"]
    assert "turbo was trained with steps 4, but this clip has steps 2" in plan.warnings[0].message
    request.mode = types_pb2.SAMPLING_MODE_DENSE
    plan = (await service.stub.PlanGeneration(video_pb2.PlanGenerationRequest(generation=request))).plan
    assert [(use.name, use.strength) for use in plan.clip.adapters] == [("raven", 1.0), ("turbo", 0.5)]
    assert (plan.clip.steps, [w.reason for w in plan.warnings]) == (4, ["MODEL_NOTICE"])


async def test_adapters_are_listed_by_name_as_the_worker_has_bound_them(service: Service) -> None:
    listed = (await service.stub.ListAdapters(video_pb2.ListAdaptersRequest())).adapters
    assert [adapter.name for adapter in listed] == ["raven", "style", "turbo"]
    assert [adapter.is_streaming for adapter in listed] == [True, False, False]
    assert {adapter.sha256 for adapter in listed} == {"cd" * 32}
    assert (await service.stub.GetServerInfo(video_pb2.GetServerInfoRequest())).adapters == listed


@dataclass(frozen=True)
class HeaderOnly:
    """What the header of an adapter's file tells."""

    name: str
    format: str = "peft"
    default_strength: float = 1.0
    is_streaming: bool = False
    partition: str = ""
    trained_steps: int | None = None
    trained_video_shift: float | None = 6.0
    trained_audio_shift: float | None = None


async def test_while_the_model_is_loaded_requests_are_planned_and_adapters_listed_from_their_headers(
    tmp_path: Path,
) -> None:
    scheduler = Scheduler([], tmp_path, max_queued_jobs=1, kept_jobs=1)
    scheduler.open()  # and never started
    settings = Settings(model=tmp_path, data=tmp_path)
    adapters = (HeaderOnly("b"), HeaderOnly("a"))
    async with serving(tmp_path, scheduler, MODEL, adapters, settings) as address, connect(address) as channel:
        stub = video_pb2_grpc.VideoServiceStub(channel)
        listed = (await stub.ListAdapters(video_pb2.ListAdaptersRequest())).adapters
        known = {"format": "peft", "default_strength": 1.0, "trained_video_shift": 6.0}
        assert list(listed) == [types_pb2.AdapterInfo(name=name, **known) for name in ("a", "b")]
        request = video_pb2.GenerateRequest(prompt="a fox", mode=types_pb2.SAMPLING_MODE_DENSE)
        plan = (await stub.PlanGeneration(video_pb2.PlanGenerationRequest(generation=request))).plan
        assert plan.num_noise_forwards == 5
        request.mode = types_pb2.SAMPLING_MODE_STREAMING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            [_ async for _ in stub.Generate(request)]
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "no streaming adapter" in refused.value.details()
        info = await stub.GetServerInfo(video_pb2.GetServerInfoRequest())
        assert (list(info.parts), info.adapters) == ([], listed)


async def test_server_info_states_limits_defaults_and_weights(service: Service) -> None:
    info = await service.stub.GetServerInfo(video_pb2.GetServerInfoRequest())
    assert (info.default_clip.num_frames, info.max_message_bytes, info.max_prompt_bytes) == (39, 1 << 20, 16_384)
    assert (info.default_dense_clip.mode, info.default_dense_clip.steps) == (types_pb2.SAMPLING_MODE_DENSE, 5)
    assert [part.component for part in info.parts] == ["text_encoder", "dit", "vae"]
    assert list(info.valid_num_frames) == list(range(22, 363, 17))
    assert {name.partition("/")[0] for name in info.weight_digests} == {"text_encoder", "dit", "vae"}
    assert info.library_versions["torch"]
    assert info.settings["max_queued_jobs"] == "4"
    assert list(info.examples) == ["A fox.", "A kite."]


@pytest.mark.parametrize(
    ("method", "request_class"),
    [
        ("PlanGeneration", video_pb2.PlanGenerationRequest),
        ("CancelJob", video_pb2.CancelJobRequest),
        ("GetJob", video_pb2.GetJobRequest),
        ("ListAdapters", video_pb2.ListAdaptersRequest),
        ("GetServerInfo", video_pb2.GetServerInfoRequest),
    ],
)
async def test_an_unknown_field_is_refused_by_every_call(service: Service, method: str, request_class: type) -> None:
    request = request_class.FromString(b"\xf8\x07\x01")  # field 127, a varint
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await getattr(service.stub, method)(request)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == f"{request_class.__name__} has no field number 127"


@pytest.mark.parametrize(
    "method", ["Generate", "CancelJob", "GetJob", "PlanGeneration", "ListAdapters", "GetServerInfo"]
)
@pytest.mark.parametrize("garbage", [b"\xff" * 10, b"\x0a\x03\xed\xa0\x80"], ids=["no message", "a lone surrogate"])
async def test_bytes_that_are_no_message_are_refused_without_a_word_in_the_log(
    service: Service, caplog: pytest.LogCaptureFixture, method: str, garbage: bytes
) -> None:
    if method in ("GetServerInfo", "ListAdapters"):
        garbage = b"\xff" * 10  # they have no text that could be wrong
    path = f"/h3stream.v1.VideoService/{method}"
    async with connect(service.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(path)(garbage)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert method in refused.value.details()
    assert isinstance(from_rpc_error(refused.value), InvalidRequestError)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
