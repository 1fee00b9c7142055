"""What every call to the edge passes first: who calls, whether it may go on, and a line of what it was.

Nothing of a request is read, and no time of the core is spent, before its caller is known.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NoReturn

import grpc
from grpc import aio

from h3stream.errors import DeadlineError, GenerationError, InvalidRequestError, RateLimitedError, UnauthenticatedError
from h3stream.status import DETAILS_KEY, to_status
from orchestrator.access.audit import AuditLog
from orchestrator.access.keys import PREFIX
from orchestrator.access.rate import RateLimiter, host_of
from orchestrator.access.store import AccessStore
from orchestrator.caller import Caller
from services.common.logs import request_context
from services.common.rpc import LAST_WRITES_S

log = logging.getLogger(__name__)

AUTHORIZATION = "authorization"
REQUEST_ID = "x-request-id"
REQUEST_S = 30.0
"""Longest that a caller may take to send the one message of its request."""
SILENCE_S = 1.0
"""How long a caller that is refused may be silent before it is told so."""
RECHECK_S = 1.0
"""How often it is looked whether those whose calls are open are still who they were."""
FINISH_S = 2.0
"""Longest that calls which the server has ended may take to be written down."""
NUM_FAILURES, FAILURES_PER_S = 20, 0.5
"""Calls with a wrong key or none that one address may make at once, and how many more a second. A secret cannot be
guessed: this bounds what the attempts cost and how fast the audit log grows."""
NUM_PROBES, PROBES_PER_S = 100, 20.0
"""Calls to the health service, which need no key, in the same way."""

_HEALTH = "/grpc.health.v1.Health/"
_REQUEST_ID = re.compile("[A-Za-z0-9._:/+=-]{1,64}")
_JOB_ID = re.compile("[A-Za-z0-9-]{1,64}")
_STATUS_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass
class Call:
    """A call that is being answered."""

    caller: Caller
    """Who calls; of one who is not known only the request id is."""
    job_id: str = ""
    """The job that it is about, as soon as it is known."""
    reason: str = ""
    """Why its caller was refused; empty: it was not."""
    is_limited: bool = False
    """Whether it is one of too many, which are not written down."""


@dataclass(frozen=True)
class _Credentials:
    """What a caller has shown, to be looked at again while its call is open."""

    authorization: tuple[str, ...]
    certificate_names: tuple[str, ...]
    caller: Caller


_current: ContextVar[Call] = ContextVar("call")
Run = Callable[[Any, Any], Awaitable[Any]]


def current_call() -> Call:
    """The call that the running task answers."""
    return _current.get()


class Guard(aio.ServerInterceptor):
    """Identifies callers, limits those who cannot be identified, ends the calls of keys that are no longer valid."""

    def __init__(
        self, store: AccessStore, audit: AuditLog | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._audit = audit
        self._failures = RateLimiter(burst=NUM_FAILURES, per_s=FAILURES_PER_S, clock=clock)
        self._probes = RateLimiter(burst=NUM_PROBES, per_s=PROBES_PER_S, clock=clock)
        self._open: dict[asyncio.Timeout, _Credentials] = {}
        self._answering: set[asyncio.Task[Any]] = set()

    async def watch(self) -> None:
        """Ends open calls whose caller is no longer valid, until it is cancelled."""
        while True:
            await asyncio.sleep(RECHECK_S)
            try:
                self.recheck()
            except Exception:  # without this task revoked keys would live on, and nobody would know
                log.exception("open calls could not be looked at again")

    def recheck(self) -> None:
        """Ends every open call whose credentials no longer stand for the caller that they stood for."""
        for lease, shown in list(self._open.items()):
            if not self._holds(shown):
                lease.reschedule(asyncio.get_running_loop().time())

    async def finish(self) -> None:
        """Returns once every call has been written down, after the server has stopped and ended them."""
        if self._answering:
            await asyncio.wait(self._answering, timeout=FINISH_S)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The method's own handler behind the guard.

        To gRPC all of them take a stream: it would else wait for a caller's one message, for ever, before it called.
        """
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        method: str = handler_call_details.method
        behaviour = handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream

        async def run(requests: Any, context: Any) -> Any:
            answer = behaviour(requests if handler.request_streaming else await _only(requests), context)
            if not hasattr(answer, "__aiter__"):
                return await answer
            async with aclosing(answer) as responses:
                async for response in responses:
                    await context.write(response)

        guarded = self._limited(run) if method.startswith(_HEALTH) else self._identified(run, method)
        make: Any = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(guarded, handler.request_deserializer, handler.response_serializer)  # type: ignore[no-any-return]

    def _limited(self, run: Run) -> Run:
        """For calls that need no key."""

        async def guarded(requests: Any, context: Any) -> Any:
            try:
                self._limit(self._probes, context, "calls to the health service")
                return await run(requests, context)
            except GenerationError as error:
                await _abort(context, error)

        return guarded

    def _identified(self, run: Run, method: str) -> Run:
        """For all others."""

        async def guarded(requests: Any, context: Any) -> Any:
            metadata = context.invocation_metadata() or ()
            call = Call(Caller(request_id=_request_id(metadata)))
            _current.set(call)
            with request_context(call.caller.request_id), self._audited(call, method, context):
                try:
                    try:  # before anything else: a caller that has gone already counts, too
                        shown = self._identify(call, metadata, context)
                    finally:
                        await context.send_initial_metadata(((REQUEST_ID, call.caller.request_id),))
                except UnauthenticatedError as error:
                    await _read_out(requests)
                    await _abort(context, error)
                except RateLimitedError as error:
                    await _abort(context, error)
                except aio.InternalError:
                    await context.abort(grpc.StatusCode.CANCELLED, "the caller has gone")
                try:
                    return await self._leased(shown, run(requests, context))
                except GenerationError as error:
                    call.reason = error.message if isinstance(error, UnauthenticatedError) else ""
                    await _abort(context, error)

        return guarded

    def _identify(self, call: Call, metadata: Sequence[tuple[str, str]], context: Any) -> _Credentials:
        """What a caller shows; who it is by that, or why it is nobody, is noted in the call.

        Raises UnauthenticatedError, and RateLimitedError for too many.
        """
        authorization = tuple(value for key, value in metadata if key == AUTHORIZATION)
        names = _certificate_names(context.auth_context())
        try:
            shown = _Credentials(authorization, names, self._store.identify(authorization, names))
        except UnauthenticatedError as error:
            call.reason = error.message
            call.is_limited = True
            self._limit(self._failures, context, "calls that are not authenticated")
            call.is_limited = False
            raise
        call.caller = replace(shown.caller, request_id=call.caller.request_id)
        return shown

    def _limit(self, limiter: RateLimiter, context: Any, what: str) -> None:
        if not self._store.authenticates:
            return
        if wait_s := limiter.take(host_of(context.peer())):
            raise RateLimitedError(f"too many {what} came from this address", retry_after_s=wait_s)

    async def _leased(self, shown: _Credentials, work: Awaitable[Any]) -> Any:
        """Awaits the work of a call for as long as its caller is valid. Raises UnauthenticatedError."""
        lease = asyncio.timeout(None)
        try:
            async with lease:
                self._open[lease] = shown
                return await work
        except TimeoutError:
            if not lease.expired():
                raise
            raise UnauthenticatedError(
                "the key of this call is no longer valid: it has been changed, or has expired"
            ) from None
        finally:
            self._open.pop(lease, None)

    def _holds(self, shown: _Credentials) -> bool:
        with suppress(UnauthenticatedError):
            return self._store.identify(shown.authorization, shown.certificate_names) == shown.caller
        return False

    @contextmanager
    def _audited(self, call: Call, method: str, context: Any) -> Iterator[None]:
        begun_s = time.monotonic()
        peer = context.peer()  # of a call that has ended there may be none
        is_cancelled = False
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
        try:
            yield
        except asyncio.CancelledError:
            is_cancelled = True
            raise
        finally:
            if self._audit is not None and not call.is_limited:
                caller = call.caller
                self._audit.write(
                    {
                        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                        "request_id": caller.request_id,
                        "peer": peer,
                        "tenant": caller.tenant if caller.key_id else "",
                        "key_id": caller.key_id,
                        "method": method.rpartition("/")[2],
                        "job_id": call.job_id if _JOB_ID.fullmatch(call.job_id) else "",
                        "status": "CANCELLED" if is_cancelled else _status_name(context.code()),
                        "elapsed_s": round(time.monotonic() - begun_s, 3),
                        **({"reason": call.reason} if call.reason else {}),
                    }
                )


