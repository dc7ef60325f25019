"""What ranks in processes of their own do with `exchange_prefill`; `rank_processes.run_ranks` starts them."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers import HEADS
from rank_processes import wait_for_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import msa_icp
from msa_icp import prefill_exchange
from msa_icp.cases import poisoned

WORDS = 33
CAPACITY = 9
"""Tokens of the larger buffers that carriers and receive buffers are slices of."""
CHUNKS = (5, 3, 0, CAPACITY, 1)
SHORT_TIMEOUT_S = 3


def carrier_words(rank: int, tokens: int, layer: int = 0) -> Tensor:
    """int32 `[4, tokens, 33]`, each word another one, and other ones for every rank and layer."""
    count = HEADS * tokens * WORDS
    return (torch.arange(count, dtype=torch.int32) + (10 * layer + rank) * 100_000).view(HEADS, tokens, WORDS)


def received_words(rank: int, world_size: int, tokens: int, layer: int = 0) -> Tensor:
    """What an owner must have after the exchange, written as the contract says it, head by head."""
    owned = [head for head in range(HEADS) if head // (HEADS // world_size) == rank]
    return torch.stack(
        [torch.stack([carrier_words(s, tokens, layer)[h] for h in owned]) for s in range(world_size)]
    )


def buffers(world_size: int, tokens: int, sliced: bool, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Poisoned memory, and a carrier and a receive buffer in it: token slices of larger ones, or dense."""
    memory = poisoned((2, HEADS * CAPACITY * WORDS), torch.int32, device)
    hpr = HEADS // world_size
    if sliced:
        carrier = memory[0].view(HEADS, CAPACITY, WORDS)[:, CAPACITY - tokens :]
        received = memory[1].view(world_size, hpr, CAPACITY, WORDS)[:, :, CAPACITY - tokens :]
    else:
        count = HEADS * tokens * WORDS
        carrier = memory[0, :count].view(HEADS, tokens, WORDS)
        received = memory[1, :count].view(world_size, hpr, tokens, WORDS)
    return memory, carrier, received


def wrong_words(
    memory: Tensor, carrier: Tensor, received: Tensor, sent: Tensor, expected: Tensor
) -> list[int]:
    """Differing words of the receive buffer, of the carrier, and written ones of everything else."""
    found = [int((received.cpu() != expected).sum()), int((carrier.cpu() != sent).sum())]
    fresh = poisoned(tuple(memory.shape), torch.int32, str(memory.device))
    for own in (carrier, received):
        own.zero_()
    touched = (memory != fresh) & (memory != 0)
    return [*found, int(touched.sum())]


def one_exchange(
    rank: int, world_size: int, tokens: int, layer: int, sliced: bool, group=None, device: str = "cpu"
) -> list[int]:
    memory, carrier, received = buffers(world_size, tokens, sliced, device)
    carrier.copy_(carrier_words(rank, tokens, layer))
    msa_icp.exchange_prefill(carrier, received, group)
    sent, expected = (
        carrier_words(rank, tokens, layer),
        received_words(rank, world_size, tokens, layer),
    )
    return wrong_words(memory, carrier, received, sent, expected)


# ---------------------------------------------------------------- scenarios


def uneven_chunks(rank: int, world_size: int, folder: Path) -> list[list[int]]:
    """Chunk after chunk of different sizes, layer after layer; slow ranks and fast ones."""
    found = []
    for layer, tokens in enumerate([*CHUNKS, *CHUNKS]):
        if layer % world_size == rank:
            time.sleep(0.02)
        # Not every rank need have its rows in slices.
        found.append(one_exchange(rank, world_size, tokens, layer, sliced=(layer + rank) % 2 == 0))
    return found


def made_in_inference_mode(rank: int, world_size: int, folder: Path) -> list[int]:
    """Buffers that PyTorch writes in that mode alone, and a call outside of it."""
    with torch.inference_mode():
        memory, carrier, received = buffers(world_size, 5, sliced=True)
        carrier.copy_(carrier_words(rank, 5, 0))
    msa_icp.exchange_prefill(carrier, received)
    with torch.inference_mode():
        sent, expected = carrier_words(rank, 5, 0), received_words(rank, world_size, 5, 0)
        return wrong_words(memory, carrier, received, sent, expected)


