from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from h3stream.errors import ConfigError, DeviceMemoryError, UnsupportedError
from services.common.ledger import ResidencyLedger, read_ledger
from services.common.residency import DeviceWeights, resolve_device

CPU = torch.device("cpu")


@pytest.fixture
def module() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    module.requires_grad_(requires_grad=False)
    return module


@pytest.fixture
def ledger_path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def pointers(module: nn.Module) -> list[int]:
    return [t.data_ptr() for t in (*module.parameters(), *module.buffers())]


def values(module: nn.Module) -> list[torch.Tensor]:
    return [t.clone() for t in (*module.parameters(), *module.buffers())]


def test_parameters_and_buffers_are_counted(module: nn.Module) -> None:
    weights = DeviceWeights([module], CPU)
    floats = 3 * 4 + 4 + 4 + 4 + 4 + 4
    assert weights.host_bytes == 4 * floats + 8  # the batch norm's counter is an int64
    assert weights.device_bytes == 0


def test_entering_counts_and_leaving_frees(module: nn.Module) -> None:
    weights = DeviceWeights([module], CPU)
    host = pointers(module)
    weights.enter()
    assert weights.is_resident
    assert weights.device_bytes == weights.host_bytes
    assert not set(pointers(module)) & set(host)
    weights.leave()
    assert not weights.is_resident
    assert weights.device_bytes == 0
    assert pointers(module) == host


def test_weights_are_equal_before_during_and_after(module: nn.Module) -> None:
    before = values(module)
    weights = DeviceWeights([module], CPU)
    weights.enter()
    assert all(torch.equal(a, b) for a, b in zip(before, values(module), strict=True))
    weights.leave()
    assert all(torch.equal(a, b) for a, b in zip(before, values(module), strict=True))


def test_what_is_written_on_the_device_never_reaches_the_owning_copy(module: nn.Module) -> None:
    before = values(module)
    weights = DeviceWeights([module], CPU)
    weights.enter()
    for tensor in module.parameters():
        tensor.data.zero_()
    weights.leave()
    weights.enter()
    assert all(torch.equal(a, b) for a, b in zip(before, values(module), strict=True))


def test_a_forward_is_allowed_only_when_resident(module: nn.Module) -> None:
    weights = DeviceWeights([module], CPU)
    x = torch.ones(2, 3)
    expected = module(x)
    with pytest.raises(UnsupportedError, match="enter the phase first"):
        weights.require()
    weights.enter()
    weights.require()
    assert torch.equal(module(x), expected)
    weights.leave()
    with pytest.raises(UnsupportedError, match="enter the phase first"):
        weights.require()


def test_entering_and_leaving_twice_change_nothing(module: nn.Module, ledger_path: Path) -> None:
    weights = DeviceWeights([module], CPU, ResidencyLedger(ledger_path, "dit"))
    weights.enter()
    on_device = pointers(module)
    weights.enter()
    assert pointers(module) == on_device
    weights.leave()
    weights.leave()
    assert [e.event for e in read_ledger(ledger_path)] == ["enter", "leave"]


def test_the_ledger_records_the_bytes_on_the_device(module: nn.Module, ledger_path: Path) -> None:
    weights = DeviceWeights([module], CPU, ResidencyLedger(ledger_path, "dit"))
    weights.enter()
    weights.leave()
    assert [e.device_weight_bytes for e in read_ledger(ledger_path)] == [weights.host_bytes, 0]


def test_a_device_held_by_another_worker_is_not_touched(module: nn.Module, ledger_path: Path) -> None:
    other = ResidencyLedger(ledger_path, "vae")
    other.enter(1)
    weights = DeviceWeights([module], CPU, ResidencyLedger(ledger_path, "dit"))
    host = pointers(module)
    with pytest.raises(UnsupportedError, match="dit cannot enter"):
        weights.enter()
    assert not weights.is_resident
    assert pointers(module) == host
    other.leave()
    weights.enter()
    assert weights.is_resident


@pytest.mark.parametrize(
    ("error", "expected"),
    [(torch.OutOfMemoryError("full"), DeviceMemoryError), (RuntimeError("device lost"), RuntimeError)],
)
def test_a_failed_entry_frees_what_was_copied_and_the_ledger(
    module: nn.Module,
    ledger_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    expected: type[Exception],
) -> None:
    weights = DeviceWeights([module], CPU, ResidencyLedger(ledger_path, "dit"))
    host = pointers(module)
    copy, calls = torch.Tensor.to, iter(range(10))

    def failing(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if next(calls) == 2:
            raise error
        return copy(tensor, *args, **kwargs)  # type: ignore[no-any-return, call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", failing)
        with pytest.raises(expected):
            weights.enter()
    assert not weights.is_resident
    assert pointers(module) == host
    weights.enter()
    weights.leave()
    assert [e.event for e in read_ledger(ledger_path)] == ["enter", "leave", "enter", "leave"]


def test_a_tensor_that_two_modules_share_is_one_copy() -> None:
    a, b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    b.weight = a.weight
    weights = DeviceWeights([a, b], CPU)
    assert weights.host_bytes == 36
    weights.enter()
    assert a.weight is b.weight


def test_the_host_reports_no_free_device_memory(module: nn.Module) -> None:
    assert DeviceWeights([module], CPU).free_device_bytes() == 0


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.usefixtures("without_gpu")
def test_auto_is_the_cpu_where_there_is_no_gpu() -> None:
    assert resolve_device("auto") == torch.device("cpu")
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.usefixtures("without_gpu")
def test_a_gpu_that_is_not_there_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="'cuda' is not there: this machine has 0 usable GPUs"):
        resolve_device("cuda")


def test_auto_is_the_first_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("auto").type == "cuda"
    with pytest.raises(ConfigError, match="'cuda:1' is not there: this machine has 1 usable"):
        resolve_device("cuda:1")


def test_an_unknown_device_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="device 'gpu0' is unknown"):
        resolve_device("gpu0")


def test_the_kernels_are_told_by_the_dtypes_that_weigh_most_first() -> None:
    narrow, wide = nn.Linear(2, 2), nn.Linear(8, 8, dtype=torch.bfloat16)
    told = DeviceWeights([narrow, wide], torch.device("cpu")).kernels()
    assert told.startswith("bfloat16, float32 on CPU (")
    assert f"{torch.get_num_threads()} threads" in told
