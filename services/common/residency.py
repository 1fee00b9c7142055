"""Weights between host memory and the device: entering and leaving a phase.

The owning copy lives in host memory and is never written, so leaving a phase frees without copying. On a machine
without a GPU the device is the host and its copies are real copies: the same code runs and the same bytes are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from h3stream.errors import ConfigError, DeviceMemoryError, UnsupportedError
from services.common.ledger import ResidencyLedger


def resolve_device(name: str) -> torch.device:
    """The device of a configuration value; "auto" is the first GPU, else the CPU.

    Raises ConfigError for a name that is no device or a GPU that is not there.
    """
    has_gpu = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_gpu else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f'device {name!r} is unknown; it must be "auto", "cpu", "cuda" or "cuda:N"') from None
    if device.type == "cuda" and not (has_gpu and (device.index or 0) < torch.cuda.device_count()):
        raise ConfigError(f"device {name!r} is not there: this machine has {torch.cuda.device_count()} usable GPUs")
    return device


class DeviceWeights:
    """The parameters and buffers of some modules, on the device or not."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        device: torch.device,
        ledger: ResidencyLedger | None = None,
    ) -> None:
        """modules: loaded in host memory; their tensors become the owning copies."""
        self.device = device
        self._ledger = ledger
        # By identity: a tensor that two modules share is one copy.
        self._tensors = list({id(t): t for m in modules for t in (*m.parameters(), *m.buffers())}.values())
        self._host = []
        for tensor in self._tensors:
            # One by one, so that pinning never needs host memory for a second copy of all weights.
            tensor.data = _pinned(tensor.data, device)
            self._host.append(tensor.data)
        self.host_bytes = sum(t.nbytes for t in self._host)
        self.is_resident = False

    @property
    def device_bytes(self) -> int:
        """Bytes of these weights on the device now."""
        return self.host_bytes if self.is_resident else 0

    def enter(self) -> None:
        """Copies every weight to the device; returns once they are usable. Entering twice changes nothing.

        Raises UnsupportedError if another worker holds the device, DeviceMemoryError if they do not fit.
        """
        if self.is_resident:
            return
        if self._ledger is not None:
            self._ledger.enter(self.host_bytes)
        try:
            for tensor, host in zip(self._tensors, self._host, strict=True):
                tensor.data = host.to(self.device, non_blocking=host.is_pinned(), copy=True)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # the phase is granted only when the weights are there
        except torch.OutOfMemoryError as error:
            self._free()
            raise DeviceMemoryError(f"{self.host_bytes} bytes of weights do not fit on {self.device}") from error
        except BaseException:  # whatever it was, half of the weights must not stay there nor the ledger's lock be held
            self._free()
            raise
        self.is_resident = True

    def leave(self) -> None:
        """Frees the device copies; returns once their memory is free. Leaving twice changes nothing."""
        if self.is_resident:
            self._free()

    def require(self) -> None:
        """Raises UnsupportedError unless the weights are on the device."""
        if not self.is_resident:
            raise UnsupportedError("the weights are not on the device: enter the phase first")

    def free_device_bytes(self) -> int:
        """Free memory of the device as its driver reports it; 0 where the device is the host."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0

    def kernels(self) -> str:
        """What decides the last bits of what is computed with them: their dtypes, most bytes first, and the device."""
        sizes: Counter[str] = Counter()
        for tensor in self._host:
            sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            device = f"{properties.name} (compute capability {properties.major}.{properties.minor})"
        else:
            device = f"CPU ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"
        return f"{', '.join(dtype for dtype, _ in sizes.most_common())} on {device}"

    def peak_device_bytes(self) -> int:
        """Most memory of the device that this process has held; 0 where the device is the host."""
        return torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else 0

    def _free(self) -> None:
        for tensor, host in zip(self._tensors, self._host, strict=True):
            tensor.data = host
        self.is_resident = False
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # other processes need the memory, not only this one's allocator
        if self._ledger is not None:
            self._ledger.leave()


def _pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor in page-locked memory where the device is a GPU and the system allows it."""
    if device.type != "cuda":
        return tensor
    try:
        return tensor.pin_memory()
    except RuntimeError:  # locked-memory limit: pageable memory works, only slower
        return tensor
