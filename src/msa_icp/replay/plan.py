"""Before anything starts: which requests are replayed, how many pages they get, whether it all fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

import msa_icp

from ..dispatch import AUTOMATIC, resolve
from ..geometry import (
    HEAD_DIM,
    LEGACY_WORDS,
    NUM_HEADS,
    PLAN_WORKSPACE_BYTES,
    TOP_K,
    ShardLayout,
    prefill_chunk_tokens,
    prefill_pitch,
)
from .engine import Engine
from .errors import UsageError
from .options import ReplayOptions
from .trace import Request

_PROCESS_BYTES = 300 << 20
"""Resident bytes of a process that has imported torch."""

_CUDA_PROCESS_BYTES = 2 << 30
"""The same with a CUDA context and kernels, on the host."""

_SCORES_BYTES = 64 << 20
"""What the torch backend keeps at a time of the scores and converted keys of a window."""


@dataclass(frozen=True)
class Plan:
    """A replay that can start. Every rank gets it; the rest follows from it."""

    options: ReplayOptions
    requests: list[Request]
    skipped: int
    """Requests passed over because they outgrow `--max-context`."""
    pages: int
    """Physical pages of each layer's cache."""
    longest: int
    """Largest context of a request, its output included."""
    walk: Walk
    devices: tuple[str, ...]
    """Of each rank; of virtual ranks in one process the same."""

    @property
    def share_a_card(self) -> bool:
        """Whether several processes take turns on a GPU."""
        on_gpu = self.devices[0] != "cpu"
        return on_gpu and not self.options.in_process and len(set(self.devices)) < len(self.devices)

    @property
    def backend(self) -> str:
        """Name of the backend that the ranks run on."""
        return resolve_backend(self.options)

    @property
    def prefill_backend(self) -> str:
        """What scores and selects prompts: the same, or the device's choice where that has no prefill."""
        try:
            resolve(self.backend, torch.device(self.options.device), "prefill_score_select")
        except ValueError:
            return "auto"
        return self.backend


@dataclass(frozen=True)
class Walk:
    """What the schedule does from its first to its last step."""

    contexts: list[list[int]]
    """For each step the context of each batch row that decodes, 0 for the others."""
    windows: list[list[int]]
    """For each step the contexts of the prompts that enter, up to and with their tokens of this step."""
    prefill_tokens: int
    """Prompt tokens that enter through the indexer."""
    tokens: int
    """Decoded ones."""
    followed: int
    """Place of the request with the most decode steps, and of those the longest."""


def make_plan(trace: Sequence[Request], options: ReplayOptions) -> Plan:
    """Choose requests and pages. Raises UsageError where the replay cannot start."""
    devices = rank_devices(options, torch.cuda.device_count() if options.device != "cpu" else 0)
    resolve_backend(options)
    requests: list[Request] = []
    skipped = 0
    for request in trace:
        if len(requests) == options.requests:
            break
        if options.final_context(request.prompt_tokens, request.output_tokens) <= options.max_context:
            requests.append(request)
        else:
            skipped += 1
    if not requests:
        raise UsageError(
            f"no request of the trace fits --max-context {options.max_context}: the shortest needs "
            f"{min(options.final_context(r.prompt_tokens, r.output_tokens) for r in trace)} tokens"
        )
    finals = sorted((options.final_context(r.prompt_tokens, r.output_tokens) for r in requests), reverse=True)
    pages = _pages(options, finals)
    _check_memory(options, pages, finals[0])
    return Plan(options, requests, skipped, pages, finals[0], _walk(requests, options, pages), devices)


def rank_devices(options: ReplayOptions, cards: int) -> tuple[str, ...]:
    """The device of each rank on a machine with so many GPUs.

    With `cuda`, ranks in processes have a card each where there are enough, else all share `cuda:0`; `cuda:N`
    is one card for all of them. Raises UsageError where this machine has GPUs, but not that one.
    """
    device, world_size = options.device, options.world_size
    if device == "cuda" and not options.in_process:
        return tuple(f"cuda:{rank if cards >= world_size else 0}" for rank in range(world_size))
    if device.startswith("cuda:") and 0 < cards <= int(device.removeprefix("cuda:")):
        raise UsageError(
            f"--device {device} is not there: the GPUs of this machine end with cuda:{cards - 1}"
        )
    return (device,) * world_size


