"""What every worker offers beside its own verbs, and the gRPC service for it."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Protocol

from grpc import aio

from h3stream.codec import adapter_to_proto, model_part_to_proto
from h3stream.job import AdapterInfo, ModelPart
from h3stream.v1 import workers_pb2, workers_pb2_grpc
from services.common.preview_map import PreviewMap
from services.common.residency import DeviceWeights
from services.common.verbs import VerbRunner


class Worker(Protocol):
    """A worker as its shell sees it."""

    name: str
    """"text_encoder", "dit" or "vae"."""
    weights: DeviceWeights
    """Its weights, on the device or not."""
    weight_digests: dict[str, str]
    """Weight files and adapters, name to digest."""

    @property
    def parts(self) -> tuple[ModelPart, ...]:
        """Parts of the model that it holds."""
        ...

    def session_ids(self) -> list[str]:
        """Open sessions."""
        ...


@dataclass(frozen=True)
class ServedWorker:
    """A worker with its services, ready to be put on a server."""

    worker: Worker
    """The verbs."""
    runner: VerbRunner
    """The thread on which they run."""
    service_name: str
    """Full name of the worker's own gRPC service."""
    register: Callable[[aio.Server], None]
    """Adds the worker's own service to a server."""
    close: Callable[[], object] = lambda: None
    """Frees what the worker holds beside its weights; called last, on the runner's thread."""
    libraries: tuple[str, ...] = field(default=("torch",))
    """Distributions whose versions decide the worker's results."""
    adapters: tuple[AdapterInfo, ...] = ()
    """Adapters that the worker holds; only the DiT has any."""
    preview_map: PreviewMap | None = None
    """How stills are made of latents; only the VAE knows."""


class WorkerServicer(workers_pb2_grpc.WorkerServiceServicer):
    """WorkerService over any worker."""

    def __init__(self, served: ServedWorker) -> None:
        self._worker = served.worker
        self._runner = served.runner
        self._adapters = served.adapters
        self._preview_map = served.preview_map
        self._versions = {name: metadata.version(name) for name in served.libraries}
        self._kernels = served.worker.weights.kernels()

    async def Describe(self, request: workers_pb2.DescribeRequest, context: Any) -> workers_pb2.DescribeResponse:
        weights = self._worker.weights
        return workers_pb2.DescribeResponse(
            worker=self._worker.name,
            device=str(weights.device),
            weight_bytes=weights.host_bytes,
            device_weight_bytes=weights.device_bytes,
            weight_digests=self._worker.weight_digests,
            library_versions=self._versions,
            session_ids=self._worker.session_ids(),
            parts=map(model_part_to_proto, self._worker.parts),
            adapters=map(adapter_to_proto, self._adapters),
            preview_map=None if self._preview_map is None else self._preview_map.to_proto(),
            kernels=self._kernels,
            peak_host_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,  # told in KiB
            peak_device_bytes=weights.peak_device_bytes(),
        )

    async def EnterPhase(self, request: workers_pb2.EnterPhaseRequest, context: Any) -> workers_pb2.EnterPhaseResponse:
        await self._runner.run(lambda _: self._worker.weights.enter())
        return workers_pb2.EnterPhaseResponse(device_weight_bytes=self._worker.weights.device_bytes)

    async def LeavePhase(self, request: workers_pb2.LeavePhaseRequest, context: Any) -> workers_pb2.LeavePhaseResponse:
        # Runs behind whatever the worker is doing, so weights never go away under a forward.
        await self._runner.run(lambda _: self._worker.weights.leave())
        return workers_pb2.LeavePhaseResponse(
            device_weight_bytes=self._worker.weights.device_bytes,
            device_free_bytes=self._worker.weights.free_device_bytes(),
        )
