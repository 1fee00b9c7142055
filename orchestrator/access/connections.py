"""What connections to the edge may take, whoever is at their other end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of each connection; tests alone have others than these."""

    handshake_s: float = 10.0
    """Longest from a connection's beginning to the end of its TLS and HTTP/2 handshakes."""
    idle_s: float = 120.0
    """Longest without a call; whoever comes back connects again."""
    max_calls: int = 4096
    """Open calls; a gateway carries all its viewers on one connection."""
    max_connections: int = 8192
    """Connections at a time, each of some 20 KiB; more are closed at once."""
    metadata_bytes: int = 8192
    """Of a call's metadata, above which calls may be refused; from twice as much on they are."""

    def options(self) -> list[tuple[str, int]]:
        """As gRPC takes them."""
        return [
            ("grpc.server_handshake_timeout_ms", int(self.handshake_s * 1000)),
            ("grpc.max_connection_idle_ms", int(self.idle_s * 1000)),
            ("grpc.max_concurrent_streams", self.max_calls),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_metadata_size", self.metadata_bytes),
            ("grpc.absolute_max_metadata_size", 2 * self.metadata_bytes),
        ]
