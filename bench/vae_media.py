"""What streaming costs in the VAE worker, as ratios measured in one run.

    python bench/vae_media.py --model DIR [--frames 73 --width 256 --height 160 --threads 1]

* decoding chunk by chunk against decoding the whole clip at once, for pictures and for sound;
* the share of a clip's time that is encoding and muxing;
* bytes that fragments add to the packets in them, against FFmpeg's muxer on the same packets' sizes.
"""

from __future__ import annotations

import argparse
import io
import platform
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from core.budget import AAC_BIT_RATE
from core.clock import audio_window, emission_table, final_audio_latents
from core.geometry import (
    FPS,
    SAMPLE_RATE,
    chunk_table,
    latent_size,
    num_audio_latents,
    num_samples,
    num_video_latents,
)
from services.vae.audio_stream import AudioStream
from services.vae.media.boxes import AudioTrack, Packet, VideoTrack
from services.vae.media.encoders import AAC_FRAME_SAMPLES, AacEncoder, open_h264_encoder
from services.vae.media.muxer import FragmentMuxer
from services.vae.output import to_pcm, to_rgb8
from services.vae.video_stream import PIXEL_MEAN, PIXEL_STD, VideoStream
from services.vae.weights import LatentStatistics, load_models

CPU = torch.device("cpu")
BIT_RATE = 6_000_000


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that a piece of work takes, and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def denormalised(latents: torch.Tensor, statistics: LatentStatistics) -> torch.Tensor:
    """`z * std + mean` with the channels in the second dimension."""
    shape = [1, -1] + [1] * (latents.ndim - 2)
    return latents * torch.tensor(statistics.std).view(shape) + torch.tensor(statistics.mean).view(shape)


def mux(num_frames: int, width: int, height: int, frames: np.ndarray, pcm: np.ndarray) -> tuple[int, int]:
    """Encodes and muxes a clip as the worker does; returns (bytes of packets, bytes of the stream)."""
    pictures, sound = open_h264_encoder(width, height, BIT_RATE), AacEncoder()
    muxer = FragmentMuxer(
        VideoTrack(width, height, pictures.decoder_configuration, num_frames),
        AudioTrack(sound.decoder_configuration, AAC_BIT_RATE, sound.priming_samples, pcm.shape[1]),
    )
    payload, total, done = 0, len(muxer.init_segment()), 0
    stops = emission_table(num_frames)
    for stop in stops:
        video = [pictures.encode(frames[i]) for i in range(done, stop)]
        # All sound goes in with the first pictures: how it is cut does not change the bytes.
        audio: list[Packet] = [*sound.encode(pcm), *sound.flush()] if done == 0 and stop else []
        muxer.add(video, audio)
        payload += sum(len(packet.data) for packet in (*video, *audio))
        total += sum(len(made.data) for made in muxer.take(stop, is_final=stop == num_frames))
        done = stop
    return payload, total


