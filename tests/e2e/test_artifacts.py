"""What a whole service leaves of a clip: every artifact, fetched through the SDK, agrees with the stream and itself."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import av
import numpy as np
from safetensors import safe_open

from core.artifacts import ARTIFACTS, DEFAULT_ARTIFACTS
from core.geometry import num_samples
from h3stream import Client
from h3stream.events import Completed, Fragment
from tests.e2e.conftest import Server
from tests.job_logs import JOB_FILES


def test_every_artifact_agrees_with_the_stream(server: Server, tmp_path: Path) -> None:
    with Client(server.address) as client:
        events = list(
            client.generate("a fox in the snow", num_frames=39, width=96, height=64, seed=3, artifacts=tuple(ARTIFACTS))
        )
        done = events[-1]
        assert isinstance(done, Completed)
        assert {artifact.name for artifact in done.artifacts} == set(ARTIFACTS)
        assert client.job(done.job_id).artifacts == done.artifacts
        for artifact in done.artifacts:
            assert client.download(done.job_id, artifact.name, tmp_path / artifact.name) == artifact
    left = {path.name for path in (server.data / "jobs" / done.job_id).iterdir()}
    assert left == {*JOB_FILES, *ARTIFACTS}, "nothing but what is listed"

    assert (tmp_path / "stream.mp4").read_bytes() == b"".join(event.media for event in events)

    with av.open(tmp_path / "frames.mkv") as lossless, av.open(tmp_path / "final.mp4") as lossy:
        exact = [frame.to_ndarray(format="rgb24") for frame in lossless.decode(video=0)]
        coded = [frame.to_ndarray(format="rgb24") for frame in lossy.decode(video=0)]
    assert [frame.shape for frame in exact] == [(64, 96, 3)] * 39
    differences = [float(np.abs(a.astype(int) - b).mean()) for a, b in zip(exact, coded, strict=True)]
    others = [float(np.abs(a.astype(int) - b).mean()) for a, b in zip(exact, reversed(coded), strict=True)]
    print(f"mean difference to final.mp4: {max(differences):.1f} levels (reversed: {max(others):.1f})")
    assert np.mean(differences) < np.mean(others), "the same frames in the same order"

    with av.open(tmp_path / "audio.flac") as sound:
        waveform = np.concatenate([frame.to_ndarray().reshape(-1, 2) for frame in sound.decode(audio=0)]).T / 2.0**31
    assert waveform.shape == (2, num_samples(39))
    assert abs(float(np.abs(waveform).max()) - min(done.audio_health.peak, 1.0)) < 1e-6

    with safe_open(tmp_path / "latents.safetensors", "np") as latents:
        video, audio = latents.get_tensor("video"), latents.get_tensor("audio")
    assert (video.shape, audio.shape) == ((1, 24, 12, 4, 6), (1, 32, 2, 65))
    chunks = json.loads((tmp_path / "timeline.json").read_text())["chunks"]
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(video[:, :, chunk["video_start"] : chunk["video_stop"]].tobytes())
        digest.update(audio[..., chunk["audio_start"] : chunk["audio_stop"]].tobytes())
    assert digest.hexdigest() == done.latents_sha256, "what was sampled, chunk by chunk"

    told = json.loads((tmp_path / "provenance.json").read_text())
    assert told["plan"]["clip"]["seed"] == "3"
    assert all(worker["weight_digests"] for worker in told["workers"].values())
    assert sum(isinstance(event, Fragment) for event in events) == len(
        json.loads((tmp_path / "timeline.json").read_text())["fragments"]
    )


def test_frames_are_kept_on_request_only(server: Server) -> None:
    with Client(server.address) as client:
        info = client.server_info()
    assert info.artifacts == tuple(ARTIFACTS)
    assert info.default_artifacts == DEFAULT_ARTIFACTS
    assert "frames.mkv" not in info.default_artifacts
