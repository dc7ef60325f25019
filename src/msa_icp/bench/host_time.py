"""Host time of one eager call of every decode entry point, and of a layer through the facade.

The batch is so small that the device is done before the host: what counts is the host's work, which does not
depend on the sizes. A layer is always the same one: its query, K shard and slot set stay.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import msa_icp
from msa_icp import ReceiveStorage, dispatch, num_valid_pages
from msa_icp.geometry import HEAD_DIM, NUM_HEADS, ShardLayout, decode_pool_bytes

from .measure import HostTime, host_times

REQUESTS = 4
COLUMNS = 8
LAYOUT = ShardLayout(world_size=4, rank=1, page_size=128)
PREFIX = "msa_icp_"
"""An entry point is called like its op, but for this."""


@dataclass(frozen=True)
class Row:
    """Microseconds of one call, by its parts; None: not to be had here."""

    op: str
    checks: float | None
    """The entry point with a backend that does nothing: checks, dispatch and the calls themselves. Of
    a layer: all but its launches."""
    triton_op: float | None
    """The Triton backend's op alone, with a launcher that does nothing."""
    whole: dict[str, float]
    """The whole call, launch included, for every backend with kernels for this GPU; empty on a CPU."""
    median: dict[str, float]
    """The median of the bursts where the others have the fastest: of `checks`, `triton_op`, the backends."""

    @classmethod
    def of(
        cls, op: str, checks: HostTime | None, triton_op: HostTime | None, whole: dict[str, HostTime]
    ) -> Row:
        """A row of what was measured; None is left out."""
        found = {"checks": checks, "triton_op": triton_op, **whole}
        return cls(
            op,
            None if checks is None else round(checks.fastest, 2),
            None if triton_op is None else round(triton_op.fastest, 2),
            {name: round(times.fastest, 2) for name, times in whole.items()},
            {name: round(times.median, 2) for name, times in found.items() if times is not None},
        )


class Workload:
    """One call of every op, by the op's name, none of which waits for another rank."""

    def __init__(self, device: torch.device, backend: str) -> None:
        # A publish writes through addresses: what lies there must live as long as the calls do.
        self._group = ReceiveStorage.in_process(LAYOUT.world_size, capacity=REQUESTS, device=device)
        self.calls = _calls(self._group[LAYOUT.rank], backend)


def _calls(storage: ReceiveStorage, backend: str) -> dict[str, Callable[[], None]]:
    device = storage.device

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    def e4m3(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)

    keys = e4m3(REQUESTS, LAYOUT.rows, HEAD_DIM)
    queries, table, lens = e4m3(REQUESTS, NUM_HEADS, HEAD_DIM), ints(REQUESTS, COLUMNS), ints(REQUESTS) + 99
    scores = torch.zeros((REQUESTS, NUM_HEADS, COLUMNS), dtype=torch.float32, device=device)
    valid = num_valid_pages(lens, 1)
    target: dict[str, Any] = {
        "slot": 0,
        "rank": LAYOUT.rank,
        "world_size": LAYOUT.world_size,
        "capacity": storage.capacity,
        "force_begin_blocks": 1,
        "force_end_blocks": 1,
        "generations": storage.publish_generations,
        "enable_pdl": True,
        "backend": backend,
    }
    shard: dict[str, Any] = {
        "rank": LAYOUT.rank,
        "world_size": LAYOUT.world_size,
        "page_size": LAYOUT.page_size,
    }
    return {
        "decode_index_score_sharded": partial(
            msa_icp.msa_icp_decode_index_score_sharded,
            *(queries, keys, table, lens, scores),
            **shard,
            decode_query_len=1,
            max_decode_query_len=8,
            enable_pdl=True,
            backend=backend,
        ),
        "topk_select_publish": partial(
            msa_icp.msa_icp_topk_select_publish,
            *(scores, valid, storage.tagged_recv_bases, storage.errors),
            **target,
            heads_per_rank=storage.heads_per_rank,
        ),
        "merge_candidates": partial(
            msa_icp.msa_icp_merge_candidates,
            *(storage.tagged_recv[0], valid, ints(REQUESTS, storage.heads_per_rank, 16), storage.errors),
            init_blocks=1,
            local_blocks=1,
            spin_limit=1,
            enable_pdl=True,
            expected_generations=storage.expected_generations[0],
            backend=backend,
        ),
        "decode_score_publish": partial(
            msa_icp.msa_icp_decode_score_publish,
            *(queries, keys, table, lens, valid),
            torch.zeros(decode_pool_bytes(REQUESTS, NUM_HEADS), dtype=torch.uint8, device=device),
            *(storage.tagged_recv_bases, storage.errors),
            **target,
            page_size=LAYOUT.page_size,
            decode_query_len=1,
        ),
        "write_index_keys": partial(
            msa_icp.write_index_keys,
            *(e4m3(REQUESTS, HEAD_DIM), lens, ints(REQUESTS), table, keys),
            **shard,
            backend=backend,
        ),
    }


