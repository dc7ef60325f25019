"""A layer of a prefill window on all ranks at once: score and select, the all-to-all, the merge.

Beside the whole chain each of its three parts alone, and the limits of the local one: the operations at the
rate of a bf16 matrix product, and the plain read of the keys, both of the same run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

import msa_icp
from msa_icp import dispatch
from msa_icp.geometry import LEGACY_WORDS, NUM_HEADS, TOP_K, ShardLayout

from .. import ruler
from ..prefill import OPS, Window, Workload, bf16_tflops
from .team import ONE_CARD, Rank
from .together import Gate

LOCAL = {"score, select": ("score", "select"), "fused": ("fused",)}
"""How a rank's rows come to be."""
_MIXED = "score, select"
"""The form in which several backends may have a part."""
_PLAN = "index_score_sharded_plan_device"
"""The op without which a backend cannot serve a window alone."""


class _Chain:
    """The launches of a window's layers."""

    def __init__(
        self, rank: Rank, work: Workload, whats: Sequence[str], group: dist.ProcessGroup | None
    ) -> None:
        self._work, self._group = work, group
        self._local = [getattr(work, what) for what in whats]
        world, tokens = rank.world_size, work.plan.total_q
        shape = (world, NUM_HEADS // world, tokens, LEGACY_WORDS)
        self._received = torch.zeros(shape, dtype=torch.int32, device=rank.device)
        self._output = torch.empty((tokens, shape[1], TOP_K), dtype=torch.int32, device=rank.device)
        self._errors = torch.zeros(4, dtype=torch.int32, device=rank.device)

    def local(self, layer: int) -> None:
        for launch in self._local:
            launch(self._work.layers[layer % len(self._work.layers)])

    def exchange(self, layer: int) -> None:
        msa_icp.exchange_prefill(self._work.carrier, self._received, self._group)

    def merge(self, layer: int) -> None:
        msa_icp.msa_icp_merge_candidates(
            self._received,
            self._work.num_valid,
            self._output,
            self._errors,
            init_blocks=1,
            local_blocks=1,
            prefill=True,
            backend=self._work.backend,
        )

    def layer(self, layer: int) -> None:
        self.local(layer)
        self.exchange(layer)
        self.merge(layer)


def part(rank: Rank, windows: Sequence[Window], page_sizes: Sequence[int], until: float) -> None:
    """Task: every window and page size, `until` that time."""
    if rank.place == ONE_CARD:
        rank.say("prefill: left out, NCCL wants a card for every rank")
        return
    group = rank.prefill_group()
    matrix_rate = min(rank.gather(bf16_tflops(rank.device)))
    gate = Gate(rank, rank.setting.backends[0])
    for window, page_size in itertools.product(windows, page_sizes):
        layout = ShardLayout(rank.world_size, rank.number, page_size)
        for backend, forms in served(rank.setting.backends):
            if not rank.go_on(until):
                return
            work = Workload(window, layout, backend, rank.device)
            limits = {
                "operations_us": round(window.operations(layout) / matrix_rate / 1e6, 3),
                "plain_read_us": _plain_read(rank, work),
                "bf16_tflops": round(matrix_rate, 3),
            }
            for form in forms:
                chain = _Chain(rank, work, LOCAL[form], group)
                times = {name: gate.time(launch, len(work.layers)) for name, launch in _launches(chain)}
                rank.row(
                    {
                        "what": "prefill",
                        "backend": backend,
                        "page_size": page_size,
                        "form": form,
                        "over": "gloo" if group is None else "nccl",
                        "query_tokens": window.tokens,
                        "keys": window.keys,
                        **{f"{name}_us": round(us, 3) for name, us in times.items()},
                        **limits,
                    }
                )
    gate.close()


def served(backends: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The forms that each backend has all ops for, the device's plan among them.

    Where one has some of the ops alone, there is "cake" as well, which takes the best backend of each op.
    """
    found = [(backend, _forms(backend)) for backend in backends]
    mixed = not all(forms for _, forms in found)
    return [(backend, forms) for backend, forms in found if forms] + [("cake", [_MIXED])] * mixed


def _launches(chain: _Chain) -> Iterator[tuple[str, Callable[[int], None]]]:
    """What is timed; the whole first, whose exchange must have been before one is captured."""
    yield "layer", chain.layer
    yield "local", chain.local
    yield "exchange", chain.exchange
    yield "merge", chain.merge


def _forms(backend: str) -> list[str]:
    """Those of one backend."""
    has = dispatch.package(backend).__all__
    if _PLAN not in has:
        return []
    return [form for form, whats in LOCAL.items() if all(OPS[what] in has for what in whats)]


def _plain_read(rank: Rank, work: Workload) -> float | None:
    """Microseconds of the plain read of a window's keys on the slowest rank."""
    if ruler.unavailable(rank.device) is not None:
        return None
    slowest: float = max(rank.gather(ruler.Ruler(rank.device).time(work.buffers)[0]))
    return round(slowest, 3)
