"""Compiled kernels of this user on disk, shared by processes; each with a digest of itself.

What cannot be read, or is not what was written, is compiled again and written anew. What cannot be written is
compiled again by the next process: a cache may be read-only or full, and no call depends on it.
"""

from __future__ import annotations

import functools
import hashlib
from contextlib import suppress
from typing import Any

_MARK = b"msa-icp, digest behind the code: "
"""Before the keys, which other programs' files in the same folder have not."""


def _digest(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()


@functools.cache
def kernel_cache() -> Any:
    """The cache, as `Program.compile` takes one; None where there is no folder for it."""
    from cuda.core.utils import FileStreamProgramCache

    class KernelCache(FileStreamProgramCache):  # type: ignore[misc]
        def __getitem__(self, key: bytes) -> bytes:
            try:
                kept: bytes = super().__getitem__(_MARK + key)
            except OSError:
                raise KeyError(key) from None
            size = len(kept) - len(_digest(b""))
            if size < 0 or _digest(kept[:size]) != kept[size:]:
                raise KeyError(key)
            return kept[:size]

        def __setitem__(self, key: bytes, value: Any) -> None:
            code = bytes(value.code)
            with suppress(OSError):
                super().__setitem__(_MARK + key, code + _digest(code))

    try:
        return KernelCache()
    except OSError:
        return None
