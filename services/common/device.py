"""Whether a compute device can be there at all, told before anything heavy starts. Imports no torch."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

from h3stream.errors import ConfigError

_NAME = re.compile(r"auto|cpu|cuda(?::(?P<index>[0-9]+))?")


def driver_gpus() -> int:
    """GPUs that the NVIDIA driver offers to this process; 0 without a driver. torch sees no more than these."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def check_device(name: str, count_gpus: Callable[[], int] = driver_gpus) -> None:
    """Raises ConfigError for a name that is no device, or a GPU that the driver does not have.

    What torch can use of the driver's GPUs is for the worker to find out.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ConfigError(f'device is {name!r}; it must be "auto", "cpu", "cuda" or "cuda:N"')
    if name.startswith("cuda") and int(found["index"] or 0) >= (count := count_gpus()):
        raise ConfigError(
            f'device is {name!r}, which is not there: the NVIDIA driver offers {count} GPUs; "cpu" works everywhere'
        )
