from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from core.artifacts import WORKER_ARTIFACTS
from h3stream.errors import ConfigError, DeviceMemoryError, InvalidRequestError, MuxError, PhaseError, UnsupportedError
from services.common.ledger import read_ledger
from services.common.verbs import VerbCancelled
from services.vae.config import VaeConfig
from services.vae.media.boxes import Packet
from services.vae.media.encoders import H264Encoder
from services.vae.worker import StreamFailure, VaeWorker
from tests.unit.services.vae.harness import Recorder, latents, make_clip, run_clip
from tests.vae_layouts import lend_config, write_vae

CLIP = make_clip(22, 64, 64)


def never() -> bool:
    return False


def decode(worker: VaeWorker, session_id: str, chunk_index: int, cancelled: Callable[[], bool] = never) -> Recorder:
    recorder = Recorder()
    worker.decode_chunk(
        session_id, chunk_index, *latents(worker, session_id, chunk_index), recorder.media.append, cancelled
    )
    return recorder


def test_files_of_other_layouts_replace_those_of_the_model_directory(model_directory: Path, tmp_path: Path) -> None:
    video, audio = (write_vae(tmp_path, component, "comfyui") for component in ("video", "audio"))
    lender = lend_config(tmp_path / "model")
    worker = VaeWorker(VaeConfig(lender, device="cpu", video_vae=video, audio_vae=audio))
    assert [(part.component, part.layout, part.source) for part in worker.parts] == [
        ("video_vae", "comfyui", "minimax_h3_video_vae.safetensors"),
        ("audio_vae", "comfyui", "minimax_h3_audio_vae.safetensors"),
    ]
    mixed = VaeWorker(VaeConfig(model_directory, device="cpu", audio_vae=audio))
    assert [(part.component, part.layout) for part in mixed.parts] == [
        ("video_vae", "diffusers"),
        ("audio_vae", "comfyui"),
    ]
    assert mixed.weight_digests.keys() == {"video_vae/diffusion_pytorch_model.safetensors", f"audio_vae/{audio.name}"}


def test_the_first_answer_starts_the_stream_and_the_last_completes_it(worker: VaeWorker) -> None:
    worker.open_session("s", CLIP, None)
    first = decode(worker, "s", 0)
    assert len(first.starts) == 1
    assert first.fragments == []
    last = decode(worker, "s", 1)
    assert last.starts == []
    assert [fragment.media.num_frames for fragment in last.fragments] == [17, 5]


def test_repeating_the_last_chunk_gives_the_same_answer(worker: VaeWorker) -> None:
    worker.open_session("s", make_clip(39, 64, 32), None)
    for chunk_index in range(3):
        first = decode(worker, "s", chunk_index)
        worker.weights.leave()  # nothing is decoded, so no phase is needed
        assert decode(worker, "s", chunk_index).media == first.media
        worker.weights.enter()


def test_chunks_come_in_order(worker: VaeWorker) -> None:
    worker.open_session("s", make_clip(39, 64, 32), None)
    with pytest.raises(UnsupportedError, match="chunk 1 of 's' is out of order: next is 0"):
        decode(worker, "s", 1)
    decode(worker, "s", 0)
    decode(worker, "s", 1)
    with pytest.raises(UnsupportedError, match="chunk 0 of 's' is out of order: next is 2"):
        decode(worker, "s", 0)
    with pytest.raises(InvalidRequestError, match="chunk_index is 3; the clip has chunks 0 to 2"):
        decode(worker, "s", 3)


def test_decoding_needs_the_phase_and_can_then_go_on(worker: VaeWorker) -> None:
    worker.weights.leave()
    worker.open_session("s", CLIP, None)
    with pytest.raises(UnsupportedError, match="enter the phase first"):
        decode(worker, "s", 0)
    worker.weights.enter()
    assert decode(worker, "s", 0).starts


def test_leaving_the_phase_between_chunks_changes_nothing(worker: VaeWorker) -> None:
    expected = run_clip(worker, CLIP, "whole")
    worker.open_session("s", CLIP, None)
    found = Recorder()
    for chunk_index in (0, 1):
        found.media += decode(worker, "s", chunk_index).media
        worker.weights.leave()
        worker.weights.enter()
    assert found.media == expected.media


