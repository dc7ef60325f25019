"""What one argument must be: a number, a tensor, a K shard, score rows."""

from __future__ import annotations

import numbers
import sys
from itertools import product
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..geometry import HEAD_DIM, NUM_HEADS, PAGE_SIZES, TOP_K, WORLD_SIZES, Layouts, ShardLayout

FP8 = torch.float8_e4m3fn
_SHORTEST_S, _LONGEST_S = 0.001, 31_536_000
"""Of a limit; the longest is a year."""


def refuse(name: str, must_be: str, was: object) -> NoReturn:
    """Raise the error of argument `name`."""
    raise ValueError(f"{name}: must be {must_be}, was {was}")


# ---------------------------------------------------------------- numbers


def integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """An integer in `low ... high` (both included, None: unbounded)."""
    if type(value) is int and (low is None or low <= value) and (high is None or value <= high):
        return value  # a call checks many, and words what is wrong with none
    if low is None and high is None:
        must_be = "an integer"
    elif high is None:
        must_be = f"an integer of at least {low}"
    elif low is None:
        must_be = f"an integer of at most {high}"
    else:
        must_be = f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        refuse(name, must_be, f"{value!r} ({type(value).__name__})")
    number = int(value)
    if (low is not None and number < low) or (high is not None and number > high):
        refuse(name, must_be, number)
    return number


def one_of(name: str, value: Any, choices: tuple[int, ...]) -> int:
    """One of a few integers."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) not in choices:
        refuse(name, " or ".join(map(str, choices)), repr(value))
    return int(value)


def real(name: str, must_be: str, value: Any, low: float, high: float) -> float:
    """A number in `low ... high`, both included, as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        refuse(name, must_be, repr(value))
    try:
        number = float(value)
    except OverflowError:  # its digits could be more than Python writes out
        refuse(name, must_be, f"of type {type(value).__name__}, too large for a float")
    if not low <= number <= high:
        refuse(name, must_be, repr(value))
    return number


def finite(name: str, value: Any) -> float:
    """A number that is a finite one as a float."""
    return real(name, "a finite number", value, -sys.float_info.max, sys.float_info.max)


def seconds(name: str, value: Any) -> float:
    """A duration: a millisecond at least, what gloo counts in, and of which none would be its default."""
    return real(name, f"seconds, from {_SHORTEST_S} to {_LONGEST_S}", value, _SHORTEST_S, _LONGEST_S)


