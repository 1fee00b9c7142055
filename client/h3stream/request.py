"""What a caller asks for, and what the server resolves it to.

A request that can be constructed can be sent; whether it can be made is the server's to say, which knows its limits.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

from h3stream.adapters import AdapterChoice, AdapterUse, adapter_violations
from h3stream.errors import FieldViolation
from h3stream.fields import (
    INT32,
    MAX_PROMPT_BYTES,
    UINT64,
    invalid_request,
    is_finite_or_none,
    text_violations,
    too_many,
)
from h3stream.refine import RefineSpec

KvStorage = Literal["gpu", "cpu", "cpu_pinned"]
KV_STORAGES: tuple[KvStorage, ...] = get_args(KvStorage)
SamplingMode = Literal["streaming", "dense"]
SAMPLING_MODES: tuple[SamplingMode, ...] = get_args(SamplingMode)
JobPriority = Literal["low", "normal", "high"]
JOB_PRIORITIES: tuple[JobPriority, ...] = get_args(JobPriority)

MAX_KEY_CHARACTERS = 128
"""Of an idempotency key."""
RANDOM_KEY_BYTES = 16
"""Of one that is made here: two that are equal are not to be met with."""

MAX_ARTIFACTS = 64
"""What a message has room for beside the longest prompt; the server's own limits are lower."""


@dataclass(frozen=True)
class ClipSpec:
    """Everything that decides a clip apart from prompt and weights; all values final."""

    num_frames: int
    """Frames at 24 per second: 17k + 5, k from 1 to 21."""
    width: int
    """Canvas width in pixels, a multiple of 32."""
    height: int
    """Canvas height in pixels, a multiple of 32."""
    steps: int
    """Noise forwards (NFE): of each chunk when streaming, of the whole clip in dense mode."""
    video_shift: float
    """Shift of the video sigma grid."""
    audio_shift: float
    """Shift of the audio sigma grid."""
    sink: int
    """First KV cache entries kept for the whole clip; the text is entry 0 and counts. 0 in dense mode, which has no KV
    cache."""
    window: int | None
    """Most recent chunks kept beside the sink; None keeps every chunk. None in dense mode."""
    kv_storage: KvStorage
    """Where the KV cache lives; without meaning in dense mode."""
    seed: int
    """Seed of the clip's only random generator."""
    mode: SamplingMode = "streaming"
    """How it is sampled."""
    adapters: tuple[AdapterUse, ...] = ()
    """Adapters of every forward, in order, each once. When streaming, the streaming adapter at strength 1 goes without
    saying and is not listed."""


@dataclass(frozen=True)
class PreviewSpec:
    """How stills of the clip in progress are made. They never change the clip."""

    max_side: int
    """Longer side of a still in pixels, 16 to 512; 0 makes none."""
    every_steps: int
    """A still at every so many noise forwards, and at the last one of each chunk; at least 1."""


@dataclass(frozen=True)
class Branch:
    """A chunk boundary of another job to go on from. The other job never changes."""

    job_id: str
    """The job, running or ended, which streams its clip."""
    from_chunk: int
    """The first chunk that is sampled anew; from 1 to the last. What comes before is that job's, its fragments too."""
    prompt: str | None = None
    """The prompt from there on; None: that job's."""
    seed: int | None = None
    """The seed from there on; None: that job's, so that without a prompt the same clip is made."""


