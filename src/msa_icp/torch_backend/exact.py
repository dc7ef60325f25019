"""e4m3 keys and queries as FP64 values, whose dot products are exact: what the scorers share.

The keys of the cache are never converted as a whole: a tile of a few thousand rows stays in the caches.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from ..geometry import HEAD_DIM

TILE_ROWS = 4096
"""Key rows converted at a time: 0.5 MiB of bytes become 4 MiB of FP64. On two Zen 4 cores tiles of
1024, 2048 and 4096 rows reached 1.1, 1.4 and 1.7 GB/s at P = 128, W = 4."""

KEY_SCALE = 256.0
"""The converted keys are their values divided by this; the queries are multiplied by it."""

NEG_INF = float("-inf")


def exact_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """Query rows `[..., 128]` -> their values times `KEY_SCALE` in FP64, and which rows hold a NaN.

    A NaN query row makes every dot product NaN, and a NaN is ignored by the maximum: its values here are
    numbers, and the caller scores it -inf.
    """
    values = q.to(torch.float64)
    dead = values.isnan().any(-1)
    return values.nan_to_num(nan=0.0) * KEY_SCALE, dead


def exact_keys(index_k: Tensor, pages: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor | None]:
    """Pages `[g]` of a shard `[pages, R, 128]` -> their values divided by `KEY_SCALE`, FP64 `[g, R, 128]`.

    Also which rows hold no NaN, bool `[g * R]`, None where all do.
    """
    count, rows = pages.shape[0], index_k.shape[1]
    raw = scratch.take("raw", (count, rows * HEAD_DIM), torch.uint8)
    torch.index_select(_page_bytes(index_k), 0, pages, out=raw)
    values, number = _exact_values(raw, scratch)
    return values.view(count, rows, HEAD_DIM), number


def _page_bytes(index_k: Tensor) -> Tensor:
    """The shard as bytes, a page a row, at the shard's own pitch."""
    pages, rows, _ = index_k.shape
    return index_k.view(torch.uint8).as_strided((pages, rows * HEAD_DIM), (index_k.stride(0), 1))


def _exact_values(raw: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor | None]:
    """e4m3 bytes `[g, n]` -> their values divided by `KEY_SCALE` in FP64, and which rows hold no NaN.

    The bits are moved in integer lanes: the sign to bit 15 and the other seven to bits 13 ... 7 make
    the fp16 number of the same digits with an exponent bias of 15 instead of 7, which is the value
    divided by 2**8. A NaN byte (0x7F, 0xFF) becomes a finite number there, so NaN rows are found in the
    bytes and reported apart: bool over all rows of 128 bytes, None where no row of the tile has one.
    """
    count, width = raw.shape
    magnitude = scratch.take("magnitude", (count, width), torch.uint8)
    torch.bitwise_and(raw, 0x7F, out=magnitude)
    number = None
    if int(magnitude.max()) == 0x7F:
        number = magnitude.view(-1, HEAD_DIM).amax(-1) != 0x7F
    half = scratch.take("half", (count, width), torch.int16)
    half.copy_(raw.view(torch.int8))  # sign-extended: the sign stands in bits 15 ... 7
    half.mul_(128).bitwise_and_(-16385)  # bit 14 cleared
    single = scratch.take("single", (count, width), torch.float32)
    single.copy_(half.view(torch.float16))
    double = scratch.take("double", (count, width), torch.float64)
    double.copy_(single)
    return double, number


class Scratch:
    """Buffers that the tiles of one thread reuse: fresh ones cost more in page faults than the work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The buffer `name` as an uninitialised contiguous tensor."""
        need = dtype.itemsize
        for size in shape:
            need *= size
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < need:
            buffer = self._buffers[name] = torch.empty(need, dtype=torch.uint8, device=self._device)
        return buffer[:need].view(dtype).view(shape)


_local = threading.local()


def scratch_of(device: torch.device) -> Scratch:
    """This thread's buffers. On CUDA the caching allocator serves as well, and knows the streams."""
    if device.type != "cpu":
        return Scratch(device)
    if not hasattr(_local, "scratch"):
        _local.scratch = Scratch(device)
    return _local.scratch  # type: ignore[no-any-return]
