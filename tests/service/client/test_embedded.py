"""The service as a child process: started, used, stopped, and never left behind. The child here is a small one."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import sys
import textwrap
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path

import pytest

from h3stream import Client, GenerateRequest, embedded
from h3stream.embedded import EmbeddedServer, model_directory, model_examples, module_command
from h3stream.errors import StartupError
from tests.fakes import content_of, media_of, plan_of

ROOT = Path(__file__).parents[3]
CLI = [sys.executable, "-m", "h3stream.cli"]

CHILD = """
    import asyncio, os, signal, sys
    from pathlib import Path

    from tests.fakes import FakeVideoService, Script, serve_video

    marks = Path(os.environ["MARKS"])
    mode = os.environ.get("MODE", "")

    async def main():
        (marks / "arguments").write_text("\\n".join(sys.argv[1:]))
        (marks / "environment").write_text("\\n".join(os.environ))
        print("starting", flush=True)
        print("a line of the log", file=sys.stderr, flush=True)
        if mode == "die":
            sys.exit("no weights here")
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, (lambda: None) if mode == "deaf" else stop.set)
        if mode == "slow":
            await stop.wait()
        if mode != "deaf":
            loop.add_reader(0, lambda: os.read(0, 1) or stop.set())
        async with serve_video(FakeVideoService(script=Script(stall_at=3 if mode == "stall" else -1))) as address:
            (marks / "pid").write_text(str(os.getpid()))
            print("listening on", address, flush=True)
            await stop.wait()
        (marks / "stopped").touch()

    asyncio.run(main())
"""


def write_examples(model: Path, examples: list[str]) -> None:
    model.mkdir(parents=True)
    (model / "generation_config.json").write_text(json.dumps({"examples": examples}))


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the child leaves marks; it also puts the child in the place of the real server."""
    packages = tmp_path / "packages"
    orchestrator = packages / "orchestrator"
    orchestrator.mkdir(parents=True)
    (orchestrator / "__init__.py").touch()
    (orchestrator / "__main__.py").write_text(textwrap.dedent(CHILD))
    (orchestrator / "model_info.py").symlink_to(ROOT / "orchestrator" / "model_info.py")
    write_examples(packages / "models" / "tiny", ["A star.", "A box over the sea."])
    marks = tmp_path / "marks"
    marks.mkdir()
    (tmp_path / "my-model").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("MARKS", str(marks))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (packages, ROOT, ROOT / "client"))))
    monkeypatch.delenv("H3STREAM_MODEL", raising=False)
    monkeypatch.chdir(tmp_path)
    return marks


async def start(*arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(*CLI, *arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE)


async def finish(process: Process) -> tuple[int, str, str]:
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


async def until_it_samples(process: Process) -> None:
    assert process.stderr is not None
    while b"denoise" not in await asyncio.wait_for(process.stderr.readline(), 30):
        pass


async def test_a_latents_file_is_refined_without_a_server(marks: Path, tmp_path: Path) -> None:
    given = ("refine", "latents.safetensors", "--prompt", "a fox", "-o", "louder.mp4", "--model", "my-model")
    status, _, err = await finish(await start(*given))
    (tmp_path / "my-model").mkdir(exist_ok=True)
    assert (status, list(marks.iterdir())) == (2, [])  # what cannot be sent starts nothing
    assert "latents.safetensors cannot be read: No such file" in err
    (tmp_path / "latents.safetensors").write_bytes(b"latents")
    status, out, err = await finish(await start(*given))
    assert status == 0, err
    assert (tmp_path / "louder.mp4").read_bytes() == content_of("refine-0", "refined.mp4")
    assert out.splitlines()[-1] == "louder.mp4"
    assert (marks / "stopped").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--frames 40 --seed -1 --model my-model", "the nearest valid values are 39 and 56"),
        ("--width 100 --sink 0", "width is 100; it must be a multiple of 32"),
        ("--refine-steps 0 --artifact final.mp5", "refine_audio.steps is 0"),
        ("--model nowhere", "there is no model directory nowhere"),
    ],
)
async def test_what_would_be_refused_starts_nothing(marks: Path, arguments: str, told: str) -> None:
    status, out, err = await finish(await start("generate", "a fox", "-o", "clip.mp4", *arguments.split()))
    assert (status, out) == (2, "")
    assert told in err
    assert "starting" not in err
    assert list(marks.iterdir()) == []


async def test_generate_without_a_server_starts_one_and_stops_it(marks: Path, tmp_path: Path) -> None:
    status, out, err = await finish(await start("generate", "a fox", "-o", "clip.mp4", "--model", "my-model"))
    assert status == 0, err
    assert (tmp_path / "clip.mp4").read_bytes() == media_of(plan_of(GenerateRequest("a fox")))
    assert out.splitlines()[-1] == "clip.mp4"
    assert "starting the service on my-model" in err
    assert (marks / "stopped").exists()
    arguments = (marks / "arguments").read_text().splitlines()
    assert arguments[:5] == ["--model", "my-model", "--listen", "127.0.0.1:0", "--data"]
    assert arguments[6:] == ["--drain-s", "0", "--exit-with-parent"]
    assert not Path(arguments[5]).exists()
    assert list((tmp_path / "temporary").iterdir()) == []