@dataclass(frozen=True)
class GenerateRequest:
    """A clip to make. None leaves a choice to the server, whose defaults `Client.server_info` tells.

    Raises InvalidRequestError, with one violation per field, for a value that no message can hold.
    """

    prompt: str = ""
    """What to show and what to sound like. Empty in a branch, which may have one of its own."""
    num_frames: int | None = None
    """Frames at 24 per second: 17k + 5, from 22 to 362."""
    width: int | None = None
    """Canvas width in pixels, a multiple of 32."""
    height: int | None = None
    """Canvas height in pixels, a multiple of 32."""
    steps: int | None = None
    """Noise forwards: of each chunk when streaming, of the whole clip in dense mode."""
    video_shift: float | None = None
    """Shift of the video sigma grid."""
    audio_shift: float | None = None
    """Shift of the audio sigma grid."""
    sink: int | None = None
    """First KV cache entries kept for the whole clip, the text included. Streaming only."""
    window: int | Literal["all"] | None = None
    """Most recent chunks kept beside the sink; "all" keeps every chunk. Streaming only."""
    kv_storage: KvStorage | None = None
    """Where the KV cache lives; changes speed and memory, never the clip. Streaming only."""
    seed: int | None = None
    """Seed of the clip: the same request makes the same clip."""
    cancel_on_disconnect: bool = False
    """Whether the job ends when its stream does, e.g. because this process has gone. Otherwise it goes on."""
    mode: SamplingMode | None = None
    """How the clip is sampled: "streaming", the default, or "dense"."""
    adapters: Sequence[AdapterChoice] = ()
    """Adapters of every forward, each once; kept as a tuple. The streaming adapter is always on when streaming and need
    not be named. Where steps and shifts of a dense clip are None and exactly one schedule is trained into the adapters
    named, they are that schedule's."""

    preview: PreviewSpec | None = None
    """Stills on the way. None: the server's own choice."""
    artifacts: Sequence[str] = ()
    """Names of the artifacts to keep, of those that `Client.server_info` lists; kept as a tuple. Empty: the server's
    own choice."""
    refine_audio: RefineSpec | None = None
    """How the sound is refined once the clip has been delivered; a second rendition follows. None: it is not."""
    branch: Branch | None = None
    """What the clip goes on from; every field that decides a clip is then that job's and must be left out. None: it
    begins at its beginning."""
    priority: JobPriority = "normal"
    """Which of the tenant's own waiting jobs comes first."""
    deadline_s: float | None = None
    """Seconds from its acceptance within which the job must have ended, else it fails; None: any."""
    idempotency_key: str = ""
    """Names this request: sent again with the same key it is answered with the same job. Up to 128 characters of ASCII
    without spaces."""

    def __post_init__(self) -> None:
        if isinstance(self.adapters, Sequence) and not isinstance(self.adapters, str):
            object.__setattr__(self, "adapters", tuple(self.adapters))
        if isinstance(self.artifacts, Sequence) and not isinstance(self.artifacts, str):
            object.__setattr__(self, "artifacts", tuple(self.artifacts))
        violations = [
            *text_violations("prompt", self.prompt, MAX_PROMPT_BYTES),
            *(v for name in ("num_frames", "width", "height", "steps", "sink") for v in self._int_violations(name)),
            *(v for name in ("video_shift", "audio_shift") for v in self._float_violations(name)),
            *(self._int_violations("window", also=' or "all"') if self.window != "all" else ()),
            *self._int_violations("seed", UINT64),
            *adapter_violations(self.adapters),
            *_preview_violations(self.preview),
            *_artifact_violations(self.artifacts),
        ]
        if self.refine_audio is not None and not isinstance(self.refine_audio, RefineSpec):
            rule = "it must be a RefineSpec"
            violations.append(FieldViolation("refine_audio", f"refine_audio is {self.refine_audio!r:.80}; {rule}"))
        violations += _branch_violations(self.branch)
        violations += order_violations(self.priority, self.deadline_s, self.idempotency_key)
        if self.mode is not None and self.mode not in SAMPLING_MODES:
            violations.append(FieldViolation("mode", f"mode is {self.mode!r:.80}; it must be one of {SAMPLING_MODES}"))
        if self.kv_storage is not None and self.kv_storage not in KV_STORAGES:
            violations.append(
                FieldViolation("kv_storage", f"kv_storage is {self.kv_storage!r}; it must be one of {KV_STORAGES}")
            )
        if not isinstance(self.cancel_on_disconnect, bool):
            violations.append(
                FieldViolation(
                    "cancel_on_disconnect",
                    f"cancel_on_disconnect is {self.cancel_on_disconnect!r}; it must be True or False",
                )
            )
        if violations:
            raise invalid_request(violations)

    def _int_violations(self, name: str, limits: tuple[int, int] = INT32, also: str = "") -> list[FieldViolation]:
        value = getattr(self, name)
        if value is None or (type(value) is int and limits[0] <= value <= limits[1]):
            return []
        return [
            FieldViolation(
                name, f"{name} is {value!r:.80}; it must be an integer from {limits[0]} to {limits[1]}{also}"
            )
        ]

    def _float_violations(self, name: str) -> list[FieldViolation]:
        value = getattr(self, name)
        if is_finite_or_none(value):
            return []
        return [FieldViolation(name, f"{name} is {value!r:.80}; it must be a finite number")]


class RequestOptions(TypedDict, total=False):
    """The fields of `GenerateRequest` beside the prompt, as keyword arguments."""

    num_frames: int | None
    width: int | None
    height: int | None
    steps: int | None
    video_shift: float | None
    audio_shift: float | None
    sink: int | None
    window: int | Literal["all"] | None
    kv_storage: KvStorage | None
    seed: int | None
    cancel_on_disconnect: bool
    mode: SamplingMode | None
    adapters: Sequence[AdapterChoice]
    preview: PreviewSpec | None
    artifacts: Sequence[str]
    refine_audio: RefineSpec | None
    branch: Branch | None
    priority: JobPriority
    deadline_s: float | None
    idempotency_key: str


