"""Memory that the processes of one machine share and that leaves nothing behind.

On Linux a block is an anonymous file (`memfd_create`) which peers open through the creator's `/proc`
entry: it never has a name, so even a process that is killed in the middle of a rendezvous leaves
none. Elsewhere a block is a temporary file whose name goes as soon as every rank has mapped it.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .agreement import Exchange, agreement, gather

NAME = "msa-icp-rows"
"""How a block shows in a process's memory map, and how a named one begins."""

MARK_BYTES = 16
"""Random bytes behind a block. In two containers the same path may lead each rank to its own block."""


class SharedBlock:
    """A block of shared memory, known to its peers by a path that is valid until `forget`."""

    def __init__(
        self, path: str, nbytes: int, mark: bytes, fd: int | None = None, named: bool = False
    ) -> None:
        self.path = path
        self.nbytes = nbytes
        self.mark = mark
        self._fd = fd
        self._named = named

    @staticmethod
    def allocate(
        nbytes: int, *, ranks: int = 1, anonymous: bool = hasattr(os, "memfd_create")
    ) -> SharedBlock:
        """A new block of zeros. Raises OSError where the machine has no room for `ranks` such blocks."""
        mark = os.urandom(MARK_BYTES)
        if anonymous:
            _refuse_more_than_there_is(nbytes * ranks)
            fd = os.memfd_create(NAME)
            block = SharedBlock(f"/proc/{os.getpid()}/fd/{fd}", nbytes, mark, fd)
        else:
            fd, path = tempfile.mkstemp(prefix=f"{NAME}-")
            block = SharedBlock(path, nbytes, mark, fd, named=True)
        try:
            if hasattr(os, "posix_fallocate"):
                # Without it a full machine answers with SIGBUS later.
                os.posix_fallocate(fd, 0, nbytes + MARK_BYTES)
            os.pwrite(fd, mark, nbytes)
        except OSError:
            block.forget()
            raise
        return block

    def map(self, dtype: torch.dtype) -> Tensor:
        """The block as a flat tensor; the memory lives as long as any process maps it.

        Raises OSError where the path leads to something else than the creator's block.
        """
        fd = os.open(self.path, os.O_RDONLY)
        try:
            if os.pread(fd, MARK_BYTES + 1, self.nbytes) != self.mark:
                raise OSError(f"{self.path} is something else in this process than in its creator's")
        finally:
            os.close(fd)
        return torch.from_file(self.path, shared=True, size=self.nbytes // dtype.itemsize, dtype=dtype)

    def forget(self) -> None:
        """Give up the path; what is mapped stays. Does nothing for a peer's block."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            if self._named:
                os.unlink(self.path)


@contextmanager
def rendezvous(nbytes: int, exchange: Exchange, *, ranks: int, what: str) -> Iterator[list[SharedBlock]]:
    """Each of `ranks` processes allocates `nbytes` and gets everybody's blocks, to map inside the `with`.

    A rank that cannot allocate or map its share tells the others, and all of them raise RuntimeError.
    """
    block, trouble = None, None
    try:
        block = SharedBlock.allocate(nbytes, ranks=ranks)
    except OSError as error:
        trouble = f"cannot allocate {nbytes} bytes of shared memory ({what}): {error}"
    try:
        theirs = gather(exchange, (block.path, nbytes, block.mark) if block else None, trouble)
        # The paths must last until the last rank has mapped them.
        with agreement(exchange):
            try:
                yield [SharedBlock(*known) for known in theirs]
            except (OSError, RuntimeError) as error:
                raise RuntimeError(
                    f"receive storage: cannot map the peers' memory: {error}; the ranks must be processes of "
                    "one machine and one user"
                ) from error
    finally:
        if block is not None:
            block.forget()


def _refuse_more_than_there_is(nbytes: int) -> None:
    """An anonymous file has no limit: filling it past the machine's memory gets somebody killed."""
    try:
        with open("/proc/meminfo") as lines:
            found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        return
    if found and nbytes > found[0]:
        raise OSError(errno.ENOMEM, f"only {found[0]} bytes of memory are available")