async def _abort(context: Any, error: GenerationError) -> NoReturn:
    code, message, details = to_status(error)
    await context.abort(code, message, ((DETAILS_KEY, details),))
    raise AssertionError("abort raises")


async def _only(requests: Any) -> Any:
    """The one message of a request. Raises DeadlineError if it does not come, InvalidRequestError if there is none."""
    try:
        async with asyncio.timeout(REQUEST_S):
            async for request in requests:
                return request
    except TimeoutError:
        raise DeadlineError(f"the request has not come within {REQUEST_S:.0f} s") from None
    raise InvalidRequestError("the call ended without its request")


async def _read_out(requests: Any) -> None:
    """Lets a caller that is refused send what it is sending, but not for ever: it would else not hear why."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + LAST_WRITES_S
    with suppress(TimeoutError):
        async with asyncio.timeout(SILENCE_S) as silence:
            async for _ in requests:
                silence.reschedule(min(end_s, loop.time() + SILENCE_S))


def _request_id(metadata: Sequence[tuple[str, str]]) -> str:
    """The caller's own name for a call, if it can be one and is no key; else a new one."""
    for key, value in metadata:
        if key == REQUEST_ID and _REQUEST_ID.fullmatch(value) and PREFIX not in value:
            return value
    return uuid.uuid4().hex


def _certificate_names(auth_context: dict[str, Sequence[bytes]]) -> tuple[str, ...]:
    """The names of the client certificate of a call, the common name first; none without one."""
    names = [*auth_context.get("x509_common_name", ()), *auth_context.get("x509_subject_alternative_name", ())]
    return tuple(dict.fromkeys(name.decode(errors="replace") for name in names if name))


def _status_name(code: Any) -> str:
    number = code.value[0] if isinstance(code, grpc.StatusCode) else code or 0
    return _STATUS_NAMES.get(number, str(number))
