"""The stream and the final file through the real decoders, encoders and muxers, judged by other readers."""

from __future__ import annotations

import io
import itertools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from core.clock import AUDIO_MARGIN_LATENTS, emission_table, samples_for_frames
from core.geometry import SAMPLES_PER_AUDIO_LATENT, chunk_table, num_audio_latents, num_samples
from h3stream.channel import MAX_MESSAGE_BYTES
from services.vae.audio_stream import AudioStream
from services.vae.worker import VaeWorker
from tests.tools.check_fmp4 import read_movie, violations
from tests.unit.services.vae.harness import Recorder, decode_pictures, decode_sound, make_clip, run_clip

CLIPS = [
    (22, 64, 64),
    (22, 32, 64),
    (39, 96, 64),
    (39, 256, 160),
    (22, 512, 288),
    (73, 64, 32),
    (192, 32, 32),
]


def ffprobe(path: Path) -> list[dict[str, Any]]:
    """What ffprobe counts in a file, stream by stream."""
    program = shutil.which("ffprobe")
    assert program is not None, "ffprobe is needed for this test: apt-get install -y ffmpeg"
    entries = (
        "stream=codec_type,codec_name,profile,level,width,height,nb_read_frames,nb_read_packets,color_space,color_range,"
        "has_b_frames,avg_frame_rate,time_base,start_pts,duration_ts"
    )
    done = subprocess.run(
        [program, "-v", "error", "-count_frames", "-count_packets", "-show_entries", entries, "-of", "json", path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr, done.stderr
    streams: list[dict[str, Any]] = json.loads(done.stdout)["streams"]
    return streams


def declared_samples(data: bytes) -> int:
    """Samples per channel that the audio packets of a file declare, priming not counted."""
    with av.open(io.BytesIO(data)) as container:
        packets = [packet for packet in container.demux(audio=0) if packet.size]
    assert packets[0].pts == -1024
    return sum(packet.duration or 0 for packet in packets) - 1024


@pytest.mark.parametrize(("num_frames", "width", "height"), CLIPS)
def test_streams_and_files_hold_exactly_the_clip(
    worker: VaeWorker, tmp_path: Path, num_frames: int, width: int, height: int
) -> None:
    recorder = run_clip(worker, make_clip(num_frames, width, height), "s", tmp_path / "artifacts")
    worker.finish("s")
    stream = recorder.stream()
    samples = num_samples(num_frames)
    assert violations(stream, frames=num_frames, samples=samples) == []

    final = (tmp_path / "artifacts" / "final.mp4").read_bytes()
    assert (tmp_path / "artifacts" / "stream.mp4").read_bytes() == stream
    for name, data in (("stream.mp4", stream), ("final.mp4", final)):
        video, audio = ffprobe(tmp_path / "artifacts" / name)
        found = video["codec_name"], video["profile"], video["width"], video["height"]
        assert found == ("h264", "High", width, height)
        assert (video["color_space"], video["color_range"]) == ("bt709", "tv")
        assert video["nb_read_frames"] == str(num_frames)
        assert (video["has_b_frames"], video["avg_frame_rate"]) == (0, "24/1")
        assert (video["time_base"], video["start_pts"], video["duration_ts"]) == ("1/96000", 0, 4000 * num_frames)
        assert (audio["time_base"], audio["start_pts"] + audio["duration_ts"]) == ("1/32000", samples)
        assert (audio["codec_name"], audio["profile"]) == ("aac", "LC")
        assert recorder.starts[0].mime_type == f'video/mp4; codecs="avc1.6400{video["level"]:02x},mp4a.40.2"'
        assert audio["nb_read_packets"] == str(-(-(samples + 1024) // 1024))
        assert declared_samples(data) == samples
        assert 0 <= decode_sound(data).shape[1] - samples < 1024  # the last AAC frame is padded to its length
    # The same pictures, not encoded again.
    assert all(np.array_equal(a, b) for a, b in zip(decode_pictures(stream), decode_pictures(final), strict=True))


@pytest.mark.parametrize(("num_frames", "bound"), [(22, 0), (39, 17), (192, 170)])
def test_chunks_leave_when_the_emission_table_says(worker: VaeWorker, num_frames: int, bound: int) -> None:
    """The bound is geometric: a decode needs two latents of the next chunk. All else leaves with the last chunk."""
    recorder = run_clip(worker, make_clip(num_frames, 32, 32), "s")
    chunks = chunk_table(num_frames)
    out = [0] * len(chunks)
    sound = [0] * len(chunks)
    for fragment in recorder.fragments:
        for chunk in range(fragment.chunk_index, len(chunks)):
            out[chunk] += fragment.media.num_frames
            sound[chunk] = fragment.media.num_samples_total
    assert tuple(out) == emission_table(num_frames)
    assert out[-2:] == [bound, num_frames]
    # Sound leaves with every chunk's pictures, up to their end; the rest comes with the last.
    assert all(samples >= samples_for_frames(frames) for frames, samples in zip(out[:-1], sound, strict=False))
    assert sound[-1] == num_samples(num_frames)


def test_sound_is_decoded_with_every_chunk_as_the_margin_allows(
    worker: VaeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """17 latents wait for what follows them, never a block of 28 more."""
    decoded: list[int] = []
    push = AudioStream.push

    def noted(stream: AudioStream, latents: torch.Tensor) -> torch.Tensor:
        waveform = push(stream, latents)
        decoded.append(waveform.shape[1] // SAMPLES_PER_AUDIO_LATENT)
        return waveform

    monkeypatch.setattr(AudioStream, "push", noted)
    run_clip(worker, make_clip(73, 32, 32), "s")
    available = [chunk.audio_stop for chunk in chunk_table(73)]
    assert list(itertools.accumulate(decoded)) == [*(stop - AUDIO_MARGIN_LATENTS for stop in available[:-1]), 122]
    assert available[-1] == num_audio_latents(73) == 122


def test_fragments_are_numbered_joined_and_keyed(worker: VaeWorker) -> None:
    recorder = run_clip(worker, make_clip(39, 64, 64), "s")
    assert recorder.media[0] == recorder.starts[0]
    assert len(recorder.starts) == 1
    found = [
        (f.chunk_index, f.media.fragment_index, f.media.start_ticks, f.media.duration_ticks, f.media.first_frame)
        for f in recorder.fragments
    ]
    assert found == [(1, 0, 0, 68_000, 0), (2, 1, 68_000, 68_000, 17), (2, 2, 136_000, 20_000, 34)]
    assert all(f.media.is_keyframe for f in recorder.fragments)
    sound = [f.media.num_samples_total for f in recorder.fragments]
    # Sound reaches the end of the pictures, by less than one AAC frame more, and in the end all of it is there.
    for fragment, total in zip(recorder.fragments[:-1], sound, strict=False):
        end = fragment.media.start_ticks + fragment.media.duration_ticks
        assert 0 <= 3 * total - end < 3 * 1024
    assert sound[-1] == num_samples(39)


def test_every_prefix_plays(worker: VaeWorker) -> None:
    recorder = run_clip(worker, make_clip(73, 64, 64), "s")
    frames = 0
    for count in range(1, len(recorder.fragments) + 1):
        frames += recorder.fragments[count - 1].media.num_frames
        prefix = recorder.stream(count)
        assert violations(prefix, frames=frames) == []
        assert decode_sound(prefix).shape[1] >= recorder.fragments[count - 1].media.num_samples_total


def test_a_late_viewer_can_start_at_any_chunk(worker: VaeWorker) -> None:
    """Pictures and sound keep their times: the whole clip's, behind a beginning that was never fetched."""
    recorder = run_clip(worker, make_clip(73, 32, 64), "s")
    whole = decode_pictures(recorder.stream())
    for first in range(1, 5):
        late = recorder.starts[0].data + b"".join(f.media.data for f in recorder.fragments[first:])
        found = decode_pictures(late)
        assert len(found) == 73 - 17 * first
        assert all(np.array_equal(a, b) for a, b in zip(found, whole[17 * first :], strict=True))
        times: dict[str, list[int]] = {"video": [], "audio": []}
        with av.open(io.BytesIO(late)) as container:
            for packet in container.demux():
                if packet.pts is not None:
                    times[packet.stream.type].append(packet.pts)
        assert times["video"] == [4000 * i for i in range(17 * first, 73)]
        # Sound begins beside the first picture, by less than one AAC frame.
        assert 0 <= 3 * times["audio"][0] - 68_000 * first < 3 * 1024


def test_the_mime_type_is_that_of_the_boxes(worker: VaeWorker) -> None:
    recorder = run_clip(worker, make_clip(22, 64, 64), "s")
    video, audio = read_movie(recorder.stream()).tracks.values()
    start = recorder.starts[0]
    assert start.mime_type == f'video/mp4; codecs="{video.codec},{audio.codec}"'
    assert video.codec.startswith("avc1.64")
    assert audio.codec == "mp4a.40.2"
    assert (start.video_encoder, start.audio_encoder) == ("libx264", "aac")


def test_the_same_latents_give_the_same_bytes(worker: VaeWorker, tmp_path: Path) -> None:
    runs: list[Recorder] = []
    for name in ("a", "b"):
        runs.append(run_clip(worker, make_clip(39, 64, 64), name, tmp_path / name))
        worker.finish(name)
    assert runs[0].media == runs[1].media
    assert (tmp_path / "a/final.mp4").read_bytes() == (tmp_path / "b/final.mp4").read_bytes()


def test_fragments_of_noise_fit_into_messages(worker: VaeWorker) -> None:
    recorder = run_clip(worker, make_clip(22, 512, 288), "s")
    sizes = [len(f.media.data) for f in recorder.fragments]
    assert max(sizes) > 100_000  # noise: as large as fragments get
    assert max(sizes) < MAX_MESSAGE_BYTES - 65_536


def test_a_stream_muxed_with_the_usual_flags_would_be_found_out(tmp_path: Path) -> None:
    """Guards the judge: FFmpeg's muxer with one fragment a frame puts pictures at wrong times once there is sound."""
    path = tmp_path / "wrong.mp4"
    with av.open(str(path), "w", options={"movflags": "frag_every_frame+empty_moov+default_base_moof"}) as container:
        video, audio = container.add_stream("libx264", rate=24), container.add_stream("aac", rate=32_000)
        video.width = video.height = 64
        video.pix_fmt = "yuv420p"
        for i in range(20):
            container.mux(video.encode(av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8))))
            silence = av.AudioFrame.from_ndarray(np.zeros((2, 1333), np.float32), format="fltp", layout="stereo")
            silence.sample_rate, silence.pts = 32_000, 1333 * i
            container.mux(audio.encode(silence))
        container.mux(video.encode(None))
        container.mux(audio.encode(None))
    assert violations(path.read_bytes(), frames=20)