class Operations(TorchDispatchMode):
    """The operations that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func).rpartition(".")[0])
        return func(*args, **(kwargs or {}))


def without_allocation(rank: int, world_size: int, folder: Path) -> list[str]:
    """What an exchange of slices does: nothing in it may make a tensor."""
    _, carrier, received = buffers(world_size, 4, sliced=True)
    with Operations() as operations:
        msa_icp.exchange_prefill(carrier, received)
    return sorted(set(operations.names))


def groups_of_two(rank: int, world_size: int, folder: Path) -> list[Any]:
    """Two groups in one job: a rank of the group is not a rank of the job. And a group of others."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, theirs = groups[rank % 2], groups[1 - rank % 2]
    found = [one_exchange(dist.get_rank(mine), 2, 6, layer, True, mine) for layer in range(3)]
    return [*found, refusal(*buffers(2, 6, True)[1:], theirs)]


def a_rank_dies(rank: int, world_size: int, folder: Path, dead: int, order: int) -> dict[str, Any]:
    """One rank is killed after two layers; the others say which, whoever comes first (`order`: 1 or -1)."""
    wrong = [one_exchange(rank, world_size, 4, layer, True) for layer in range(2)]
    dist.barrier()
    # Rank 0, if it lives, waits when the death comes, and for ranks that know of it before they begin.
    if rank == dead:
        time.sleep(0.15)
        os.kill(os.getpid(), signal.SIGKILL)
    _, carrier, received = buffers(world_size, 4, True)
    time.sleep(0.3 * ((order * rank) % world_size))
    began = time.monotonic()
    try:
        msa_icp.exchange_prefill(carrier, received)
        error = ""
    except RuntimeError as caught:
        error = str(caught)
    seconds = time.monotonic() - began
    return {"wrong": wrong, "error": error, "seconds": seconds}


