"""A refined sound in one call: rendition, artifacts and measurements, whatever fails on the way."""

from __future__ import annotations

import gc
import hashlib
import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from core.artifacts import REFINED_ARTIFACTS
from core.geometry import SAMPLE_RATE, chunk_table, num_samples
from h3stream.errors import DeviceMemoryError, InvalidRequestError, MuxError, PhaseError, UnsupportedError
from services.common.verbs import VerbCancelled
from services.vae.artifacts.base import Artifact
from services.vae.audio_stream import AudioStream
from services.vae.media.boxes import Packet
from services.vae.media.encoders import AacEncoder
from services.vae.refined import DecodedSound, RefinedSound
from services.vae.worker import Media, VaeWorker
from tests.tools.check_fmp4 import boxes, violations
from tests.unit.services.vae.harness import Recorder, decode_sound, latents, make_clip, run_clip
from tests.unit.services.vae.test_stream import ffprobe

CLIP = make_clip(39, 64, 64)
NUM_SAMPLES = num_samples(39)
ALL = frozenset(REFINED_ARTIFACTS)


@dataclass(frozen=True)
class Source:
    """A finished clip."""

    directory: Path
    audio: torch.Tensor
    video: torch.Tensor

    def read(self, name: str) -> bytes:
        return (self.directory / name).read_bytes()


@pytest.fixture(scope="module")
def source(loaded_worker: VaeWorker, tmp_path_factory: pytest.TempPathFactory) -> Source:
    directory = tmp_path_factory.mktemp("source")
    loaded_worker.weights.enter()
    run_clip(loaded_worker, CLIP, "source", directory)
    loaded_worker.finish("source")
    pieces = [latents(loaded_worker, "source", chunk.index) for chunk in chunk_table(CLIP.num_frames)]
    loaded_worker.close_session("source")
    loaded_worker.weights.leave()
    video, audio = (torch.cat(parts, dim) for parts, dim in zip(zip(*pieces, strict=True), (2, 3), strict=True))
    return Source(directory, audio, video)


@dataclass
class Made:
    """What a call gave."""

    media: list[Media] = field(default_factory=list)
    result: DecodedSound | None = None

    @property
    def stream(self) -> bytes:
        return Recorder(self.media).stream()

    @property
    def finished(self) -> DecodedSound:
        assert self.result is not None
        return self.result


def order(source: Source, directory: Path | None, **changes: Any) -> RefinedSound:
    """An order of everything, for a sound that is not the source's."""
    generator = torch.Generator().manual_seed(99)
    made = RefinedSound(
        clip=CLIP,
        artifact_directory=directory,
        artifacts=ALL,
        video_file=source.directory / "final.mp4",
        latents_file=source.directory / "latents.safetensors",
        audio=torch.randn(source.audio.shape, generator=generator),
        audio_before=source.audio,
        exact_audio=None,
    )
    return replace(made, **changes)


def decode(worker: VaeWorker, wanted: RefinedSound, cancelled: Callable[[], bool] = lambda: False) -> Made:
    made = Made()
    made.result = worker.decode_audio(wanted, made.media.append, cancelled)
    return made


@pytest.fixture
def quick(worker: VaeWorker, monkeypatch: pytest.MonkeyPatch) -> VaeWorker:
    """A worker whose audio decoder takes no time: each latent's channels become every 25th sample."""

    def play(z: torch.Tensor) -> SimpleNamespace:  # [2, 32, a]
        sample = torch.zeros(2, 1, z.shape[2] * 32, 25)
        sample[:, 0, :, 0] = z.transpose(1, 2).reshape(2, -1)
        return SimpleNamespace(sample=sample.reshape(2, 1, -1))

    monkeypatch.setattr(worker._models.audio, "decode", play)
    return worker


def record(quick: VaeWorker, pcm: npt.NDArray[Any]) -> torch.Tensor:
    """The latents that `quick` decodes to every 25th sample of a sound `[2, S]`."""
    mean, std = audio_scale(quick)
    kept = torch.from_numpy(np.asarray(pcm[:, ::25], np.float32))
    return ((kept.reshape(2, -1, 32).transpose(1, 2) - mean) / std).transpose(0, 1)[None]