class BranchOptions(TypedDict, total=False):
    """The fields of `GenerateRequest` that a branch may have beside its `Branch`, as keyword arguments."""

    cancel_on_disconnect: bool
    preview: PreviewSpec | None
    artifacts: Sequence[str]
    refine_audio: RefineSpec | None
    priority: JobPriority
    deadline_s: float | None
    idempotency_key: str


def make_request(prompt: str | GenerateRequest, options: Mapping[str, Any]) -> GenerateRequest:
    """The request of a prompt and options, or a request with some fields replaced."""
    if isinstance(prompt, GenerateRequest):
        return dataclasses.replace(prompt, **options)
    return GenerateRequest(prompt, **options)


def with_idempotency_key(request: GenerateRequest) -> GenerateRequest:
    """The request under a name of its own, so that asking again makes no second job; as it is if it has one."""
    return request if request.idempotency_key else dataclasses.replace(request, idempotency_key=random_key())


def random_key() -> str:
    """An idempotency key that nobody else has."""
    return secrets.token_urlsafe(RANDOM_KEY_BYTES)


def order_violations(priority: object, deadline_s: object, idempotency_key: object) -> list[FieldViolation]:
    """What is wrong with when a job is to run and what its request is called."""
    violations = []
    if priority not in JOB_PRIORITIES:
        rule = f"it must be one of {JOB_PRIORITIES}"
        violations.append(FieldViolation("priority", f"priority is {priority!r:.80}; {rule}"))
    if not is_finite_or_none(deadline_s):
        violations.append(FieldViolation("deadline_s", f"deadline_s is {deadline_s!r:.80}; it must be a finite number"))
    if not isinstance(idempotency_key, str) or not is_idempotency_key(idempotency_key):
        description = (
            f"idempotency_key is {idempotency_key!r:.80}; it must be up to {MAX_KEY_CHARACTERS} characters of ASCII "
            "without spaces"
        )
        violations.append(FieldViolation("idempotency_key", description))
    return violations


def is_idempotency_key(text: str) -> bool:
    """Whether a text can name a request; the empty one names none."""
    return len(text) <= MAX_KEY_CHARACTERS and all("!" <= character <= "~" for character in text)


def _branch_violations(branch: object) -> list[FieldViolation]:
    if branch is None:
        return []
    if not isinstance(branch, Branch):
        return [FieldViolation("branch", f"branch is {branch!r:.80}; it must be a Branch")]
    violations = text_violations("branch.job_id", branch.job_id, MAX_PROMPT_BYTES)
    if branch.prompt is not None:
        violations += text_violations("branch.prompt", branch.prompt, MAX_PROMPT_BYTES)
    for name, value, (low, high) in (
        ("branch.from_chunk", branch.from_chunk, INT32),
        ("branch.seed", 0 if branch.seed is None else branch.seed, UINT64),
    ):
        if type(value) is not int or not low <= value <= high:
            rule = f"it must be an integer from {low} to {high}"
            violations.append(FieldViolation(name, f"{name} is {value!r:.80}; {rule}"))
    return violations


def _preview_violations(preview: object) -> list[FieldViolation]:
    if preview is None:
        return []
    if not isinstance(preview, PreviewSpec):
        return [FieldViolation("preview", f"preview is {preview!r:.80}; it must be a PreviewSpec")]
    return [
        FieldViolation(f"preview.{name}", f"preview.{name} is {value!r:.80}; it must be an integer")
        for name, value in (("max_side", preview.max_side), ("every_steps", preview.every_steps))
        if type(value) is not int or not INT32[0] <= value <= INT32[1]
    ]


def _artifact_violations(artifacts: object) -> list[FieldViolation]:
    if not isinstance(artifacts, tuple) or not all(isinstance(name, str) for name in artifacts):
        return [FieldViolation("artifacts", f"artifacts is {artifacts!r:.80}; it must be a sequence of names")]
    if len(artifacts) > MAX_ARTIFACTS:
        return [too_many("artifacts", len(artifacts), MAX_ARTIFACTS)]
    return [
        FieldViolation(field := f"artifacts[{index}]", f"{field} is {name!r:.80}; it must be up to 64 ASCII characters")
        for index, name in enumerate(artifacts)
        if len(name) > 64 or not name.isascii()
    ]
