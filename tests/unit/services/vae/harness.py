"""Runs clips through the real worker, encoders and muxers, and reads what comes out."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
import torch

from core.budget import AAC_BIT_RATE
from core.clock import emission_table, final_audio_latents
from core.geometry import SAMPLES_PER_AUDIO_LATENT, chunk_table, num_audio_latents, num_samples
from h3stream.request import ClipSpec
from services.vae.artifacts.final_file import FinalFile
from services.vae.media.boxes import AudioTrack, VideoTrack
from services.vae.media.encoders import AacEncoder, open_h264_encoder
from services.vae.media.muxer import FragmentMuxer, mime_type
from services.vae.media_lane import SoundLane, StreamStart
from services.vae.worker import ChunkFragment, Media, VaeWorker


def make_clip(num_frames: int, width: int, height: int) -> ClipSpec:
    """A resolved clip; the VAEs read its geometry only."""
    return ClipSpec(
        num_frames=num_frames,
        width=width,
        height=height,
        steps=4,
        video_shift=12.0,
        audio_shift=3.0,
        sink=2,
        window=2,
        kv_storage="gpu",
        seed=0,
    )


@dataclass
class Recorder:
    """Collects what a worker emits."""

    media: list[Media] = field(default_factory=list)
    """Everything, in order."""

    @property
    def starts(self) -> list[StreamStart]:
        """The starts of the stream; there should be one."""
        return [media for media in self.media if isinstance(media, StreamStart)]

    @property
    def fragments(self) -> list[ChunkFragment]:
        """The fragments."""
        return [media for media in self.media if isinstance(media, ChunkFragment)]

    def stream(self, num_fragments: int | None = None) -> bytes:
        """The init segment and the first fragments, joined."""
        return self.starts[0].data + b"".join(fragment.media.data for fragment in self.fragments[:num_fragments])


def latents(worker: VaeWorker, session_id: str, chunk_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random latents of a chunk, always the same for its index."""
    generator = torch.Generator().manual_seed(chunk_index)
    shapes = worker.latent_shapes(session_id, chunk_index)
    return torch.randn(shapes["video"], generator=generator), torch.randn(shapes["audio"], generator=generator)


def run_clip(worker: VaeWorker, clip: ClipSpec, session_id: str, directory: Path | None = None) -> Recorder:
    """Decodes a whole clip; the session stays open."""
    recorder = Recorder()
    worker.open_session(session_id, clip, directory)
    for chunk in chunk_table(clip.num_frames):
        worker.decode_chunk(
            session_id, chunk.index, *latents(worker, session_id, chunk.index), recorder.media.append, lambda: False
        )
    return recorder


@dataclass(frozen=True)
class MuxedClip:
    """A clip of given pictures and sound, through the real encoders and muxers."""

    init_segment: bytes
    """The start of the stream."""
    mime_type: str
    """With the codecs string."""
    fragments: list[bytes]
    """The rest of the stream."""
    final_file: bytes
    """The whole file."""

    @property
    def stream(self) -> bytes:
        """The stream, joined."""
        return self.init_segment + b"".join(self.fragments)


def mux_clip(
    num_frames: int,
    width: int,
    height: int,
    picture: Callable[[int], npt.NDArray[np.uint8]],
    pcm: npt.NDArray[np.float32],
    directory: Path,
) -> MuxedClip:
    """Feeds pictures by frame number and sound `[2, S]` to encoders and muxers as the chunks of a clip bring them."""
    samples = num_samples(num_frames)
    pictures, sound = open_h264_encoder(width, height, 6_000_000), AacEncoder()
    video = VideoTrack(width, height, pictures.decoder_configuration, num_frames)
    audio = AudioTrack(sound.decoder_configuration, AAC_BIT_RATE, sound.priming_samples, samples)
    muxer, final = FragmentMuxer(video, audio), FinalFile(directory, video)
    fragments = []
    frame, sample = 0, 0
    for chunk, stop_frame in zip(chunk_table(num_frames), emission_table(num_frames), strict=True):
        stop = final_audio_latents(chunk.audio_stop, num_audio_latents(num_frames)) * SAMPLES_PER_AUDIO_LATENT
        packets = [pictures.encode(picture(i)) for i in range(frame, stop_frame)]
        muxer.add(packets, [*sound.encode(pcm[:, sample:stop]), *(sound.flush() if chunk.is_tail else ())])
        final.add_sound(pcm[:, sample:stop])
        for packet in packets:
            final.add_packet(packet)
        fragments += [made.data for made in muxer.take(stop_frame, is_final=chunk.is_tail)]
        frame, sample = stop_frame, stop
    name = final.finish(divisor=1.0).name
    return MuxedClip(muxer.init_segment(), mime_type(video, audio), fragments, (directory / name).read_bytes())


def mux_sound(num_frames: int, pcm: npt.NDArray[np.float32]) -> MuxedClip:
    """A stream without pictures of a given sound `[2, S]`, fed as the chunks of a clip bring it; there is no file."""
    lane = SoundLane(make_clip(num_frames, 64, 64))
    total = num_audio_latents(num_frames)
    fragments: list[bytes] = []
    sample = 0
    for chunk in chunk_table(num_frames):
        stop = final_audio_latents(chunk.audio_stop, total) * SAMPLES_PER_AUDIO_LATENT
        fragments += [made.data for made in lane.add(pcm[:, sample:stop], is_last=chunk.is_tail)]
        sample = stop
    return MuxedClip(lane.start.data, lane.start.mime_type, fragments, b"")


def decode_pictures(data: bytes) -> list[npt.NDArray[np.uint8]]:
    """The pictures of a file as planar YUV."""
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray() for frame in container.decode(video=0)]


def decode_sound(data: bytes) -> npt.NDArray[np.float32]:
    """The sound of a file, `[2, S]`, each sample at its true place by the time stamps."""
    pieces = []
    with av.open(io.BytesIO(data)) as container:
        for frame in container.decode(audio=0):
            assert frame.pts is not None
            pieces.append((frame.pts, frame.to_ndarray()))
    sound = np.zeros((2, max(pts + piece.shape[1] for pts, piece in pieces)), np.float32)
    for pts, piece in pieces:
        sound[:, max(pts, 0) : pts + piece.shape[1]] = piece[:, max(-pts, 0) :]
    return sound
