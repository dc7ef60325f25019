"""The receive storage as the facade takes it: any object with the fields that section 8 names."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from .. import checks
from ..storage import ReceiveStorage
from .limits import Limits


class Comm(Protocol):
    """Receive storage of one rank, and the addresses of its peers'. `ReceiveStorage` is one."""

    recv: Tensor
    tagged_recv: Tensor
    recv_bases: Tensor
    tagged_recv_bases: Tensor
    publish_generations: Tensor
    expected_generations: Tensor
    errors: Tensor


FIELDS = tuple(Comm.__annotations__)


class CheckedComm:
    """A `comm` that holds the rules, as it was then. It keeps the memory that launches have addresses of."""

    def __init__(self, comm: Any, limits: Limits, device: torch.device) -> None:
        """Checks it; ValueError names the field."""
        found = _placed_fields(comm, limits, device)
        self._known = [
            (name, field, field.data_ptr(), field.shape, field.stride())
            for name, field in zip(FIELDS, found, strict=True)
        ]
        self._address = found[0].data_ptr()

    def still_describes(self, comm: Any) -> bool:
        """Whether every field of `comm` is the tensor that was checked, where and as it was."""
        for name, field, address, shape, stride in self._known:  # every eager call looks at all of them
            found = getattr(comm, name, None)
            if found is not field or found.data_ptr() != address:
                return False
            if found.shape != shape or found.stride() != stride:
                return False
        return True

    def is_at(self, comm: Any) -> bool:
        """Whether the rows of `comm` are where those are that were checked: a look that is cheap."""
        found = getattr(comm, "recv", None)
        return isinstance(found, Tensor) and found.data_ptr() == self._address


def comm_fields(comm: Any, limits: Limits, device: torch.device) -> list[Tensor]:
    """The tensors of a `comm`, checked but for where they lie, which a traced function cannot know."""
    layout = limits.comm_layout
    ranks = (limits.world_size,)
    if isinstance(comm, ReceiveStorage):  # another object's may mean anything
        if comm.closed:
            checks.refuse("comm", "a receive storage that is open", "a closed one")
        if comm.rank != limits.rank:
            checks.refuse("comm.rank", f"{limits.rank}, the rank of the indexer", comm.rank)
        if comm.capacity != limits.max_decode_tokens:
            must_be = f"max_decode_tokens of the indexer, {limits.max_decode_tokens}"
            checks.refuse("comm.capacity", must_be, comm.capacity)
    rules: dict[str, tuple[torch.dtype, tuple[int | str, ...]]] = {
        "recv": (torch.int32, layout["legacy_shape"]),
        "tagged_recv": (torch.int64, layout["tagged_shape"]),
        "recv_bases": (torch.int64, ranks),
        "tagged_recv_bases": (torch.int64, ranks),
        "publish_generations": (torch.int32, layout["generations_shape"]),
        "expected_generations": (torch.int32, layout["expected_shape"]),
        "errors": (torch.int32, ("words",)),
    }
    found = []
    for name, (dtype, shape) in rules.items():
        field = f"comm.{name}"
        value = getattr(comm, name, None)
        found.append(checks.tensor(field, value, dtype, shape, device=device, contiguous=True))
    checks.at_least("comm.errors", found[-1], 0, 1)
    return found


def _placed_fields(comm: Any, limits: Limits, device: torch.device) -> list[Tensor]:
    layout = limits.comm_layout
    found = comm_fields(comm, limits, device)
    recv, tagged_recv = found[:2]
    distance = tagged_recv.data_ptr() - recv.data_ptr()
    if distance != layout["tagged_offset_bytes"]:
        must_be = f"{layout['tagged_offset_bytes']} bytes after comm.recv, in one storage"
        checks.refuse("comm.tagged_recv", must_be, f"{distance} bytes after it")
    return found
