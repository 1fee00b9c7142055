"""The gateway as an ASGI application: the page, and a small HTTP API over the service's calls.

    GET    /                             the page
    GET    /healthz                      whether the gateway answers
    GET    /readyz                       whether the server takes jobs: 200, else 503
    POST   /api/session                  keeps the key of the call in a cookie, for what a page's elements fetch
    DELETE /api/session                  forgets it
    GET    /api/info                     the server's versions, limits, defaults and adapters
    POST   /api/jobs                     makes a clip, or a branch of one: a JSON object with the fields of
                                         GenerateRequest; 201 {"job_id"}
    POST   /api/jobs/ID/refine           refines its sound: a JSON object with the fields of RefineSpec; 201 {"job_id"}
    GET    /api/jobs/ID                  what is known of a job
    DELETE /api/jobs/ID                  cancels it
    GET    /api/jobs/ID/events           its events as Server-Sent Events, without media bytes; Last-Event-ID resumes
    GET    /api/jobs/ID/media/SEQ.mp4    the media bytes of one event: of the stream, or of the refined rendition
    GET    /api/jobs/ID/stream.mp4       the stream from its start, as it comes; ?partial=true: what there is of it
    GET    /api/jobs/ID/hls/index.m3u8   the stream as an HLS event playlist
    GET    /api/jobs/ID/artifacts/NAME   an artifact; Range works

The API key of a call is handed on: it is the server's to judge. Every failure is a JSON object {"error": {"reason",
"message", "job_id", "violations"?, "retry_after_s"?}}; a body that has begun is cut instead, so that nobody takes it
for whole. The gateway holds no state that matters: all of it can be lost and everybody resumes.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from h3stream.errors import (
    ArtifactNotFoundError,
    FieldViolation,
    GenerationError,
    NotReadyError,
    UnauthenticatedError,
)
from h3stream.events import StreamComplete
from h3stream.fields import invalid_request
from web.callers import forget_key, header_key, keep_key, key_of
from web.gone import GoneError, find_artifact, incomplete_stream
from web.playlist import ENDED_STATES, MediaIndexes
from web.upstream import Upstream
from web.wire import (
    byte_range,
    error_json,
    event_name,
    event_number,
    http_status,
    parse_refinement,
    parse_request,
    server_sent_event,
    sse_message,
    to_json,
)

log = logging.getLogger("web")

PLAYER = Path(__file__).with_name("player")
MAX_BODY_BYTES = 1_048_576
"""A request with the longest prompt is far smaller."""

PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self' blob:; "
        "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
IMMUTABLE = "private, max-age=3600, immutable"

Handler = Callable[[Request], Awaitable[Response]]


def make_app(upstream: Upstream, *, any_host: bool) -> ASGIApp:
    """The application in front of a service; the connection belongs to the event loop that serves.

    any_host: answer whatever name callers know this machine by. Otherwise only names of this machine itself are served,
    so that no web site can reach the gateway through a name that it points at loopback.
    """
    gateway = Gateway(upstream)
    job = "/api/jobs/{job_id}"
    routes = [
        Route("/healthz", gateway.healthz),
        Route("/readyz", gateway.readyz),
        Route("/api/session", gateway.begin_session, methods=["POST"]),
        Route("/api/session", gateway.end_session, methods=["DELETE"]),
        Route("/api/info", gateway.info),
        Route("/api/jobs", gateway.create, methods=["POST"]),
        Route(f"{job}/refine", gateway.refine, methods=["POST"]),
        Route(job, gateway.job, methods=["GET"]),
        Route(job, gateway.cancel, methods=["DELETE"]),
        Route(f"{job}/events", gateway.events),
        Route(f"{job}/media/{{seq}}.mp4", gateway.media),
        Route(f"{job}/stream.mp4", gateway.stream),
        Route(f"{job}/hls/index.m3u8", gateway.playlist),
        Route(f"{job}/artifacts/{{name}}", gateway.artifact),
        Mount("/", StaticFiles(directory=PLAYER, html=True)),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            GenerationError: _on_generation_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
        },
    )
    return Guard(app, any_host=any_host)


class Gateway:
    """The handlers of the API."""

    def __init__(self, upstream: Upstream) -> None:
        self._shared = upstream
        self._indexes = MediaIndexes()

    def _upstream(self, request: Request) -> Upstream:
        """The service, as a caller sees it."""
        return self._shared.as_caller(key_of(request))

    async def healthz(self, request: Request) -> Response:
        """Whether the gateway answers."""
        return _json({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        """Whether the service takes jobs."""
        is_ready = await self._shared.is_ready()
        return _json({"status": "ok" if is_ready else "the server takes no jobs"}, 200 if is_ready else 503)

    async def begin_session(self, request: Request) -> Response:
        """Keeps the key of the call, which the server must take, for what the browser fetches by itself."""
        key = header_key(request)
        await self._shared.as_caller(key).server_info()
        response = Response(status_code=204)
        keep_key(response, request, key)
        return response

    async def end_session(self, request: Request) -> Response:
        """Forgets it."""
        response = Response(status_code=204)
        forget_key(response)
        return response

    async def info(self, request: Request) -> Response:
        """The server's facts."""
        return _json(await self._upstream(request).server_info())

    async def create(self, request: Request) -> Response:
        """Starts a job, which goes on by itself."""
        wanted = parse_request(await _json_body(request))
        async with self._upstream(request).generate(wanted) as events:
            accepted = await anext(events)
        return _json({"job_id": accepted.job_id}, 201)

    async def refine(self, request: Request) -> Response:
        """Starts a job that refines the sound of another, which has ended."""
        spec = parse_refinement(await _json_body(request))
        async with self._upstream(request).refine(request.path_params["job_id"], spec) as events:
            accepted = await anext(events)
        return _json({"job_id": accepted.job_id}, 201)

    async def job(self, request: Request) -> Response:
        """What is known of a job."""
        return _json(await self._upstream(request).job(request.path_params["job_id"]))

    async def cancel(self, request: Request) -> Response:
        """Cancels a job; answers once it has ended."""
        return _json(await self._upstream(request).cancel(request.path_params["job_id"]))

    async def events(self, request: Request) -> Response:
        """Events as they come; `ended` follows the last one, however the job ended.

        A stream that closes without `ended` is to be resumed.
        """
        job = await self._upstream(request).job(request.path_params["job_id"])
        last = request.headers.get("last-event-id") or request.query_params.get("last_event_id")
        from_seq = 0 if not last else event_number("last_event_id", last) + 1
        if from_seq > job.num_events:
            rule = f"has not come yet; there are {job.num_events}"
            raise invalid_request([FieldViolation("last_event_id", f"event {from_seq - 1} {rule}")])
        # nginx and its like would otherwise collect events before they pass them on.
        headers = {"X-Accel-Buffering": "no"}
        return LiveResponse(
            self._event_messages(self._upstream(request), job.job_id, from_seq),
            headers=headers,
            media_type="text/event-stream",
        )

    async def _event_messages(self, upstream: Upstream, job_id: str, from_seq: int) -> AsyncIterator[bytes]:
        yield b"retry: 1000\n\n"
        error: GenerationError | None = None
        try:
            async with upstream.follow(job_id, from_seq) as events:
                async for event in events:
                    yield server_sent_event(event)
        except GenerationError as ending:
            error = ending
        job = await upstream.job(job_id)
        if job.state not in ENDED_STATES:
            raise error or NotReadyError("the events ended before the job", job_id=job_id)
        yield sse_message("ended", to_json({"state": job.state, "error": None if error is None else error_json(error)}))

    async def media(self, request: Request) -> Response:
        """The bytes of an init segment or a fragment, which never change."""
        job = await self._upstream(request).job(request.path_params["job_id"])
        seq = event_number("SEQ", request.path_params["seq"])
        if seq >= job.num_events:
            missing = f"event {seq} of job {job.job_id} has not come yet; there are {job.num_events}"
            raise ArtifactNotFoundError(missing, job_id=job.job_id)
        async with self._upstream(request).follow(job.job_id, seq) as events:
            event = await anext(events)
        if data := event.media or event.refined_media:
            return Response(data, media_type="video/mp4", headers={"Cache-Control": IMMUTABLE})
        missing = (
            f"event {seq} ({event_name(event)}) of job {job.job_id} has no media; init segments and fragments have"
        )
        raise ArtifactNotFoundError(missing, job_id=job.job_id)

    async def stream(self, request: Request) -> Response:
        """The stream as one progressive file: the bytes so far, then the rest as it is made.

        Without `partial=true` it is cut where a job ends without the whole stream.
        """
        job = await self._upstream(request).job(request.path_params["job_id"])
        wish = request.query_params.get("partial", "false")
        if wish not in ("true", "false"):
            raise invalid_request([FieldViolation("partial", f"partial is {wish[:80]!a}; it must be true or false")])
        headers = {"Content-Disposition": 'inline; filename="partial.mp4"'} if wish == "true" else None
        return LiveResponse(
            self._media(self._upstream(request), job.job_id, wish == "true"), headers=headers, media_type="video/mp4"
        )

    async def _media(self, upstream: Upstream, job_id: str, is_partial: bool) -> AsyncIterator[bytes]:
        ending: GenerationError | None = None
        try:
            async with upstream.follow(job_id) as events:
                async for event in events:
                    if event.media:
                        yield event.media
                    elif isinstance(event, StreamComplete):
                        return
        except GenerationError as error:
            ending = error
        job = await upstream.job(job_id)
        if not is_partial or job.state not in ENDED_STATES:
            raise ending or incomplete_stream(job)

    async def playlist(self, request: Request) -> Response:
        """The playlist as far as the job is; 410 once there will never be a whole one, so that players stop to ask."""
        job = await self._upstream(request).job(request.path_params["job_id"])
        index = await self._indexes.get(job, self._upstream(request))
        if job.state in ENDED_STATES and not index.is_complete:
            raise incomplete_stream(job)
        return Response(index.playlist(), media_type="application/vnd.apple.mpegurl")

    async def artifact(self, request: Request) -> Response:
        """An artifact, or the range of it that is asked for."""
        job = await self._upstream(request).job(request.path_params["job_id"])
        name = request.path_params["name"]
        artifact = find_artifact(job, name)
        tag = f'"{artifact.sha256}"'
        headers = {"Accept-Ranges": "bytes", "ETag": tag, "Cache-Control": "private, no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        wanted = None
        if request.headers.get("if-range", tag) == tag:
            try:
                wanted = byte_range(request.headers.get("range"), artifact.size_bytes)
            except ValueError as error:
                raise HTTPException(416, str(error), {"Content-Range": f"bytes */{artifact.size_bytes}"}) from None
        start, stop = wanted or (0, artifact.size_bytes)
        headers["Content-Length"] = str(stop - start)
        if wanted is not None:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{artifact.size_bytes}"
        status = 200 if wanted is None else 206
        data = self._upstream(request).artifact_bytes(job.job_id, name, start, stop)
        return LiveResponse(data, status, headers, artifact.media_type)


class LiveResponse(StreamingResponse):
    """A body that is sent as it is made. If that fails, the connection is cut, so that nobody takes it for whole."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response; to HEAD without waiting for a body that may take minutes."""
        if scope["method"] == "HEAD":
            self.body_iterator = _nothing()
        try:
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError:  # the gateway stops, and this task with it
            log.info("a response is cut short: the gateway stops")

    async def stream_response(self, send: Send) -> None:
        """Sends the head and the body."""
        try:
            await super().stream_response(send)
        except (GenerationError, GoneError) as error:
            # What ends without a last message, uvicorn cuts.
            log.warning("a response is cut short: %s", error)


async def _nothing() -> AsyncIterator[bytes]:
    for _ in ():
        yield b""


class Guard:
    """Refuses callers under foreign names, and puts the headers that keep a browser safe on every response."""

    def __init__(self, app: ASGIApp, *, any_host: bool) -> None:
        self._app = app
        self._any_host = any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                defaults = {"Cache-Control": "no-cache", "Vary": "Authorization, Cookie", **PAGE_HEADERS}
                extra = [(name.lower().encode(), value.encode()) for name, value in defaults.items()]
                message["headers"] = [*message["headers"], *(pair for pair in extra if pair[0] not in present)]
            await send(message)

        host = Request(scope).headers.get("host", "")
        if self._any_host or _is_own_name(host):
            await self._app(scope, receive, send_guarded)
        else:
            message = f"this gateway serves this machine alone, not {host[:80]!r}"
            refusal = _error(421, {"reason": "WRONG_HOST", "message": message, "job_id": ""})
            await refusal(scope, receive, send_guarded)


def _is_own_name(host: str) -> bool:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name == "localhost"


async def _json_body(request: Request) -> bytes:
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        # Also keeps forms of other sites out: a browser asks before it sends this type across origins.
        raise HTTPException(415, "the body must be application/json")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    return body


async def _on_generation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GenerationError)
    headers: dict[str, str] = {}
    facts = error_json(error)
    if isinstance(error, UnauthenticatedError):
        headers["WWW-Authenticate"] = "Bearer"
    if "retry_after_s" in facts:
        headers["Retry-After"] = str(math.ceil(facts["retry_after_s"]))
    return _error(http_status(error), facts, headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason, job_id = (error.reason, error.job_id) if isinstance(error, GoneError) else ("HTTP_ERROR", "")
    return _error(error.status_code, {"reason": reason, "message": error.detail, "job_id": job_id}, error.headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # which nobody reads: the caller has gone in the middle of the body


def _error(status: int, facts: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    # In ASCII: a caller may have sent what is no UTF-8, and is told of it.
    return Response(to_json({"error": facts}), status, headers, "application/json")


def _json(value: object, status: int = 200) -> Response:
    return Response(to_json(value), status, {"Cache-Control": "no-store"}, media_type="application/json")