def flag(name: str, value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        refuse(name, "True or False", repr(value))


def layout(rank: Any, world_size: Any, page_size: Any) -> ShardLayout:
    """The shard layout that the three numbers name."""
    world = one_of("world_size", world_size, WORLD_SIZES)
    return ShardLayout(world, integer("rank", rank, 0, world - 1), one_of("page_size", page_size, PAGE_SIZES))


def layouts(page_size: Any, world_size: Any) -> Layouts:
    """Every (page size, world size) that `warmup` is asked for; None stands for all."""
    pages = PAGE_SIZES if page_size is None else (one_of("page_size", page_size, PAGE_SIZES),)
    worlds = WORLD_SIZES if world_size is None else (one_of("world_size", world_size, WORLD_SIZES),)
    return tuple(product(pages, worlds))


def group_shape(world_size: Any, heads_per_rank: Any, capacity: Any) -> tuple[int, int, int]:
    """World size, heads a rank and capacity of a receive storage."""
    world = one_of("world_size", world_size, WORLD_SIZES)
    heads = one_of("heads_per_rank", heads_per_rank, (NUM_HEADS // world,))
    return world, heads, integer("capacity", capacity, 1, 2**31 - 1)


def forced_blocks(begin_name: str, begin: Any, end_name: str, end: Any) -> None:
    """Counts of forced blocks: not negative, together at most 16."""
    total = integer(begin_name, begin, 0) + integer(end_name, end, 0)
    if total > TOP_K:
        refuse(f"{begin_name} + {end_name}", f"at most {TOP_K}", total)


def device(name: str, value: Any) -> torch.device:
    """A device, or what names one."""
    try:
        return torch.device(value)
    except (RuntimeError, TypeError):
        refuse(name, "a torch.device or the name of one", repr(value))


# ---------------------------------------------------------------- tensors


def tensor(
    name: str,
    value: Any,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int | str, ...],
    *,
    device: torch.device | None = None,
    contiguous: bool = False,
    aligned: int = 1,
    first: str = "",
) -> Tensor:
    """A tensor of that dtype and shape; a string in `shape` names a free dimension.

    `first` says for a reader where the first number of `shape` comes from, which may be what is wrong.
    """
    if not isinstance(value, Tensor):
        refuse(name, "a torch.Tensor", type(value).__name__)
    if value.layout != torch.strided:
        refuse(name, "a strided (dense) tensor", value.layout)
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if value.dtype not in dtypes:
        refuse(name, " or ".join(str(d) for d in dtypes), value.dtype)
    if value.dim() != len(shape) or any(
        isinstance(want, int) and got != want for want, got in zip(shape, value.shape, strict=True)
    ):
        blamed = first and value.dim() == len(shape) and value.shape[0] != shape[0]
        source = f" (the first is {first})" if blamed else ""
        refuse(name, f"of shape [{', '.join(map(str, shape))}]{source}", list(value.shape))
    if device is not None and value.device != device:
        refuse(name, f"on {device}", f"on {value.device}")
    if contiguous and not value.is_contiguous():
        refuse(name, "contiguous", f"of strides {value.stride()} at shape {list(value.shape)}")
    if aligned > 1 and value.data_ptr() % aligned:
        refuse(name, f"{aligned}-byte aligned", f"at address {value.data_ptr():#x}")
    return value


def at_least(name: str, value: Tensor, dim: int, low: int) -> None:
    """A tensor whose dimension `dim` has at least `low` elements."""
    if value.shape[dim] < low:
        refuse(f"{name}.shape[{dim}]", f"at least {low}", value.shape[dim])


def unit_last_stride(name: str, value: Tensor) -> None:
    """Neighbours of the last dimension lie beside each other."""
    if value.stride(-1) != 1:
        refuse(f"{name}.stride(-1)", "1", value.stride(-1))


def separate_rows(name: str, value: Tensor) -> None:
    """Rows of the last dimension that do not overlap, in whatever order the other dimensions lie."""
    unit_last_stride(name, value)
    if value.numel() == 0:
        return
    extent = value.shape[-1]
    for stride, size in sorted((value.stride(d), value.shape[d]) for d in range(value.dim() - 1)):
        if size > 1:
            if stride < extent:
                refuse(f"{name} strides", "those of rows that do not overlap", value.stride())
            extent = stride * (size - 1) + extent


def score_rows(
    name: str, value: Any, tokens: int | str, device: torch.device | None = None, first: str = ""
) -> Tensor:
    """Score rows `[T, 4, K]` (contract, section 2); `first` as `tensor` takes it."""
    rows = tensor(name, value, torch.float32, (tokens, NUM_HEADS, "columns"), device=device, first=first)
    unit_last_stride(name, rows)
    columns = rows.shape[2]
    if rows.stride(1) < columns:
        refuse(f"{name}.stride(1)", f"at least its {columns} columns", rows.stride(1))
    if rows.stride(0) < NUM_HEADS * rows.stride(1):
        refuse(
            f"{name}.stride(0)",
            f"at least {NUM_HEADS} * stride(1) = {NUM_HEADS * rows.stride(1)}",
            rows.stride(0),
        )
    return rows


def k_shard(
    value: Any, shard: ShardLayout, device: torch.device | None = None, name: str = "index_k"
) -> Tensor:
    """A rank's K shard `[pages, R, 128]` (contract, section 2)."""
    keys = tensor(name, value, FP8, ("pages", shard.rows, HEAD_DIM), device=device, aligned=16)
    if keys.stride(2) != 1 or keys.stride(1) != HEAD_DIM:
        refuse(f"{name} strides", f"(pitch, {HEAD_DIM}, 1)", keys.stride())
    pitch = keys.stride(0)
    if pitch % 16 or pitch < shard.page_bytes:
        refuse(f"{name}.stride(0)", f"a multiple of 16 of at least {shard.page_bytes}", pitch)
    return keys


def valid_pages_of(value: Any, tokens: int | str, device: torch.device) -> Tensor:
    """How many blocks each token sees: `num_valid_pages` of a selection or a merge."""
    return tensor("num_valid_pages", value, torch.int32, (tokens,), device=device, contiguous=True)
