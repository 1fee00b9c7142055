"""Makes a model directory of the published layout and classes with small random weights.

    python -m tools.make_tiny_model DIR [--seed N] [--force]

The same seed writes the same bytes. Clips of such a model are coloured noise with noise for sound.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from h3stream.errors import ConfigError, StartupError

GENERATION_DEFAULTS = {
    "num_frames": 39,
    "width": 256,
    "height": 160,
    "notice": "random weights: the clip is coloured noise with noise for sound, not what the prompt says",
}
"""What a request for this model gets where it says nothing, and what its user should be told."""


def make_tiny_model(directory: Path, seed: int = 0, *, force: bool = False) -> bool:
    """Writes the model directory, whole or not at all; returns whether it did.

    A directory that holds a model (it has a `model_index.json`) is left alone unless `force`, which replaces it.
    Raises ConfigError if `directory` exists, is not empty and is something else.
    """
    if (directory / "model_index.json").is_file():
        if not force:
            return False
    elif directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ConfigError(f"{directory} exists and is no model directory; remove it or choose another")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        _write_components(made, seed)
        for file in made.rglob("*.safetensors"):
            file.chmod(0o644)  # written private; another user's worker must be able to read them
        if directory.exists():
            directory.rename(Path(scratch) / "replaced")
        made.rename(directory)
    return True


def _write_components(directory: Path, seed: int) -> None:
    # Imported here: the libraries take seconds, and a complete model needs none of them.
    from tools.tiny.adapter import write_raven_adapter
    from tools.tiny.audio_vae import write_audio_vae
    from tools.tiny.index import write_json, write_model_index
    from tools.tiny.text_encoder import write_text_encoder
    from tools.tiny.tokenizer import write_tokenizer
    from tools.tiny.transformer import write_transformer
    from tools.tiny.video_vae import write_video_vae

    transformer = write_transformer(directory / "transformer", seed)
    write_raven_adapter(directory / "adapters" / "raven.safetensors", transformer, seed)
    write_video_vae(directory / "vae", seed)
    write_audio_vae(directory / "audio_vae", seed)
    added_token_ids = write_tokenizer(directory / "tokenizer")
    write_text_encoder(directory / "text_encoder", added_token_ids, seed)
    write_json(directory / "generation_config.json", GENERATION_DEFAULTS)
    write_model_index(directory)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.make_tiny_model", description="Makes a tiny random model.")
    parser.add_argument("directory", type=Path, help="model directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument("--force", action="store_true", help="replace a model that is already there")
    arguments = parser.parse_args()
    try:
        if not make_tiny_model(arguments.directory, arguments.seed, force=arguments.force):
            sys.exit(
                f"make_tiny_model: {arguments.directory} holds a model already, which is kept; --force replaces it"
            )
    except StartupError as error:
        sys.exit(f"make_tiny_model: {error}")
    total = sum(file.stat().st_size for file in arguments.directory.rglob("*") if file.is_file())
    print(f"{arguments.directory}: {total / 1e6:.1f} MB; {GENERATION_DEFAULTS['notice']}")


if __name__ == "__main__":
    main()
