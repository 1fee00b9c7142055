"""The contract keeps its style: comments everywhere, names that say what they are, stubs that are current."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FileDescriptorProto, FileDescriptorSet

from tools import make_protos

LOWER_SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
UPPER_SNAKE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
CAMEL = re.compile(r"([A-Z][a-z0-9]*)+")

# Field numbers of descriptor.proto, of which the paths of source locations are made.
FILE_MESSAGE, FILE_ENUM, FILE_SERVICE = 4, 5, 6
MESSAGE_FIELD, MESSAGE_NESTED, MESSAGE_ENUM, MESSAGE_ONEOF = 2, 3, 4, 8
ENUM_VALUE, SERVICE_METHOD = 2, 2

PathTo = tuple[int, ...]
Named = tuple[PathTo, str, str, Any]
"""Where an element is, what kind it is, its full name, and its descriptor."""


def elements(file: FileDescriptorProto) -> Iterator[Named]:
    """Every service, rpc, message, field, oneof, enum and value of a file."""
    for i, message in enumerate(file.message_type):
        yield from _message((FILE_MESSAGE, i), file.package, message)
    for i, enum in enumerate(file.enum_type):
        yield from _enum((FILE_ENUM, i), file.package, enum)
    for i, service in enumerate(file.service):
        name = f"{file.package}.{service.name}"
        yield (FILE_SERVICE, i), "service", name, service
        for j, method in enumerate(service.method):
            yield (FILE_SERVICE, i, SERVICE_METHOD, j), "rpc", f"{name}.{method.name}", method


def _message(path: PathTo, scope: str, message: DescriptorProto) -> Iterator[Named]:
    name = f"{scope}.{message.name}"
    yield path, "message", name, message
    # An `optional` field is in a oneof that protoc made for it.
    made = {field.oneof_index for field in message.field if field.proto3_optional}
    for i, field in enumerate(message.field):
        yield (*path, MESSAGE_FIELD, i), "field", f"{name}.{field.name}", field
    for i, oneof in enumerate(message.oneof_decl):
        if i not in made:
            yield (*path, MESSAGE_ONEOF, i), "oneof", f"{name}.{oneof.name}", oneof
    for i, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _message((*path, MESSAGE_NESTED, i), name, nested)
    for i, enum in enumerate(message.enum_type):
        yield from _enum((*path, MESSAGE_ENUM, i), name, enum)


def _enum(path: PathTo, scope: str, enum: EnumDescriptorProto) -> Iterator[Named]:
    name = f"{scope}.{enum.name}"
    yield path, "enum", name, enum
    for i, value in enumerate(enum.value):
        yield (*path, ENUM_VALUE, i), "value", f"{name}.{value.name}", value


def uncommented(file: FileDescriptorProto) -> list[str]:
    """Full names of the elements that have no comment above or beside them."""
    commented = {
        tuple(location.path)
        for location in file.source_code_info.location
        if location.leading_comments.strip() or location.trailing_comments.strip()
    }
    return [f"{kind} {name}" for path, kind, name, _ in elements(file) if path not in commented]


def misnamed(file: FileDescriptorProto) -> list[str]:
    """Full names of the elements whose names break the rules of style."""
    patterns = {"field": LOWER_SNAKE, "oneof": LOWER_SNAKE, "value": UPPER_SNAKE}
    bad = [
        f"{kind} {name}"
        for _, kind, name, descriptor in elements(file)
        if not patterns.get(kind, CAMEL).fullmatch(descriptor.name)
    ]
    for _, kind, name, enum in elements(file):
        if kind == "enum":
            prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
            bad += [f"value {name}.{value.name}" for value in enum.value if not value.name.startswith(f"{prefix}_")]
            zero = enum.value[0]
            if zero.number != 0 or zero.name != f"{prefix}_UNSPECIFIED":
                bad.append(f"zero of enum {name}")
    return bad


def descriptors(directory: Path, *sources: Path) -> list[FileDescriptorProto]:
    """Descriptors of protos, comments included."""
    output = directory / "descriptors.binpb"
    make_protos.run_protoc(
        f"--descriptor_set_out={output}", "--include_source_info", f"-I{directory}", *map(str, sources)
    )
    return list(FileDescriptorSet.FromString(output.read_bytes()).file)


@pytest.fixture(scope="module")
def contract(tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    return descriptors(tmp_path_factory.mktemp("contract"))


def test_the_contract_is_read_whole(contract: list[FileDescriptorProto]) -> None:
    names = {name for file in contract for _, _, name, _ in elements(file)}
    assert {
        "h3stream.v1.VideoService.Generate",
        "h3stream.v1.DitService.SampleChunk",
        "h3stream.v1.Event.payload",
        "h3stream.v1.ClipSpec.window",
        "h3stream.v1.RpcBadRequest.FieldViolation.reason",
        "h3stream.v1.JobState.JOB_STATE_FAILED",
    } <= names


def test_everything_has_a_comment(contract: list[FileDescriptorProto]) -> None:
    assert [name for file in contract for name in uncommented(file)] == []


def test_names_follow_the_style(contract: list[FileDescriptorProto]) -> None:
    assert [name for file in contract for name in misnamed(file)] == []


def test_the_package_is_versioned_and_lies_where_it_says(contract: list[FileDescriptorProto]) -> None:
    for file in contract:
        assert file.syntax == "proto3"
        assert re.fullmatch(r"h3stream\.v\d+", file.package)
        assert Path(file.name).parent.as_posix() == file.package.replace(".", "/")


def test_every_rpc_has_messages_of_its_own(contract: list[FileDescriptorProto]) -> None:
    rpcs = [
        (file.package, service.name, rpc) for file in contract for service in file.service for rpc in service.method
    ]
    assert len(rpcs) >= 5
    used = Counter(message for _, _, rpc in rpcs for message in (rpc.input_type, rpc.output_type))
    assert [message for message, count in used.items() if count > 1] == []
    for scope, service, rpc in rpcs:
        for message, suffix in ((rpc.input_type, "Request"), (rpc.output_type, "Response")):
            expected = {f".{scope}.{rpc.name}{suffix}", f".{scope}.{service}{rpc.name}{suffix}"}
            assert message in expected, f"{service}.{rpc.name}"


def test_numbers_never_repeat_within_a_message(contract: list[FileDescriptorProto]) -> None:
    for file in contract:
        for _, kind, name, descriptor in elements(file):
            if kind == "message":
                numbers = [field.number for field in descriptor.field]
                assert len(set(numbers)) == len(numbers), name


def test_the_rules_find_what_breaks_them(tmp_path: Path) -> None:
    source = tmp_path / "bad.proto"
    source.write_text(
        """
