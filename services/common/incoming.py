"""Calls that begin with a header and go on with the parts of tensors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from torch import Tensor

from h3stream.errors import InvalidRequestError
from services.common.tensors import TensorAssembler


async def receive_header(call: str, requests: AsyncIterator[Any]) -> Any:
    """The header that a call's stream begins with. Raises InvalidRequestError for any other beginning."""
    async for message in requests:
        if message.WhichOneof("payload") != "header":
            raise _wrong_order(call)
        return message.header
    raise InvalidRequestError(f"{call} takes one header, first; the stream was empty")


async def receive_tensors(call: str, requests: AsyncIterator[Any], tensors: TensorAssembler) -> dict[str, Tensor]:
    """The tensors that the rest of it holds, by name. Raises InvalidRequestError for what is not expected."""
    async for message in requests:
        if message.WhichOneof("payload") != "tensor":
            raise _wrong_order(call)
        tensors.add(message.tensor)
    return tensors.finish()


def _wrong_order(call: str) -> InvalidRequestError:
    return InvalidRequestError(f"{call} takes one header, first, and then only tensors")