def a_rank_does_not_come(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Rank 1 lives on without the exchange; the other gives up after the timeout of the group."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=SHORT_TIMEOUT_S))
    one_exchange(rank, world_size, 4, 0, True, group)
    began = time.monotonic()
    if rank == 1:
        wait_for_file(folder / "gave-up", 60)
        return {"error": "", "seconds": 0}
    _, carrier, received = buffers(world_size, 4, True)
    try:
        msa_icp.exchange_prefill(carrier, received, group)
        error = ""
    except RuntimeError as caught:
        error = str(caught)
    (folder / "gave-up").touch()
    return {"error": error, "seconds": time.monotonic() - began}


def an_interrupt(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Ctrl-C reaches a rank that waits for one that does not come, and so does a signal that ends nothing."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=SHORT_TIMEOUT_S))
    one_exchange(rank, world_size, 4, 0, True, group)
    if rank == 1:
        wait_for_file(folder / "interrupted", 60)
        return {}
    handled: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: handled.append(os.getpid()))
    for after, number in ((0.1, signal.SIGUSR1), (0.2, signal.SIGINT)):
        threading.Timer(after, os.kill, (os.getpid(), number)).start()
    _, carrier, received = buffers(world_size, 4, True)
    began = time.monotonic()
    try:
        msa_icp.exchange_prefill(carrier, received, group)
        raised = ""
    except BaseException as caught:
        raised = type(caught).__name__
    seconds = time.monotonic() - began
    (folder / "interrupted").touch()
    return {"raised": raised, "seconds": seconds, "handled": len(handled)}


def refusal(carrier: Any, received: Any, group: Any = None) -> str:
    try:
        msa_icp.exchange_prefill(carrier, received, group)
    except ValueError as error:
        return str(error)
    return "accepted"


def bad_arguments(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Every rank is refused on its own, nothing is sent, and the next exchange is right."""
    _, carrier, received = buffers(world_size, 4, sliced=True)
    said = [
        (name, pattern, refusal(*change(carrier, received)))
        for name, pattern, change in bad_tensors(world_size)
    ]
    found = {
        "unexpected": [
            (name, message) for name, pattern, message in said if not re.fullmatch(pattern, message)
        ],
        "count": len(said),
        "pair": refusal([carrier, carrier], [received, received], dist.group.WORLD),
        "string": refusal(carrier, received, "gloo"),
    }
    return {**found, "wrong": one_exchange(rank, world_size, 4, 0, True)}


def bad_tensors(world_size: int) -> Sequence[tuple[str, str, Any]]:
    """What is wrong, what the message says, and a function of the right carrier and receive buffer."""
    hpr = HEADS // world_size
    wide = torch.zeros(HEADS, 4, 40, dtype=torch.int32)
    return (
        ("no tensor", r"received: must be a torch.Tensor, was NoneType", lambda c, r: (c, None)),
        ("int64", r"carrier: must be torch.int32, was torch.int64", lambda c, r: (c.long(), r)),
        ("float", r"received: must be torch.int32, was torch.float32", lambda c, r: (c, r.float())),
        (
            "3 heads",
            r"carrier: must be of shape \[4, tokens, 33\], was \[3, 4, 33\]",
            lambda c, r: (c[:3], r),
        ),
        ("32 words", r"carrier: must be of shape .*, was \[4, 4, 32\]", lambda c, r: (c[..., :32], r)),
        (
            "fewer tokens",
            rf"received: must be of shape \[{world_size}, {hpr}, 4, 33\], was .* 3, 33\]",
            lambda c, r: (c, r[:, :, :3]),
        ),
        ("heads of all", r"received: must be of shape .*, was \[4, 4, 33\]", lambda c, r: (c, c)),
        ("elsewhere", r"received: must be on cpu, was on meta", lambda c, r: (c, r.to("meta"))),
        (
            "gaps",
            r"carrier\.stride\(1\): must be the 33 words of a row, was 40",
            lambda c, r: (wide[..., :33], r),
        ),
        (
            "gaps received",
            r"received\.stride\(2\): must be the 33 words of a row, was 40",
            lambda c, r: (c, wide[..., :33].view(world_size, hpr, 4, 33)),
        ),
        (
            "gaps in rows",
            r"carrier\.stride\(-1\): must be 1, was 2",
            lambda c, r: (torch.zeros(HEADS, 4, 66, dtype=torch.int32)[..., ::2], r),
        ),
        (
            "heads that overlap",
            r"carrier\.stride\(0\): must be at least 4 \* 33 = 132, was 131",
            lambda c, r: (torch.zeros(999, dtype=torch.int32).as_strided((HEADS, 4, 33), (131, 33, 1)), r),
        ),
        (
            "in place",
            r"received: must be in memory of its own, was on rows of carrier",
            lambda c, r: in_place(world_size),
        ),
        (
            "one row in common",
            r"received: must be in memory of its own, was on rows of carrier",
            lambda c, r: in_place(world_size, HEADS * 4 - 1),
        ),
        (
            "ranks that overlap",
            r"received strides: must be those of rows that do not overlap, was .*",
            lambda c, r: (c, r[:1].expand(world_size, hpr, 4, 33)),
        ),
    )


def in_place(world_size: int, apart: int = 0) -> tuple[Tensor, Tensor]:
    """A carrier and a receive buffer that begins so many rows behind the carrier's first."""
    rows = torch.zeros(2 * HEADS * 4, WORDS, dtype=torch.int32)
    shape = (world_size, HEADS // world_size, 4, WORDS)
    return rows[: HEADS * 4].view(HEADS, 4, WORDS), rows[apart : apart + HEADS * 4].view(shape)


def no_backend(rank: int, world_size: int, folder: Path) -> list[str]:
    """Tensors of devices that a group of gloo cannot send from."""
    _, carrier, received = buffers(world_size, 4, False)
    try:
        prefill_exchange._check_backend(dist.group.WORLD, "cuda")
        on_cuda = "accepted"
    except ValueError as error:
        on_cuda = str(error)
    dist.barrier()  # a rank that leaves before the other has joined would fail it
    return [refusal(carrier.to("meta"), received.to("meta")), on_cuda]


def over_nccl(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """A GPU a rank: eager exchanges, then one in a CUDA graph that is replayed with other rows."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    group = dist.new_group(backend="nccl")
    eager = [
        one_exchange(rank, world_size, tokens, layer, True, group, "cuda")
        for layer, tokens in enumerate(CHUNKS)
    ]
    _, carrier, received = buffers(world_size, 5, True, "cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    msa_icp.exchange_prefill(carrier, received, group)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        msa_icp.exchange_prefill(carrier, received, group)
    wrong = []
    for layer in range(2):
        carrier.copy_(carrier_words(rank, 5, layer))
        graph.replay()
        wrong.append(int((received.cpu() != received_words(rank, world_size, 5, layer)).sum()))
    refused = refusal(*buffers(world_size, 4, False)[1:], group)
    dist.barrier()
    return {"eager": eager, "allocated": allocated, "graph": wrong, "cpu tensors": refused}