def rows(device: torch.device) -> Iterator[Row]:
    """Measure every op and yield its row as soon as it is there."""
    where = torch.empty(0, device=device).device  # with its index
    names = [name for name, reason in dispatch.backends(where).items() if reason is None and name != "torch"]
    kernels = {name: Workload(where, name) for name in names if where.type == "cuda"}
    for op, call in Workload(where, "cake").calls.items():
        with _stand_in(op, "cake", where) as seen:
            checks = host_times(call, where)
        arguments, options = seen[0]
        yield Row.of(
            op=op,
            checks=checks,
            triton_op=_triton_op(op, arguments, options, where),
            whole={name: host_times(work.calls[op], where) for name, work in kernels.items()},
        )


def layer_rows(device: torch.device) -> Iterator[Row]:
    """A decode layer of the facade, three launches: as a call, as a prepared step, as a replayed graph."""
    where = torch.empty(0, device=device).device
    reasons = dispatch.backends(where).items()
    names = [name for name, reason in reasons if reason is None and (name != "torch" or where.type == "cpu")]
    layers = {name: Layer(where, name) for name in names}
    first = next(iter(layers.values()))
    ways: dict[str, tuple[Callable[[], None] | None, str]] = {
        "layer, call": (first.record_call, "call"),
        "layer, prepared step": (first.record_step, "step"),
    }
    if where.type == "cuda":
        ways["layer, replayed graph"] = (None, "replay")
    for op, (recorded, way) in ways.items():
        yield Row.of(
            op=op,
            checks=None if recorded is None else host_times(recorded, where),
            triton_op=None,
            whole={
                name: host_times(getattr(layer, way), where)
                for name, layer in layers.items()
                if where.type == "cuda"
            },
        )


class Layer:
    """A decode layer whose merge waits for nobody: one poll, and it gives up."""

    def __init__(self, device: torch.device, backend: str) -> None:
        self._plan = msa_icp.prepare_msa_icp_indexer(
            world_size=LAYOUT.world_size,
            rank=LAYOUT.rank,
            num_index_heads=NUM_HEADS,
            page_size=LAYOUT.page_size,
            init_blocks=1,
            local_blocks=1,
            max_decode_tokens=REQUESTS,
            max_decode_query_len=1,
            max_num_batched_tokens=1,
            max_num_seqs=1,
            max_model_len=COLUMNS * LAYOUT.page_size,
            num_sparse_layers=57,
            device=device,
            backend=backend,
            spin_limit=1,
        )
        self._group = ReceiveStorage.in_process(LAYOUT.world_size, capacity=REQUESTS, device=device)

        def e4m3(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)

        lens = torch.full((REQUESTS,), 99, dtype=torch.int32, device=device)
        self._layer = e4m3(REQUESTS, NUM_HEADS, HEAD_DIM), e4m3(REQUESTS, LAYOUT.rows, HEAD_DIM)
        self._buffers = (
            torch.zeros((REQUESTS, COLUMNS), dtype=torch.int32, device=device),
            lens,
            num_valid_pages(lens, 1),
            torch.zeros(self._plan.decode_scores_shape(), device=device),
            torch.zeros((REQUESTS, self._plan.heads_per_rank, 16), dtype=torch.int32, device=device),
        )
        self._arguments: dict[str, Any] = {
            "comm": self._group[LAYOUT.rank],
            "tagged": True,
            "decode_query_len": 1,
        }
        self._plan.warmup()
        self._step = self._plan.prepare_decode_step(*self._buffers, **self._arguments)
        graphs = self._plan.layer_graphs(capture_after=0)
        self._graphs = graphs.begin_step(decode=self._step, decode_tokens=REQUESTS)

    def all_graphs(self, keys: int) -> _Graphs:
        """Graphs that capture at once, for as many keys: outputs of their own."""
        steps = [
            self._plan.prepare_decode_step(
                *self._buffers[:-1], torch.zeros_like(self._buffers[-1]), **self._arguments
            )
            for _ in range(keys)
        ]
        graphs = self._plan.layer_graphs(capture_after=0, max_keys=keys)
        return _Graphs(graphs, steps, self._layer[0])

    def another_shard(self) -> torch.Tensor:
        """The K shard of another layer."""
        return self._layer[1].clone()

    def record_call(self) -> None:
        """All of a call but its launches."""
        self._plan.record_decode(*self._layer, *self._buffers, slot=0, **self._arguments)

    def record_step(self) -> None:
        """All of a prepared step's layer but its launches."""
        self._step.record(*self._layer, slot=0)

    def call(self) -> None:
        """`decode`."""
        self._plan.decode(*self._layer, *self._buffers, slot=0, **self._arguments)

    def step(self) -> None:
        """`run` of a prepared step."""
        self._step.run(*self._layer, slot=0)

    def replay(self) -> None:
        """`run` of a layer graph, from the second time on a replay."""
        self._graphs.run(0, *self._layer, slot=0)


