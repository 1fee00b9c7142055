"""Protobuf messages to dataclasses and back, for both sides of the wire."""

from __future__ import annotations

from h3stream.request import ClipSpec, KvStorage
from h3stream.v1 import types_pb2

KV_STORAGE_TO_PROTO: dict[KvStorage, types_pb2.KvStorage] = {
    "gpu": types_pb2.KV_STORAGE_GPU,
    "cpu": types_pb2.KV_STORAGE_CPU,
    "cpu_pinned": types_pb2.KV_STORAGE_CPU_PINNED,
}
KV_STORAGE_FROM_PROTO: dict[int, KvStorage] = {int(v): k for k, v in KV_STORAGE_TO_PROTO.items()}


def clip_spec_to_proto(clip: ClipSpec) -> types_pb2.ClipSpec:
    """The wire form of a resolved clip."""
    return types_pb2.ClipSpec(
        num_frames=clip.num_frames,
        width=clip.width,
        height=clip.height,
        steps=clip.steps,
        video_shift=clip.video_shift,
        audio_shift=clip.audio_shift,
        sink=clip.sink,
        window=clip.window,
        kv_storage=KV_STORAGE_TO_PROTO[clip.kv_storage],
        seed=clip.seed,
    )


def clip_spec_from_proto(message: types_pb2.ClipSpec) -> ClipSpec:
    """The resolved clip of a message; an unspecified storage is "gpu"."""
    return ClipSpec(
        num_frames=message.num_frames,
        width=message.width,
        height=message.height,
        steps=message.steps,
        video_shift=message.video_shift,
        audio_shift=message.audio_shift,
        sink=message.sink,
        window=message.window if message.HasField("window") else None,
        kv_storage=KV_STORAGE_FROM_PROTO.get(message.kv_storage, "gpu"),
        seed=message.seed,
    )
