"""The options of the command line that say what is to be made, and the requests that they stand for."""

from __future__ import annotations

import argparse
import re
from typing import Any

from h3stream.embedded import rule_violations
from h3stream.errors import InvalidRequestError
from h3stream.fields import invalid_request
from h3stream.options import adapter_choice, add_refine_options, refine_spec
from h3stream.refine import RefineSpec
from h3stream.request import (
    JOB_PRIORITIES,
    KV_STORAGES,
    SAMPLING_MODES,
    Branch,
    GenerateRequest,
    PreviewSpec,
)

PREVIEW_SIDE = 256


def add_request_options(command: argparse.ArgumentParser) -> None:
    """Adds the fields of a request, the prompt or what stands for it first."""
    prompt = command.add_mutually_exclusive_group(required=True)
    prompt.add_argument("prompt", metavar="PROMPT", nargs="?", help="what to show and what to sound like")
    prompt.add_argument(
        "--example",
        nargs="?",
        const=1,
        type=_example_number,
        metavar="N",
        help="in place of a prompt, one that the model suggests: the first, or that of a number (`h3stream examples` "
        "lists them)",
    )
    group = command.add_argument_group("request", "What is left out takes the server's default.")
    group.add_argument("--frames", type=int, help="frames at 24 per second: 17k + 5, from 22 to 362")
    group.add_argument("--width", type=int, help="canvas width in pixels, a multiple of 32")
    group.add_argument("--height", type=int, help="canvas height in pixels, a multiple of 32")
    group.add_argument("--seed", type=int, help="seed of the clip")
    group.add_argument(
        "--mode",
        choices=SAMPLING_MODES,
        help="how the clip is sampled: chunk by chunk (streaming, the default), or at once (dense)",
    )
    group.add_argument("--steps", type=int, help="noise forwards: of each chunk when streaming, of a dense clip in all")
    group.add_argument("--video-shift", type=float, help="shift of the video sigma grid")
    group.add_argument("--audio-shift", type=float, help="shift of the audio sigma grid")
    group.add_argument("--sink", type=int, help="first KV cache entries that are kept for the whole clip")
    group.add_argument("--window", type=_window, metavar="N|all", help="most recent chunks kept beside the sink")
    group.add_argument("--kv-storage", choices=KV_STORAGES, help="where the KV cache lives")
    group.add_argument(
        "--adapter",
        action="append",
        default=[],
        type=adapter_choice,
        metavar="NAME[=STRENGTH]",
        help="an adapter of the server's to sample with (`h3stream adapters` lists them), at its own strength or this; "
        "may be given several times",
    )
    add_result_options(command, group)


def add_branch_options(command: argparse.ArgumentParser) -> None:
    """Adds what a branch may be told."""
    command.add_argument("job_id", metavar="JOB", help="the job to go on from, running or ended")
    group = command.add_argument_group("request", "The clip is the job's up to the chunk.")
    group.add_argument(
        "--from-chunk", type=int, required=True, metavar="N", help="first chunk that is sampled anew, from 1 on"
    )
    group.add_argument("--prompt", metavar="PROMPT", help="the prompt from there on (default: the job's)")
    group.add_argument("--seed", type=int, help="the seed from there on (default: the job's)")
    add_result_options(command, group)


def add_result_options(command: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> None:
    """Adds what is to be kept of a clip and done with it, to a group of options and to one of its own."""
    group.add_argument(
        "--artifact",
        action="append",
        default=[],
        metavar="NAME",
        help="an artifact to keep (`h3stream info` lists them) in place of the server's choice; may be given several "
        "times",
    )
    group.add_argument(
        "--preview-side",
        type=int,
        metavar="N",
        help=f"longer side of the stills on the way, 16 to 512 pixels, or 0 for none ({PREVIEW_SIDE} where only "
        "--preview-every is given)",
    )
    group.add_argument(
        "--preview-every",
        type=int,
        metavar="N",
        help="noise forwards from one still to the next (1 where only --preview-side is given)",
    )
    group = command.add_argument_group("refinement of the sound", "Any of these asks for it.")
    group.add_argument("--refine-audio", action="store_true", help="refine the sound once the clip has been delivered")
    add_refine_options(group, "refine-")


def add_order_options(command: argparse.ArgumentParser) -> None:
    """Adds when a job is to run, and what its request is called."""
    group = command.add_argument_group("order")
    group.add_argument(
        "--priority", choices=JOB_PRIORITIES, default="normal", help="which of your waiting jobs runs first"
    )
    group.add_argument(
        "--deadline", type=float, metavar="SECONDS", help="how soon the job must have ended; else it fails"
    )
    group.add_argument(
        "--idempotency-key",
        default="",
        metavar="KEY",
        help="name of this request: the same name and request answer with the same job (default: a random one)",
    )


def order_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """When a job is to run and what its request is called: fields of a request."""
    return {
        "priority": arguments.priority,
        "deadline_s": arguments.deadline,
        "idempotency_key": arguments.idempotency_key,
    }


def _example_number(text: str) -> int:
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of an example; `h3stream examples` lists them")


def _window(text: str) -> Any:
    if text == "all":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of chunks; give N, or all") from None


def request_of(arguments: argparse.Namespace) -> GenerateRequest:
    """The request of the arguments. Raises InvalidRequestError with all that can be seen from here to be wrong."""
    fields = _clip_fields(arguments) | _result_fields(arguments) | order_of(arguments)
    try:
        return GenerateRequest(**fields)
    except InvalidRequestError as error:
        # What no message can hold hides from the server what else is wrong.
        broken = {re.split(r"[.\[]", violation.field)[0] for violation in error.violations}
        sound = {"prompt": "-"} | {name: value for name, value in fields.items() if name not in broken}
        raise invalid_request([*error.violations, *rule_violations(GenerateRequest(**sound))]) from None


def branch_of(arguments: argparse.Namespace) -> GenerateRequest:
    """The request of the arguments of a branch. Raises InvalidRequestError for what no message can hold."""
    branch = Branch(arguments.job_id, arguments.from_chunk, arguments.prompt, arguments.seed)
    return GenerateRequest(branch=branch, **_result_fields(arguments), **order_of(arguments))


def _clip_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "prompt": arguments.prompt,
        "num_frames": arguments.frames,
        "width": arguments.width,
        "height": arguments.height,
        "steps": arguments.steps,
        "video_shift": arguments.video_shift,
        "audio_shift": arguments.audio_shift,
        "sink": arguments.sink,
        "window": arguments.window,
        "kv_storage": arguments.kv_storage,
        "seed": arguments.seed,
        "mode": arguments.mode,
        "adapters": arguments.adapter,
    }


def _result_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "cancel_on_disconnect": arguments.cancel_on_disconnect,
        "artifacts": arguments.artifact,
        "preview": _preview(arguments.preview_side, arguments.preview_every),
        "refine_audio": refine_spec(arguments) or (RefineSpec() if arguments.refine_audio else None),
    }


def _preview(max_side: int | None, every_steps: int | None) -> PreviewSpec | None:
    if max_side is None and every_steps is None:
        return None
    return PreviewSpec(PREVIEW_SIDE if max_side is None else max_side, 1 if every_steps is None else every_steps)
