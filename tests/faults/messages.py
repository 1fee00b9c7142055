"""Messages of any type with any content that its fields can hold, sensible or not."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

INT32 = st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31), 22, 64]) | st.integers(-(2**31), 2**31 - 1)
INT64 = INT32 | st.sampled_from([2**63 - 1, -(2**63)])
UINT64 = st.sampled_from([0, 1, 2**32, 2**64 - 1])
FLOAT = st.floats() | st.sampled_from([float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 1e308])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    ["", "\x00", "../../etc/passwd", "a fox", "%s%n", "‮", "x" * 20_000, "é" * 9_000, "final.mp4"]
)
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_INT32: INT32,
    FieldDescriptor.TYPE_INT64: INT64,
    FieldDescriptor.TYPE_UINT64: UINT64,
    FieldDescriptor.TYPE_DOUBLE: FLOAT,
    FieldDescriptor.TYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: TEXT,
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=200),
    FieldDescriptor.TYPE_ENUM: st.sampled_from([0, 1, 2, 3, 4, 99, -1, 2**31 - 1]),
}
MAX_DEPTH = 4
UNKNOWN_FIELD = b"\x98\x3f\x01"
"""Field number 1011, which no message has."""


def messages(descriptor: Descriptor, depth: int = 0) -> st.SearchStrategy[Message]:
    """Messages of a type, some fields set, the others left out."""

    @st.composite
    def build(draw: st.DrawFn) -> Message:
        message = GetMessageClass(descriptor)()
        for field in descriptor.fields:
            if depth >= MAX_DEPTH or not draw(st.integers(0, 2)):
                continue
            _fill(draw, message, field, depth)
        if draw(st.integers(0, 19)) == 0:
            message.MergeFromString(UNKNOWN_FIELD)
        return message

    return build()


def _fill(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, field.name)[draw(TEXT)] = draw(TEXT)
    elif field.message_type is not None:
        inner = messages(field.message_type, depth + 1)
        if field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(inner, max_size=3)))
        else:
            getattr(message, field.name).CopyFrom(draw(inner))
    elif field.is_repeated:
        getattr(message, field.name).extend(draw(st.lists(SCALARS[field.type], max_size=5)))
    else:
        setattr(message, field.name, draw(SCALARS[field.type]))
