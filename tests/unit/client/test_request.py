"""A request that can be constructed can be sent; everything else is refused field by field."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_type_hints

import pytest

from h3stream.adapters import MAX_ADAPTER_NAME_BYTES, MAX_ADAPTERS, AdapterChoice
from h3stream.errors import InvalidRequestError
from h3stream.fields import MAX_PROMPT_BYTES
from h3stream.request import (
    GenerateRequest,
    RequestOptions,
    make_request,
)


def test_what_is_left_out_is_left_to_the_server() -> None:
    request = GenerateRequest("a fox")
    left_out = {f.name: getattr(request, f.name) for f in dataclasses.fields(request) if f.name != "prompt"}
    assert left_out.pop("cancel_on_disconnect") is False
    assert left_out.pop("adapters") == left_out.pop("artifacts") == ()
    assert (left_out.pop("priority"), left_out.pop("idempotency_key")) == ("normal", "")
    assert set(left_out.values()) == {None}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_frames", 2**31 - 1),
        ("num_frames", -(2**31)),
        ("seed", 0),
        ("seed", 2**64 - 1),
        ("window", 0),
        ("window", "all"),
        ("video_shift", 12),
        ("video_shift", -1e308),
        ("kv_storage", "cpu_pinned"),
        ("mode", "dense"),
        ("adapters", (AdapterChoice("turbo", -0.5), AdapterChoice("style"))),
        ("adapters", MAX_ADAPTERS * (AdapterChoice(MAX_ADAPTER_NAME_BYTES * "a", 1e308),)),
        ("prompt", ""),
        ("prompt", "狐狸" * 100),
    ],
)
def test_what_a_message_can_hold_is_accepted(field: str, value: Any) -> None:
    assert getattr(GenerateRequest(**{"prompt": "a fox", field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("prompt", b"a fox", "prompt is b'a fox'; it must be a string"),
        ("prompt", "a \ud800 fox", "prompt holds a lone surrogate at character 2; it must be Unicode text"),
        ("prompt", "x" * (MAX_PROMPT_BYTES + 1), "prompt has 1000001 bytes; a message holds at most 1000000"),
        ("num_frames", 2**31, "num_frames is 2147483648; it must be an integer from -2147483648 to 2147483647"),
        ("num_frames", 39.0, "num_frames is 39.0; it must be an integer"),
        ("width", True, "width is True; it must be an integer"),
        ("height", "64", "height is '64'; it must be an integer"),
        ("steps", -(2**31) - 1, "must be an integer"),
        ("sink", [2], "must be an integer"),
        ("window", "none", """window is 'none'; it must be an integer from -2147483648 to 2147483647 or "all\""""),
        ("window", 2**31, "must be an integer"),
        ("seed", -1, "seed is -1; it must be an integer from 0 to 18446744073709551615"),
        ("seed", 2**64, "must be an integer"),
        ("video_shift", math.nan, "video_shift is nan; it must be a finite number"),
        ("video_shift", math.inf, "video_shift is inf; it must be a finite number"),
        ("audio_shift", 10**400, "must be a finite number"),
        ("audio_shift", "3", "audio_shift is '3'; it must be a finite number"),
        ("kv_storage", "disk", "kv_storage is 'disk'; it must be one of ('gpu', 'cpu', 'cpu_pinned')"),
        ("mode", "turbo", "mode is 'turbo'; it must be one of ('streaming', 'dense')"),
        ("adapters", "turbo", "adapters is 'turbo'; it must be a sequence of AdapterChoice"),
        ("adapters", 5, "adapters is 5; it must be a sequence of AdapterChoice"),
        ("adapters", 65 * (None,), "adapters holds 65 adapters; a message holds at most 64"),
        ("cancel_on_disconnect", None, "cancel_on_disconnect is None; it must be True or False"),
    ],
)
def test_what_no_message_can_hold_is_refused_by_name(field: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        GenerateRequest(**{"prompt": "a fox", field: value})
    (violation,) = caught.value.violations
    assert violation.field == field
    assert words in violation.description
    assert violation.description == caught.value.message
    assert len(violation.description) < 200


def test_adapters_may_be_any_sequence_and_are_kept_as_a_tuple() -> None:
    choices = [AdapterChoice("turbo"), AdapterChoice("style", 0.5)]
    request = GenerateRequest("a fox", adapters=choices)
    choices.clear()
    assert request.adapters == (AdapterChoice("turbo"), AdapterChoice("style", 0.5))
    assert hash(request) == hash(GenerateRequest("a fox", adapters=request.adapters))


@pytest.mark.parametrize(
    ("choice", "field", "words"),
    [
        ("turbo", "adapters[1]", "adapters[1] is 'turbo'; it must be an AdapterChoice with a string as name"),
        (AdapterChoice(5), "adapters[1]", "adapters[1] is AdapterChoice(name=5,"),  # type: ignore[arg-type]
        (AdapterChoice("b\ud800"), "adapters[1].name", r"adapters[1].name is 'b\ud800'; it must be Unicode text of at"),
        (AdapterChoice(86 * "狐"), "adapters[1].name", r"adapters[1].name is '\u72d0"),
        (AdapterChoice("b", math.nan), "adapters[1].strength", "adapters[1].strength is nan; it must be a finite"),
        (AdapterChoice("b", True), "adapters[1].strength", "adapters[1].strength is True; it must be a finite"),
    ],
)
def test_an_adapter_that_no_message_can_hold_is_refused_by_position(choice: Any, field: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        GenerateRequest("a fox", adapters=(AdapterChoice("a"), choice))
    (violation,) = caught.value.violations
    assert violation.field == field
    assert violation.description.startswith(words)


def test_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        GenerateRequest("a fox", num_frames=2**31, seed=-1, video_shift=math.nan)
    assert [violation.field for violation in caught.value.violations] == ["num_frames", "video_shift", "seed"]


def test_the_options_are_the_fields_of_the_request() -> None:
    options, fields = get_type_hints(RequestOptions), get_type_hints(GenerateRequest)
    assert options == {name: kind for name, kind in fields.items() if name != "prompt"}


def test_options_replace_fields_of_a_whole_request() -> None:
    request = GenerateRequest("a fox", seed=1, steps=2)
    assert make_request(request, {"seed": 5}) == GenerateRequest("a fox", seed=5, steps=2)
    assert make_request("a fox", {"seed": 5}) == GenerateRequest("a fox", seed=5)
    with pytest.raises(TypeError, match="colour"):
        make_request("a fox", {"colour": "red"})
