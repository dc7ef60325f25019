"""Memory that the processes of one machine share and that leaves nothing behind.

On Linux a block is an anonymous file (`memfd_create`) which peers open through the creator's `/proc`
entry: it never has a name, so even a process that is killed in the middle of a rendezvous leaves
none. Elsewhere a block is a temporary file whose name goes as soon as every rank has mapped it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class SharedBlock:
    """A block of shared memory, known to its peers by a path that is valid until `forget`."""

    def __init__(self, path: str, nbytes: int, fd: int | None = None, named: bool = False) -> None:
        self.path = path
        self.nbytes = nbytes
        self._fd = fd
        self._named = named

    @staticmethod
    def allocate(nbytes: int, *, anonymous: bool = hasattr(os, "memfd_create")) -> SharedBlock:
        """A new block of zeros. Raises OSError where the machine has no room for it."""
        if anonymous:
            fd = os.memfd_create("msa-icp")
            block = SharedBlock(f"/proc/{os.getpid()}/fd/{fd}", nbytes, fd)
        else:
            fd, path = tempfile.mkstemp(prefix="msa-icp-")
            block = SharedBlock(path, nbytes, fd, named=True)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, nbytes)  # without it a full machine answers with SIGBUS later
            else:
                os.truncate(fd, nbytes)
        except OSError:
            block.forget()
            raise
        return block

    def map(self, dtype: torch.dtype) -> Tensor:
        """The block as a flat tensor; the memory lives as long as any process maps it."""
        return torch.from_file(self.path, shared=True, size=self.nbytes // dtype.itemsize, dtype=dtype)

    def forget(self) -> None:
        """Give up the path; what is mapped stays. Does nothing for a peer's block."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            if self._named:
                os.unlink(self.path)


@contextmanager
def rendezvous(
    nbytes: int, exchange: Callable[[Any], list[Any]], *, what: str
) -> Iterator[list[SharedBlock]]:
    """Everybody allocates `nbytes` and gets everybody's blocks, to be mapped inside the `with`.

    `exchange` gathers one object of every rank. A rank that cannot allocate or map its share tells the
    others, and all of them raise RuntimeError; ValueError where the ranks ask for different sizes.
    """
    block, trouble = None, None
    try:
        block = SharedBlock.allocate(nbytes)
    except OSError as error:
        trouble = f"cannot allocate {nbytes} bytes of shared memory ({what}): {error}"
    try:
        paths = _all_well(exchange((trouble, (block.path, nbytes) if block else None)))
        sizes = [size for _, size in paths]
        if len(set(sizes)) > 1:
            raise ValueError(f"capacity: must be the same on every rank, the ranks ask for {sizes} bytes")
        body_error: Exception | None = None
        try:
            yield [SharedBlock(path, size) for path, size in paths]
        except Exception as error:
            body_error = error
        # The paths must last until the last rank has mapped them.
        trouble = None if body_error is None else f"cannot map its peers' memory: {body_error}"
        reports = exchange((trouble, None))
        if body_error is not None:
            raise RuntimeError(
                f"receive storage: {trouble}; the ranks must be processes of one machine and one user"
            ) from body_error
        _all_well(reports)
    finally:
        if block is not None:
            block.forget()


def _all_well(reports: list[tuple[str | None, Any]]) -> list[Any]:
    """What the ranks sent, or RuntimeError with what went wrong on which of them."""
    wrong = [f"rank {rank} {trouble}" for rank, (trouble, _) in enumerate(reports) if trouble]
    if wrong:
        raise RuntimeError("receive storage: " + "; ".join(wrong))
    return [sent for _, sent in reports]
