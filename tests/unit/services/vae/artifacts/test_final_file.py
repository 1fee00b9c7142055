from __future__ import annotations

import hashlib
import io
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
import pytest

from h3stream.errors import PhaseError
from services.vae.artifacts.final_file import FinalFile
from services.vae.media.boxes import Packet, VideoTrack
from services.vae.media.encoders import H264Encoder, open_h264_encoder
from tests.tools.check_fmp4 import boxes
from tests.unit.services.vae.harness import decode_sound

SIZE = 64
NUM_FRAMES = 22
NUM_SAMPLES = 29_600


@pytest.fixture
def encoder() -> H264Encoder:
    return open_h264_encoder(SIZE, SIZE, 6_000_000)


def pictures(encoder: H264Encoder) -> list[Packet]:
    return [encoder.encode(np.full((SIZE, SIZE, 3), 10 * i, np.uint8)) for i in range(NUM_FRAMES)]


def track(encoder: H264Encoder) -> VideoTrack:
    return VideoTrack(SIZE, SIZE, encoder.decoder_configuration, NUM_FRAMES)


def fill(made: FinalFile, packets: list[Packet], pcm: npt.NDArray[np.float32]) -> None:
    for packet in packets:
        made.add_packet(packet)
    made.add_sound(pcm)


def tone(level: float) -> npt.NDArray[np.float32]:
    return level * np.sin(np.arange(NUM_SAMPLES) / 20, dtype=np.float32)[None].repeat(2, 0)


def test_the_file_appears_only_when_it_is_complete(encoder: H264Encoder, tmp_path: Path) -> None:
    made = FinalFile(tmp_path / "new" / "directory", track(encoder))
    fill(made, pictures(encoder), tone(0.1))
    assert all(path.name.startswith(".") for path in (tmp_path / "new" / "directory").iterdir())
    file = made.finish(divisor=1.0)
    assert [path.name for path in (tmp_path / "new" / "directory").iterdir()] == ["final.mp4"]
    data = (tmp_path / "new" / "directory" / file.name).read_bytes()
    assert (file.size_bytes, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert file.media_type == "video/mp4"


def test_players_find_the_header_first(encoder: H264Encoder, tmp_path: Path) -> None:
    made = FinalFile(tmp_path, track(encoder))
    fill(made, pictures(encoder), tone(0.1))
    made.finish(divisor=1.0)
    assert [kind for kind, _ in boxes((tmp_path / "final.mp4").read_bytes())] == ["ftyp", "moov", "mdat"]


def test_pictures_are_copied_and_times_are_exact(encoder: H264Encoder, tmp_path: Path) -> None:
    packets = pictures(encoder)
    made = FinalFile(tmp_path, track(encoder))
    for start in (0, 17):  # as chunks come
        fill(made, packets[start : start + 17], tone(0.1)[:, start * 1000 : start * 1000 + 17_000])
    made.finish(divisor=1.0)
    with av.open(io.BytesIO((tmp_path / "final.mp4").read_bytes())) as container:
        found = [packet for packet in container.demux(video=0) if packet.size]
        assert [bytes(packet) for packet in found] == [packet.data for packet in packets]
        assert [packet.pts for packet in found] == [4000 * i for i in range(NUM_FRAMES)]
        assert [i for i, packet in enumerate(found) if packet.is_keyframe] == [0, 17]
        video, audio = container.streams
        assert video.duration == 4000 * NUM_FRAMES
        assert audio.duration == NUM_SAMPLES


@pytest.mark.parametrize("divisor", [1.0, 2.5])
def test_sound_is_divided_by_the_whole_clips_divisor(encoder: H264Encoder, tmp_path: Path, divisor: float) -> None:
    made = FinalFile(tmp_path, track(encoder))
    fill(made, pictures(encoder), tone(0.5))
    made.finish(divisor)
    sound = decode_sound((tmp_path / "final.mp4").read_bytes())[:, 2000:27_000]
    assert float(sound.std()) == pytest.approx(0.5 / divisor / 2**0.5, rel=0.01)


def test_discarding_leaves_nothing(encoder: H264Encoder, tmp_path: Path) -> None:
    made = FinalFile(tmp_path, track(encoder))
    fill(made, pictures(encoder), tone(0.1))
    made.discard()
    made.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_that_names_it(encoder: H264Encoder, tmp_path: Path) -> None:
    (tmp_path / ".final.mp4.pcm").symlink_to("/dev/full")
    made = FinalFile(tmp_path, track(encoder))
    with pytest.raises(PhaseError, match=r"final\.mp4 cannot be written: No space left on device"):
        made.add_sound(tone(0.1))
    made.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_an_error_that_names_it(encoder: H264Encoder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PhaseError, match=r"final\.mp4 cannot be written: Not a directory"):
        FinalFile(tmp_path / "file" / "below", track(encoder))
