"""The parts of a model on the disk, opened and checked as far as headers go: before anything is loaded or started."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from h3stream.errors import CheckpointError, StartupError
from services.checkpoints import audio_vae, dit, text_encoder, video_vae
from services.checkpoints.adapter_registry import AdapterHeader, bind
from services.checkpoints.components import FOLDERS, Part, part_path
from services.checkpoints.dit_modules import DitLayout
from services.checkpoints.identify import expect, identify
from services.checkpoints.key_map import Rule
from services.checkpoints.layout import NAMES
from services.checkpoints.source import Checkpoint, open_checkpoint
from services.checkpoints.tokenizer import check_tokenizer
from services.checkpoints.vae_files import Architecture, PublishedClass, read_map

VaeName = Literal["video_vae", "audio_vae"]


@dataclass(frozen=True)
class DitFiles:
    """The files of a DiT, found to be in order."""

    checkpoint: Checkpoint
    """The files."""
    layout: DitLayout
    """The layout that they are read in."""
    contents: dit.Contents
    """What they hold."""
    notes: tuple[str, ...]
    """What their user should know."""


@dataclass(frozen=True)
class VaeFiles:
    """The files of one VAE, found to be in order."""

    component: VaeName
    """Which of the two."""
    checkpoint: Checkpoint
    """The files."""
    layout: str
    """The layout of their keys."""
    architecture: Architecture
    """What the class is made with."""
    notes: tuple[str, ...]
    """What their user should know."""

    @property
    def unused_modules(self) -> tuple[str, ...]:
        """Modules of the class that decoding does not need."""
        return VAES[self.component].UNUSED_MODULES

    @property
    def rules(self) -> dict[str, Rule]:
        """Rules of the stored tensors that decoding needs."""
        key_map = VAES[self.component].key_map(self.layout, self.architecture.config)
        return read_map(key_map, self.unused_modules)


@dataclass(frozen=True)
class TextEncoderFiles:
    """The files of a text encoder, found to be in order."""

    checkpoint: Checkpoint
    """The files."""
    layout: str
    """The layout of their keys."""
    contents: text_encoder.Contents
    """What of them H3 reads."""


class Vae(Protocol):
    """What `services.checkpoints.video_vae` and `.audio_vae` know about their files."""

    PUBLISHED: PublishedClass
    """The class that computes with them."""
    UNUSED_MODULES: tuple[str, ...]
    """Modules of the class that decoding does not need."""

    def architecture(self, checkpoint: Checkpoint, layout: str, directories: Iterable[Path]) -> Architecture:
        """What the class is made with.  directories: may lend a configuration. Raises CheckpointError."""

    def faults(self, checkpoint: Checkpoint, layout: str, chosen: Architecture) -> list[str]:
        """What is wrong with weights of this architecture."""

    def key_map(self, layout: str, config: dict[str, Any]) -> dict[str, Rule]:
        """What the keys of a layout become.  config: arguments of the class."""


VAES: dict[VaeName, Vae] = {"video_vae": video_vae, "audio_vae": audio_vae}


def open_dit(path: Path, layout: str = "auto") -> DitFiles:
    """Opens the files of a DiT and checks their headers.

    layout: "diffusers", "official", "comfyui" or "auto".
    Raises CheckpointError for another part of the model, for a variant that is not taken, and for everything that is
    wrong with the tensors, all of it in one error; ConfigError for a layout that contradicts them or must be given.
    """
    checkpoint, recognition = expect(path, "dit")
    chosen = dit.choose_layout(checkpoint, recognition, layout)
    faults = dit.file_problems(checkpoint, dataclasses.replace(recognition, layout=chosen))
    if faults:
        raise CheckpointError(f"{path}, read as a DiT in the {chosen} layout: {'; '.join(faults)}")
    notes = recognition.notes if layout == "auto" else dit.notes(checkpoint, chosen)
    return DitFiles(checkpoint, chosen, dit.describe(checkpoint, chosen), notes)


def refuse_swapped_vaes(video_path: Path, audio_path: Path) -> None:
    """Raises CheckpointError if each of the two VAEs was given as the other one."""
    video, audio = (identify(open_checkpoint(path)) for path in (video_path, audio_path))
    if video and audio and (video.component, audio.component) == ("audio_vae", "video_vae"):
        raise CheckpointError(
            f"the two VAEs are swapped: {video_path}, given as the video VAE, is the audio VAE ({video.layout} layout) "
            f"and {audio_path}, given as the audio VAE, is the video VAE ({audio.layout} layout)"
        )


def open_vae(component: VaeName, path: Path, model_directory: Path | None) -> VaeFiles:
    """Opens the files of a VAE and checks their headers.

    model_directory: its configuration is used where the files have none and it fits them.
    Raises CheckpointError with everything that is wrong.
    """
    checkpoint, recognition = expect(path, component)
    lenders = [model_directory / folder for folder in FOLDERS[component]] if model_directory is not None else []
    architecture = VAES[component].architecture(checkpoint, recognition.layout, lenders)
    faults = VAES[component].faults(checkpoint, recognition.layout, architecture)
    if faults:
        origin = architecture.source or "the shapes in it"
        raise CheckpointError(
            f"{path}, taken for the {NAMES[component]} in the {recognition.layout} layout with the dimensions of "
            f"{origin}: {'; '.join(faults)}"
        )
    return VaeFiles(component, checkpoint, recognition.layout, architecture, recognition.notes)


def open_text_encoder(path: Path) -> TextEncoderFiles:
    """Opens the files of a text encoder and checks their headers. Raises CheckpointError with everything wrong."""
    checkpoint, recognition = expect(path, "text_encoder")
    faults = text_encoder.file_problems(checkpoint, recognition)
    if faults:
        raise CheckpointError(f"{path} cannot be loaded: {'; '.join(faults)}")
    return TextEncoderFiles(checkpoint, recognition.layout, text_encoder.describe(checkpoint, recognition))


def check_model(
    model_directory: Path | None,
    parts: Mapping[Part, Path | None],
    dit_layout: str,
    adapters: Sequence[AdapterHeader],
    *,
    allow_partial_adapters: bool,
) -> None:
    """Looks at every file of a model before anything is started or read: a mistake is told in a second, not minutes.

    parts: what replaces the model directory's own.  adapters: the registry.
    Raises ConfigError for a part that is nowhere, else CheckpointError with what is wrong with all of the files.
    """
    paths = {part: part_path(model_directory, part, parts.get(part)) for part in FOLDERS}
    found: list[str] = []
    with _noted(found):
        files = open_dit(paths["dit"], dit_layout)
        partition = dit.partition_of(files.checkpoint.path)
        for header in adapters:
            with _noted(found):
                bind(header, files.contents.architecture, partition=partition, allow_partial=allow_partial_adapters)
    with _noted(found):
        refuse_swapped_vaes(paths["video_vae"], paths["audio_vae"])
        with _noted(found):
            open_vae("video_vae", paths["video_vae"], model_directory)
        with _noted(found):
            open_vae("audio_vae", paths["audio_vae"], model_directory)
    with _noted(found):
        open_text_encoder(paths["text_encoder"])
    with _noted(found):
        check_tokenizer(paths["tokenizer"])
    if len(found) == 1:
        raise CheckpointError(found[0])
    if found:
        raise CheckpointError("\n- ".join((f"{len(found)} things are wrong with the model's files:", *found)))


@contextmanager
def _noted(found: list[str]) -> Iterator[None]:
    """Notes what is wrong instead of stopping at it."""
    try:
        yield
    except StartupError as error:
        found.append(str(error))
