from pathlib import Path

import pytest

from h3stream.errors import ConfigError
from services.dit.config import DitConfig


def test_defaults_take_the_checkpoint_as_it_is(tmp_path: Path) -> None:
    config = DitConfig(dit=tmp_path)
    assert (config.compute_dtype, config.dit_layout, config.adapters) == ("auto", "auto", ())
    assert not config.allow_partial_adapters


def test_a_dtype_that_is_not_offered_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'float16'; it must be one of auto, bfloat16, float32"):
        DitConfig(dit=tmp_path, compute_dtype="float16")


def test_a_model_directory_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        DitConfig(tmp_path / "nowhere")
