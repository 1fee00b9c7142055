"""The blocking client. `h3stream.aio` is its asynchronous twin, with the same verbs."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from h3stream import codec
from h3stream.access import Tls, call_metadata, channel_credentials
from h3stream.artifact_file import open_sink
from h3stream.channel import CHANNEL_OPTIONS
from h3stream.clip_file import ClipFile
from h3stream.errors import InvalidRequestError
from h3stream.events import Artifact, Completed, Event, Plan
from h3stream.fields import sendable
from h3stream.job import AdapterInfo, Job, JobPage, JobState, ServerInfo
from h3stream.listing import list_request
from h3stream.refine import RefineOptions, RefineSpec, make_spec
from h3stream.request import (
    Branch,
    BranchOptions,
    GenerateRequest,
    JobPriority,
    RequestOptions,
    make_request,
    with_idempotency_key,
)
from h3stream.status import from_rpc_error
from h3stream.stream import RECONNECT_S, EventOrder, EventResponse, Line, Reconnection, StallBudget, attach_request
from h3stream.upload import JobSource, RefineCall, Source, job_id_of
from h3stream.v1 import video_pb2, video_pb2_grpc

Response = TypeVar("Response")


class Generation(Iterator[Event]):
    """A job in progress: an iterator over its events.

    Closing it early (or leaving its `with` block, or dropping it) ends the call; the job goes on unless the request
    says `cancel_on_disconnect`. Raises the error that ends the job; what was yielded before stays valid.
    """

    def __init__(self, line: Line, budget: StallBudget) -> None:
        """Made by the client."""
        self._line = line
        self._events = _events(line, budget)

    @property
    def job_id(self) -> str:
        """The job; empty until the first event of a new one has come."""
        return self._line.order.job_id

    def __next__(self) -> Event:
        return next(self._events)

    def close(self) -> None:
        """Ends the call; changes nothing once it has ended."""
        self._events.close()
        self._line.call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """A connection to one server, made when the first call needs it. Every call raises a GenerationError if it fails.

    No job is made twice; a job's events go on after a lost connection. May be used from several threads.
    """

    def __init__(self, address: str, *, api_key: str | None = None, tls: Tls = None, timeout_s: float = 60.0) -> None:
        """address: "HOST:PORT", or "unix:PATH".  api_key: sent with every call; None for a server that asks for none.
        tls: True, or TlsOptions, for a server that speaks TLS.
        timeout_s: deadline of every call that does not follow a job.

        Raises ConfigError for a key that no call can carry and for files that cannot be read.
        """
        self._metadata = call_metadata(api_key, address, tls)
        credentials = channel_credentials(tls)
        self._channel = (
            grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
            if credentials is None
            else grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        )
        self._stub = video_pb2_grpc.VideoServiceStub(self._channel)
        self._address = address
        self._timeout_s = timeout_s

    def generate(
        self,
        prompt: str | GenerateRequest,
        *,
        stall_timeout_s: float | None = None,
        reconnect_s: float = RECONNECT_S,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Makes a clip; returns an iterator over its events.

        prompt: the prompt, or a whole request.  options: fields of GenerateRequest.
        stall_timeout_s: raise DeadlineError once the job has stood still for so long, waiting in the queue included;
        heartbeats only show that it is alive. None waits for ever.
        reconnect_s: how long a lost connection is tried again, a server that is stopped and started again included; 0
        for never. Not at all for a request with `cancel_on_disconnect`, whose job ends with its connection. A request
        without an `idempotency_key` gets a random one, so that asking again makes no second job.
        """
        request = make_request(prompt, options)
        budget = StallBudget(stall_timeout_s)
        again = Reconnection(0.0 if request.cancel_on_disconnect else reconnect_s)
        message = codec.request_to_proto(with_idempotency_key(request))
        return Generation(self._line(lambda: self._start(self._stub.Generate, message), EventOrder(), again), budget)

    def branch(
        self,
        source: JobSource,
        from_chunk: int,
        prompt: str | None = None,
        seed: int | None = None,
        *,
        stall_timeout_s: float | None = None,
        reconnect_s: float = RECONNECT_S,
        **options: Unpack[BranchOptions],
    ) -> Generation:
        """Goes on from a chunk boundary of another job, as a job of its own; returns its events like `generate`.

        The source never changes, and the chunks before `from_chunk` are its own, their fragments too.
        source: the id of a job, a Job or a generation, running or ended.  from_chunk, prompt, seed: as in Branch.
        options: fields of GenerateRequest which do not decide the clip.
        The others are those of `generate`.
        """
        request = GenerateRequest(branch=Branch(job_id_of(source), from_chunk, prompt, seed), **options)
        return self.generate(request, stall_timeout_s=stall_timeout_s, reconnect_s=reconnect_s)

    def attach(
        self,
        job_id: str,
        *,
        from_seq: int | None = None,
        from_chunk: int | None = None,
        live: bool = False,
        stall_timeout_s: float | None = None,
        reconnect_s: float = RECONNECT_S,
    ) -> Generation:
        """Follows a job, running or ended; returns an iterator over its events.

        Leaving it never cancels the job.
        Without a start, from event 0 on.  from_seq: from this event on; at most the number of events so far.
        from_chunk: what a player needs to start at this chunk: `Accepted`, the InitSegment, then everything from the
        chunk's first keyframe on, which is waited for.  live: the same from the latest keyframe on.
        The others are those of `generate`; a connection is tried again from the start on.
        """
        request = attach_request(job_id, from_seq, from_chunk, live)
        budget = StallBudget(stall_timeout_s)
        again = Reconnection(reconnect_s)
        return Generation(self._line(None, EventOrder(request), again), budget)

    def refine(
        self,
        source: Source,
        spec: RefineSpec | None = None,
        *,
        prompt: str = "",
        cancel_on_disconnect: bool = False,
        priority: JobPriority = "normal",
        deadline_s: float | None = None,
        idempotency_key: str = "",
        stall_timeout_s: float | None = None,
        reconnect_s: float = RECONNECT_S,
        **options: Unpack[RefineOptions],
    ) -> Generation:
        """Refines the sound of a finished clip, as a job of its own; returns an iterator over its events.

        The source never changes; the refined clip is the artifact `refined.mp4`, and `refined_media` of the events.
        source: the id of a job, a Job or a generation that has ended; or the Path of a `latents.safetensors`, which is
        uploaded in pieces and checked on arrival.  prompt: what the latents of a file were made with.
        spec, options: how it is refined; options are fields of RefineSpec.
        cancel_on_disconnect, priority, deadline_s, idempotency_key: as fields of GenerateRequest.
        A file is never sent twice: a connection that is lost before there is a job raises NotReadyError. The time of an
        upload counts as standing still.
        The others are those of `generate`.
        """
        budget = StallBudget(stall_timeout_s)
        again = Reconnection(0.0 if cancel_on_disconnect else reconnect_s)
        asked = RefineCall(
            source,
            prompt,
            make_spec(spec, options),
            cancel_on_disconnect=cancel_on_disconnect,
            priority=priority,
            deadline_s=deadline_s,
            idempotency_key=idempotency_key,
        )
        line = self._line(lambda: self._start(self._stub.RefineAudio, iter(asked)), EventOrder(), again, asked)
        return Generation(line, budget)

    def save(
        self,
        prompt: str | GenerateRequest,
        path: str | os.PathLike[str],
        *,
        stall_timeout_s: float | None = None,
        reconnect_s: float = RECONNECT_S,
        **options: Unpack[RequestOptions],
    ) -> Completed:
        """Makes a clip in the file `path`, which is playable at every moment; returns the last event.

        If the job fails, the file keeps what had arrived. Raises MuxError, which says what the server has of the clip,
        where the job succeeds without a whole stream. Arguments are those of `generate`.
        """
        with (
            ClipFile(path) as file,
            self.generate(prompt, stall_timeout_s=stall_timeout_s, reconnect_s=reconnect_s, **options) as events,
        ):
            for event in events:
                file.write(event)
        assert isinstance(event, Completed), event  # EventOrder lets no stream end otherwise
        file.check(event)
        return event

    def plan(self, prompt: str | GenerateRequest, **options: Unpack[RequestOptions]) -> Plan:
        """What a request would make; nothing is made."""
        request = codec.plan_request_to_proto(make_request(prompt, options))
        return codec.plan_from_proto(self._call(self._stub.PlanGeneration, request).plan)

    def job(self, job_id: str) -> Job:
        """What is known of a job."""
        request = video_pb2.GetJobRequest(job_id=sendable("job_id", job_id))
        return codec.job_from_proto(self._call(self._stub.GetJob, request).job)

    def cancel(self, job_id: str) -> Job:
        """Cancels a job; returns it once its lane is free. Changes nothing if it has ended."""
        request = video_pb2.CancelJobRequest(job_id=sendable("job_id", job_id))
        return codec.job_from_proto(self._call(self._stub.CancelJob, request).job)

    def job_page(
        self,
        page_token: str = "",
        *,
        page_size: int = 0,
        states: Sequence[JobState] = (),
        all_tenants: bool = False,
    ) -> JobPage:
        """Some of the jobs that there are, the newest first.

        page_token: what the page before ended with; empty: from the newest.  page_size: 1 to 100; 0 is the server's.
        states: those to list; none: all.  all_tenants: not only the caller's own jobs, which its key must allow.
        """
        request = list_request(page_token, page_size, states, all_tenants)
        return codec.job_page_from_proto(self._call(self._stub.ListJobs, request))

    def jobs(self, *, states: Sequence[JobState] = (), all_tenants: bool = False, page_size: int = 0) -> Iterator[Job]:
        """The jobs that there are, the newest first, asked for page by page. Arguments are those of `job_page`."""
        token = ""
        while True:
            page = self.job_page(token, page_size=page_size, states=states, all_tenants=all_tenants)
            yield from page.jobs
            if not (token := page.next_page_token):
                return

    def delete(self, job_id: str) -> None:
        """Removes a job that has ended, with its events and artifacts."""
        self._call(self._stub.DeleteJob, video_pb2.DeleteJobRequest(job_id=sendable("job_id", job_id)))

    def download(self, job_id: str, name: str, path: str | os.PathLike[str]) -> Artifact:
        """Downloads an artifact of a finished job to the file `path`, which appears once it is whole and verified.

        What arrives is kept in `path` + ".part", and a download that broke off goes on from there. A link's target is
        written; a pipe or a device gets the bytes as they come. Raises OSError if it cannot be written, also where
        another download is writing it.
        """
        sendable("job_id", job_id), sendable("name", name)
        with open_sink(path) as file:
            while True:
                request = video_pb2.DownloadArtifactRequest(job_id=job_id, name=name, offset_bytes=file.num_bytes)
                try:
                    for response in self._start(self._stub.DownloadArtifact, request):
                        file.take(response)
                except grpc.RpcError as rpc_error:
                    error = from_rpc_error(rpc_error, self._address)
                    if not isinstance(error, InvalidRequestError) or not file.start_anew():
                        raise error from rpc_error
                    continue  # what was left is longer than the artifact
                if (artifact := file.keep()) is not None:
                    return artifact

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters that requests may name, in order of their names."""
        return codec.adapters_from_proto(self._call(self._stub.ListAdapters, video_pb2.ListAdaptersRequest()))

    def server_info(self) -> ServerInfo:
        """The server's versions, model, limits, defaults and settings."""
        response = self._call(self._stub.GetServerInfo, video_pb2.GetServerInfoRequest())
        return codec.server_info_from_proto(response)

    def close(self) -> None:
        """Ends all calls and the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _line(
        self,
        submit: Callable[[], Any] | None,
        order: EventOrder,
        again: Reconnection,
        asked: RefineCall | None = None,
    ) -> Line:
        attach = functools.partial(self._start, self._stub.Attach)
        return Line(submit, attach, order, again, asked, address=self._address)

    def _start(self, method: Callable[..., Any], request: Any) -> Any:
        """A call whose responses are read as they come."""
        return method(request, metadata=self._metadata)

    def _call(self, method: Callable[..., Response], request: Any) -> Response:
        try:
            return method(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._address) from error


def _events(line: Line, budget: StallBudget) -> Generator[Event, None, None]:
    # Not a method: a generator that held its Generation would keep a dropped one, and so its call, alive.
    try:
        while True:
            started_s = time.monotonic()
            event: Event | None = None
            try:
                response = _receive(line, budget)
                if response is None:
                    break
                event = line.accept(response)
            except grpc.RpcError as error:
                delay_s = line.delay_s(error)
                time.sleep(delay_s if budget.left_s is None else min(delay_s, budget.left_s))
                line.reopen()
            budget.spend(time.monotonic() - started_s, event)
            if event is not None:
                yield event
        line.order.end()
    finally:
        line.call.cancel()


def _receive(line: Line, budget: StallBudget) -> EventResponse | None:
    """The next response, None at the end. Raises DeadlineError, and the call's own error as it is."""
    is_stalled = threading.Event()

    def give_up() -> None:
        is_stalled.set()
        line.call.cancel()

    # A blocking read takes no timeout; a timer that cancels the call is its only end from outside.
    timer = None if budget.left_s is None else threading.Timer(budget.left_s, give_up)
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        response: EventResponse | None = next(line.call, None)
    except grpc.RpcError as error:
        if is_stalled.is_set():
            raise budget.exceeded(line.order.job_id) from error
        raise
    finally:
        if timer is not None:
            timer.cancel()
    return response