def audio_scale(worker: VaeWorker) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of the audio latents, `[1, 32, 1]`."""
    statistics = worker._models.audio_statistics
    mean, std = (torch.tensor(values).view(1, -1, 1) for values in (statistics.mean, statistics.std))
    return mean, std


def read_flac(path: Path) -> npt.NDArray[np.float64]:
    with av.open(str(path)) as container:
        pieces = [frame.to_ndarray().reshape(-1, 2) for frame in container.decode(audio=0)]
    return np.concatenate(pieces).T / 2.0**31


def test_the_sound_of_the_clip_itself_gives_the_files_of_the_clip(
    worker: VaeWorker, source: Source, tmp_path: Path
) -> None:
    """Bit for bit: the same decodes, the same normalisation, the same pictures."""
    made = decode(worker, order(source, tmp_path, audio=source.audio))
    assert [file.name for file in made.finished.artifacts] == list(REFINED_ARTIFACTS)
    assert (made.finished.failures, made.finished.stream_failure) == ([], "")
    assert (tmp_path / "refined.mp4").read_bytes() == source.read("final.mp4")
    assert (tmp_path / "refined.flac").read_bytes() == source.read("audio.flac")
    assert made.finished.change.log_mel_db == 0
    assert made.finished.change.rms_ratio == 1
    assert made.finished.sound == made.finished.sound_before
    assert {path.name for path in tmp_path.iterdir()} == ALL


def test_artifacts_are_what_is_told_of_them(quick: VaeWorker, source: Source, tmp_path: Path) -> None:
    for file in decode(quick, order(source, tmp_path)).finished.artifacts:
        data = (tmp_path / file.name).read_bytes()
        assert (file.size_bytes, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
        assert file.media_type == REFINED_ARTIFACTS[file.name]


def test_the_rendition_holds_the_sound_alone_and_all_of_it(quick: VaeWorker, source: Source, tmp_path: Path) -> None:
    made = decode(quick, order(source, None))
    recorder = Recorder(made.media)
    (start,) = recorder.starts
    assert made.media[0] == start
    assert (start.mime_type, start.video_encoder, start.audio_encoder) == ('audio/mp4; codecs="mp4a.40.2"', "", "aac")
    assert violations(made.stream, frames=0, samples=NUM_SAMPLES) == []
    found = [
        (f.chunk_index, f.media.fragment_index, f.media.first_frame, f.media.num_frames) for f in recorder.fragments
    ]
    assert found == [(-1, 0, 0, 0), (-1, 1, 0, 0), (-1, 2, 0, 0)]
    assert all(f.media.is_keyframe for f in recorder.fragments)
    assert recorder.fragments[-1].media.num_samples_total == NUM_SAMPLES
    last = recorder.fragments[-1].media
    assert last.start_ticks + last.duration_ticks == 3 * NUM_SAMPLES
    (tmp_path / "rendition.mp4").write_bytes(made.stream)
    (audio,) = ffprobe(tmp_path / "rendition.mp4")
    assert (audio["codec_name"], audio["profile"], audio["time_base"]) == ("aac", "LC", "1/32000")
    assert audio["start_pts"] + audio["duration_ts"] == NUM_SAMPLES
    assert audio["nb_read_packets"] == str(-(-(NUM_SAMPLES + 1024) // 1024))


def test_fragments_leave_before_the_last_latents_are_decoded(
    quick: VaeWorker, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made()
    sent_before: list[int] = []
    push = AudioStream.push

    def noted(stream: AudioStream, piece: torch.Tensor) -> torch.Tensor:
        sent_before.append(len(made.media))
        return push(stream, piece)

    monkeypatch.setattr(AudioStream, "push", noted)
    quick.decode_audio(order(source, None), made.media.append, lambda: False)
    # The start alone; then a chunk's sound waits for the decoder's margin; the sound before is decoded in the end.
    assert sent_before == [1, 1, 2, 4, 4, 4]


def test_the_sound_is_that_of_a_decode_of_the_whole_clip(worker: VaeWorker, source: Source, tmp_path: Path) -> None:
    wanted = order(source, tmp_path)
    made = decode(worker, wanted)
    mean, std = audio_scale(worker)
    with torch.inference_mode():
        wave = worker._models.audio.decode(wanted.audio[0].transpose(0, 1) * std + mean).sample[:, 0].double()
    np.testing.assert_allclose(read_flac(tmp_path / "refined.flac"), wave.clamp(-1, 1).numpy(), atol=3e-6)
    assert made.finished.sound.std == pytest.approx(float(wave.std()), abs=1e-6)
    assert made.finished.sound.peak == pytest.approx(float(wave.abs().max()), abs=3e-6)


def test_an_impulse_comes_back_within_a_millisecond(quick: VaeWorker, source: Source, tmp_path: Path) -> None:
    impulses = (175, 975, 16_000, 22_675, 30_000, 45_325, 51_500)
    pcm = np.zeros((2, NUM_SAMPLES))
    pcm[:, impulses] = 0.9
    made = decode(quick, order(source, tmp_path, audio=record(quick, pcm)))
    for kind, data in (("rendition", made.stream), ("refined.mp4", (tmp_path / "refined.mp4").read_bytes())):
        sound = np.abs(decode_sound(data)).max(axis=0)
        for impulse in impulses:
            start = max(0, impulse - 400)
            found = start + int(sound[start : impulse + 400].argmax())
            assert abs(found - impulse) <= SAMPLE_RATE // 1000, f"{kind}: impulse at {impulse} came back at {found}"
            assert sound[found] > 0.1


def packets(path: Path) -> list[tuple[bytes, Any, Any, Any, bool]]:
    with av.open(str(path)) as container:
        found = [packet for packet in container.demux(video=0) if packet.size]
        return [(bytes(p), p.pts, p.dts, p.duration, p.is_keyframe) for p in found]


def test_pictures_are_copied_and_the_file_is_as_long_as_before(
    quick: VaeWorker, source: Source, tmp_path: Path
) -> None:
    decode(quick, order(source, tmp_path))
    assert packets(tmp_path / "refined.mp4") == packets(source.directory / "final.mp4")
    data = (tmp_path / "refined.mp4").read_bytes()
    assert [kind for kind, _ in boxes(data)] == ["ftyp", "moov", "mdat"]
    before, after = (
        [(s["codec_type"], s["start_pts"], s["duration_ts"], s["nb_read_packets"]) for s in ffprobe(path)]
        for path in (source.directory / "final.mp4", tmp_path / "refined.mp4")
    )
    assert after == before
    with av.open(io.BytesIO(source.read("final.mp4"))) as first, av.open(io.BytesIO(data)) as second:
        assert first.streams.video[0].codec_context.extradata == second.streams.video[0].codec_context.extradata
        assert first.duration == second.duration


def test_a_stream_lends_its_pictures_as_a_file_does(quick: VaeWorker, source: Source, tmp_path: Path) -> None:
    wanted = order(source, tmp_path, video_file=source.directory / "stream.mp4", artifacts=frozenset({"refined.mp4"}))
    assert decode(quick, wanted).finished.failures == []
    assert packets(tmp_path / "refined.mp4") == packets(source.directory / "final.mp4")


def test_loud_sound_is_normalised_in_the_file_alone(quick: VaeWorker, source: Source, tmp_path: Path) -> None:
    pcm = np.random.default_rng(0).choice([-2.5, 2.5], (2, NUM_SAMPLES))  # every 25th sample: an RMS of 0.5
    made = decode(quick, order(source, tmp_path, audio=record(quick, pcm), audio_before=record(quick, pcm / 25)))
    assert made.finished.sound.normalisation_divisor == pytest.approx(2.5, rel=1e-3)
    assert made.finished.sound.num_clipped_samples == 2 * NUM_SAMPLES // 25
    assert made.finished.sound_before.normalisation_divisor == 1
    heard = decode_sound((tmp_path / "refined.mp4").read_bytes())[:, 2000:50_000]
    assert float(heard.std()) == pytest.approx(0.2, rel=0.1)  # AAC leaves out what is highest
    assert np.abs(read_flac(tmp_path / "refined.flac")).max() == pytest.approx(1, abs=1e-6), "as decoded, held to 1"


def test_latents_are_the_refined_sound_beside_the_very_video(quick: VaeWorker, source: Source, tmp_path: Path) -> None:
    wanted = order(source, tmp_path)
    decode(quick, wanted)
    with (
        safe_open(source.directory / "latents.safetensors", "pt") as before,
        safe_open(tmp_path / "refined-latents.safetensors", "pt") as after,
    ):
        assert torch.equal(after.get_tensor("video"), before.get_tensor("video"))
        assert torch.equal(after.get_tensor("audio"), wanted.audio)
        assert after.metadata() == before.metadata() | {"refined": "true"}


def test_the_picture_shows_every_sound_there_is(quick: VaeWorker, source: Source, tmp_path: Path) -> None:
    wanted = order(source, tmp_path, artifacts=frozenset({"refine-compare.png"}))
    heights = []
    for exact in (None, source.audio):
        decode(quick, replace(wanted, exact_audio=exact))
        with Image.open(tmp_path / "refine-compare.png") as image:
            heights.append(image.height)
    assert heights[1] == heights[0] * 3 // 2


@pytest.mark.parametrize(
    ("factor", "log_mel_db", "rms_ratio"), [(1, 0, 1), (2, 6.0206, 2), (0.1, 20, 0.1)], ids=["same", "double", "tenth"]
)
def test_distances_are_those_of_the_waveforms(
    quick: VaeWorker,
    source: Source,
    factor: float,
    log_mel_db: float,
    rms_ratio: float,
) -> None:
    pcm = np.random.default_rng(0).normal(0, 0.2, (2, NUM_SAMPLES))
    sounds = {
        "audio": record(quick, factor * pcm),
        "audio_before": record(quick, pcm),
        "exact_audio": record(quick, factor * pcm),
    }
    made = decode(quick, order(source, None, **sounds)).finished
    assert made.change.log_mel_db == pytest.approx(log_mel_db, abs=1e-2)
    assert made.change.rms_ratio == pytest.approx(rms_ratio, rel=1e-5)
    assert made.against_exact is not None
    assert (made.against_exact.log_mel_db, made.against_exact.rms_ratio) == (0, 1)


def test_silence_has_measures_too(quick: VaeWorker, source: Source) -> None:
    silence = record(quick, np.zeros((2, NUM_SAMPLES)))
    made = decode(quick, order(source, None, audio=silence, audio_before=silence)).finished
    assert made.change.log_mel_db == pytest.approx(0, abs=1e-3)
    assert made.change.rms_ratio == pytest.approx(1)
    assert made.against_exact is None


def test_a_repetition_gives_the_same_and_nothing_is_kept(quick: VaeWorker, source: Source, tmp_path: Path) -> None:
    wanted = order(source, tmp_path, exact_audio=source.audio)
    first, second = (decode(quick, wanted) for _ in range(2))
    assert first == second
    assert {path.name for path in tmp_path.iterdir()} == ALL
    gc.collect()
    assert not any(isinstance(kept, AudioStream) for kept in gc.get_objects())
    assert quick.session_ids() == []


def test_files_of_the_clip_in_the_same_directory_stay(quick: VaeWorker, source: Source) -> None:
    before = {path.name: path.read_bytes() for path in source.directory.iterdir()}
    decode(quick, order(source, source.directory))
    after = {path.name: path.read_bytes() for path in source.directory.iterdir()}
    for name in ALL:
        (source.directory / name).unlink()
    assert after.keys() == before.keys() | ALL
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize("name", REFINED_ARTIFACTS)
def test_an_artifact_that_cannot_be_written_is_given_up_alone(
    quick: VaeWorker, source: Source, tmp_path: Path, name: str
) -> None:
    whole = decode(quick, order(source, tmp_path / "whole"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / f".{name}.part").symlink_to("/dev/full")
    made = decode(quick, order(source, tmp_path / "full"))
    assert made.media == whole.media
    assert made.finished.artifacts == [file for file in whole.finished.artifacts if file.name != name]
    (failure,) = made.finished.failures
    assert (failure.name, failure.message) == (name, f"{name} cannot be written: No space left on device")
    assert {path.name for path in (tmp_path / "full").iterdir()} == ALL - {name}


def cut(path: Path, directory: Path, size: int) -> Path:
    made = directory / path.name
    made.write_bytes(path.read_bytes()[:size])
    return made


def bad_sources() -> Iterator[Any]:
    def missing(source: Source, directory: Path) -> dict[str, Path]:
        return {"video_file": directory / "final.mp4", "latents_file": directory / "latents.safetensors"}

    def cut_off(source: Source, directory: Path) -> dict[str, Path]:
        size = len(source.read("final.mp4")) * 2 // 3
        return {
            "video_file": cut(source.directory / "final.mp4", directory, size),
            "latents_file": cut(source.directory / "latents.safetensors", directory, 20_000),
        }

    def exchanged(source: Source, directory: Path) -> dict[str, Path]:
        return {"video_file": source.directory / "latents.safetensors", "latents_file": source.directory / "final.mp4"}

    def directories(source: Source, directory: Path) -> dict[str, Path]:
        return {"video_file": directory, "latents_file": directory}

    def without_pictures(source: Source, directory: Path) -> dict[str, Path]:
        return {"video_file": source.directory / "audio.flac"}

    return iter((missing, cut_off, exchanged, directories, without_pictures))


@pytest.mark.parametrize("make", bad_sources())
def test_a_source_that_is_not_what_it_should_be_fails_its_artifact_alone(
    quick: VaeWorker, source: Source, tmp_path: Path, make: Callable[[Source, Path], dict[str, Path]]
) -> None:
    (tmp_path / "bad").mkdir()
    bad = make(source, tmp_path / "bad")
    made = decode(quick, order(source, tmp_path / "made", **bad))
    assert violations(made.stream, frames=0, samples=NUM_SAMPLES) == []
    failed = {"refined.mp4"} | ({"refined-latents.safetensors"} if "latents_file" in bad else set())
    assert {failure.name for failure in made.finished.failures} == failed
    for failure in made.finished.failures:
        assert str(tmp_path) not in failure.message, "paths of the server are no caller's business"
        assert len(failure.message) > 20
    assert {path.name for path in (tmp_path / "made").iterdir()} == ALL - failed


def test_files_of_another_clip_are_told(quick: VaeWorker, source: Source, tmp_path: Path) -> None:
    shorter, smaller = make_clip(22, 64, 64), make_clip(39, 32, 64)
    for clip, picture_rule in ((shorter, "39 pictures"), (smaller, "other pictures than the clip")):
        directory = tmp_path / str(clip.num_frames)
        shape = (*source.audio.shape[:3], num_samples(clip.num_frames) // 800)
        sound = torch.randn(shape)
        made = decode(quick, order(source, directory, clip=clip, audio=sound, audio_before=sound)).finished
        messages = {failure.name: failure.message for failure in made.failures}
        assert messages.keys() == {"refined.mp4", "refined-latents.safetensors"}
        assert picture_rule in messages["refined.mp4"]
        assert "latents.safetensors holds" in messages["refined-latents.safetensors"]


def test_a_stream_that_cannot_begin_ends_alone(
    quick: VaeWorker, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(encoder: AacEncoder) -> None:
        raise MuxError("there is no encoder")

    monkeypatch.setattr(AacEncoder, "__init__", fail)
    made = decode(quick, order(source, tmp_path))
    assert made.media == []
    assert made.finished.stream_failure == "there is no encoder"
    assert [(failure.name, failure.message) for failure in made.finished.failures] == [
        ("refined.mp4", "there is no encoder")
    ]
    assert {path.name for path in tmp_path.iterdir()} == ALL - {"refined.mp4"}


def test_a_stream_that_breaks_off_ends_alone(
    quick: VaeWorker, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = decode(quick, order(source, tmp_path / "whole"))
    flush = AacEncoder.flush
    calls = iter((True,))

    def fail_once(encoder: AacEncoder) -> list[Packet]:
        if next(calls, False):
            raise MuxError("the encoder is out of order")
        return flush(encoder)

    monkeypatch.setattr(AacEncoder, "flush", fail_once)
    made = decode(quick, order(source, tmp_path / "broken"))
    assert made.finished.stream_failure == "the encoder is out of order"
    assert 1 < len(made.media) < len(whole.media)
    assert made.media == whole.media[: len(made.media)]
    assert made.finished.artifacts == whole.finished.artifacts


def test_a_cancelled_call_leaves_nothing(quick: VaeWorker, source: Source, tmp_path: Path) -> None:
    for polls in (0, 1, 3, 5, 6, 8, 46, 48, 49):
        left = polls

        def cancelled() -> bool:
            nonlocal left
            left -= 1
            return left < 0

        with pytest.raises(VerbCancelled):
            decode(quick, order(source, tmp_path), cancelled)
        assert left == -1  # stopped at the first poll that said so
        assert list(tmp_path.iterdir()) == []
    gc.collect()
    assert not any(isinstance(kept, (AudioStream, Artifact)) for kept in gc.get_objects())


def test_the_last_poll_comes_after_the_files_are_complete(quick: VaeWorker, source: Source, tmp_path: Path) -> None:
    num_files: list[int] = []

    def noted() -> bool:
        num_files.append(len([path for path in tmp_path.iterdir() if not path.name.startswith(".")]))
        return False

    decode(quick, order(source, tmp_path), noted)
    assert num_files[-2:] == [0, 4]
    assert len(num_files) == 50, "the numbers of the test above"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"audio": torch.zeros(1, 32, 2, 64)}, r"audio has the shape \(1, 32, 2, 64\), expected \(1, 32, 2, 65\)"),
        ({"audio_before": torch.zeros(1, 32, 2, 66)}, r"audio_before has the shape .*66\)"),
        ({"exact_audio": torch.zeros(1, 32, 1, 65)}, "exact_audio has the shape"),
        ({"audio": torch.full((1, 32, 2, 65), math.nan)}, "audio holds values that are not finite numbers"),
        ({"exact_audio": torch.full((1, 32, 2, 65), math.inf)}, "exact_audio holds values that are not finite"),
        ({"artifacts": frozenset({"final.mp4"})}, r"'final.mp4' is no artifact of a refined sound: refined.mp4, "),
        ({"video_file": None}, "video_file is empty; refined.mp4 needs it"),
        ({"latents_file": None}, "latents_file is empty; refined-latents.safetensors needs it"),
        ({"clip": make_clip(40, 64, 64)}, "40; .*17k \\+ 5"),
    ],
)
def test_orders_that_cannot_be_are_refused_before_anything_is_made(
    quick: VaeWorker, source: Source, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    made = Made()
    with pytest.raises(InvalidRequestError, match=message):
        quick.decode_audio(order(source, tmp_path / "made", **changes), made.media.append, lambda: False)
    assert made.media == []
    assert not (tmp_path / "made").exists()


def test_decoding_needs_the_phase(quick: VaeWorker, source: Source, tmp_path: Path) -> None:
    quick.weights.leave()
    with pytest.raises(UnsupportedError, match="enter the phase first"):
        decode(quick, order(source, tmp_path))
    quick.weights.enter()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (lambda z: SimpleNamespace(sample=torch.full((2, 1, 800 * z.shape[2]), math.nan)), PhaseError, "not numbers"),
        (torch.OutOfMemoryError("CUDA out of memory"), DeviceMemoryError, "the sound of a clip of 39 frames does not"),
    ],
)
def test_a_decoder_that_fails_fails_the_call_and_leaves_nothing(
    quick: VaeWorker,
    source: Source,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Any,
    error: type[Exception],
    message: str,
) -> None:
    def fail(z: torch.Tensor) -> Any:
        if isinstance(fault, Exception):
            raise fault
        return fault(z)

    monkeypatch.setattr(quick._models.audio, "decode", fail)
    with pytest.raises(error, match=message):
        decode(quick, order(source, tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_full", [False, True])
def test_an_ordinary_session_makes_refined_files_as_it_makes_the_others(
    worker: VaeWorker, source: Source, tmp_path: Path, is_full: bool
) -> None:
    names = ("refined.mp4", "refined.flac", "refined-latents.safetensors")
    if is_full:
        (tmp_path / ".refined.mp4.part").symlink_to("/dev/full")
    worker.open_session("s", CLIP, tmp_path, names)
    for chunk in chunk_table(CLIP.num_frames):
        worker.decode_chunk("s", chunk.index, *latents(worker, "s", chunk.index), [].append, lambda: False)
    finished = worker.finish("s")
    made = set(names) - ({"refined.mp4"} if is_full else set())
    assert {file.name for file in finished.artifacts} == {path.name for path in tmp_path.iterdir()} == made
    assert [failure.name for failure in finished.failures] == (["refined.mp4"] if is_full else [])
    for file in finished.artifacts:
        assert file.media_type == REFINED_ARTIFACTS[file.name]
    if not is_full:
        assert (tmp_path / "refined.mp4").read_bytes() == source.read("final.mp4")
    assert (tmp_path / "refined.flac").read_bytes() == source.read("audio.flac")
    with safe_open(tmp_path / "refined-latents.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("audio"), source.audio)
        assert torch.equal(file.get_tensor("video"), source.video)
        assert file.metadata()["refined"] == "true"