def test_two_sessions_do_not_disturb_each_other(worker: VaeWorker) -> None:
    expected = run_clip(worker, CLIP, "alone")
    found = Recorder(), Recorder()
    for name in "ab":
        worker.open_session(name, CLIP, None)
    for chunk_index in (0, 1):
        for name, recorder in zip("ab", found, strict=True):
            recorder.media += decode(worker, name, chunk_index).media
    assert found[0].media == found[1].media == expected.media
    assert worker.session_ids() == ["alone", "a", "b"]


def test_latents_of_another_shape_are_refused_and_cost_nothing(worker: VaeWorker) -> None:
    worker.open_session("s", CLIP, None)
    video, audio = latents(worker, "s", 0)
    with pytest.raises(InvalidRequestError, match="the latents of chunk 0 have shapes"):
        worker.decode_chunk("s", 0, video[..., :-1], audio, print, never)
    assert decode(worker, "s", 0).starts


def test_latents_that_are_no_numbers_fail_the_chunk(worker: VaeWorker) -> None:
    worker.open_session("s", make_clip(39, 64, 32), None)
    decode(worker, "s", 0)
    video, audio = latents(worker, "s", 1)
    with pytest.raises(PhaseError, match="video decoder returned values that are not numbers"):
        worker.decode_chunk("s", 1, torch.full_like(video, math.nan), audio, print, never)
    worker.open_session("t", make_clip(39, 64, 32), None)
    decode(worker, "t", 0)
    with pytest.raises(PhaseError, match="audio decoder returned values that are not numbers"):
        worker.decode_chunk("t", 1, video, torch.full_like(audio, math.nan), print, never)


def test_a_call_cancelled_before_it_began_leaves_the_session_good(worker: VaeWorker) -> None:
    worker.open_session("s", CLIP, None)
    with pytest.raises(VerbCancelled):
        decode(worker, "s", 0, cancelled=lambda: True)
    assert decode(worker, "s", 0).starts


@pytest.mark.parametrize("polls", [1, 2, 5, 17])
def test_a_call_cancelled_half_way_ends_the_session(worker: VaeWorker, tmp_path: Path, polls: int) -> None:
    left = polls

    def cancelled() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    worker.open_session("s", CLIP, tmp_path)
    decode(worker, "s", 0)
    with pytest.raises(VerbCancelled):
        decode(worker, "s", 1, cancelled)
    assert left == -1  # stopped at the first poll that said so
    with pytest.raises(UnsupportedError, match="ended half-way"):
        decode(worker, "s", 1)
    with pytest.raises(UnsupportedError, match="has decoded 1 of 2 chunks"):
        worker.finish("s")
    assert worker.close_session("s")
    assert list(tmp_path.iterdir()) == []
    # The worker itself is unharmed.
    assert len(run_clip(worker, CLIP, "next").fragments) == 2