async def test_a_server_whose_parts_the_environment_names_gets_no_tiny_model(
    marks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("H3STREAM_VIDEO_VAE", "vae.safetensors")
    status, _, err = await finish(await start("plan", "a fox"))
    assert status == 0, err
    assert "starting the service on the files that the environment names" in err
    assert (marks / "arguments").read_text().splitlines()[:3] == ["--listen", "127.0.0.1:0", "--data"]


async def test_where_no_model_is_named_it_is_the_repository_s(marks: Path, tmp_path: Path) -> None:
    status, _, err = await finish(await start("plan", "a fox"))
    assert status == 0, err
    model = tmp_path / "packages" / "models" / "tiny"
    assert (marks / "arguments").read_text().splitlines()[:2] == ["--model", str(model)]


async def test_an_installed_server_without_the_repository_s_model_asks_for_one(marks: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "packages" / "models")
    for command in (["generate", "a fox", "-o", "clip.mp4"], ["examples"], ["serve"]):
        status, out, err = await finish(await start(*command))
        assert (status, out) == (2, "")
        assert "no model is named: give --model DIR, or set H3STREAM_MODEL" in err
    assert list(marks.iterdir()) == []


async def test_an_example_of_the_model_takes_the_prompt_s_place(marks: Path, tmp_path: Path) -> None:
    status, out, err = await finish(await start("examples"))
    assert (status, out) == (0, " 1  A star.\n 2  A box over the sea.\n"), err
    write_examples(tmp_path / "other-model", ["A fox."])
    status, out, _ = await finish(await start("examples", "--model", "other-model"))
    assert (status, out, list(marks.iterdir())) == (0, " 1  A fox.\n", [])  # which start no server
    status, _, err = await finish(await start("generate", "--example", "2", "-o", "clip.mp4"))
    assert status == 0, err
    assert err.splitlines()[0] == "example 2 of 2: A box over the sea."
    assert (tmp_path / "clip.mp4").read_bytes() == media_of(plan_of(GenerateRequest("A box over the sea.")))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--example", "3"], "example is 3; this model has 2 examples; the nearest valid value is 2"),
        (["--example", "--model", "my-model"], "example is 1; this model suggests no examples; give a PROMPT"),
        (["--example", "--model", "nowhere"], "there is no model directory nowhere"),
    ],
)
async def test_an_example_that_is_not_there_starts_nothing(marks: Path, arguments: list[str], told: str) -> None:
    status, out, err = await finish(await start("generate", "-o", "clip.mp4", *arguments))
    assert (status, out) == (2, "")
    assert told in err
    assert list(marks.iterdir()) == []


