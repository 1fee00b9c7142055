from h3stream.v1 import types_pb2 as _types_pb2
from h3stream.v1 import video_pb2 as _video_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SubmitRequest(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: _video_pb2.GenerateRequest
    def __init__(self, generation: _Optional[_Union[_video_pb2.GenerateRequest, _Mapping]] = ...) -> None: ...

class SubmitResponse(_message.Message):
    __slots__ = ("job_id", "is_known")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    IS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    is_known: bool
    def __init__(self, job_id: _Optional[str] = ..., is_known: _Optional[bool] = ...) -> None: ...

class SubmitRefinementRequest(_message.Message):
    __slots__ = ("refinement",)
    REFINEMENT_FIELD_NUMBER: _ClassVar[int]
    refinement: _video_pb2.RefineAudioRequest
    def __init__(self, refinement: _Optional[_Union[_video_pb2.RefineAudioRequest, _Mapping]] = ...) -> None: ...

class SubmitRefinementResponse(_message.Message):
    __slots__ = ("job_id", "is_known")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    IS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    is_known: bool
    def __init__(self, job_id: _Optional[str] = ..., is_known: _Optional[bool] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class FollowResponse(_message.Message):
    __slots__ = ("path", "num_events")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NUM_EVENTS_FIELD_NUMBER: _ClassVar[int]
    path: str
    num_events: int
    def __init__(self, path: _Optional[str] = ..., num_events: _Optional[int] = ...) -> None: ...

class FindArtifactRequest(_message.Message):
    __slots__ = ("download",)
    DOWNLOAD_FIELD_NUMBER: _ClassVar[int]
    download: _video_pb2.DownloadArtifactRequest
    def __init__(self, download: _Optional[_Union[_video_pb2.DownloadArtifactRequest, _Mapping]] = ...) -> None: ...

class FindArtifactResponse(_message.Message):
    __slots__ = ("artifact", "path")
    ARTIFACT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    artifact: _types_pb2.Artifact
    path: str
    def __init__(self, artifact: _Optional[_Union[_types_pb2.Artifact, _Mapping]] = ..., path: _Optional[str] = ...) -> None: ...
