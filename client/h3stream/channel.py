"""How both clients connect."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 1 << 20
"""Limit of a message in both directions; the server cuts payloads below it."""
WINDOW_BYTES = 512 * 1024
"""What a server may send of a call before its caller reads on: at a round trip of 50 ms, 10 MB/s."""

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # gRPC would estimate the window and let it grow to many megabytes for each call, all of which a caller who then
    # stops reading keeps in memory. A fixed one holds that to about 1 MB, a message that is being received included.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    # A stream may be silent for seconds. Notice a frozen server within 25 s: keepalive alone would wait for the ping
    # timeout, whose default is 60 s.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A second Generate would be a second job: whether to try again is the caller's decision, or that of `Reconnection`,
    # which should find out soon that a server is back: gRPC alone may wait two minutes before it looks.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
