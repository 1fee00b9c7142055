"""What a VAE worker says of its encoders before it serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from h3stream.errors import ConfigError
from services.vae.config import VaeConfig
from services.vae.media import encoders
from services.vae.servicer import build


def test_the_encoder_that_will_be_used_is_told_at_the_start(
    model_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        build(VaeConfig(model_directory, device="cpu", video_encoder="libx264"))
    assert "pictures are encoded by libx264" in caplog.messages


def test_a_named_encoder_that_does_not_work_is_refused_at_the_start(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders, "H264_ENCODERS", {"no_such_codec": {}, "libx264": encoders.H264_ENCODERS["libx264"]})
    with pytest.raises(ConfigError, match="no_such_codec cannot be opened for 256x256: this build of FFmpeg does not"):
        build(VaeConfig(model_directory, device="cpu", video_encoder="no_such_codec"))


def test_a_host_without_encoders_still_makes_what_is_lossless(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(encoders, "H264_ENCODERS", {"no_such_codec": {}})
    assert build(VaeConfig(model_directory, device="cpu")).worker.name == "vae"
    (message,) = (message for message in caplog.messages if "no media stream" in message)
    assert message.startswith("clips have no media stream here, only their lossless artifacts: no H.264 encoder works")
