"""The `h3stream` command as a process of its own, against a real server."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import pytest

from h3stream import (
    AdapterChoice,
    DeviceMemoryError,
    Fragment,
    FrozenCacheSpec,
    GenerateRequest,
    JobCancelledError,
    MuxError,
    NotReadyError,
    OverloadedError,
    PreviewSpec,
    RefineProgress,
    RefineSpec,
    TimeRange,
)
from h3stream.cli import main, make_parser
from h3stream.codec import refine_spec_from_proto
from tests.fakes import EXAMPLES, NOTICE, FakeVideoService, Script, content_of, events_of, media_of, plan_of
from tests.service.client.conftest import CLI, Run, finish, start, until

PLAN = plan_of(GenerateRequest("a fox"))
FIRST = next(e for e in events_of(PLAN) if isinstance(e, Fragment))


async def test_generate_writes_the_stream_and_tells_how_it_went(run: Run, tmp_path: Path) -> None:
    result = await run("generate", "a fox", "-o", "clip.mp4")
    assert result.status == 0, result.err
    assert (tmp_path / "clip.mp4").read_bytes() == media_of(PLAN)
    lines = result.out.decode().splitlines()
    assert re.fullmatch(r"first fragment after \d+\.\d s; 17 of 39 frames were out before sampling ended", lines[0])
    num_bytes = len(media_of(PLAN))
    assert re.fullmatch(rf"39 frames, 52000 samples, {num_bytes} bytes in 2 fragments; \d+\.\d s in all", lines[1])
    assert lines[2:] == [f"warning: {NOTICE}", "warning: 3 audio samples are at full scale", "clip.mp4"]


async def test_an_example_of_the_server_takes_the_prompt_s_place(run: Run, service: FakeVideoService) -> None:
    listed = (await run("examples")).out.decode().splitlines()
    assert listed == [f" {number}  {prompt}" for number, prompt in enumerate(EXAMPLES, start=1)]
    for number, options in ((1, ["--example"]), (2, ["--example", "2"])):
        result = await run("generate", "-o", "clip.mp4", *options)
        assert result.status == 0, result.err
        assert result.err.splitlines()[0] == f"example {number} of 2: {EXAMPLES[number - 1]}"
    assert [request.prompt for request in service.requests] == list(EXAMPLES)


async def test_attach_saves_the_clip_of_a_job_from_its_start(run: Run, tmp_path: Path) -> None:
    await run("generate", "a fox", "-o", "made.mp4")
    result = await run("attach", "job-0", "-o", "clip.mp4")
    assert result.status == 0, result.err
    assert (tmp_path / "clip.mp4").read_bytes() == media_of(PLAN)
    assert result.out.decode().splitlines()[-1] == "clip.mp4"
    assert "joined" not in result.out.decode()


@pytest.mark.parametrize("start", [["--from-chunk", "2"], ["--live"]], ids=" ".join)
async def test_attach_joins_a_job_where_it_is_told(run: Run, tmp_path: Path, start: list[str]) -> None:
    await run("generate", "a fox", "-o", "made.mp4")
    result = await run("attach", "job-0", "-o", "clip.mp4", *start)
    assert result.status == 0, result.err
    init, *_, last = [event.media for event in events_of(PLAN) if event.media]
    assert (tmp_path / "clip.mp4").read_bytes() == init + last
    first, second, *_ = result.out.decode().splitlines()
    assert first.endswith("joined at frame 17: the clip begins there")
    assert second.startswith(f"22 frames, {len(init + last)} bytes in 1 fragments; ")


async def test_attach_to_a_job_that_is_not_there_fails(run: Run, tmp_path: Path) -> None:
    result = await run("attach", "job-7", "-o", "clip.mp4")
    assert (result.status, result.err.splitlines()[0]) == (1, "h3stream: JOB_NOT_FOUND: there is no job 'job-7'")
    assert not (tmp_path / "clip.mp4").exists()


async def test_progress_that_is_no_terminal_is_plain_lines(run: Run) -> None:
    result = await run("generate", "a fox", "-o", "clip.mp4")
    assert "\r" not in result.err
    assert "\x1b" not in result.err
    notes = ["job job-0: 39 frames of 64x64 in 3 chunks, seed 0", f"warning: {NOTICE}"]
    assert result.err.splitlines()[:2] == notes
    lines = [line.split("s  ", 1)[1] for line in result.err.splitlines()[2:] if not line.startswith("warning")]
    assert lines[:4] == [
        "encode  0/39 frames",
        "denoise  chunk 0 of 0-2  step 0/2  0/39 frames",
        "denoise  chunk 1 of 0-2  step 0/2  0/39 frames",
        "decode  chunk 0 of 0-2  0/39 frames",
    ]
    assert re.fullmatch(r"denoise  chunk 2 of 0-2  step 0/2  17/39 frames  first at \d+\.\d s", lines[5])


async def test_stills_are_written_one_by_one(run: Run, tmp_path: Path) -> None:
    given = ("generate", "a fox", "-o", "clip.mp4", "--preview-side", "64", "--previews", "made/stills")
    result = await run(*given)
    assert result.status == 0, result.err
    names = [f"chunk-{chunk:02}-step-{step:03}.jpg" for chunk in range(3) for step in (1, 2)]
    stills = tmp_path / "made" / "stills"
    assert sorted(path.name for path in stills.iterdir()) == names
    assert (stills / names[-1]).read_bytes() == b"still 2.2"
    assert (tmp_path / "clip.mp4").read_bytes() == media_of(PLAN)
    await run(*given, "--mode", "dense")
    assert len(list(stills.glob("clip-step-00?.jpg"))) == 5


async def test_stills_that_cannot_be_written_are_told_once_and_leave_the_clip_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "stills" / "chunk-00-step-001.jpg").mkdir(parents=True)
    result = await run("generate", "a fox", "-o", "clip.mp4", "--preview-side", "64", "--previews", "stills")
    assert result.status == 0, result.err
    assert result.err.count("no more stills are written to stills: Is a directory") == 1
    assert (tmp_path / "clip.mp4").read_bytes() == media_of(PLAN)


async def test_every_option_arrives(run: Run, service: FakeVideoService) -> None:
    options = (
        "--frames 22 --width 96 --height 128 --seed 18446744073709551615 --steps 3 --video-shift 5.5 --audio-shift 2 "
        "--sink 4 --window all --kv-storage cpu_pinned --no-cancel-on-disconnect"
    )
    result = await run("generate", "a fox", "-o", "clip.mp4", *options.split())
    assert result.status == 0, result.err
    result = await run("generate", "a fox", "-o", "clip.mp4", "--window", "1")
    assert result.status == 0, result.err
    dense = ("--mode", "dense", "--adapter", "turbo=-0.5", "--adapter", "style", "--artifact", "audio.flac")
    result = await run("generate", "a fox", "-o", "clip.mp4", *dense)
    assert result.status == 0, result.err
    for stills in ("--preview-side 0", "--preview-every 2", "--preview-side 64 --preview-every 3"):
        result = await run("generate", "a fox", "-o", "clip.mp4", *stills.split())
        assert result.status == 0, result.err
    assert service.requests == [
        GenerateRequest(
            "a fox", num_frames=22, width=96, height=128, seed=2**64 - 1, steps=3, video_shift=5.5, audio_shift=2.0,
            sink=4, window="all", kv_storage="cpu_pinned",
        ),
        GenerateRequest("a fox", window=1, cancel_on_disconnect=True),
        GenerateRequest(
            "a fox", mode="dense", adapters=(AdapterChoice("turbo", -0.5), AdapterChoice("style")),
            artifacts=("audio.flac",), cancel_on_disconnect=True,
        ),
        *(
            GenerateRequest("a fox", cancel_on_disconnect=True, preview=PreviewSpec(*preview))
            for preview in ((0, 1), (256, 2), (64, 3))
        ),
    ]  # fmt: skip


async def test_standard_output_carries_the_stream_and_nothing_else(run: Run) -> None:
    result = await run("generate", "a fox", "-o", "-")
    assert result.status == 0
    assert result.out == media_of(PLAN)
    assert "first fragment after" in result.err


async def test_standard_output_carries_each_fragment_as_it_comes(
    address: str, service: FakeVideoService, tmp_path: Path
) -> None:
    service.script = Script(stall_at=FIRST.seq + 1)
    process = await start("generate", "a fox", "-o", "-", "--server", address, cwd=tmp_path)
    assert process.stdout is not None
    due = b"".join(event.media for event in events_of(PLAN) if event.seq <= FIRST.seq)
    assert await asyncio.wait_for(process.stdout.readexactly(len(due)), 30) == due
    process.send_signal(signal.SIGINT)
    assert (await finish(process)).status == 130


@pytest.mark.parametrize("output", ["clip.mp4", "-"])
async def test_a_clip_without_a_whole_stream_is_no_success(
    run: Run, address: str, service: FakeVideoService, tmp_path: Path, output: str
) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"older")
    service.script = Script(has_stream=False)
    told = f"the server has audio.flac: h3stream download job-0 NAME --server {address}"
    for verb in (("generate", "a fox"), ("attach", "job-0")):
        result = await run(*verb, "-o", output)
        assert (result.status, result.out) == (1, b"")
        assert result.err.splitlines()[-1] == f"h3stream: the stream of the clip is not whole; {told}"
        assert "warning: no encoder can open" in result.err
    assert (tmp_path / "clip.mp4").exists() == (output == "-")


async def test_a_closed_standard_output_is_nowhere_to_deliver(
    run: Run, address: str, service: FakeVideoService, tmp_path: Path
) -> None:
    await run("generate", "a fox", "-o", "clip.mp4")
    for command in ("attach job-0", "download job-0 final.mp4"):
        script = f"{' '.join(CLI)} {command} -o - --server {address} >&-"
        process = await asyncio.create_subprocess_exec("bash", "-c", script, cwd=tmp_path, stdout=PIPE, stderr=PIPE)
        result = await finish(process)
        assert (result.status, result.err) == (2, "h3stream: standard output is closed\n")
    assert (service.attached, service.downloads) == ([], [])


async def test_a_download_goes_where_it_is_told(run: Run, service: FakeVideoService, tmp_path: Path) -> None:
    await run("generate", "a fox", "-o", "clip.mp4")
    assert (await run("download", "job-0")).out == b"none\n"
    data = content_of("job-0", "final.mp4")
    for output in ("-", "/dev/stdout"):
        result = await run("download", "job-0", "final.mp4", "-o", output)
        assert (result.status, result.out) == (0, data), result.err
    result = await run("download", "job-0", "final.mp4")
    assert (result.status, result.out) == (0, b"final.mp4\n")
    assert (tmp_path / "final.mp4").read_bytes() == data


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_job_that_is_not_to_be_cancelled_goes_on(
    number: signal.Signals, address: str, service: FakeVideoService, tmp_path: Path
) -> None:
    service.script = Script(stall_at=FIRST.seq + 1)
    options = ("-o", "clip.mp4", "--no-cancel-on-disconnect", "--server", address)
    process = await start("generate", "a fox", *options, cwd=tmp_path)
    await until(lambda: (tmp_path / "clip.mp4").exists() and (tmp_path / "clip.mp4").stat().st_size > 5000)
    process.send_signal(number)
    result = await finish(process)
    assert (result.status, service.cancelled) == (130, set())
    assert result.err.splitlines()[-1] == (
        f"h3stream: interrupted; job job-0 goes on; follow it with: h3stream attach job-0 --server {address} -o FILE; "
        "clip.mp4 keeps the 17 of 39 frames that had arrived"
    )


async def test_a_lost_connection_is_told_and_so_is_its_return(
    run: Run, service: FakeVideoService, tmp_path: Path
) -> None:
    service.script = Script(lose_at=[FIRST.seq])
    result = await run("generate", "a fox", "-o", "clip.mp4", "--no-cancel-on-disconnect")
    assert result.status == 0, result.err
    assert [line for line in result.err.splitlines() if "connect" in line] == [
        "h3stream: connection lost; trying again for up to 60 s",
        "h3stream: connected again",
    ]
    assert (tmp_path / "clip.mp4").read_bytes() == media_of(PLAN)


async def test_a_reader_that_goes_away_cancels_the_job(address: str, service: FakeVideoService, tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *CLI, "generate", "a fox", "-o", "-", "--server", address, cwd=tmp_path, stdout=write_end, stderr=PIPE
    )
    os.close(write_end)
    os.close(read_end)
    result = await finish(process)
    assert result.status == 141
    assert result.err.splitlines()[-1] == "h3stream: the reader has gone; the job is cancelled"
    assert "Traceback" not in result.err
    assert "Exception ignored" not in result.err
    assert service.cancelled == {"job-0"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupt_cancels_the_job_and_keeps_what_had_arrived(
    number: signal.Signals, address: str, service: FakeVideoService, tmp_path: Path
) -> None:
    service.script = Script(stall_at=FIRST.seq + 1)
    process = await start("generate", "a fox", "-o", "clip.mp4", "--server", address, cwd=tmp_path)
    due = b"".join(event.media for event in events_of(PLAN) if event.seq <= FIRST.seq)
    clip = tmp_path / "clip.mp4"
    await until(lambda: clip.exists() and clip.stat().st_size == len(due))
    process.send_signal(number)
    result = await finish(process)
    assert result.status == 130
    assert service.cancelled == {"job-0"}
    assert result.err.splitlines()[-1] == (
        "h3stream: interrupted; the job is cancelled; clip.mp4 keeps the 17 of 39 frames that had arrived"
    )
    assert "Traceback" not in result.err
    assert clip.read_bytes() == due


async def test_a_job_that_could_not_be_cancelled_is_not_called_cancelled(
    address: str, service: FakeVideoService, tmp_path: Path
) -> None:
    service.script = Script(stall_at=FIRST.seq + 1)
    process = await start("generate", "a fox", "-o", "clip.mp4", "--server", address, cwd=tmp_path)
    await until(lambda: (tmp_path / "clip.mp4").exists() and (tmp_path / "clip.mp4").stat().st_size > 5000)
    service.script.refuse_with = NotReadyError("the server is stopping")
    process.send_signal(signal.SIGINT)
    result = await finish(process)
    assert result.status == 130
    assert "interrupted; job job-0 could not be cancelled (the server is stopping); clip.mp4 keeps" in result.err


async def test_bad_input_is_told_field_by_field_and_leaves_an_older_file_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"older")
    result = await run("generate", "a fox", "-o", "clip.mp4", "--frames", "40")
    assert (result.status, result.out) == (2, b"")
    assert result.err == "h3stream: the request is not valid\n  num_frames is 40; it must be 17k + 5\n"
    result = await run("generate", "a fox", "-o", "clip.mp4", "--seed", "-1", "--steps", "9999999999")
    assert result.status == 2
    assert result.err.splitlines() == [
        "h3stream: the request is not valid",
        "  steps is 9999999999; it must be an integer from -2147483648 to 2147483647",
        "  seed is -1; it must be an integer from 0 to 18446744073709551615",
    ]
    assert (tmp_path / "clip.mp4").read_bytes() == b"older"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "a fox", "-o", "missing/clip.mp4"], "is no directory"),
        (["generate", "a fox", "-o", "clip.mp4", "--frames", "many"], "--frames: invalid int value: 'many'"),
        (["generate", "a fox", "-o", "clip.mp4", "--frame", "22"], "unknown arguments: --frame"),
        (["generate", "a fox"], "required: -o/--output"),
        (["generate", "-o", "clip.mp4"], "one of the arguments PROMPT --example is required"),
        (["generate", "a fox", "-o", "clip.mp4", "--example"], "--example: not allowed with argument PROMPT"),
        (
            ["generate", "--example", "a fox", "-o", "clip.mp4"],
            "'a fox' is no number of an example",
        ),
        (["plan", "--example", "0"], "'0' is no number of an example; `h3stream examples` lists them"),
        (["plan", "--example", "7"], "example is 7; this model has 2 examples; the nearest valid value is 2"),
        (["plan", "a fox", "--mode", "turbo"], "--mode: invalid choice: 'turbo' (choose from 'streaming', 'dense')"),
        (
            ["plan", "a fox", "--adapter", "turbo=much"],
            "'turbo=much' is not NAME or NAME=STRENGTH: 'much' is no number",
        ),
        (["plan", "a fox", "--window", "foo"], "--window: 'foo' is no number of chunks; give N, or all"),
        (["plan", "a fox", "--seed", "-1", "--frames", "40"], "the nearest valid values are 39 and 56"),
        (["generate", "a fox", "-o", "c.mp4", "--previews", __file__], "is no directory"),
        (
            ["generate", "a fox", "-o", "c.mp4", "--previews", "s", "--preview-side", "0"],
            "there is nothing for --previews",
        ),
        (["job", os.fsdecode(b"\xff")], "job_id holds a lone surrogate at character 0"),
        (["cancel", os.fsdecode(b"\xff")], "job_id holds a lone surrogate at character 0"),
        (["attach", os.fsdecode(b"\xff"), "-o", "c.mp4"], "job_id holds a lone surrogate at character 0"),
        (["download", "job-0", os.fsdecode(b"\xff")], "name holds a lone surrogate at character 0"),
        (["download", "job-0", "final.mp4", "-o", "."], "cannot write .: it is a directory"),
        (["download", "job-0", "final.mp4", "-o", ""], "cannot write '': it is a directory"),
        (["plan", "a fox", "--adapter", "turbo=nan"], "adapters[0].strength is nan; it must be a finite number"),
        (["generate", "a fox", "-o", "clip.mp4", "--model", "."], "not allowed with argument"),
        (["paint", "a fox"], "invalid choice: 'paint'"),
        (["refine", "job-0", "-o", "missing/clip.mp4"], "is no directory"),
        (["refine", "job-0", "-o", "/dev/stdout"], "the refined clip is fetched once it is whole: give -o a file"),
        (["refine", "job-0", "-o", "-"], "the refined clip is fetched once it is whole: give -o a file"),
        (["refine", "job-0", "-o", "clip.mp4", "--range", "5"], "--range: '5' is not FROM-TO in seconds, e.g. 3-5"),
        (["refine", "job-0", "-o", "clip.mp4", "--contents", "all"], "--contents: invalid choice: 'all'"),
        (["refine", "job-0", "-o", "clip.mp4", "--prompt", "a fox"], "the prompt of a job's clip is known"),
        (["refine", "job-0", "-o", "clip.mp4", "--steps", "9999999999"], "steps is 9999999999; it must be"),
        (["refine", "latents.safetensors", "-o", "clip.mp4"], "latents.safetensors cannot be read: No such file"),
        (["refine", "latents.safetensors", "-o", "clip.mp4", "--model", "."], "not allowed with argument"),
        (["generate", "a fox", "-o", "-", "--refine-audio"], "the refined clip goes to a file beside the clip's"),
        (["generate", "a fox", "-o", "c.mp4", "--refine-adapter", "style=much"], "--refine-adapter: 'style=much' is"),
    ],
)
async def test_bad_arguments_end_with_status_2(
    arguments: list[str], words: str, run: Run, service: FakeVideoService
) -> None:
    result = await run(*arguments)
    assert result.status == 2
    assert words in result.err
    assert (service.requests, service.headers, service.downloads) == ([], [], [])


async def test_a_latents_file_is_never_overwritten_with_what_is_made_of_it(tmp_path: Path) -> None:
    latents = tmp_path / "latents.safetensors"
    latents.write_bytes(b"latents")
    (tmp_path / "linked.mp4").symlink_to(latents)
    for output in ("latents.safetensors", "./latents.safetensors", "linked.mp4"):
        result = await finish(await start("refine", latents.name, "--prompt", "a fox", "-o", output, cwd=tmp_path))
        assert result.status == 2
        assert f"{output} is the latents file itself: give -o another file" in result.err
    assert latents.read_bytes() == b"latents"


async def test_a_file_that_is_no_latents_file_is_not_taken_for_a_job(tmp_path: Path) -> None:
    (tmp_path / "latents.mp4").touch()
    result = await finish(await start("refine", "latents.mp4", "--prompt", "a fox", "-o", "clip.mp4", cwd=tmp_path))
    assert result.status == 2
    assert "latents.mp4 is a file, but no latents file: those end in .safetensors" in result.err


async def test_a_job_is_refined_at_its_server_alone(tmp_path: Path) -> None:
    result = await finish(await start("refine", "job-0", "-o", "clip.mp4", "--model", ".", cwd=tmp_path))
    assert result.status == 2
    assert "a job is refined where it was made: --model is for a file" in result.err


async def test_the_environment_names_the_server_where_no_argument_does(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("H3STREAM_SERVER", address)
    result = await finish(await start("generate", "a fox", "-o", "clip.mp4", cwd=tmp_path))
    assert result.status == 0, result.err
    assert "starting" not in result.err
    assert b'"job_id": "job-0"' in (await finish(await start("job", "job-0", cwd=tmp_path))).out
    monkeypatch.setenv("H3STREAM_SERVER", "localhost")
    result = await finish(await start("info", cwd=tmp_path))
    assert result.status == 2
    assert "'localhost' is no address of a server; give HOST:PORT" in result.err


def test_a_server_on_this_machine_is_the_default_of_what_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("H3STREAM_SERVER", raising=False)
    for line in ("info", "adapters", "job J", "cancel J", "download J", "attach J -o c.mp4"):
        assert make_parser().parse_args(line.split()).server == "127.0.0.1:50051"
    for line in ("generate P -o c.mp4", "plan P", "refine J -o c.mp4"):
        assert make_parser().parse_args(line.split()).server is None


@pytest.mark.parametrize("text", ["localhost", "localhost:abc", "", "localhost:0", "http://localhost:1", "::1:5"])
def test_what_is_no_address_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["info", "--server", text])
    assert end.value.code == 2
    assert "is no address of a server; give HOST:PORT, e.g. localhost:50051, or unix:PATH" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["localhost:1", "[::1]:50051", "unix:/tmp/socket", "unix:socket"])
def test_an_address_is_taken_as_it_is(address: str) -> None:
    assert make_parser().parse_args(["info", "--server", address]).server == address


async def test_a_failure_mid_stream_says_why_and_keeps_what_had_arrived(
    run: Run, service: FakeVideoService, tmp_path: Path
) -> None:
    service.script = Script(
        fail_at=FIRST.seq + 1, fail_with=MuxError("no encoder", job_id="job-0", phase="decode", chunk_index=1)
    )
    result = await run("generate", "a fox", "-o", "clip.mp4")
    assert (result.status, result.out) == (1, b"")
    assert result.err.splitlines()[-3:] == [
        "h3stream: the clip is not whole; clip.mp4 keeps the 17 of 39 frames that had arrived",
        "h3stream: MUX_FAILED: no encoder",
        "  job job-0, phase decode, chunk 1",
    ]
    assert len((tmp_path / "clip.mp4").read_bytes()) > 5000


async def test_a_full_server_says_when_to_come_back(run: Run, service: FakeVideoService) -> None:
    service.script = Script(refuse_with=OverloadedError("4 jobs wait already", retry_after_s=2.5))
    result = await run("generate", "a fox", "-o", "clip.mp4")
    assert (result.status, result.err) == (1, "h3stream: OVERLOADED: 4 jobs wait already\n  try again in 2.5 s\n")


async def test_a_file_that_cannot_be_written_cancels_the_job(
    run: Run, service: FakeVideoService, tmp_path: Path
) -> None:
    (tmp_path / "clip.mp4").symlink_to("/dev/full")
    result = await run("generate", "a fox", "-o", "clip.mp4")
    assert result.status == 1
    assert (
        result.err.splitlines()[-1] == "h3stream: cannot write clip.mp4: No space left on device; the job is cancelled"
    )
    assert service.cancelled == {"job-0"}


async def test_a_server_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    result = await finish(await start("info", "--server", "127.0.0.1:1", cwd=tmp_path))
    told = "nothing answers at 127.0.0.1:1; is a server running there (h3stream serve)?"
    assert (result.status, result.err) == (1, f"h3stream: NOT_READY: {told}\n")


async def test_plan_prints_the_chunks(run: Run, service: FakeVideoService) -> None:
    result = await run("plan", "a fox", "--seed", "7", "--window", "all")
    assert result.status == 0
    assert result.out.decode().splitlines() == [
        "39 frames of 64x64, 1.62 s, 52000 samples, about 100000 bytes",
        "2 steps, shifts 12 and 3, sink 2, all chunks, KV on gpu, seed 7",
        "6 noise forwards, 2 clean forwards",
        "",
        "chunk  video latents  audio latents  frames out",
        "    0            0:5           0:29           0",
        "    1           5:10          29:57          17",
        "    2          10:12          57:65          39",
        f"warning: {NOTICE}",
    ]
    assert service.requests == []


async def test_plan_tells_of_a_dense_clip_what_it_has(run: Run) -> None:
    result = await run("plan", "a fox", "--mode", "dense", "--adapter", "turbo=0.5", "--adapter", "style")
    assert result.status == 0
    assert result.out.decode().splitlines()[1:4] == [
        "5 steps, shifts 12 and 3, dense, seed 0",
        "adapters turbo at 0.5, style at 1",
        "5 noise forwards, 0 clean forwards",
    ]


async def test_adapters_are_a_table_or_json(run: Run) -> None:
    result = await run("adapters")
    assert result.status == 0
    assert result.out.decode().splitlines() == [
        "name   strength  format   rank  modules  trained for                            file",
        "raven  1         raven    128   266/266  streaming                              raven.safetensors",
        "turbo  0.75      comfyui  8-64  200/208  steps 4, video shift 6, audio shift 3  turbo-4.safetensors",
    ]
    listed = json.loads((await run("adapters", "--json")).out)
    assert [(adapter["name"], adapter["trained_steps"]) for adapter in listed] == [("raven", None), ("turbo", 4)]


@pytest.mark.parametrize("command", ["plan 'a fox'", "plan 'a fox' --json", "info", "adapters"])
@pytest.mark.parametrize(
    ("redirection", "status", "line"),
    [
        ("| true", 141, ""),
        ("> /dev/full", 1, "h3stream: cannot write standard output: No space left on device\n"),
        (">&-", 0, ""),
        ("2>&-", 0, ""),
    ],
)
async def test_results_that_nobody_takes_end_the_command_without_a_traceback(
    address: str, tmp_path: Path, command: str, redirection: str, status: int, line: str
) -> None:
    script = f"{' '.join(CLI)} {command} --server {address} {redirection}; exit ${{PIPESTATUS[0]}}"
    process = await asyncio.create_subprocess_exec("bash", "-c", script, cwd=tmp_path, stdout=PIPE, stderr=PIPE)
    result = await finish(process)
    assert (result.status, result.err) == (status, line)


async def test_a_file_name_may_be_any_bytes(run: Run, tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff.mp4")
    result = await run("generate", "a fox", "-o", name)
    assert (result.status, result.out.splitlines()[-1]) == (0, b"\xff.mp4")
    assert (tmp_path / name).read_bytes() == media_of(PLAN)


@pytest.mark.parametrize("output", [".", ""])
async def test_a_directory_is_refused_before_anything_is_made(run: Run, service: FakeVideoService, output: str) -> None:
    result = await run("generate", "a fox", "-o", output)
    assert (result.status, result.err) == (2, f"h3stream: cannot write {output or repr(output)}: it is a directory\n")
    assert service.requests == []


async def test_plan_prints_json(run: Run) -> None:
    plan = json.loads((await run("plan", "a fox", "--json")).out)
    assert plan["clip"]["num_frames"] == 39
    assert [chunk["num_frames_emitted"] for chunk in plan["chunks"]] == [0, 17, 39]
    assert plan["warnings"] == [{"reason": "MODEL_NOTICE", "message": NOTICE}]


async def test_info_job_and_cancel_tell_what_the_server_knows(run: Run, service: FakeVideoService) -> None:
    await run("generate", "a fox", "-o", "clip.mp4")
    info = json.loads((await run("info")).out)
    assert (info["model_name"], info["max_message_bytes"]) == ("fake", 1 << 20)
    job = json.loads((await run("job", "job-0")).out)
    assert (job["state"], job["create_time"]) == ("running", "2026-01-02 03:04:05+00:00")
    assert (await run("cancel", "job-0")).out == b"cancelled\n"
    result = await run("job", "job-9")
    assert (result.status, result.err) == (1, "h3stream: JOB_NOT_FOUND: there is no job 'job-9'\n  job job-9\n")


REFINE_OPTIONS = (
    "--{0}steps 4 --{0}audio-denoise 0.4 --{0}video-denoise 0.1 --{0}sampler heun --{0}scheduler native --{0}cfg 2 "
    "--{0}negative-prompt hum,hiss --{0}seed 5 --{0}adapter style:-0.5 --{0}adapter turbo --{0}range 0.5-1 "
    "--{0}contents kv --{0}precision fp8 --{0}text kept --{0}refresh 2 --{0}backend disk --{0}allow-disk "
    "--{0}vram-margin-gb 2 --{0}shared --{0}on-no-room exact --{0}compare"
)
REFINE_SPEC = RefineSpec(
    steps=4, audio_denoise=0.4, video_denoise=0.1, sampler="heun", scheduler="native", cfg=2.0,
    negative_prompt="hum,hiss", seed=5, adapters=(AdapterChoice("style", -0.5), AdapterChoice("turbo")),
    audio_range=TimeRange(0.5, 1.0), compare=True,
    cache=FrozenCacheSpec(contents="kv", precision="fp8", text="kept", refresh_interval=2, backend="disk",
                          allow_disk=True, vram_margin_gb=2.0, shared=True, on_no_room="exact"),
)  # fmt: skip


async def test_every_option_of_a_refinement_arrives_whichever_command_has_it(
    run: Run, service: FakeVideoService, tmp_path: Path
) -> None:
    result = await run("generate", "a fox", "-o", "clip.mp4", *REFINE_OPTIONS.format("refine-").split())
    assert result.status == 0, result.err
    assert service.requests[0].refine_audio == REFINE_SPEC
    assert (tmp_path / "clip.mp4").read_bytes() == media_of(PLAN)
    assert (tmp_path / "clip.refined.mp4").read_bytes() == content_of("job-0", "refined.mp4")
    assert (tmp_path / "clip.refined.compare.png").read_bytes() == content_of("job-0", "refine-compare.png")
    assert result.out.decode().splitlines()[-3:] == ["clip.mp4", "clip.refined.mp4", "clip.refined.compare.png"]
    result = await run("refine", "job-0", "-o", "louder.mp4", *REFINE_OPTIONS.format("").split())
    assert result.status == 0, result.err
    (header,) = service.headers
    assert refine_spec_from_proto(header.spec, "spec") == REFINE_SPEC
    assert (header.job_id, header.cancel_on_disconnect) == ("job-0", True)
    assert (tmp_path / "louder.compare.png").read_bytes() == content_of("refine-0", "refine-compare.png")
    await run("generate", "a fox", "-o", "clip.mp4", "--refine-audio", "--refine-exact")
    assert service.requests[1].refine_audio == RefineSpec(cache=FrozenCacheSpec(enabled=False))
    await run("generate", "a fox", "-o", "clip.mp4", "--refine-audio")
    assert service.requests[2].refine_audio == RefineSpec()


async def test_refine_tells_each_step_and_what_changed(run: Run, tmp_path: Path) -> None:
    await run("generate", "a fox", "-o", "clip.mp4")
    result = await run("refine", "job-0", "-o", "louder.mp4", "--steps", "3", "--compare")
    assert result.status == 0, result.err
    assert (tmp_path / "louder.mp4").read_bytes() == content_of("refine-0", "refined.mp4")
    lines = [line.split(" s  ", 1)[-1] for line in result.err.splitlines()]
    assert lines == [
        "job refine-0: the sound of 39 frames of 64x64 refined in 3 steps",
        f"warning: {NOTICE}",
        "refine",
        "cache of hidden in int4 in ram: it has no room on the device",
        "refine  step 1/3 build",
        "refine  step 2/3 cached",
        "refine  step 3/3 cached",
        "decode",
    ]
    assert result.out.decode().splitlines() == [
        "sound refined in 1.8 s, steps: 1 build, 2 cached",
        "against the sound before: latents 0.25 (relative L2), log-mel 3.50 dB, RMS ratio 1.200",
        "against exact: latents 0.026 (relative L2), log-mel 0.80 dB, RMS ratio 0.990; 3.50 times as fast",
        f"warning: {NOTICE}",
        "louder.mp4",
        "louder.compare.png",
    ]


async def test_a_download_that_breaks_off_goes_on(run: Run, service: FakeVideoService, tmp_path: Path) -> None:
    await run("generate", "a fox", "-o", "clip.mp4")
    service.script = Script(cut_download=True)
    result = await run("refine", "job-0", "-o", "louder.mp4")
    assert result.status == 0, result.err
    assert (tmp_path / "louder.mp4").read_bytes() == content_of("refine-0", "refined.mp4")
    assert [request.offset_bytes > 0 for request in service.downloads] == [False, True]


async def test_a_latents_file_is_refined(run: Run, service: FakeVideoService, tmp_path: Path) -> None:
    (tmp_path / "latents.safetensors").write_bytes(b"latents" * 100_000)
    result = await run("refine", "latents.safetensors", "-o", "louder.mp4", "--prompt", "a fox")
    assert result.status == 0, result.err
    assert service.uploads == [b"latents" * 100_000]
    assert service.headers[0].upload.prompt == "a fox"


async def test_a_sound_that_cannot_be_refined_leaves_the_clip_and_fails_the_command(
    run: Run, service: FakeVideoService, tmp_path: Path
) -> None:
    service.script = Script(refine_failure="the cache needs 9.7 GiB")
    result = await run("generate", "a fox", "-o", "clip.mp4", "--refine-audio")
    assert result.status == 1
    told = "h3stream: the clip is whole, but its sound is not refined: OUT_OF_MEMORY: the cache needs 9.7 GiB"
    assert result.err.splitlines()[-1] == told
    assert (tmp_path / "clip.mp4").read_bytes() == media_of(PLAN)
    assert not (tmp_path / "clip.refined.mp4").exists()
    assert result.out.decode().splitlines()[-1] == "clip.mp4"


async def test_a_refinement_that_fails_says_why(run: Run, service: FakeVideoService, tmp_path: Path) -> None:
    await run("generate", "a fox", "-o", "clip.mp4")
    error = DeviceMemoryError("the cache needs 9.7 GiB", job_id="refine-0", phase="refine")
    service.script = Script(fail_at=3, fail_with=error)
    result = await run("refine", "job-0", "-o", "louder.mp4")
    assert (result.status, result.out) == (1, b"")
    assert result.err.splitlines()[-2:] == [
        "h3stream: OUT_OF_MEMORY: the cache needs 9.7 GiB", "  job refine-0, phase refine",
    ]  # fmt: skip
    assert not (tmp_path / "louder.mp4").exists()


async def test_an_interrupt_cancels_the_refinement(address: str, service: FakeVideoService, tmp_path: Path) -> None:
    service.script = Script(stall_at=4)
    (tmp_path / "latents.safetensors").write_bytes(b"latents")
    given = ("refine", "latents.safetensors", "--prompt", "a fox", "-o", "louder.mp4", "--server", address)
    process = await start(*given, cwd=tmp_path)
    assert process.stderr is not None
    while b"refine  step 1/6 build" not in (await asyncio.wait_for(process.stderr.readline(), 30)):
        pass
    process.send_signal(signal.SIGINT)
    result = await finish(process)
    assert (result.status, result.err) == (130, "h3stream: interrupted; the job is cancelled\n")
    assert service.cancelled == {"refine-0"}


async def test_a_job_that_ends_behind_its_clip_leaves_the_clip_whole(
    run: Run, service: FakeVideoService, tmp_path: Path
) -> None:
    events = list(events_of(plan_of(GenerateRequest("a fox", refine_audio=RefineSpec()))))
    step = next(event.seq for event in events if isinstance(event, RefineProgress))
    service.script = Script(fail_at=step, fail_with=JobCancelledError("job-0 was cancelled", job_id="job-0"))
    result = await run("generate", "a fox", "-o", "clip.mp4", "--refine-audio")
    assert result.status == 1
    assert "h3stream: clip.mp4 is whole, but its sound is not refined" in result.err.splitlines()
    assert (tmp_path / "clip.mp4").read_bytes() == media_of(PLAN)


async def test_a_download_that_cannot_be_written_or_is_interrupted_is_told(
    run: Run, address: str, service: FakeVideoService, tmp_path: Path
) -> None:
    await run("generate", "a fox", "-o", "clip.mp4")
    (tmp_path / "louder.mp4").symlink_to("/dev/full")
    result = await run("refine", "job-0", "-o", "louder.mp4")
    assert result.status == 1
    told = "h3stream: cannot write louder.mp4: No space left on device; job refine-0 has ended"
    assert result.err.splitlines()[-1] == told
    service.script = Script(silent_download=True)
    process = await start("refine", "job-0", "-o", "quiet.mp4", "--server", address, cwd=tmp_path)
    part = tmp_path / "quiet.mp4.part"
    await until(lambda: part.exists() and part.stat().st_size > 0)
    process.send_signal(signal.SIGINT)
    result = await finish(process)
    assert result.status == 130
    assert result.err.splitlines()[-1] == "h3stream: interrupted; job refine-1 has ended, but quiet.mp4 is not whole"
    assert service.cancelled == set()


async def test_a_job_without_a_clip_can_be_followed(run: Run, tmp_path: Path) -> None:
    await run("generate", "a fox", "-o", "clip.mp4")
    await run("refine", "job-0", "-o", "louder.mp4")
    result = await run("attach", "refine-0", "-o", "nothing.mp4")
    assert result.status == 0
    assert result.out.decode().splitlines()[0] == "sound refined in 1.8 s, steps: 1 build, 5 cached"
    assert "job refine-0 streams no clip; `h3stream download refine-0 refined.mp4` fetches" in result.err
    assert not (tmp_path / "nothing.mp4").exists()


async def test_plan_tells_how_the_sound_will_be_refined(run: Run) -> None:
    result = await run("plan", "a fox", "--refine-steps", "4")
    told = "sound refined in 4 steps from 0.5, euler, simple, cfg 1, cache of hidden in int4"
    assert told in result.out.decode().splitlines()


async def test_version_is_the_distribution_s(tmp_path: Path) -> None:
    result = await finish(await start("--version", cwd=tmp_path))
    assert (result.status, result.out) == (0, b"h3stream 0.1.0\n")


async def test_a_terminal_shows_one_line_that_fits_it(address: str, tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *CLI, "generate", "a fox", "-o", "clip.mp4", "--server", address,
        cwd=tmp_path, stdout=PIPE, stderr=terminal,
    )  # fmt: skip
    os.close(terminal)
    reading = asyncio.get_running_loop().run_in_executor(None, _read_all, controller)
    assert (await finish_without_error(process)) == 0
    shown = (await reading).decode()
    os.close(controller)
    drawn = [line.removesuffix("\x1b[K") for line in re.split(r"[\r\n]+", shown) if "%" in line]
    assert len(drawn) > 5
    assert max(map(len, drawn)) <= 79
    assert re.fullmatch(r"\[#+\] 100%  decode  chunk 2 of 0-2  39/39 frames  first at \d\.\d s", drawn[-1])
    assert f"warning: {NOTICE}" in shown


async def test_a_stream_of_bytes_is_not_poured_into_a_terminal(address: str, tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *CLI, "generate", "a fox", "-o", "-", "--server", address, cwd=tmp_path, stdout=terminal, stderr=PIPE
    )
    result = await finish(process)
    os.close(terminal)
    os.close(controller)
    assert result.status == 2
    assert "standard output is a terminal" in result.err


async def finish_without_error(process: Process) -> int:
    await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode


def _read_all(descriptor: int) -> bytes:
    data = b""
    while True:
        try:
            data += os.read(descriptor, 65536)
        except OSError:  # how a terminal whose other end is closed says so
            return data