async def test_a_server_that_does_not_start_shows_the_end_of_its_log(
    marks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODE", "die")
    status, out, err = await finish(await start("generate", "a fox", "-o", "clip.mp4", "--model", "my-model"))
    assert (status, out) == (1, "")
    assert err.splitlines()[-3:] == [
        "h3stream: the service ended with exit status 1; its log ends with:",
        "a line of the log",
        "no weights here",
    ]
    assert list((tmp_path / "temporary").iterdir()) == []


async def test_an_interrupt_cancels_the_job_and_stops_the_server(marks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODE", "stall")
    process = await start("generate", "a fox", "-o", "clip.mp4", "--model", "my-model")
    await until_it_samples(process)
    process.send_signal(signal.SIGINT)
    status, _, err = await finish(process)
    assert status == 130
    assert err.splitlines()[-1] == "h3stream: interrupted; the job is cancelled"
    assert (marks / "stopped").exists()


async def test_the_server_finds_nothing_of_who_may_call_where(marks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("API_KEY", "KEYS", "TLS", "TLS_CA", "TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA", "THREADS", "CLIENT_KEY")
    for name in names:
        monkeypatch.setenv(f"H3STREAM_{name}", "no" if name == "TLS" else "1")
    status, _, err = await finish(await start("generate", "a fox", "-o", "clip.mp4", "--model", "my-model"))
    assert status == 0, err
    found = (marks / "environment").read_text().splitlines()
    assert [name for name in found if name.startswith("H3STREAM_")] == ["H3STREAM_THREADS"]


async def test_an_interrupt_while_the_server_starts_stops_it(marks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODE", "slow")  # it never listens, so an interrupt that is lost shows
    process = await start("generate", "a fox", "-o", "clip.mp4", "--model", "my-model")
    await until((marks / "arguments").exists)
    process.send_signal(signal.SIGINT)
    status, _, err = await finish(process)
    assert status == 130
    assert "Traceback" not in err


async def test_the_server_ends_when_its_parent_is_killed(marks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODE", "stall")
    process = await start("generate", "a fox", "-o", "clip.mp4", "--model", "my-model")
    await until_it_samples(process)
    process.kill()
    await finish(process)
    await until((marks / "stopped").exists)


def test_a_server_that_does_not_stop_is_killed(marks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODE", "deaf")
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_S", 0.3)
    with EmbeddedServer(Path("my-model"), lambda line: None, os.environ) as server, Client(server.address) as client:
        assert client.server_info().model_name == "fake"
        assert server.log_tail() == "a line of the log"
    with pytest.raises(ProcessLookupError):
        os.kill(int((marks / "pid").read_text()), 0)
    assert not (marks / "stopped").exists()


def test_a_user_who_waits_is_told_so_and_in_the_end_that_it_failed(
    marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "STARTUP_REPORT_S", 0.01)
    monkeypatch.setattr(embedded, "STARTUP_TIMEOUT_S", 0.05)
    said: list[str] = []
    with pytest.raises(StartupError, match=r"has not started within 0\.05 s"):
        EmbeddedServer(Path("my-model"), said.append, os.environ).__enter__()
    assert said[0] == "starting the service on my-model"
    assert said[1].startswith("still starting after")


def test_the_model_is_the_one_given_else_the_environment_s() -> None:
    environment = {"H3STREAM_MODEL": "from-the-environment"}
    assert model_directory(Path("given"), environment) == Path("given")
    assert model_directory(None, environment) == Path("from-the-environment")
    assert model_directory(None, {"H3STREAM_DIT": "dit.safetensors"}) is None
    assert model_directory(Path("given"), {"H3STREAM_DIT": "dit.safetensors"}) == Path("given")


def test_a_model_without_a_directory_suggests_nothing() -> None:
    assert model_examples(None) == ()


def test_without_the_server_package_the_user_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match="install h3stream-server, or use a running server with --server"):
        EmbeddedServer(Path("my-model"), lambda line: None, os.environ).__enter__()


def test_a_folder_of_the_user_s_is_never_run_in_place_of_the_server(tmp_path: Path) -> None:
    assert module_command("orchestrator", ["--threads", "3"]) == [
        sys.executable,
        "-P",
        "-m",
        "orchestrator",
        "--threads",
        "3",
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "my-model", "--listen", "127.0.0.1:0", "--new-option", "3"], None),
        (["--threads", "3"], ["--model", "{tiny}", "--threads", "3"]),
        (["--config=my.toml"], None),
        (["--dit", "dit.safetensors", "--video-vae=vae.safetensors", "--adapter", "turbo=t.safetensors:0.5"], None),
        (["--tokenizer", "tokenizer"], None),
        (
            ["--adapter", "turbo=t.safetensors", "--dit-layout", "comfyui"],
            ["--model", "{tiny}", "--adapter", "turbo=t.safetensors", "--dit-layout", "comfyui"],
        ),
    ],
)
async def test_serve_hands_its_arguments_to_the_server(
    arguments: list[str], expected: list[str] | None, marks: Path, tmp_path: Path
) -> None:
    process = await start("serve", *arguments)
    assert process.stdout is not None
    await process.stdout.readline()
    assert (await process.stdout.readline()).startswith(b"listening on 127.0.0.1:")
    tiny = str(tmp_path / "packages" / "models" / "tiny")
    wanted = arguments if expected is None else [part.format(tiny=tiny) for part in expected]
    assert (marks / "arguments").read_text().splitlines() == wanted
    assert int((marks / "pid").read_text()) == process.pid
    process.send_signal(signal.SIGTERM)
    assert (await finish(process))[0] == 0


INSPECTOR = """
    import os, sys
    from pathlib import Path

    (Path(os.environ["MARKS"]) / "arguments").write_text("\\n".join(sys.argv[1:]))
    (Path(os.environ["MARKS"]) / "pid").write_text(str(os.getpid()))
    sys.exit(3)
"""


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
async def test_inspect_becomes_the_program_that_looks_at_files(
    marks: Path, tmp_path: Path, json_flag: list[str]
) -> None:
    package = tmp_path / "packages" / "services"
    (package / "checkpoints").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "checkpoints" / "__init__.py").touch()
    (package / "checkpoints" / "__main__.py").write_text(textwrap.dedent(INSPECTOR))
    process = await start("inspect", "a model", "b.safetensors", *json_flag)
    status, _, err = await finish(process)
    assert (status, err) == (3, "")
    assert (marks / "arguments").read_text().splitlines() == ["a model", "b.safetensors", *json_flag]
    assert int((marks / "pid").read_text()) == process.pid


async def test_inspect_needs_a_path() -> None:
    status, _, err = await finish(await start("inspect"))
    assert status == 2
    assert "required: PATH" in err