def mux_with_ffmpeg(width: int, height: int, frames: np.ndarray, pcm: np.ndarray, movflags: str) -> tuple[int, int]:
    """The same with FFmpeg's muxer: (bytes of packets, bytes of the stream)."""
    output = io.BytesIO()
    payload = 0
    options = {"movflags": movflags, "frag_duration": "708333"}  # 17 frames
    with av.open(output, "w", format="mp4", options=options) as container:
        video: Any = container.add_stream("libx264", rate=FPS, options={"preset": "veryfast", "tune": "zerolatency"})
        video.width, video.height, video.pix_fmt, video.gop_size, video.bit_rate = (
            width,
            height,
            "yuv420p",
            17,
            BIT_RATE,
        )
        audio: Any = container.add_stream("aac", rate=SAMPLE_RATE, layout="stereo")
        audio.bit_rate = AAC_BIT_RATE
        num_fed = 0
        for i, rgb in enumerate(frames):
            packets = video.encode(av.VideoFrame.from_ndarray(rgb, format="rgb24"))
            for packet in packets:
                packet.duration = 1
            while num_fed < min((i + 1) * SAMPLE_RATE // FPS, pcm.shape[1]):
                block = np.ascontiguousarray(pcm[:, num_fed : num_fed + AAC_FRAME_SAMPLES])
                frame = av.AudioFrame.from_ndarray(block, format="fltp", layout="stereo")
                frame.sample_rate = SAMPLE_RATE
                packets += audio.encode(frame)
                num_fed += block.shape[1]
            payload += sum(packet.size for packet in packets)
            container.mux(packets)
        rest = [*video.encode(None), *audio.encode(None)]
        payload += sum(packet.size for packet in rest)
        container.mux(rest)
    return payload, len(output.getvalue())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="model directory with vae/ and audio_vae/")
    parser.add_argument("--frames", type=int, default=73)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--height", type=int, default=160)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    num_frames, width, height = arguments.frames, arguments.width, arguments.height
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    models = load_models(arguments.model, torch.float32)
    generator = torch.Generator().manual_seed(0)
    video_latents = torch.randn(
        (1, 24, num_video_latents(num_frames), latent_size(height), latent_size(width)), generator=generator
    )
    audio_latents = torch.randn((1, 32, 2, num_audio_latents(num_frames)), generator=generator)
    chunks = chunk_table(num_frames)

    def stream_video() -> torch.Tensor:
        stream = VideoStream(models.video, models.video_statistics, CPU)
        parts = [part for c in chunks for part in stream.push(video_latents[:, :, c.video_start : c.video_stop])]
        return torch.cat([*parts, stream.flush()], dim=2)

    def stream_audio() -> torch.Tensor:
        stream = AudioStream(models.audio, models.audio_statistics, CPU, audio_latents.shape[3])
        return torch.cat([stream.push(audio_latents[..., c.audio_start : c.audio_stop]) for c in chunks], dim=1)

    audio_rows = denormalised(audio_latents[0].transpose(0, 1), models.audio_statistics)
    video: Any = models.video
    audio: Any = models.audio
    pixels = LatentStatistics(PIXEL_MEAN, PIXEL_STD)
    whole_video_s, _ = timed(
        lambda: denormalised(video.decode(denormalised(video_latents, models.video_statistics)).sample, pixels).clamp_(
            0, 1
        )
    )
    whole_audio_s, _ = timed(lambda: audio.decode(audio_rows))
    video_s, frames = timed(stream_video)
    audio_s, waveform = timed(stream_audio)
    rgb, pcm = to_rgb8(frames), to_pcm(waveform)
    assert rgb.shape[0] == num_frames
    assert pcm.shape[1] == num_samples(num_frames)
    media_s, (payload, total) = timed(lambda: mux(num_frames, width, height, rgb, pcm))
    total_latents = audio_latents.shape[3]
    finals = [0, *(final_audio_latents(c.audio_stop, total_latents) for c in chunks)]
    windows = [audio_window(start, stop, total_latents) for start, stop in pairwise(finals)]
    decoded_latents = sum(window.decode_stop - window.decode_start for window in windows)

    print(f"{num_frames} frames {width}x{height}, {arguments.threads} thread(s), {platform.machine()}, fp32, CPU")
    print(f"pictures: chunk by chunk / whole clip      {video_s / whole_video_s:.2f}x   ({whole_video_s:.2f} s whole)")
    print(f"sound:    chunk by chunk / whole clip      {audio_s / whole_audio_s:.2f}x   ({whole_audio_s:.2f} s whole)")
    print(f"sound:    latents decoded / latents kept   {decoded_latents / total_latents:.2f}x")
    all_s = video_s + audio_s + media_s
    print(f"encoding and muxing                        {media_s / all_s:.1%} of {all_s:.2f} s")
    print(f"fragments: bytes beside the packets        {total / payload - 1:.2%} ({total - payload} B)")
    for name, movflags in (
        ("FFmpeg, a fragment per 17 frames", "delay_moov+default_base_moof"),
        ("FFmpeg, a fragment per frame", "frag_every_frame+empty_moov+default_base_moof"),
    ):
        other_payload, other_total = mux_with_ffmpeg(width, height, rgb, pcm, movflags)
        print(f"{name + ':':42} {other_total / other_payload - 1:.2%} ({other_total - other_payload} B)")


if __name__ == "__main__":
    main()
