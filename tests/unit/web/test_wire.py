from __future__ import annotations

import re
from pathlib import Path

import pytest

from h3stream import errors
from h3stream.adapters import AdapterChoice
from h3stream.request import PreviewSpec
from h3stream.status import STATUS_OF
from web.app import make_app
from web.upstream import Upstream
from web.wire import byte_range, http_status, parse_request

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "web.md").read_text()


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("bytes=0-", (0, 10)),
        ("bytes=3-3", (3, 4)),
        ("bytes=3-99", (3, 10)),
        ("bytes=-4", (6, 10)),
        ("bytes=-99", (0, 10)),
        ("bytes=5-3", None),
        ("bytes=-", None),
        ("bytes=0-1,4-5", None),
        ("items=0-1", None),
        ("bytes=a-b", None),
    ],
)
def test_ranges_are_read_as_rfc_9110_says(header: str | None, expected: tuple[int, int] | None) -> None:
    assert byte_range(header, 10) == expected


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=99-100", "bytes=-0"])
def test_a_range_beyond_the_end_is_refused(header: str) -> None:
    with pytest.raises(ValueError, match="there are 10"):
        byte_range(header, 10)


def test_a_request_is_what_its_json_says() -> None:
    request = parse_request(
        b'{"prompt": "a fox", "seed": 18446744073709551615, "window": "all", "mode": "dense",'
        b' "preview": {"max_side": 0, "every_steps": 1}, "artifacts": ["final.mp4"],'
        b' "adapters": [{"name": "turbo"}, {"name": "style", "strength": 0.5}]}'
    )
    assert (request.prompt, request.seed, request.window, request.mode) == ("a fox", 2**64 - 1, "all", "dense")
    assert request.preview == PreviewSpec(0, 1)
    assert request.adapters == (AdapterChoice("turbo"), AdapterChoice("style", 0.5))
    assert request.artifacts == ("final.mp4",)
    assert not request.cancel_on_disconnect


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"prompt": "\xff"}', b"\xff", b'{"prompt": "a", "seed": NaN}', b"1"]
)
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(errors.InvalidRequestError):
        parse_request(body)


def test_the_table_of_statuses_is_the_truth() -> None:
    assert http_status(errors.ArtifactNotFoundError("")) == 404
    rows = dict.fromkeys(errors.GenerationError.__subclasses__(), 500)
    for status, names in re.findall(r"^\| (\d{3}) \| ((?:`\w+`(?:, )?)+) \|$", GUIDE, re.MULTILINE):
        rows |= dict.fromkeys((getattr(errors, name) for name in re.findall(r"\w+", names)), int(status))
    assert {cls: http_status(cls("")) for cls in rows} == rows
    assert all(400 <= http_status(cls("")) < 600 for cls in STATUS_OF)


async def test_the_table_of_calls_is_the_apps() -> None:
    async with Upstream("127.0.0.1:1") as upstream:
        app = make_app(upstream, any_host=False)
    routes = {
        (method, route.path)
        for route in app._app.routes  # type: ignore[attr-defined]
        for method in getattr(route, "methods", None) or ()
        if method != "HEAD"
    }
    names = {"JOB": "{job_id}", "SEQ": "{seq}", "NAME": "{name}"}
    rows = re.findall(r"^\| `([A-Z]+) (/\S*)` \|", GUIDE, re.MULTILINE)
    assert {(method, re.sub("JOB|SEQ|NAME", lambda m: names[m[0]], path)) for method, path in rows} == routes
