from __future__ import annotations

import pytest

from h3stream.errors import ConfigError
from services.common.device import check_device


@pytest.mark.parametrize(("name", "num_gpus"), [("auto", 0), ("cpu", 0), ("cuda", 1), ("cuda:0", 1), ("cuda:1", 2)])
def test_devices_that_may_be_there_pass(name: str, num_gpus: int) -> None:
    check_device(name, lambda: num_gpus)


@pytest.mark.parametrize(("name", "num_gpus"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_gpu_that_the_driver_does_not_have_is_refused(name: str, num_gpus: int) -> None:
    with pytest.raises(ConfigError, match=f"device is '{name}', which is not there: .* offers {num_gpus} GPUs"):
        check_device(name, lambda: num_gpus)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "cuda:one", "", "CPU"])
def test_a_name_that_is_no_device_is_refused_without_asking_the_driver(name: str) -> None:
    with pytest.raises(ConfigError, match=r'it must be "auto", "cpu", "cuda" or "cuda:N"'):
        check_device(name, lambda: pytest.fail("asked"))


def test_only_what_needs_a_gpu_asks_the_driver() -> None:
    for name in ("auto", "cpu"):
        check_device(name, lambda: pytest.fail("asked"))
