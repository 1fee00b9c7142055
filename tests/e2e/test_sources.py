"""A server whose parts are given one by one in other layouts: the same clips, and clips that adapters change."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from h3stream import AdapterChoice, Client, Completed, GenerateRequest, InvalidRequestError
from services.checkpoints.layout import Layout
from tests.e2e.conftest import Server, start_server, stop_server
from tools.convert_checkpoint import convert

STREAMING = GenerateRequest("a fox in the snow", num_frames=22, width=64, height=64, steps=2)
DENSE = GenerateRequest("a fox in the snow", num_frames=22, width=64, height=64, steps=2, mode="dense")


@pytest.fixture(scope="module")
def composed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("composed")
    raven = tiny_model / "adapters" / "raven.safetensors"
    other = shutil.copy(raven, directory / "other.safetensors")
    paths = {"--tokenizer": tiny_model / "tokenizer"}
    layouts: tuple[tuple[str, str, Layout, str], ...] = (
        ("--dit", "transformer", "comfyui", "minimax_h3_fl2va_bf16.safetensors"),
        ("--video-vae", "vae", "official", "source"),
        ("--audio-vae", "audio_vae", "comfyui", "minimax_h3_audio_vae_fp32.safetensors"),
        ("--text-encoder", "text_encoder", "comfyui", "qwen3vl_32b_minimax_h3_bf16.safetensors"),
    )
    for flag, folder, layout, name in layouts:
        paths[flag] = directory / name
        convert(tiny_model / folder, paths[flag], to=layout)
    parts = [f"{flag}={path}" for flag, path in paths.items()]
    running = start_server(None, directory, *parts, "--adapter", str(raven), "--adapter", f"turbo={other}:0.5")
    yield running
    assert stop_server(running) == 0, running.log.read_text()[-4000:]


def digest(server: Server, request: GenerateRequest, *adapters: AdapterChoice) -> str:
    with Client(server.address) as client:
        *_, completed = client.generate(request, adapters=adapters)
    assert isinstance(completed, Completed)
    return completed.latents_sha256


def test_its_clips_are_those_of_the_model_directory(server: Server, composed: Server) -> None:
    for request in (STREAMING, DENSE):
        assert digest(composed, request) == digest(server, request)


def test_it_tells_what_its_files_are(composed: Server, tiny_model: Path) -> None:
    with Client(composed.address) as client:
        info, adapters = client.server_info(), client.adapters()
    assert info.model_name == "minimax_h3_fl2va_bf16"
    assert {part.component: (part.layout, part.source) for part in info.parts} == {
        "dit": ("comfyui", "minimax_h3_fl2va_bf16.safetensors"),
        "video_vae": ("official", "source"),
        "audio_vae": ("comfyui", "minimax_h3_audio_vae_fp32.safetensors"),
        "text_encoder": ("comfyui", "qwen3vl_32b_minimax_h3_bf16.safetensors"),
    }
    assert adapters == info.adapters
    sha256 = hashlib.sha256((tiny_model / "adapters" / "raven.safetensors").read_bytes()).hexdigest()
    assert [(a.name, a.is_streaming, a.default_strength, a.sha256) for a in adapters] == [
        ("raven", True, 1.0, sha256),
        ("turbo", False, 0.5, sha256),
    ]
    assert all(a.num_bound_modules == a.num_modules > 0 for a in adapters)


@pytest.mark.parametrize("request_", [STREAMING, DENSE], ids=["streaming", "dense"])
def test_an_adapter_changes_a_clip_by_its_strength_and_no_clip_that_does_not_name_it(
    composed: Server, request_: GenerateRequest
) -> None:
    plain = digest(composed, request_)
    default, named, strong = (
        digest(composed, request_, AdapterChoice("turbo", strength)) for strength in (None, 0.5, 2.0)
    )
    assert default == named
    assert len({plain, named, strong}) == 3
    assert digest(composed, request_) == plain


def test_the_streaming_adapter_is_on_whether_it_is_named_or_not(composed: Server) -> None:
    assert digest(composed, STREAMING, AdapterChoice("raven")) == digest(composed, STREAMING)
    assert digest(composed, DENSE, AdapterChoice("raven")) != digest(composed, DENSE)


def test_an_adapter_that_is_not_there_is_refused_by_name(composed: Server) -> None:
    with Client(composed.address) as client, pytest.raises(InvalidRequestError, match="the nearest is turbo"):
        client.plan(DENSE, adapters=[AdapterChoice("turbo4")])


def test_a_file_that_is_no_dit_ends_the_server_with_one_line_that_names_it(tiny_model: Path, tmp_path: Path) -> None:
    vae = next((tiny_model / "vae").glob("*.safetensors"))
    command = [sys.executable, "-m", "orchestrator", "--model", str(tiny_model), "--dit", str(vae)]
    ended = subprocess.run(
        [*command, "--listen", "127.0.0.1:0", "--data", str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (1, "")
    line = ended.stderr.splitlines()[-1]
    assert line.startswith("h3stream: ")
    assert str(vae) in line
    assert "video VAE" in line
    assert "Error" not in line
