"""The `h3stream` command. Results go to standard output, everything else to standard error.

Exit status: 0 done, 1 failed, 2 bad input, 130 interrupted (Ctrl-C, SIGTERM), 141 the reader of the output has gone.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from h3stream.aio import AsyncClient, AsyncGeneration
from h3stream.delivery import STANDARD_OUTPUT, Ending, Outputs, deliver
from h3stream.embedded import (
    MODEL_SETTINGS,
    EmbeddedServer,
    check_request,
    model_directory,
    model_examples,
    module_command,
    require_server_package,
)
from h3stream.endpoint import DEFAULT_SERVER, Endpoint, add_server_option, add_server_options, endpoint_of
from h3stream.errors import (
    ConfigError,
    GenerationError,
    InvalidRequestError,
    JobCancelledError,
    JobNotFoundError,
    StartupError,
    UnsupportedError,
)
from h3stream.examples import example_of, example_table
from h3stream.job import JOB_STATES, Job
from h3stream.options import add_refine_options, output_path, refine_spec
from h3stream.progress import Tally
from h3stream.refine import RefineSpec
from h3stream.report import adapter_table, artifact_table, describe_error, job_table, plan_table, say
from h3stream.request import GenerateRequest
from h3stream.request_options import (
    add_branch_options,
    add_order_options,
    add_request_options,
    branch_of,
    order_of,
    request_of,
)
from h3stream.still_files import StillFiles
from h3stream.stream import RECONNECT_S
from h3stream.upload import check_source

Answer = TypeVar("Answer")

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130
PROGRAMS = {
    "serve": ("orchestrator", "run the server; takes the server's options, --help lists them"),
    "keys": ("orchestrator.access", "keep the file of API keys; --help lists what can be done"),
    "doctor": ("orchestrator.doctor", "check this machine for what a server needs; --help lists the options"),
}
"""Commands that become a program of the server's, which takes all their arguments."""
LATENTS_SUFFIX = ".safetensors"
STATUS_OF_ENDING = {
    Ending.WHOLE: 0,
    Ending.NOT_WRITTEN: EXIT_FAILED,
    Ending.NOT_REFINED: EXIT_FAILED,
    Ending.NOT_STREAMED: EXIT_FAILED,
    Ending.INTERRUPTED: EXIT_INTERRUPTED,
    Ending.READER_GONE: 141,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = make_parser()
    arguments, extra = parser.parse_known_args(argv)
    if extra and arguments.run not in (serve, become):
        parser.error(f"unknown arguments: {' '.join(extra)}")
    arguments.extra = extra
    if getattr(arguments, "model", None) is not None:
        arguments.server = None  # as said here, whatever the environment says
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller has closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the job is cancelled, the child stopped
    try:
        return int(arguments.run(arguments) or 0)
    except InvalidRequestError as error:
        say(describe_error(error))
        return EXIT_BAD_INPUT
    except GenerationError as error:
        say(describe_error(error))
        return EXIT_FAILED
    except StartupError as error:
        say(f"h3stream: {error}")
        return EXIT_BAD_INPUT if isinstance(error, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        say("h3stream: interrupted")
        return EXIT_INTERRUPTED


def generate(arguments: argparse.Namespace) -> int:
    """`h3stream generate`: makes a clip."""
    _take_example(arguments)
    return _make(arguments, request_of(arguments))


def branch(arguments: argparse.Namespace) -> int:
    """`h3stream branch`: goes on from a chunk of a job's clip."""
    return _make(arguments, branch_of(arguments))


def _make(arguments: argparse.Namespace, request: GenerateRequest) -> int:
    """Makes a clip."""
    output: str = arguments.output
    spec = request.refine_audio
    refined = {} if spec is None else _refined_files(f"{_root(output)}.refined.mp4", spec)
    if refined and output == STANDARD_OUTPUT:
        say("h3stream: the refined clip goes to a file beside the clip's: give -o a file")
        return EXIT_BAD_INPUT
    if not all(map(_can_write, (output, *refined.values()))) or not _can_keep_stills(arguments):
        return EXIT_BAD_INPUT
    if not arguments.server:
        check_request(request)
    with _server(arguments) as server:
        return _deliver(
            server,
            lambda client: client.generate(request, reconnect_s=_reconnect_s(arguments)),
            Outputs(output, refined),
            Tally(),
            owns_job=arguments.cancel_on_disconnect or not arguments.server,
            is_lasting=bool(arguments.server),
            previews=arguments.previews,
            reconnect_s=_reconnect_s(arguments),
        )


def refine(arguments: argparse.Namespace) -> int:
    """`h3stream refine`: refines the sound of a clip that there is."""
    spec = refine_spec(arguments) or RefineSpec()
    prompt: str = arguments.prompt or ""
    source: str | Path = arguments.source
    if arguments.source.lower().endswith(LATENTS_SUFFIX):
        source = Path(arguments.source)
    elif os.path.isfile(arguments.source):
        say(f"h3stream: {arguments.source} is a file, but no latents file: those end in {LATENTS_SUFFIX}")
        return EXIT_BAD_INPUT
    elif arguments.model is not None:
        say(f"h3stream: a job is refined where it was made: --model is for a file that ends in {LATENTS_SUFFIX}")
        return EXIT_BAD_INPUT
    else:
        arguments.server = arguments.server or DEFAULT_SERVER
    if arguments.output == STANDARD_OUTPUT:
        say("h3stream: the refined clip is fetched once it is whole: give -o a file")
        return EXIT_BAD_INPUT
    check_source(source, prompt)
    files = _refined_files(arguments.output, spec)
    if overwritten := [path for path in files.values() if isinstance(source, Path) and _is_same_file(path, source)]:
        say(f"h3stream: {overwritten[0]} is the latents file itself: give -o another file")
        return EXIT_BAD_INPUT
    if not all(map(_can_write, files.values())):
        return EXIT_BAD_INPUT

    def start(client: AsyncClient) -> AsyncGeneration:
        return client.refine(
            source,
            spec,
            prompt=prompt,
            cancel_on_disconnect=arguments.cancel_on_disconnect,
            reconnect_s=_reconnect_s(arguments),
            **order_of(arguments),
        )

    with _server(arguments) as server:
        return _deliver(
            server,
            start,
            Outputs(None, files),
            Tally(has_clip=False),
            owns_job=arguments.cancel_on_disconnect or not arguments.server,
            is_lasting=bool(arguments.server),
            reconnect_s=_reconnect_s(arguments),
        )


def attach(arguments: argparse.Namespace) -> int:
    """`h3stream attach`: follows a job."""
    if not _can_write(arguments.output):
        return EXIT_BAD_INPUT
    return _deliver(
        endpoint_of(arguments, os.environ),
        lambda client: client.attach(arguments.job_id, from_chunk=arguments.from_chunk, live=arguments.live),
        Outputs(arguments.output),
        Tally(),
        owns_job=False,
        is_lasting=True,
    )


def plan(arguments: argparse.Namespace) -> None:
    """`h3stream plan`: tells what a request would make."""
    _take_example(arguments)
    request = request_of(arguments)
    if not arguments.server:
        check_request(request)
    with _server(arguments) as server:
        result = _ask(server, lambda client: client.plan(request))
    if arguments.json:
        _print_json(result)
    else:
        _print("\n".join(plan_table(result)))


def serve(arguments: argparse.Namespace) -> None:
    """`h3stream serve`: becomes the server; every argument is the server's own."""
    require_server_package()
    extra: list[str] = arguments.extra
    telling = {f"--{name.replace('_', '-')}" for name in MODEL_SETTINGS} | {"--config", "-h", "--help"}
    if not any(argument.partition("=")[0] in telling for argument in extra):
        model = model_directory(None, os.environ)
        extra = extra if model is None else ["--model", str(model), *extra]
    _become(module_command(arguments.program, extra))


def become(arguments: argparse.Namespace) -> None:
    """`h3stream keys` and `h3stream doctor`: become a program of the server's; every argument is its own."""
    require_server_package()
    _become(module_command(arguments.program, arguments.extra))


def inspect(arguments: argparse.Namespace) -> None:
    """`h3stream inspect`: becomes the program that tells what model files are."""
    require_server_package()
    options = ["--json"] if arguments.json else []
    _become(module_command("services.checkpoints", [*arguments.paths, *options]))


def examples(arguments: argparse.Namespace) -> None:
    """`h3stream examples`: lists the prompts that the model suggests."""
    _print("\n".join(example_table(_examples(arguments))))


def adapters(arguments: argparse.Namespace) -> None:
    """`h3stream adapters`: lists the adapters of a server."""
    result = _ask(endpoint_of(arguments, os.environ), lambda client: client.adapters())
    if arguments.json:
        _print_json(result)
    else:
        _print("\n".join(adapter_table(result)))


def info(arguments: argparse.Namespace) -> None:
    """`h3stream info`: prints the server's facts."""
    _print_json(_ask(endpoint_of(arguments, os.environ), lambda client: client.server_info()))


def job(arguments: argparse.Namespace) -> None:
    """`h3stream job`: prints what is known of a job."""
    _print_json(_ask(endpoint_of(arguments, os.environ), lambda client: client.job(arguments.job_id)))


def cancel(arguments: argparse.Namespace) -> None:
    """`h3stream cancel`: cancels a job and waits until its lane is free."""
    _print(_ask(endpoint_of(arguments, os.environ), lambda client: client.cancel(arguments.job_id)).state)


def jobs(arguments: argparse.Namespace) -> None:
    """`h3stream jobs`: lists jobs, the newest first."""

    async def collect(client: AsyncClient) -> tuple[Job, ...]:
        found: list[Job] = []
        async for each in client.jobs(states=arguments.state, all_tenants=arguments.all_tenants):
            if len(found) == arguments.limit:
                break
            found.append(each)
        return tuple(found)

    found = _ask(endpoint_of(arguments, os.environ), collect)
    if arguments.json:
        _print_json(found)
    else:
        _print("\n".join(job_table(found, with_tenants=arguments.all_tenants)))


def delete(arguments: argparse.Namespace) -> int:
    """`h3stream delete`: removes jobs that have ended; goes on with the others where one cannot be."""

    async def remove(client: AsyncClient) -> int:
        status = 0
        for job_id in arguments.job_ids:
            try:
                await client.delete(job_id)
            except (JobNotFoundError, UnsupportedError) as error:
                say(describe_error(error))
                status = EXIT_FAILED
            else:
                _print(job_id)
        return status

    return _ask(endpoint_of(arguments, os.environ), remove)


def download(arguments: argparse.Namespace) -> int:
    """`h3stream download`: fetches an artifact of a finished job, or lists them."""
    job_id, name = arguments.job_id, arguments.name
    if name is None:
        known = _ask(endpoint_of(arguments, os.environ), lambda client: client.job(job_id))
        _print("\n".join(artifact_table(known)))
        return 0
    path: str = name if arguments.output is None else arguments.output
    if not _can_write(path):
        return EXIT_BAD_INPUT
    is_piped = path == STANDARD_OUTPUT
    try:
        _ask(
            endpoint_of(arguments, os.environ),
            lambda client: client.download(job_id, name, "/dev/stdout" if is_piped else path),
        )
    except OSError as error:
        if is_piped and isinstance(error, BrokenPipeError):
            return STATUS_OF_ENDING[Ending.READER_GONE]
        say(f"h3stream: cannot write {path}: {error.strerror}")
        return EXIT_FAILED
    if not is_piped:
        _print(path)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The commands and their arguments; the parsed `run` is the function to call."""
    parser = argparse.ArgumentParser(
        prog="h3stream", description="Video with sound from a prompt, streamed while it is sampled.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"h3stream {metadata.version('h3stream')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("generate", help="make a clip", allow_abbrev=False)
    _add_output_argument(command)
    add_request_options(command)
    add_server_options(command, os.environ)
    _add_making_options(command)
    command.set_defaults(run=generate)

    command = commands.add_parser("branch", help="go on from a chunk of a job's clip", allow_abbrev=False)
    _add_output_argument(command)
    add_branch_options(command)
    add_server_option(command, os.environ)
    _add_making_options(command)
    command.set_defaults(run=branch)

    command = commands.add_parser("refine", help="refine the sound of a clip", allow_abbrev=False)
    command.add_argument(
        "source", metavar="SOURCE", help=f"a job that has ended, or a latents file, which ends in {LATENTS_SUFFIX}"
    )
    command.add_argument(
        "-o", "--output", required=True, type=output_path, metavar="FILE", help="file to write the refined clip to"
    )
    command.add_argument("--prompt", metavar="PROMPT", help="what the clip of a latents file was made with")
    add_server_options(command, os.environ)
    _add_disconnect_argument(command)
    add_order_options(command)
    add_refine_options(command.add_argument_group("refinement"))
    command.set_defaults(run=refine)

    command = commands.add_parser("plan", help="tell what a request would make", allow_abbrev=False)
    add_request_options(command)
    add_server_options(command, os.environ)
    command.add_argument("--json", action="store_true", help="print the plan as JSON")
    command.set_defaults(run=plan, cancel_on_disconnect=False, priority="normal", deadline=None, idempotency_key="")

    command = commands.add_parser("examples", help="list prompts that the model suggests", allow_abbrev=False)
    add_server_options(command, os.environ)
    command.set_defaults(run=examples)

    for name, (program, text) in PROGRAMS.items():
        command = commands.add_parser(name, help=text, add_help=False, allow_abbrev=False)
        command.set_defaults(run=serve if name == "serve" else become, program=program)

    command = commands.add_parser("inspect", help="tell what model files are, from their headers", allow_abbrev=False)
    command.add_argument("paths", nargs="+", metavar="PATH", help="a file, a folder of one part, or a model directory")
    command.add_argument("--json", action="store_true", help="print what was found as JSON")
    command.set_defaults(run=inspect)

    command = commands.add_parser("adapters", help="list the adapters that requests may name", allow_abbrev=False)
    add_server_option(command, os.environ)
    command.add_argument("--json", action="store_true", help="print the adapters as JSON")
    command.set_defaults(run=adapters)

    for name, run, text in (("job", job, "tell what is known of a job"), ("cancel", cancel, "cancel a job")):
        command = commands.add_parser(name, help=text, allow_abbrev=False)
        command.add_argument("job_id", metavar="JOB")
        add_server_option(command, os.environ)
        command.set_defaults(run=run)
    command = commands.add_parser("jobs", help="list jobs, the newest first", allow_abbrev=False)
    add_server_option(command, os.environ)
    command.add_argument(
        "--state", action="append", default=[], choices=JOB_STATES, help="list these; may be given several times"
    )
    command.add_argument(
        "--all-tenants", action="store_true", help="list those of all tenants, which the key must allow"
    )
    command.add_argument("--limit", type=_count, default=20, metavar="N", help="how many to list (default: 20)")
    command.add_argument("--json", action="store_true", help="print the jobs as JSON")
    command.set_defaults(run=jobs)
    command = commands.add_parser(
        "delete", help="remove jobs that have ended, with all they have left", allow_abbrev=False
    )
    command.add_argument("job_ids", metavar="JOB", nargs="+")
    add_server_option(command, os.environ)
    command.set_defaults(run=delete)
    command = commands.add_parser(
        "download", help="fetch an artifact of a finished job; without a name, list them", allow_abbrev=False
    )
    command.add_argument("job_id", metavar="JOB")
    command.add_argument("name", metavar="NAME", nargs="?", help="the artifact, e.g. final.mp4")
    command.add_argument(
        "-o",
        "--output",
        type=output_path,
        metavar="FILE",
        help='file to write, or "-" for standard output (default: the artifact\'s name); a pipe or a device is written '
        "into",
    )
    add_server_option(command, os.environ)
    command.set_defaults(run=download)
    command = commands.add_parser("attach", help="follow a job and save its clip", allow_abbrev=False)
    command.add_argument("job_id", metavar="JOB")
    add_server_option(command, os.environ)
    _add_output_argument(command)
    start = command.add_mutually_exclusive_group()
    start.add_argument("--from-chunk", type=int, metavar="N", help="start at this chunk (default: at the beginning)")
    start.add_argument("--live", action="store_true", help="start where the job is")
    command.set_defaults(run=attach)
    command = commands.add_parser("info", help="tell the server's versions, limits and defaults", allow_abbrev=False)
    add_server_option(command, os.environ)
    command.set_defaults(run=info)
    return parser


def _add_output_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-o",
        "--output",
        required=True,
        type=output_path,
        metavar="FILE",
        help='file to write, or "-" for standard output',
    )


def _add_making_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--previews", type=Path, metavar="DIR", help="write the stills of the clip in progress into this directory"
    )
    _add_disconnect_argument(command)
    add_order_options(command)


def _add_disconnect_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--cancel-on-disconnect",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="cancel the job if this command ends before it, by Ctrl-C too (default: yes); the job of a server that "
        "was started for the command always ends with it",
    )


def _examples(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The prompts suggested by the model of a server, or by the one that a server would be started on."""
    if arguments.server:
        return _ask(endpoint_of(arguments, os.environ), lambda client: client.server_info()).examples
    return model_examples(model_directory(arguments.model, os.environ))


def _take_example(arguments: argparse.Namespace) -> None:
    """Puts the example that was asked for, if one was, in the prompt's place and tells which it is."""
    if arguments.example is not None:
        known = _examples(arguments)
        arguments.prompt = example_of(known, arguments.example)
        say(f"example {arguments.example} of {len(known)}: {arguments.prompt}")


def _can_write(output: str) -> bool:
    """Whether a clip may be written there; tells the user if not."""
    if output == STANDARD_OUTPUT:
        if sys.stdout.name == os.devnull:  # what main has put in the place of one that is closed
            say("h3stream: standard output is closed")
            return False
        if sys.stdout.isatty():
            say(
                "h3stream: standard output is a terminal; pipe it into a player, "
                "e.g. h3stream generate ... -o - | ffplay -"
            )
        return not sys.stdout.isatty()
    if Path(output).is_dir():
        say(f"h3stream: cannot write {output or repr(output)}: it is a directory")
        return False
    if not Path(output).absolute().parent.is_dir():
        say(f"h3stream: cannot write {output}: {Path(output).absolute().parent} is no directory")
        return False
    return True


def _can_keep_stills(arguments: argparse.Namespace) -> bool:
    """Whether there are stills to write where they are wanted; tells the user if not."""
    directory: Path | None = arguments.previews
    if directory is None:
        return True
    if arguments.preview_side == 0:
        say("h3stream: --preview-side 0 makes no stills, so there is nothing for --previews: leave one of them out")
        return False
    nearest = next(path for path in (directory.absolute(), *directory.absolute().parents) if os.path.lexists(path))
    if not nearest.is_dir():
        say(f"h3stream: cannot write stills to {directory}: {nearest} is no directory")
        return False
    return True


def _deliver(
    server: Endpoint,
    follow: Callable[[AsyncClient], AsyncGeneration],
    outputs: Outputs,
    tally: Tally,
    *,
    owns_job: bool,
    is_lasting: bool,
    previews: Path | None = None,
    reconnect_s: float = RECONNECT_S,
) -> int:
    """Writes what a job makes, and its stills where they are wanted, and tells how it went; returns the exit status."""
    if previews is not None:
        outputs = dataclasses.replace(outputs, stills=StillFiles(previews, tally.notes.append))
    ending = asyncio.run(
        deliver(server, follow, outputs, tally, owns_job=owns_job, is_lasting=is_lasting, reconnect_s=reconnect_s)
    )
    if ending in (Ending.WHOLE, Ending.NOT_REFINED):
        is_piped = outputs.clip == STANDARD_OUTPUT
        (say if is_piped else _print)("\n".join(tally.summary()))
        fetched = outputs.artifacts.values() if ending is Ending.WHOLE else ()
        has_clip = tally.first_fragment_s is not None
        if outputs.clip is not None and not has_clip and tally.refined is not None:
            job_id = tally.refined.job_id
            say(
                f"h3stream: job {job_id} streams no clip; `h3stream download {job_id} refined.mp4` fetches what it made"
            )
        streamed = [outputs.clip] if outputs.clip is not None and has_clip and not is_piped else []
        for path in (*streamed, *fetched):
            _print(path)
    return STATUS_OF_ENDING[ending]


def _reconnect_s(arguments: argparse.Namespace) -> float:
    """How long a lost server is looked for: one that was started for this command does not come back."""
    return RECONNECT_S if arguments.server else 0.0


def _is_same_file(path: str, other: Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:  # one of them is not there
        return False


def _refined_files(path: str, spec: RefineSpec) -> dict[str, str]:
    """Artifacts of a refinement to fetch, with their files; the spectrograms go beside the clip."""
    return {"refined.mp4": path, **({"refine-compare.png": f"{_root(path)}.compare.png"} if spec.compare else {})}


def _root(path: str) -> str:
    """A file's path without its suffix."""
    return os.path.splitext(path)[0]


def _count(text: str) -> int:
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of jobs; give 1 or more")


@contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[Endpoint]:
    """The server that was named, or one that runs for the block."""
    if arguments.server:
        yield endpoint_of(arguments, os.environ)
        return
    require_server_package()
    model = model_directory(arguments.model, os.environ)
    with EmbeddedServer(model, say, os.environ) as server:
        try:
            yield Endpoint(server.address)
        except (InvalidRequestError, JobCancelledError):
            raise
        except GenerationError:
            # The log goes with the server.
            say(f"the service's log ends with:\n{server.log_tail()}")
            raise


def _ask(server: Endpoint, question: Callable[[AsyncClient], Awaitable[Answer]]) -> Answer:
    """One call to a server.

    Asynchronous, like everything here that calls: asyncio lets a Ctrl-C in only where it can be handled, whereas one
    that hits grpc's blocking client while it starts a call leaves a connection that cannot be closed any more.
    """

    async def ask() -> Answer:
        async with server.client() as client:
            return await question(client)

    return asyncio.run(ask())


def _become(command: list[str]) -> NoReturn:
    os.execv(command[0], command)


def _print_json(value: Any) -> None:
    """Prints a dataclass, or several in a tuple."""
    content = [dataclasses.asdict(item) for item in value] if isinstance(value, tuple) else dataclasses.asdict(value)
    _print(json.dumps(content, indent=2, default=str))


def _print(text: str) -> None:
    """Writes a result to standard output; ends the command if that takes no more."""
    try:
        data = text.encode(sys.stdout.encoding, "surrogateescape")  # a file name may hold any bytes
        sys.stdout.buffer.write(data + b"\n")
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or what is left would fail again at exit
        if isinstance(error, BrokenPipeError):
            sys.exit(STATUS_OF_ENDING[Ending.READER_GONE])
        say(f"h3stream: cannot write standard output: {error.strerror}")
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main())
