"""A request to a checked clip and its plan, decided before anything is queued or loaded."""

from __future__ import annotations

import dataclasses

from core.budget import AAC_BIT_RATE, expected_stream_bytes
from core.clock import emission_table
from core.geometry import chunk_table, num_audio_latents, num_samples, num_video_latents
from core.request import clip_violations, clip_warnings, prompt_violations
from h3stream.codec import clip_spec_to_proto
from h3stream.request import ClipSpec, GenerateRequest
from h3stream.v1 import video_pb2
from orchestrator.model_info import ModelInfo
from services.common.refusal import refuse


def resolve(request: GenerateRequest, defaults: ClipSpec) -> ClipSpec:
    """The request with the server's defaults for what it leaves out; nothing that is set is changed."""
    values = {field.name: getattr(request, field.name) for field in dataclasses.fields(ClipSpec)}
    given = {name: value for name, value in values.items() if value is not None}
    if request.window == "all":
        given["window"] = None
    return dataclasses.replace(defaults, **given)


def check(prompt: str, clip: ClipSpec) -> None:
    """Raises InvalidRequestError with every violation of a request whose defaults are filled in."""
    refuse([*prompt_violations(prompt), *clip_violations(clip)])


def make_plan(clip: ClipSpec, model: ModelInfo, video_bits_per_second: int) -> video_pb2.Plan:
    """What a checked clip makes, in full."""
    chunks = chunk_table(clip.num_frames)
    warnings = [video_pb2.Warning(reason=reason, message=message) for reason, message in clip_warnings(clip)]
    if model.notice:
        warnings.append(video_pb2.Warning(reason="MODEL_NOTICE", message=model.notice))
    return video_pb2.Plan(
        clip=clip_spec_to_proto(clip),
        chunks=[
            video_pb2.ChunkPlan(
                video_start=chunk.video_start,
                video_stop=chunk.video_stop,
                audio_start=chunk.audio_start,
                audio_stop=chunk.audio_stop,
                num_frames_emitted=num_frames,
            )
            for chunk, num_frames in zip(chunks, emission_table(clip.num_frames), strict=True)
        ],
        num_video_latents=num_video_latents(clip.num_frames),
        num_audio_latents=num_audio_latents(clip.num_frames),
        num_samples=num_samples(clip.num_frames),
        num_noise_forwards=clip.steps * len(chunks),
        num_clean_forwards=len(chunks) - 1,
        expected_stream_bytes=expected_stream_bytes(clip.num_frames, video_bits_per_second, AAC_BIT_RATE),
        warnings=warnings,
    )
