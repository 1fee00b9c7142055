"""The guide tells the truth: its programs run, its commands parse, its tables are complete."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import shlex
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from core.budget import ModelSize
from core.cache_policy import bytes_per_row, transient_bytes
from h3stream import FrozenCacheSpec, GenerateRequest, RefineSpec, errors
from h3stream.cli import make_parser
from h3stream.codec import PAYLOADS
from h3stream.status import STATUS_OF
from orchestrator.access import __main__ as access
from orchestrator.config import Settings
from tests.fakes import FakeVideoService, media_of, plan_of, serve_video

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "api.md").read_text()
REFINING = (ROOT / "docs" / "refine.md").read_text()
WEIGHTS = (ROOT / "docs" / "getting-the-weights.md").read_text()
OPERATING = (ROOT / "docs" / "access.md").read_text() + (ROOT / "docs" / "operations.md").read_text()
TINY_MODEL = (ROOT / "docs" / "tiny-model.md").read_text()
READMES = (ROOT / "README.md").read_text() + (ROOT / "client" / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with serve_video(FakeVideoService()) as address:
        yield address


@pytest.mark.parametrize("program", blocks(GUIDE + REFINING + READMES, "python"))
async def test_every_program_runs(
    program: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "127.0.0.1:50051" in program
    (tmp_path / "latents.safetensors").write_bytes(b"latents")
    await asyncio.to_thread(exec, program.replace("127.0.0.1:50051", address), {"__name__": "__main__"})
    clip = tmp_path / "clip.mp4"
    if "clip.mp4" in program:
        assert clip.read_bytes() == media_of(plan_of(GenerateRequest("a red kite over the sea")))
    else:
        assert capsys.readouterr().out


def commands(text: str) -> list[str]:
    return "".join(blocks(text, "sh")).replace("\\\n", "").splitlines()


@pytest.mark.parametrize(
    "line",
    [
        *commands(GUIDE),
        *commands(REFINING),
        *commands(READMES),
        *(line for line in commands(OPERATING + TINY_MODEL) if line.startswith("h3stream")),
        *(line for line in commands(WEIGHTS) if line.startswith("h3stream")),
    ],
)
def test_every_command_parses(line: str) -> None:
    words = shlex.split(line.partition("#")[0].partition("|")[0])
    assert words[0] == "h3stream"
    _, extra = make_parser().parse_known_args(words[1:])
    if words[1] == "keys":
        access._parser().parse_args(extra)
        return
    allowed = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Settings)} | {"--config", "--json"}
    assert {word for word in extra if word.startswith("-")} <= allowed
    assert words[1] in ("serve", "doctor") or extra == []


def test_the_table_of_errors_is_the_tree() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([A-Z_]+)` \| `([A-Z_]+)` \|", GUIDE, re.MULTILINE)
    expected = {(cls.__name__, cls.reason, code.name) for cls, code in STATUS_OF.items()}
    expected.remove(("GenerationError", errors.GenerationError.reason, "UNKNOWN"))
    assert set(rows) == expected


def test_the_table_of_events_is_the_contract() -> None:
    rows = re.findall(r"^\| `(\w+)` \(`(\w+)`\) \|", GUIDE, re.MULTILINE)
    assert {field: cls for cls, field in rows} == {name: cls.__name__ for name, (cls, _) in PAYLOADS.items()}


def test_the_tables_of_options_are_the_dataclasses() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]+) \|", REFINING, re.MULTILINE))
    fields = [field for cls in (RefineSpec, FrozenCacheSpec) for field in dataclasses.fields(cls)]
    assert set(rows) == {field.name for field in fields}
    words = {True: "on", False: "off", "": "empty", (): "none"}
    for field in fields:
        if field.default is None or field.name == "cache":
            continue  # a sentence
        if isinstance(field.default, bool | tuple) or field.default == "":
            expected = words[field.default]
        else:
            expected = f"`{field.default}`" if isinstance(field.default, str) else f"{field.default:g}"
        assert rows[field.name] == expected, field.name


def test_the_table_of_memory_is_computed() -> None:
    model = ModelSize(num_layers=50, num_heads=56, head_dim=128, hidden=5376, ffn=14336, compute_bytes=2)
    rows = re.findall(r"^\| (`\w+`, `\w+`|a build .*?) \| ([\d,]+) \| ([\d.]+) GiB \| ([\d.]+) GiB \|", REFINING, re.M)
    assert len(rows) == 7
    for name, each, *sizes in rows:
        kinds = re.findall(r"`(\w+)`", name)
        per_row = bytes_per_row(*kinds, model) if kinds else transient_bytes(1, model)
        assert int(each.replace(",", "")) == per_row
        assert [f"{number * per_row / 2**30:.2f}" for number in (38_000, 75_216)] == sizes


@pytest.mark.parametrize(
    ("file", "table"),
    [
        ("`transformer/` (14 shards)", "dit.diffusers"),
        ("`FL2VA/transformer/` (13 shards)", "dit.official"),
        ("`diffusion_models/minimax_h3_fl2va_bf16.safetensors`", "dit.comfy_bf16"),
        ("`text_encoder/`, `FL2VA/text_encoder/` (14 shards)", "text_encoder.transformers"),
        ("`text_encoders/qwen3vl_32b_minimax_h3_bf16.safetensors`", "text_encoder.comfy_bf16"),
        ("`text_encoders/qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors`", "text_encoder.comfy_nvfp4_awq"),
        ("`vae/` (3 shards)", "video_vae.diffusers"),
        ("`FL2VA/video_vae/source/`", "video_vae.official"),
        ("`vae/minimax_h3_video_vae_fp16.safetensors`", "video_vae.comfy_fp16"),
        ("`audio_vae/`, `FL2VA/audio_vae/`", "audio_vae.diffusers_and_official"),
        ("`vae/minimax_h3_audio_vae_fp32.safetensors`", "audio_vae.comfy_fp32"),
    ],
)
def test_the_sizes_of_the_published_files_are_those_of_their_tables(file: str, table: str) -> None:
    size = json.loads((ROOT / f"tests/fixtures/checkpoints/{table}.json").read_text())["total_bytes"]
    (row,) = [line for line in WEIGHTS.splitlines() if line.startswith(f"| {file} |")]
    assert row.split(" | ")[2] == f"{size / 1e9:.2f} GB"


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "client/README.md",
        "docs/api.md",
        "docs/architecture.md",
        "docs/getting-the-weights.md",
        "docs/refine.md",
        "docs/tiny-model.md",
        "docs/web.md",
    ],
)
def test_every_link_leads_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    headings = {"#" + re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.M)}
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    lost = [
        link
        for link in links
        if not (link in headings if link.startswith("#") else ((ROOT / page).parent / link.partition("#")[0]).exists())
    ]
    assert lost == []
