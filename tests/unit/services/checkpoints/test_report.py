"""`h3stream inspect`: what files are, told to people and programs, from headers alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.prompt import ALLOWED_SPECIAL_TOKENS
from services.checkpoints import report
from services.checkpoints.__main__ import main
from services.checkpoints.header import BITS, read_header
from services.checkpoints.report import Finding, as_json, as_table, exit_status, inspect
from tests import dit_layouts, text_encoder_files, vae_layouts
from tests.weight_files import TABLES, file_bytes, published, write_shards, write_sparse

ROOT = Path(__file__).parents[4]


def one(path: Path) -> Finding:
    (finding,) = inspect([path])
    return finding


def by_name(findings: Sequence[Finding]) -> dict[str, Finding]:
    return {Path(finding.path).name: finding for finding in findings}


def write_tokenizer(folder: Path, tokens: Sequence[str] = ALLOWED_SPECIAL_TOKENS) -> None:
    folder.mkdir(parents=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"extra_special_tokens": list(tokens)}))
    (folder / "tokenizer.json").write_text("{}")


# ---- what is found --------------------------------------------------------------------------------------------------


def test_a_published_file_is_told_in_full(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "minimax_h3_fl2va_bf16.safetensors", published("dit.comfy_bf16"))
    finding = one(path)
    assert finding == Finding(
        path=str(path),
        kind="dit",
        layout="comfyui",
        data_types=("BF16", "F32"),
        num_parameters=33_122_992_896 + 16,  # and the rotary frequencies
        num_bytes=path.stat().st_size,
        num_files=1,
        partition="fl2va",
    )
    assert finding.is_fine


def test_a_folder_of_hundreds_of_shards_is_one_finding(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "FL2VA" / "transformer", published("dit.official"), 300)
    finding = one(folder)
    assert (finding.kind, finding.layout, finding.partition, finding.num_files) == ("dit", "official", "fl2va", 300)
    assert finding.num_parameters == 33_122_992_896 + 16
    assert finding.is_fine


def test_a_comfyui_folder_is_told_file_by_file(tmp_path: Path) -> None:
    write_sparse(tmp_path / "vae/minimax_h3_audio_vae_fp32.safetensors", published("audio_vae.comfy_fp32"))
    write_sparse(tmp_path / "vae/minimax_h3_video_vae_fp16.safetensors", published("video_vae.comfy_fp16"))
    write_sparse(tmp_path / "vae/other.safetensors", {"encoder.weight": ([3, 3], "F16")})
    (tmp_path / "vae/old.ckpt").write_bytes(b"PK\x03\x04\x00\x00\x08\x08" + bytes(64))
    findings = inspect([tmp_path])
    assert [(Path(found.path).name, found.kind) for found in findings] == [
        ("minimax_h3_audio_vae_fp32.safetensors", "audio_vae"),
        ("minimax_h3_video_vae_fp16.safetensors", "video_vae"),
        ("old.ckpt", "unknown"),
        ("other.safetensors", "unknown"),
    ]
    # Other models' files, which nobody asked about, are nothing wrong.
    assert exit_status(findings) == 0
    assert findings[2].notes == (
        "is not a safetensors file but a zip archive, probably a PyTorch pickle; only safetensors files are read",
    )


def test_a_file_of_another_model_is_wrong_if_it_is_asked_about(tmp_path: Path) -> None:
    finding = one(write_sparse(tmp_path / "x.safetensors", {"encoder.weight": ([3, 3], "F16")}))
    assert finding.problems == ("is not recognised as any part of the model",)
    assert exit_status([finding]) == 1


def test_a_model_directory_says_what_is_in_it_and_what_is_missing(tmp_path: Path) -> None:
    write_shards(tmp_path / "transformer", published("dit.diffusers"), 3)
    write_sparse(tmp_path / "audio_vae/m.safetensors", published("audio_vae.diffusers_and_official"))
    write_tokenizer(tmp_path / "tokenizer")
    model, *parts = inspect([tmp_path])
    assert (model.kind, model.layout) == ("model", "diffusers")
    assert set(model.parts or ()) == {"dit", "audio_vae", "tokenizer"}
    assert [problem.split(":")[0] for problem in model.problems] == ["has no video VAE", "has no text encoder"]
    assert model.num_parameters == sum(part.num_parameters for part in parts) == 33_122_992_896 + 151_326_585
    assert [part.kind for part in parts] == ["audio_vae", "tokenizer", "dit"]
    assert exit_status([model]) == 1


def test_the_official_repository_is_a_model_directory(tmp_path: Path) -> None:
    write_shards(tmp_path / "FL2VA/transformer", published("dit.official"), 2)
    write_shards(tmp_path / "Ref2VA/transformer", published("dit.official"), 2)
    write_sparse(tmp_path / "FL2VA/audio_vae/m.safetensors", published("audio_vae.diffusers_and_official"))
    model, *parts = inspect([tmp_path])
    assert (model.kind, model.layout) == ("model", "official")
    assert (model.parts or {})["dit"] == str(tmp_path / "FL2VA/transformer")
    assert [part.partition for part in parts if part.kind == "dit"] == ["fl2va", "ref2va"]


def test_an_adapter_is_told_with_its_rank_and_training() -> None:
    finding = one(TABLES.parent / "raven" / "lora_raven.safetensors")
    assert (finding.kind, finding.layout, finding.is_fine) == ("adapter", "raven", True)
    assert finding.adapter is not None
    assert finding.adapter.min_rank == finding.adapter.max_rank > 0
    assert finding.adapter.num_modules > 0
    assert (finding.adapter.trained_video_shift, finding.adapter.trained_audio_shift) == (12, 3)
    assert f"rank {finding.adapter.min_rank}, alpha " in as_table([finding])
    assert json.loads(as_json([finding]))["findings"][0]["adapter"]["num_modules"] == finding.adapter.num_modules


def test_a_tokenizer_without_h3s_tokens_is_noted(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "h3")
    write_tokenizer(tmp_path / "stock", ALLOWED_SPECIAL_TOKENS[1:])
    h3, stock = inspect([tmp_path])
    assert (h3.kind, h3.notes, h3.problems) == ("tokenizer", (), ())
    assert stock.notes == ("It does not name <d>: loading adds them if it is Qwen3-VL's own tokenizer.",)
    (tmp_path / "h3/tokenizer.json").write_text('{"added_tokens": [')
    assert one(tmp_path / "h3").problems[0].startswith("tokenizer.json is not valid JSON")
    (tmp_path / "h3/tokenizer.json").unlink()
    (problem,) = one(tmp_path / "h3").problems
    assert problem == "holds no vocabulary: neither tokenizer.json nor vocab.json with merges.txt"


# ---- what is wrong --------------------------------------------------------------------------------------------------


def test_keys_shapes_and_dtypes_that_are_wrong_are_all_told(tmp_path: Path) -> None:
    tensors = published("audio_vae.comfy_fp32")
    key, *_, last = tensors
    del tensors[last]
    tensors[key] = (tensors[key][0], "F64")
    tensors["more.weight"] = ([1], "F32")
    told = " ".join(one(write_sparse(tmp_path / "x.safetensors", tensors)).problems)
    assert all(name in told for name in ("more.weight", last, key, "F64"))


def test_a_variant_that_is_refused_says_why(tmp_path: Path) -> None:
    tensors = {key: (shape, "F8_E4M3") for key, (shape, _) in published("text_encoder.comfy_bf16").items()}
    finding = one(write_sparse(tmp_path / "x.safetensors", tensors))
    assert (finding.kind, finding.is_fine, finding.problems) == ("text_encoder", False, ())
    assert "refused: it has FP8 weights" in as_table([finding])
    assert exit_status([finding]) == 1


def test_broken_files_are_findings_among_others(tmp_path: Path) -> None:
    for name in ("good", "cut"):
        path = write_sparse(tmp_path / f"{name}.safetensors", published("audio_vae.comfy_fp32"))
    os.truncate(path, path.stat().st_size - 1)
    (tmp_path / "html.safetensors").write_text("<html>404</html>")
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    write_shards(tmp_path / "shards", {"a": ([2], "F32"), "b": ([2], "F32")}, 2)
    (tmp_path / "shards/model-00002-of-00002.safetensors").unlink()
    found = by_name(inspect([tmp_path]))
    assert found["good.safetensors"].is_fine
    assert {name: finding.problems[0][:40] for name, finding in found.items() if finding.problems} == {
        "cut.safetensors": found["cut.safetensors"].problems[0][:40],
        "html.safetensors": "is not a safetensors file but a web page",
        "pipe.safetensors": "is not a regular file",
        "zero.safetensors": "is not a regular file",
        "shards": "lacks model-00002-of-00002.safetensors, ",
    }
    assert "the file is cut off" in found["cut.safetensors"].problems[0]
    assert all(finding.kind == "unknown" for finding in found.values() if finding.problems)


def test_nothing_to_look_at_is_told_by_the_exit_status(tmp_path: Path) -> None:
    fine = write_sparse(tmp_path / "x.safetensors", published("audio_vae.comfy_fp32"))
    (tmp_path / "empty").mkdir()
    assert exit_status(inspect([fine])) == 0
    assert exit_status(inspect([fine, tmp_path / "absent"])) == 2
    assert exit_status(inspect([tmp_path / "empty"])) == 2


GOLDEN = sorted((TABLES.parent / "h3").glob("*_state*.safetensors")) + sorted(
    (TABLES.parent / "raven").glob("lora_*.safetensors")
)
CONFIGS: dict[str, Callable[[], dict[str, Any]]] = {
    "dit": lambda: dict(dit_layouts.class_config()),
    "video": lambda: vae_layouts.class_config("video"),
    "audio": lambda: vae_layouts.class_config("audio"),
    "text": lambda: {"model_type": "qwen3_vl", **text_encoder_files.GOLDEN["transformers_config"]},
}
PLACES = st.floats(0, 1, exclude_max=True)
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["remove", "reshape", "scalar", "retype", "rename", "renumber", "prefix"]),
        PLACES,
        st.lists(st.sampled_from([0, 1, 2, 3, 5, 48, 4096]), max_size=5),
        st.sampled_from(sorted(name for name, bits in BITS.items() if bits >= 8)),
        st.sampled_from(["x", ".0", "\x1b[31m", "999999999", "1" * 40, "é"]),
    ),
    max_size=4,
)
SCRAPS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=3),
    st.lists(st.one_of(st.integers(), st.none()), max_size=3),
    st.builds(dict),
)
METADATA = st.dictionaries(
    st.sampled_from(["format", "lora_alpha", "alpha", "h3_hidden_state_index", "lora_adapter_metadata"]),
    st.sampled_from(["pt", "8", "nan", "-1", "1e999", "{", "[]", '{"transformer.r": []}', "99999"]),
)


def edited(
    tensors: dict[str, tuple[Sequence[int], str]], edits: Sequence[tuple[str, float, list[int], str, str]]
) -> dict[str, tuple[Sequence[int], str]]:
    """Tensors with some of them changed: what, where among them, and to which shape, dtype or name."""
    for what, where, shape, dtype, text in edits:
        key = list(tensors)[int(where * len(tensors))]
        old_shape, old_dtype = tensors[key]
        match what:
            case "remove":
                del tensors[key]
            case "reshape":
                tensors[key] = (shape, old_dtype)
            case "scalar":
                tensors[key] = ((), old_dtype)
            case "retype":
                tensors[key] = (old_shape, dtype)
            case "rename":
                tensors[key + text] = tensors.pop(key)
            case "renumber":
                tensors[key.replace("0", text)] = tensors.pop(key)
            case _:
                tensors = {f"model.diffusion_model.{name}": value for name, value in tensors.items()}
    return tensors


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    golden=st.sampled_from(GOLDEN),
    edits=EDITS,
    metadata=METADATA,
    config=st.one_of(st.none(), st.sampled_from(sorted(CONFIGS))),
    changes=st.lists(st.tuples(PLACES, SCRAPS), max_size=3),
    adapter_config=st.one_of(st.none(), st.dictionaries(st.sampled_from(["r", "lora_alpha", "rank_pattern"]), SCRAPS)),
)
def test_files_that_are_almost_right_are_told_and_never_end_it(
    golden: Path,
    edits: Sequence[tuple[str, float, list[int], str, str]],
    metadata: dict[str, str],
    config: str | None,
    changes: Sequence[tuple[float, Any]],
    adapter_config: dict[str, Any] | None,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    tensors = edited({name: (info.shape, info.dtype) for name, info in read_header(golden).tensors.items()}, edits)
    file = write_sparse(folder / "adapter_model.safetensors", tensors, metadata)
    if config is not None:
        values = CONFIGS[config]()
        for where, value in changes:
            values[list(values)[int(where * len(values))]] = value
        (folder / "config.json").write_text(json.dumps(values))
    if adapter_config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(adapter_config))
    for path in (folder, file):
        findings = inspect([path])
        assert findings
        assert all(line.isprintable() for line in as_table(findings).splitlines())
        json.loads(as_json(findings))


# ---- how it is told -------------------------------------------------------------------------------------------------


def test_json_has_the_fields_of_a_finding(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "x.safetensors", published("audio_vae.comfy_fp32"))
    (told,) = json.loads(as_json(inspect([path])))["findings"]
    assert list(told) == [field.name for field in fields(Finding)]
    assert (told["kind"], told["data_types"], told["problems"]) == ("audio_vae", ["F32"], [])


def test_a_table_is_aligned(tmp_path: Path) -> None:
    long = Finding("a/long/path", "dit", "diffusers", ("BF16", "F32"), 33_122_992_896, 66_280_430_080, 14)
    short = Finding("b", "adapter", "raven", ("F32",), 999, 1_000, 1, problems=("is wrong",), notes=("Careful.",))
    assert as_table([long, short]).splitlines() == [
        "path         part     layout     types      parameters     size  state",
        "a/long/path  DiT      diffusers  BF16, F32      33.1 B  66.3 GB  ok",
        "b            adapter  raven      F32               999     1 kB  wrong",
        "    problem: is wrong",
        "    note: Careful.",
    ]


def test_nothing_from_a_file_reaches_the_terminal_raw(tmp_path: Path) -> None:
    nasty = "\x1b]0;owned\x07\x1b[2J\r\u202e\x9b31m"
    tensors = {f"{nasty}{key}": value for key, value in published("audio_vae.comfy_fp32").items()}
    write_sparse(tmp_path / "a.safetensors", {**published("audio_vae.comfy_fp32"), **tensors}, {nasty: nasty})
    (tmp_path / f"b{nasty}.safetensors").write_bytes(file_bytes({nasty: {"dtype": nasty}}))
    (tmp_path / f"c{nasty}").mkdir()
    write_sparse(tmp_path / f"c{nasty}" / "config.json.safetensors", tensors)
    (tmp_path / os.fsdecode(b"d\xff.safetensors")).write_bytes(b"")
    findings = inspect([tmp_path])
    assert len(findings) == 4
    assert all(line.isprintable() for line in as_table(findings).splitlines())
    assert as_json(findings).isascii()
    assert all(line.isprintable() for line in as_json(findings).splitlines())


def test_a_remark_without_end_is_cut() -> None:
    finding = Finding("x", "unknown", problems=("x" * 1_000_000,))
    assert len(as_table([finding])) < 10_000


# ---- the command ----------------------------------------------------------------------------------------------------


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.checkpoints", *arguments],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
        timeout=120,
        **options,
    )


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sparse(tmp_path / "x.safetensors", published("audio_vae.comfy_fp32"))
    assert main([str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1:3] == ["audio", "VAE"]
    assert main([str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["kind"] == "audio_vae"
    assert main([str(tmp_path / "absent"), str(path)]) == 2
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2


def test_the_command_ends_quietly_when_its_reader_has_gone(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "x.safetensors", published("audio_vae.comfy_fp32"))
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "services.checkpoints", str(path)],
            cwd=ROOT,
            stdout=write_end,
            stderr=subprocess.PIPE,
            check=False,
            timeout=120,
        )
    finally:
        os.close(write_end)
    assert (result.returncode, result.stderr) == (141, b"")


def test_letters_that_the_terminal_does_not_have_are_escaped(tmp_path: Path) -> None:
    write_sparse(tmp_path / "größe.safetensors", {"ключ": ([1], "F32")})
    result = run(str(tmp_path), env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert (result.returncode, result.stderr) == (0, "")
    assert "gr\\xf6\\xdfe.safetensors" in result.stdout


def test_looking_at_files_loads_no_model_library(tmp_path: Path) -> None:
    """It must answer at once; torch alone takes seconds to load."""
    for name in ("dit.comfy_bf16", "video_vae.comfy_fp16", "audio_vae.comfy_fp32", "text_encoder.comfy_nvfp4_awq"):
        write_sparse(tmp_path / f"{name}.safetensors", published(name))
    shutil.copy(TABLES.parent / "raven" / "lora_raven.safetensors", tmp_path)
    program = """
import sys
from services.checkpoints.__main__ import main
assert main(sys.argv[1:]) == 0
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.splitlines()[-1].split())
    assert loaded & {"torch", "numpy", "safetensors", "diffusers", "transformers", "ray", "av"} == set()


def test_only_headers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_sparse(tmp_path / "x.safetensors", published("dit.diffusers"))
    reads: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, at: reads.append(at + count) or pread(fd, count, at))
    assert one(path).is_fine
    assert max(reads) < 1 << 20


def test_every_kind_has_a_name() -> None:
    assert set(report.KINDS) == set(get_args(report.Kind))
