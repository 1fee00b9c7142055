"""A whole worker process in this one: real gRPC, real weights, a scripted package in place of a model."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import types
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import torch
from torch import nn

from h3stream.errors import ConfigError
from h3stream.job import AdapterInfo, ModelPart
from h3stream.v1 import workers_pb2, workers_pb2_grpc
from services.common.config import WorkerConfig
from services.common.ledger import ResidencyLedger, read_ledger
from services.common.process import WorkerProcess
from services.common.residency import DeviceWeights
from services.common.rpc import connect
from services.common.token import TOKEN_VARIABLE
from services.common.verbs import VerbRunner
from services.common.worker import ServedWorker

ROOT = Path(__file__).parents[4]


class LinearWorker:
    """A worker with one small layer and a session."""

    name = "dit"

    def __init__(self, config: WorkerConfig) -> None:
        ledger = ResidencyLedger(config.ledger, self.name) if config.ledger else None
        self.weights = DeviceWeights([nn.Linear(2, 3)], torch.device("cpu"), ledger)
        self.weight_digests = {"transformer/model.safetensors": "ab" * 32}
        self.parts = (ModelPart("dit", "official", "transformer", "BF16, F32", 9, 22),)
        self.adapters = (
            AdapterInfo(
                name="raven",
                file_name="raven.safetensors",
                sha256="cd" * 32,
                format="raven",
                min_rank=128,
                max_rank=128,
                min_alpha=64.0,
                max_alpha=64.0,
                num_bound_modules=1,
                num_modules=1,
                num_parameters=640,
                default_strength=1.0,
                is_streaming=True,
                partition="fl2va",
            ),
        )

    def session_ids(self) -> list[str]:
        return ["job-1"]


def build(config: WorkerConfig) -> ServedWorker:
    worker = LinearWorker(config)
    return ServedWorker(
        worker, VerbRunner("dit"), "h3stream.v1.DitService", lambda server: None, adapters=worker.adapters
    )


@pytest.fixture
def config(tmp_path: Path) -> WorkerConfig:
    return WorkerConfig(model_directory=tmp_path, ledger=tmp_path / "ledger.jsonl")


@pytest.fixture
async def process(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerProcess]:
    package, servicer = types.ModuleType("linear"), types.ModuleType("linear.servicer")
    servicer.build = build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "linear", package)
    monkeypatch.setitem(sys.modules, "linear.servicer", servicer)
    yield WorkerProcess("linear", config)
    torch.set_grad_enabled(True)


async def test_a_worker_tells_what_it_is_and_what_it_holds(process: WorkerProcess) -> None:
    address = await process.start("127.0.0.1:0")
    async with connect(address) as channel:
        stub = workers_pb2_grpc.WorkerServiceStub(channel)
        answer = await stub.Describe(workers_pb2.DescribeRequest(), timeout=20)
    await process.stop()
    assert (answer.worker, answer.device) == ("dit", "cpu")
    assert (answer.weight_bytes, answer.device_weight_bytes) == (36, 0)
    assert answer.kernels.startswith("float32 on CPU (")
    assert answer.peak_host_bytes > 50 << 20  # torch alone
    assert answer.peak_device_bytes == 0
    assert answer.weight_digests == {"transformer/model.safetensors": "ab" * 32}
    assert answer.library_versions == {"torch": torch.__version__}
    assert list(answer.session_ids) == ["job-1"]
    (part,), (adapter,) = answer.parts, answer.adapters
    assert (part.layout, part.source, part.data_types, part.num_parameters) == (
        "official",
        "transformer",
        "BF16, F32",
        9,
    )
    assert (adapter.name, adapter.min_alpha, adapter.is_streaming) == ("raven", 64.0, True)
    assert not adapter.HasField("trained_steps")


async def test_phases_are_entered_and_left_over_the_wire(process: WorkerProcess, config: WorkerConfig) -> None:
    address = await process.start("127.0.0.1:0")
    async with connect(address) as channel:
        stub = workers_pb2_grpc.WorkerServiceStub(channel)
        for _ in range(2):
            entered = await stub.EnterPhase(workers_pb2.EnterPhaseRequest(), timeout=20)
            assert entered.device_weight_bytes == 36
        for _ in range(2):
            left = await stub.LeavePhase(workers_pb2.LeavePhaseRequest(), timeout=20)
            assert left.device_weight_bytes == 0
    await process.stop()
    assert config.ledger is not None
    assert [e.event for e in read_ledger(config.ledger)] == ["enter", "leave"]


async def test_stopping_frees_the_device(process: WorkerProcess, config: WorkerConfig) -> None:
    address = await process.start(f"unix:{config.model_directory}/w.sock")
    async with connect(address) as channel:
        await workers_pb2_grpc.WorkerServiceStub(channel).EnterPhase(workers_pb2.EnterPhaseRequest(), timeout=20)
    waiting = asyncio.create_task(process.wait())
    await process.stop()
    await asyncio.wait_for(waiting, 20)
    assert config.ledger is not None
    assert [e.event for e in read_ledger(config.ledger)] == ["enter", "leave"]


@pytest.mark.parametrize("worker", ["text_encoder", "dit", "vae"])
def test_a_model_directory_that_is_not_there_ends_the_process_with_one_line(worker: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"services.{worker}", "--model", str(tmp_path / "nothing-here")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 1
    assert result.stderr == f"services.{worker}: model directory {tmp_path / 'nothing-here'} does not exist\n"


def test_listening_beyond_loopback_needs_the_flag_that_says_insecure(tmp_path: Path) -> None:
    """With the flag the process goes on, to the weights that are not there."""
    ends = {}
    for flags in ((), ("--insecure",)):
        command = [sys.executable, "-m", "services.vae", "--model", str(tmp_path), "--listen", "0.0.0.0:0", *flags]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
        assert result.returncode == 1
        ends[flags] = result.stderr.splitlines()[-1]
    assert ends[()].startswith("services.vae: listen is '0.0.0.0:0': callers are not authenticated")
    assert ends[("--insecure",)].endswith("; give --video-vae PATH")


def test_a_token_in_the_environment_authenticates_callers_so_that_any_address_will_do(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.vae", "--model", str(tmp_path), "--listen", "0.0.0.0:0"]
    ends = {}
    for token in ("q8Zr2xWc7Lk4Vn1T", "too short"):
        environment = os.environ | {TOKEN_VARIABLE: token}
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert result.returncode == 1
        assert token not in result.stderr + result.stdout
        ends[token] = result.stderr.splitlines()[-1]
    assert ends["q8Zr2xWc7Lk4Vn1T"].endswith("; give --video-vae PATH")
    assert "must be 16 to 256 letters" in ends["too short"]


async def test_a_worker_with_a_token_answers_those_who_send_it(
    process: WorkerProcess, config: WorkerConfig, tmp_path: Path
) -> None:
    guarded = WorkerProcess("linear", dataclasses.replace(config, token="q8Zr2xWc7Lk4Vn1T"))
    torch.set_grad_enabled(True)
    address = await guarded.start(f"unix:{tmp_path}/w.sock")
    async with connect(address) as stranger, connect(address, "q8Zr2xWc7Lk4Vn1T") as known:
        with pytest.raises(grpc.RpcError) as raised:
            await workers_pb2_grpc.WorkerServiceStub(stranger).Describe(workers_pb2.DescribeRequest(), timeout=20)
        assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED
        answer = await workers_pb2_grpc.WorkerServiceStub(known).Describe(workers_pb2.DescribeRequest(), timeout=20)
    assert answer.worker == "dit"
    await guarded.stop()


def test_a_part_that_is_nowhere_ends_the_process_with_one_line_that_names_its_flag() -> None:
    command = [sys.executable, "-m", "services.dit"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 1
    assert result.stderr == "services.dit: dit is not set: give --dit PATH, or --model DIR with all parts\n"


def test_a_value_of_another_kind_ends_the_process_with_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.vae", "--model", str(tmp_path), "--threads", "many"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 1
    assert result.stderr == "services.vae: threads is 'many', which is no int\n"


def test_a_negative_number_of_threads_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="threads is -1; it must be 0"):
        WorkerConfig(model_directory=tmp_path, threads=-1)
