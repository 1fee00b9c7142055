"""An edge that knows keys in front of a service, on this event loop or in a process of its own; and callers."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc

from h3stream.v1 import video_pb2_grpc
from orchestrator.access.access_file import AccessFile, Certificate, Key, Tenant, write_access_file
from orchestrator.access.keys import make_key, read_key
from orchestrator.caller import Scope
from orchestrator.edge import Edge
from orchestrator.edge_process import EdgeProcess
from orchestrator.edge_settings import EdgeSettings
from services.common.rpc import connect
from tests.service.conftest import Service


@dataclass
class AccessKeys:
    """An access file, and the keys in it as their holders know them."""

    path: Path
    texts: dict[str, str] = field(default_factory=dict)
    content: AccessFile = field(default_factory=AccessFile)

    def add(self, key_id: str, tenant: str, *scopes: Scope, expires: datetime | None = None) -> str:
        """Adds a key to the file; returns it."""
        text = self.texts[key_id] = make_key(key_id)
        parts = read_key(text)
        assert parts is not None
        key = Key(key_id, tenant, scopes, parts.sha256, datetime.now(UTC), expires)
        self.write(keys=(*self.content.keys, key))
        return text

    def revoke(self, key_id: str) -> None:
        self.write(keys=tuple(key for key in self.content.keys if key.key_id != key_id))

    def write(
        self,
        *,
        keys: Sequence[Key] | None = None,
        certificates: Sequence[Certificate] = (),
        tenants: dict[str, Tenant] | None = None,
    ) -> None:
        self.content = replace(
            self.content,
            keys=self.content.keys if keys is None else tuple(keys),
            certificates=tuple(certificates) or self.content.certificates,
            tenants=tenants or self.content.tenants,
        )
        write_access_file(self.path, self.content)


class Keyed:
    """A service behind an edge that knows keys."""

    def __init__(self, service: Service, keys: AccessKeys) -> None:
        self.service = service
        self.keys = keys
        self.core = f"unix:{service.data}/core.sock"
        self.audit = service.data / "audit.jsonl"
        self.log = service.data / "edge.log"
        """The log of an edge in a process of its own."""
        self.settings = EdgeSettings(keys=keys.path, audit=self.audit, log_format="json")
        self.address = ""

    @asynccontextmanager
    async def caller(self, key: str = "", **metadata: str) -> AsyncIterator[Any]:
        """The stub of one who shows a key in every call; without one, of one who shows none."""
        shown = [(name.replace("_", "-"), value) for name, value in metadata.items()]
        if key:
            shown.append(("authorization", f"Bearer {key}"))
        async with connect(self.address) as channel:
            yield video_pb2_grpc.VideoServiceStub(Showing(channel, shown))

    async def audited(self, num_calls: int) -> list[dict[str, Any]]:
        """What the audit log says once it tells of so many calls: the line of one that fails follows its answer."""
        async with asyncio.timeout(10):
            while len(lines := self.audit.read_text().splitlines()) < num_calls:
                await asyncio.sleep(0.01)
        return [json.loads(line) for line in lines]


class Showing:
    """A channel whose every call carries the same metadata."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]]) -> None:
        self._channel = channel
        self._metadata = tuple(metadata)

    def __getattr__(self, kind: str) -> Any:
        make = getattr(self._channel, kind)

        def made(*arguments: Any, **options: Any) -> Any:
            call = make(*arguments, **options)
            return lambda request, **given: call(request, metadata=self._metadata, **given)

        return made


@asynccontextmanager
async def keyed_edge(service: Service, keys: AccessKeys) -> AsyncIterator[Keyed]:
    """One on this event loop, in front of a service's core."""
    keyed = Keyed(service, keys)
    edge = Edge(keyed.core, keyed.settings)
    try:
        keyed.address = await edge.start("127.0.0.1:0")
        yield keyed
    finally:
        await edge.stop(grace_s=0)


@asynccontextmanager
async def keyed_process(service: Service, keys: AccessKeys) -> AsyncIterator[Keyed]:
    """One in a process of its own, in front of a service's core."""
    keyed = Keyed(service, keys)
    edge = EdgeProcess(keyed.core, keyed.settings)
    try:
        with standard_error_to(keyed.log):
            keyed.address = await edge.start("127.0.0.1:0")
        yield keyed
    finally:
        await edge.stop()


@contextmanager
def standard_error_to(path: Path) -> Iterator[None]:
    """Processes that are started meanwhile write their log there."""
    before = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
