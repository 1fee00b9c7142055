"""What a worker tells about the files that it was loaded from."""

from __future__ import annotations

from collections.abc import Iterable

from h3stream.job import ModelPart
from services.checkpoints.source import Checkpoint, StoredTensor, data_types


def model_part(component: str, layout: str, checkpoint: Checkpoint, read: Iterable[StoredTensor]) -> ModelPart:
    """A part of the model, as its files describe it.

    component: as in `services.checkpoints.layout.Component`.  layout: the layout that it was read in.
    read: those of the checkpoint's tensors that the worker takes.
    """
    tensors = tuple(read)
    return ModelPart(
        component=component,
        layout=layout,
        source=checkpoint.path.absolute().name,
        data_types=", ".join(data_types(tensors)),
        num_parameters=sum(tensor.info.num_elements for tensor in tensors),
        num_bytes=sum(tensor.info.num_bytes for tensor in tensors),
    )


def weight_digests(component: str, checkpoint: Checkpoint) -> dict[str, str]:
    """Component and name of every weight file, such as `video_vae/model.safetensors`, to its digest."""
    return {f"{component}/{name}": digest for name, digest in checkpoint.digests().items()}
