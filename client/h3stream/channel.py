"""How both clients connect."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 1 << 20
"""Limit of a message in both directions; the server cuts payloads below it."""

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A stream may be silent for seconds. Notice a frozen server within 25 s: keepalive alone would wait for the ping
    # timeout, whose default is 60 s.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A second Generate would be a second job: whether to try again is the caller's decision.
    ("grpc.enable_retries", 0),
]