def _pages(options: ReplayOptions, finals: list[int]) -> int:
    """Pages of a layer's cache for requests that end with contexts `finals`, the largest first."""
    if options.cache_tokens is None:
        # Enough for any batch, so that the schedule is the same for every page size.
        return sum(-(-tokens // options.page_size) for tokens in finals[: options.max_batch])
    if options.cache_tokens < finals[0] + options.page_size:
        raise UsageError(
            f"--cache-tokens must be at least {finals[0] + options.page_size} for the longest request, was "
            f"{options.cache_tokens}"
        )
    return options.cache_tokens // options.page_size


def resolve_backend(options: ReplayOptions) -> str:
    """The name of the backend that a replay runs on. Raises UsageError with the reason why it cannot."""
    backend, device = options.backend, options.device
    reasons = msa_icp.backends(device)
    if backend in AUTOMATIC:
        serving = [name for name, reason in reasons.items() if reason is None]
        if not serving:
            why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise UsageError(f"no backend serves --device {device} ({why})")
        backend = serving[0]
    if backend not in reasons:
        raise UsageError(f"--backend must be one of {', '.join([*AUTOMATIC, *reasons])}, was {backend}")
    if reasons[backend] is not None:
        raise UsageError(f"--backend {backend} does not serve --device {device}: {reasons[backend]}")
    if backend == "torch" and device != "cpu":
        raise UsageError(f"--backend torch exchanges rows on a CPU only: it cannot replay on {device}")
    return backend


def needed_bytes(options: ReplayOptions, pages: int, longest: int) -> int:
    """Memory that all ranks of a replay take together, roughly and rather too much."""
    columns = msa_icp.msa_icp_decode_score_columns(longest, options.page_size)
    layout = msa_icp.msa_icp_comm_layout(options.world_size, options.heads_per_rank, options.capacity)
    per_rank: int = (
        options.capacity * NUM_HEADS * columns * 4  # score rows
        + options.batch_rows * columns * 4  # block table
        + layout["storage_words"] * 4
        + _prefill_bytes(options, longest)
        + _process_bytes(options)
    )
    cache: int = pages * options.page_size * HEAD_DIM * options.sparse_layers
    checking = longest * HEAD_DIM * 10 if options.check_every else 0  # a context in FP8, FP32 and FP64
    return (
        cache + options.world_size * per_rank + checking * (1 if options.in_process else options.world_size)
    )


def _process_bytes(options: ReplayOptions) -> int:
    if options.in_process:
        return 0
    return _PROCESS_BYTES if options.device == "cpu" else _CUDA_PROCESS_BYTES


def _prefill_bytes(options: ReplayOptions, longest: int) -> int:
    """Memory that a rank takes for the windows of prompts: the larger form's, whichever serves."""
    pool: int = msa_icp.msa_icp_prefill_pool_bytes(
        total_q=options.chunk_tokens, batch=options.max_batch, device=options.device
    )
    pitch = prefill_pitch(msa_icp.msa_icp_index_score_columns(longest, options.page_size))
    scores = min(prefill_chunk_tokens(pitch), options.chunk_tokens) * NUM_HEADS * pitch * 4
    carriers = 2 * NUM_HEADS * options.chunk_tokens * LEGACY_WORDS * 4
    merged = options.sparse_layers * options.chunk_tokens * options.heads_per_rank * TOP_K * 4
    return max(pool, scores) + carriers + merged + PLAN_WORKSPACE_BYTES + _SCORES_BYTES


def _check_memory(options: ReplayOptions, pages: int, longest: int) -> None:
    need, free = needed_bytes(options, pages, longest), available_bytes()
    if need > free:
        raise UsageError(
            f"contexts up to {longest} tokens with --max-batch {options.max_batch} and --sparse-layers "
            f"{options.sparse_layers} need about {need / 2**30:.1f} GiB, this machine has "
            f"{free / 2**30:.1f} GiB available: lower one of them, --max-context or --cache-tokens"
        )


def available_bytes() -> int:
    """Memory that can still be taken: the machine's, or less where a control group limits it."""
    free: int = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        details = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return free  # no control group of version 2
    cached = int(details["inactive_file"])  # given back when it is needed
    return free if limit == "max" else min(free, int(limit) - used + cached)


def _walk(requests: list[Request], options: ReplayOptions, pages: int) -> Walk:
    contexts, windows, prefill_tokens = [], [], 0
    decoded: Counter[int] = Counter()
    for step in Engine(requests, options, pages).steps():
        of_row = {row.row: row.seq_len for row in step.rows}
        contexts.append([of_row.get(row, 0) for row in range(options.max_batch)])
        decoded.update(row.request for row in step.rows)
        windows.append([segment.stop for segment in step.window.segments] if step.window else [])
        prefill_tokens += step.window.tokens if step.window else 0
    followed = max(decoded, key=lambda place: (decoded[place], requests[place].prompt_tokens))
    return Walk(contexts, windows, prefill_tokens, decoded.total() * options.query_len, followed)


def k_bytes(plan: Plan, contexts: Sequence[Sequence[int]]) -> list[int]:
    """For each step the index-key bytes that each rank's scorer reads for its `contexts`, over all layers.

    Whole pages, so that every rank reads the same: a replicated indexer reads world-size times that.
    """
    layout = ShardLayout(plan.options.world_size, 0, plan.options.page_size)
    page_bytes = layout.page_bytes * plan.options.sparse_layers
    return [sum(map(layout.columns, of_step)) * page_bytes for of_step in contexts]


def threads_per_rank(options: ReplayOptions) -> int:
    """torch threads of one rank, so that all ranks together have one for each core."""
    return (
        torch.get_num_threads()
        if options.in_process
        else max(1, torch.get_num_threads() // options.world_size)
    )