def graph_memory(device: torch.device, layers: int = 60, keys: int = 4) -> dict[str, int]:
    """What layer graphs of so many layers and keys take: bytes of the card and of the host, all told.

    One more layer's graphs are captured before, so that what the driver and the allocator take once is not
    counted.
    """
    where = torch.empty(0, device=device).device
    layer = Layer(where, "cake")
    graphs = layer.all_graphs(keys)
    shards = [layer.another_shard() for _ in range(layers + 1)]
    graphs.run(shards[:1], slot=0)
    before = _memory(where)
    graphs.run(shards, slot=0)
    after = _memory(where)
    captured = graphs.captured - keys
    if captured != layers * keys:
        raise RuntimeError(f"{captured} graphs were captured, not {layers * keys}")
    return {
        "graphs": captured,
        "device_bytes": after[0] - before[0],
        "host_bytes": after[1] - before[1],
    }


def _memory(device: torch.device) -> tuple[int, int]:
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return total - free, pages * os.sysconf("SC_PAGE_SIZE")


class _Graphs:
    """Layer graphs of a step for each of some keys."""

    def __init__(self, graphs: Any, steps: list[Any], index_q: torch.Tensor) -> None:
        self._graphs, self._steps, self._q = graphs, steps, index_q

    @property
    def captured(self) -> int:
        return int(self._graphs.stats["captured_layers"])

    def run(self, shards: list[torch.Tensor], slot: int) -> None:
        """Every layer of every key once."""
        for step in self._steps:
            at = self._graphs.begin_step(decode=step, decode_tokens=REQUESTS)
            for number, shard in enumerate(shards):
                at.run(number, self._q, shard, slot=slot)


@contextmanager
def _stand_in(op: str, backend: str, device: torch.device) -> Iterator[list[tuple[Any, Any]]]:
    """An op that does nothing in the place of the backend's; what it was called with the first time."""
    seen: list[tuple[Any, Any]] = []

    def nothing(*arguments: Any, **options: Any) -> None:
        if not seen:
            seen.append((arguments, options))

    package = dispatch.resolve(backend, device, op)
    own = getattr(package, op)
    setattr(package, op, nothing)
    try:
        yield seen
    finally:
        setattr(package, op, own)


def _triton_op(op: str, arguments: Any, options: Any, device: torch.device) -> HostTime | None:
    """Microseconds of the Triton backend's op up to the launcher; None without Triton, or interpreted."""
    from msa_icp import triton_backend

    try:
        from msa_icp.triton_backend import launch
    except ImportError:
        return None
    if launch.INTERPRETED:
        return None
    target = launch.target_of(device)
    kernels = {kernel for kernel, _ in triton_backend.variants(target)}
    loaded = {kernel: kernel._loaded for kernel in kernels}
    for kernel in kernels:
        kernel._loaded = _NothingLoaded()
    try:
        return host_times(partial(getattr(triton_backend, op), *arguments, **options), device)
    finally:
        for kernel, own in loaded.items():
            kernel._loaded = own


class _NothingLoaded(dict[Any, Any]):
    """For every variant a launcher that does nothing."""

    def get(self, key: Any, default: Any = None) -> Any:
        return _launch_nothing


def _launch_nothing(*arguments: Any) -> None:
    pass
