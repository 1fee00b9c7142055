"""What a job writes down of itself beside its clip."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from core.schedule import dense_sigmas, shifted_sigmas
from h3stream.v1 import types_pb2, video_pb2
from orchestrator import provenance
from tests.service.conftest import CLIP, Service


def read(service: Service, events: list[video_pb2.Event], name: str) -> Any:
    (artifact,) = [artifact for artifact in events[-1].completed.artifacts if artifact.name == name]
    data = (service.data / artifact.relative_path).read_bytes()
    assert (artifact.size_bytes, artifact.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert artifact.media_type == "application/json"
    return json.loads(data)


async def test_the_timeline_says_when_phases_began_and_fragments_left(service: Service) -> None:
    events = await service.generate(num_frames=73)
    timeline = read(service, events, "timeline.json")
    fragments = [event for event in events if event.HasField("fragment")]
    phases = [event for event in events if event.HasField("phase")]
    assert [entry["seq"] for entry in timeline["fragments"]] == [event.seq for event in fragments]
    assert [entry["seq"] for entry in timeline["phases"]] == [event.seq for event in phases]
    for entry, event in zip(timeline["fragments"], fragments, strict=True):
        assert entry["num_bytes"] == len(event.fragment.data)
        for name in ("chunk_index", "start_ticks", "duration_ticks", "first_frame", "num_frames", "num_samples_total"):
            assert entry[name] == getattr(event.fragment, name)
    assert timeline["phases"][-1]["phase"] == "finish"
    times = [entry["time_s"] for entry in sorted(timeline["phases"] + timeline["fragments"], key=lambda e: e["seq"])]
    assert times == sorted(times)
    assert times[0] >= 0
    assert [chunk["num_frames_emitted"] for chunk in timeline["chunks"]] == [
        chunk.num_frames_emitted for chunk in events[0].accepted.plan.chunks
    ]


@pytest.mark.parametrize("mode", ["streaming", "dense"])
async def test_the_provenance_says_all_that_it_takes_to_make_the_clip_again(service: Service, mode: str) -> None:
    wanted: dict[str, Any] = {"seed": 2**60 + 1, "steps": 3, "adapters": [types_pb2.AdapterChoice(name="turbo")]}
    if mode == "dense":
        wanted["mode"] = types_pb2.SAMPLING_MODE_DENSE
    events = await service.generate("a fox ≠ a bear", **wanted)
    told = read(service, events, "provenance.json")
    assert told["prompt"] == told["request"]["prompt"] == "a fox ≠ a bear"
    assert told["plan"]["clip"]["seed"] == str(2**60 + 1)
    assert told["plan"]["clip"]["num_frames"] == CLIP.num_frames
    grid = dense_sigmas if mode == "dense" else shifted_sigmas
    assert told["sigmas"] == {"video": list(grid(3, 12.0)), "audio": list(grid(3, 3.0))}
    assert told["kv_storage"] == ("" if mode == "dense" else "KV_STORAGE_GPU")
    assert told["workers"].keys() == {"text_encoder", "dit", "vae"}
    assert told["residency"] == "exclusive"
    assert all(worker["kernels"] and worker["peak_host_bytes"] > 0 for worker in told["workers"].values())
    assert told["workers"]["dit"]["weight_digests"] == {"dit/model.safetensors": "00" * 32}
    names = {"turbo"} if mode == "dense" else {"turbo", "raven"}
    assert {adapter["name"] for adapter in told["workers"]["dit"]["adapters"]} == names
    completed = events[-1].completed
    assert told["result"]["latents_sha256"] == completed.latents_sha256
    assert told["result"]["audio_health"]["peak"] == pytest.approx(0.5)
    assert {(a["name"], a["sha256"]) for a in told["result"]["artifacts"]} == {
        (a.name, a.sha256) for a in completed.artifacts if a.name != "provenance.json"
    }


async def test_one_that_cannot_be_written_is_told_and_the_job_succeeds(service: Service) -> None:
    original = provenance.write_json

    def into_full(directory: Any, name: str, content: Any) -> Any:
        if name == "timeline.json":
            (directory / ".timeline.json.part").symlink_to("/dev/full")
        return original(directory, name, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "write_json", into_full)
        events = await service.generate()
    (message,) = [e.warning.message for e in events if e.warning.reason == "ARTIFACT_FAILED"]
    assert message == "artifact timeline.json was given up: timeline.json cannot be written: No space left on device"
    names = {artifact.name for artifact in events[-1].completed.artifacts}
    assert "provenance.json" in names
    assert "timeline.json" not in names
    assert not list((service.data / "jobs").glob("*/.*"))