def test_a_full_device_is_a_typed_error(worker: VaeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode_nothing(z: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    worker.open_session("s", CLIP, None)
    decode(worker, "s", 0)
    monkeypatch.setattr(worker._models.video, "decode", decode_nothing)
    with pytest.raises(DeviceMemoryError, match="chunk 1 of a 64x64 clip does not fit in memory: CUDA out of memory"):
        decode(worker, "s", 1)


def test_opening_again_changes_nothing_unless_it_is_another_clip(worker: VaeWorker, tmp_path: Path) -> None:
    worker.open_session("s", CLIP, tmp_path)
    first = decode(worker, "s", 0)
    worker.open_session("s", CLIP, tmp_path)
    assert decode(worker, "s", 0).media == first.media
    for clip, directory in ((make_clip(39, 64, 64), tmp_path), (CLIP, None)):
        with pytest.raises(InvalidRequestError, match="session 's' is open with another clip"):
            worker.open_session("s", clip, directory)


@pytest.mark.parametrize(
    ("session_id", "clip", "message"),
    [
        ("", CLIP, "session_id is empty"),
        ("s", make_clip(23, 64, 64), "23; .*17k \\+ 5"),
        ("s", make_clip(22, 48, 64), "width is 48; .*multiple of 32"),
        ("s", make_clip(22, 64, 0), "height is 0; "),
        ("s", make_clip(22, 1376, 800), "1100800.*1056768|1056768.*1100800"),
    ],
)
def test_clips_that_cannot_be_are_refused(worker: VaeWorker, session_id: str, clip: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        worker.open_session(session_id, clip, None)  # type: ignore[arg-type]
    assert worker.session_ids() == []


def test_finishing_needs_every_chunk_and_repeats_its_answer(worker: VaeWorker, tmp_path: Path) -> None:
    worker.open_session("s", CLIP, tmp_path)
    decode(worker, "s", 0)
    with pytest.raises(UnsupportedError, match="has decoded 1 of 2 chunks"):
        worker.finish("s")
    decode(worker, "s", 1)
    worker.weights.leave()  # finishing needs no phase
    finished = worker.finish("s")
    assert worker.finish("s") == finished
    assert {file.name for file in finished.artifacts} == WORKER_ARTIFACTS.keys()
    assert finished.failures == []


def test_the_sound_report_is_that_of_the_whole_waveform(worker: VaeWorker) -> None:
    run_clip(worker, CLIP, "s")
    report = worker.finish("s").sound
    audio = torch.cat([latents(worker, "s", chunk_index)[1] for chunk_index in (0, 1)], dim=3)
    statistics = worker._models.audio_statistics
    mean, std = (torch.tensor(values).view(1, -1, 1) for values in (statistics.mean, statistics.std))
    with torch.inference_mode():
        wave = worker._models.audio.decode(audio[0].transpose(0, 1) * std + mean).sample.double()
    assert report.std == pytest.approx(float(wave.std()), abs=1e-6)
    assert report.peak == pytest.approx(float(wave.abs().max()), abs=3e-6)
    assert report.dc_offset == pytest.approx(float(wave.mean()), abs=1e-6)
    assert report.normalisation_divisor == max(1.0, 5 * report.std)


def test_sessions_without_a_directory_leave_no_files(worker: VaeWorker) -> None:
    run_clip(worker, CLIP, "s")
    assert worker.finish("s").artifacts == []


def test_closing_removes_what_is_not_complete(worker: VaeWorker, tmp_path: Path) -> None:
    worker.open_session("unfinished", CLIP, tmp_path / "a")
    decode(worker, "unfinished", 0)
    assert any((tmp_path / "a").iterdir())
    run_clip(worker, CLIP, "finished", tmp_path / "b")
    worker.finish("finished")
    assert worker.close_session("unfinished")
    assert worker.close_session("finished")
    assert not worker.close_session("finished")
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*")} == {
        f"b/{name}" for name in WORKER_ARTIFACTS
    }
    with pytest.raises(UnsupportedError, match="session 'finished' is not open"):
        worker.finish("finished")


def test_phases_are_recorded_in_the_ledger(model_directory: Path, tmp_path: Path) -> None:
    config = VaeConfig(model_directory, device="cpu", ledger=tmp_path / "ledger", preview_map_cache=tmp_path / "maps")
    first = VaeWorker(config)  # whose map of stills takes a phase of its own
    worker = VaeWorker(config)
    assert worker.preview_map == first.preview_map is not None
    worker.weights.enter()
    worker.weights.leave()
    assert [(entry.worker, entry.event) for entry in read_ledger(tmp_path / "ledger")] == [
        ("vae", "enter"),
        ("vae", "leave"),
    ] * 2


def test_only_the_artifacts_that_are_named_are_written(worker: VaeWorker, tmp_path: Path) -> None:
    names = ("audio.flac", "provenance.json")  # the other is none of the worker's
    worker.open_session("s", CLIP, tmp_path, names)
    for chunk_index in (0, 1):
        decode(worker, "s", chunk_index)
    assert [file.name for file in worker.finish("s").artifacts] == ["audio.flac"]
    assert [path.name for path in tmp_path.iterdir()] == ["audio.flac"]


def test_without_an_encoder_there_is_no_stream_and_all_that_is_lossless(model_directory: Path, tmp_path: Path) -> None:
    worker = VaeWorker(VaeConfig(model_directory, device="cpu", video_encoder="none"))
    worker.weights.enter()
    failure = worker.open_session("s", CLIP, tmp_path)
    assert failure.startswith("the H.264 encoder 'none' is not known")
    assert run_clip(worker, CLIP, "s", tmp_path).media == []
    finished = worker.finish("s")
    assert worker.open_session("s", CLIP, tmp_path) == failure
    assert [file.name for file in finished.artifacts] == ["frames.mkv", "audio.flac", "latents.safetensors"]
    assert {failure.name for failure in finished.failures} == {"stream.mp4", "final.mp4"}
    assert all(given_up.message.endswith(failure) for given_up in finished.failures)


def test_an_encoder_that_fails_half_way_ends_the_stream_alone(
    worker: VaeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = make_clip(56, 64, 64)
    whole = run_clip(worker, clip, "whole", tmp_path / "whole")
    expected = {file.name: file for file in worker.finish("whole").artifacts}
    encode = H264Encoder.encode

    def fail_at_20(encoder: H264Encoder, rgb: npt.NDArray[np.uint8]) -> Packet:
        if encoder._num_frames == 20:
            raise MuxError("the encoder is out of order")
        return encode(encoder, rgb)

    monkeypatch.setattr(H264Encoder, "encode", fail_at_20)
    broken = run_clip(worker, clip, "broken", tmp_path / "broken")
    *sent, end = broken.media
    assert sent == whole.media[: len(sent)], "what was sent before is the stream's beginning"
    assert end == StreamFailure("the encoder is out of order")
    assert sum(fragment.media.num_frames for fragment in broken.fragments) == 17
    finished = worker.finish("broken")
    assert finished.artifacts == [expected[name] for name in ("frames.mkv", "audio.flac", "latents.safetensors")]
    assert {failure.name for failure in finished.failures} == {"stream.mp4", "final.mp4"}
    assert {path.name for path in (tmp_path / "broken").iterdir()} == {file.name for file in finished.artifacts}


@pytest.mark.parametrize("name", WORKER_ARTIFACTS)
def test_an_artifact_that_cannot_be_written_is_given_up_alone(worker: VaeWorker, tmp_path: Path, name: str) -> None:
    """Its device is full: at the first write, or when what was buffered goes out."""
    whole = run_clip(worker, CLIP, "whole", tmp_path / "whole")
    expected = [file for file in worker.finish("whole").artifacts if file.name != name]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / f".{name}.part").symlink_to("/dev/full")
    assert run_clip(worker, CLIP, "full", tmp_path / "full").media == whole.media
    finished = worker.finish("full")
    assert finished.artifacts == expected
    (failure,) = finished.failures
    assert (failure.name, failure.message) == (name, f"{name} cannot be written: No space left on device")
    assert {path.name for path in (tmp_path / "full").iterdir()} == {file.name for file in expected}


def replace_by_a_file(directory: Path, patch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(directory)
    directory.write_bytes(b"")


def make_immutable(directory: Path, patch: pytest.MonkeyPatch) -> None:
    """Open files can be written, names neither made nor removed: what `chattr +i` does, to root also."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    for name in ("unlink", "replace"):
        patch.setattr(os, name, refuse)


@pytest.mark.parametrize("spoil", [replace_by_a_file, make_immutable])
@pytest.mark.parametrize("num_decoded", [0, 1, 2])
def test_a_directory_that_can_be_changed_no_more_costs_the_artifacts_alone(
    worker: VaeWorker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    num_decoded: int,
) -> None:
    whole = run_clip(worker, CLIP, "whole")
    directory, recorder = tmp_path / "job", Recorder()
    worker.open_session("s", CLIP, directory)
    with monkeypatch.context() as patch:
        for chunk_index in (0, 1):
            if chunk_index == num_decoded:
                spoil(directory, patch)
            tensors = latents(worker, "s", chunk_index)
            worker.decode_chunk("s", chunk_index, *tensors, recorder.media.append, never)
        if num_decoded == 2:
            spoil(directory, patch)
        assert recorder.media == whole.media
        finished = worker.finish("s")
        assert finished.artifacts == []
        assert {failure.name for failure in finished.failures} == set(WORKER_ARTIFACTS)
        assert worker.close_session("s")


def test_a_directory_that_is_none_costs_the_artifacts_alone(worker: VaeWorker, tmp_path: Path) -> None:
    (tmp_path / "job").write_bytes(b"")
    assert run_clip(worker, CLIP, "s", tmp_path / "job").media == run_clip(worker, CLIP, "whole").media
    finished = worker.finish("s")
    assert finished.artifacts == []
    assert {failure.name for failure in finished.failures} == set(WORKER_ARTIFACTS)


def test_settings_are_checked(model_directory: Path) -> None:
    with pytest.raises(ConfigError, match="video_dtype is 'float64'; it must be one of auto, float32, float16"):
        VaeConfig(model_directory, video_dtype="float64")
    with pytest.raises(ConfigError, match="video_bit_rate is 1; it must be 100000 to 100000000"):
        VaeConfig(model_directory, video_bit_rate=1)
