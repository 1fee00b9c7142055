from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from h3stream.errors import ConfigError
from services.text_encoder.config import TextEncoderConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"dtype": "float16"}, "dtype is 'float16'"), ({"embedding_cache_bytes": -1}, "embedding_cache_bytes is -1")],
)
def test_a_wrong_setting_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextEncoderConfig(model_directory=tmp_path, **settings)


def test_a_model_directory_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        TextEncoderConfig(model_directory=tmp_path / "none")