syntax = "proto3";
package bad;
// Fine.
message Fine {
  // Fine.
  optional int32 size_bytes = 1;
  int32 BadField = 2;
}
// Fine.
enum JobKind {
  UNKNOWN = 0;
  // Fine.
  JOB_KIND_SHORT = 1;
}
service Quiet {
  rpc Say(Fine) returns (Fine);
}
"""
    )
    (file,) = [file for file in descriptors(tmp_path, source) if file.name == "bad.proto"]
    assert uncommented(file) == [
        "field bad.Fine.BadField",
        "value bad.JobKind.UNKNOWN",
        "service bad.Quiet",
        "rpc bad.Quiet.Say",
    ]
    assert misnamed(file) == ["field bad.Fine.BadField", "value bad.JobKind.UNKNOWN", "zero of enum bad.JobKind"]


def test_committed_stubs_are_current() -> None:
    assert make_protos.stale_stubs() == []


def test_a_stub_that_is_not_current_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stubs = tmp_path / make_protos.PACKAGE
    stubs.mkdir(parents=True)
    (stubs / "left_over_pb2.py").touch()
    (stubs / "__init__.py").touch()
    monkeypatch.setattr(make_protos, "STUBS", tmp_path)
    stale = make_protos.stale_stubs()
    assert {"left_over_pb2.py", "video_pb2.py", "video_pb2_grpc.pyi"} <= set(stale)
    assert not {"types_pb2_grpc.py", "__init__.py"} & set(stale)
    make_protos.write_stubs()
    assert make_protos.stale_stubs() == []
    assert not (stubs / "left_over_pb2.py").exists()
    assert (stubs / "__init__.py").exists()
