"""Dataclasses that mirror messages: same field names, one rule for each kind of field.

    scalar, bytes            itself; where the field is optional and absent, the dataclass's default, or None
    enum                     its name in lower case without the prefix; "unknown" for a number that has no name here
    repeated                 tuple
    map<string, string>      dict
    Timestamp                datetime in UTC
    another message          the dataclass that mirrors it; where it is absent, the dataclass's default if it has one

`h3stream.codec` says which dataclass mirrors which message.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import UTC
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

M = TypeVar("M", bound=Message)
Descriptor = Any
"""protobuf's descriptor classes exist twice, in Python and in C, with no type in common."""

UNKNOWN = "unknown"


class Mirror:
    """Converts between messages and the dataclasses that mirror them."""

    def __init__(self, pairs: Mapping[type[Any], type[Message]], unspecified: Mapping[str, str]) -> None:
        """pairs: dataclass to message, for every message that may be met inside another.

        unspecified: what an unspecified value means, for the enums (by full name) where it means something.
        """
        self._unspecified = unspecified
        self._class_of = {message.DESCRIPTOR.full_name: cls for cls, message in pairs.items()}
        self._message_of = {message.DESCRIPTOR.full_name: message for message in pairs.values()}

    def to_message(self, value: Any, message_class: type[M]) -> M:
        """The message that a dataclass mirrors; fields of the dataclass that the message has not are left out."""
        fields = {}
        for field in message_class.DESCRIPTOR.fields:
            member = getattr(value, field.name)
            if member is None:
                continue
            if field.is_repeated and not _is_map(field):
                fields[field.name] = [self._to_wire(field, item) for item in member]
            else:
                fields[field.name] = self._to_wire(field, member)
        return message_class(**fields)

    def from_message(self, message: Message) -> Any:
        """The dataclass that mirrors a message."""
        cls = self._class_of[message.DESCRIPTOR.full_name]
        return cls(**self.fields(message, cls))

    def fields(self, message: Message, cls: type[Any]) -> dict[str, Any]:
        """The fields of a message as keyword arguments of a dataclass."""
        have_default = {field.name for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING}
        result: dict[str, Any] = {}
        for field in message.DESCRIPTOR.fields:
            member = getattr(message, field.name)
            is_message = field.message_type is not None
            if _is_map(field):
                result[field.name] = dict(member)
            elif field.is_repeated:
                result[field.name] = tuple(self._from_wire(field, item) for item in member)
            elif field.has_presence and not message.HasField(field.name) and field.name in have_default:
                continue
            elif field.has_presence and not message.HasField(field.name) and not is_message:
                result[field.name] = None
            else:
                result[field.name] = self._from_wire(field, member)
        return result

    def _to_wire(self, field: Descriptor, value: Any) -> Any:
        if field.enum_type is not None:
            return (
                0
                if value == UNKNOWN
                else field.enum_type.values_by_name[_prefix(field.enum_type) + value.upper()].number
            )
        if field.message_type is None or _is_map(field):
            return value
        if field.message_type.full_name == Timestamp.DESCRIPTOR.full_name:
            timestamp = Timestamp()
            timestamp.FromDatetime(value)
            return timestamp
        return self.to_message(value, self._message_of[field.message_type.full_name])

    def _from_wire(self, field: Descriptor, value: Any) -> Any:
        if field.enum_type is not None:
            if value == 0:
                return self._unspecified.get(field.enum_type.full_name, UNKNOWN)
            known = field.enum_type.values_by_number.get(value)
            return UNKNOWN if known is None else known.name.removeprefix(_prefix(field.enum_type)).lower()
        if field.message_type is None:
            return value
        if isinstance(value, Timestamp):
            return value.ToDatetime(UTC)
        return self.from_message(value)


def _is_map(field: Descriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _prefix(enum: Descriptor) -> str:
    name: str = enum.values_by_number[0].name
    return name.removesuffix("UNSPECIFIED")
