"""One rank's decode chain over the layers of a batch: producer, scorer, publish, merge, or parts of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from msa_icp import ReceiveStorage, dispatch
from msa_icp.geometry import NUM_HEADS, SLOT_SETS, TOP_K, ceil_div, decode_pool_bytes

from .batch import Batch
from .measure import chain_length, time_chain
from .producer import Consumer, Producer, made_up_rows, put_peers_rows

FORCED_BEGIN, FORCED_END = 1, 1
"""Blocks that are selected whatever their score."""
SPIN_LIMIT = 1 << 16
"""Polls of a wait. Nothing is ever waited for: the peers' rows are there."""

PUBLISHED = ("produce", "score", "publish", "merge")
"""A layer of this library."""
FUSED = ("produce", "score_publish", "merge")
"""The same with the fused form."""
SELECTED = ("produce", "score", "select")
"""A layer without an exchange: the rank selects for its own heads alone."""
CONSUMED = ("produce", "score", "consume")
"""A scorer between two small kernels."""


def chain_layers(k_bytes: int, device: torch.device) -> int:
    """Layers of a chain: enough to find K cold, but no more than a graph holds; every slot set as often."""
    most = 600 if device.type == "cuda" else 3
    return SLOT_SETS * int(ceil_div(min(most, chain_length(k_bytes, device)), SLOT_SETS))


class Chain:
    """The launches of every layer, with a receive storage of its own whose peers' rows are always there.

    `steps` are the launches of a layer, in order. `form` is that of the rows; None: nobody's rows are made,
    for chains that neither publish nor merge. `peers_rows`, int32 `[W, hpr, T, 32]`, is what the peers have
    sent for every layer; made up by default. With `storage`, this rank's of a group, nothing is made: the
    peers are there and run the same layers, and `spin_limit` covers what they may come later.
    """

    def __init__(
        self,
        batch: Batch,
        backend: str,
        steps: Sequence[str] = PUBLISHED,
        *,
        form: str | None = "tagged",
        enable_pdl: bool = True,
        peers_rows: Tensor | None = None,
        storage: ReceiveStorage | None = None,
        spin_limit: int | None = None,
    ) -> None:
        self.batch = batch
        self._backend = backend
        self._tagged = form == "tagged"
        self._enable_pdl = enable_pdl
        self.device = batch.score_out.device
        self._spin_limit = SPIN_LIMIT if spin_limit is None else spin_limit
        self.group: Sequence[ReceiveStorage] = ()
        """The storages of all ranks, where they are this process's."""
        if storage is None:
            self.group = ReceiveStorage.in_process(
                batch.world_size, capacity=batch.tokens, device=self.device
            )
            storage = self.group[batch.rank]
            if peers_rows is None:
                peers_rows = made_up_rows(batch.num_valid, batch.world_size)
            put_peers_rows(storage, peers_rows)
        self.storage = storage
        made = form if self.group and batch.exchanges else None
        self.output = torch.full(
            (batch.tokens, self.storage.heads_per_rank, TOP_K), -1, dtype=torch.int32, device=self.device
        )
        makers: dict[str, Callable[[], Callable[[int, int], None]]] = {
            "produce": lambda: Producer(batch, self.storage, self.group, made, enable_pdl),
            "score": lambda: self._score,
            "publish": lambda: self._publish,
            "score_publish": self._fused,
            "merge": lambda: self._merge,
            "select": self._select,
            "consume": lambda: Consumer(batch, enable_pdl),
        }
        self.steps = [makers[step]() for step in steps]

    def layer(self, index: int) -> None:
        """Launch a layer; layers are numbered without end."""
        for step in self.steps:
            step(index % len(self.batch.layers), index % SLOT_SETS)

    def time(self) -> float:
        """Microseconds of a layer. Raises `IcpTimeoutError` where a row was waited for in vain."""
        us = time_chain(self.layer, len(self.batch.layers), self.device)
        self.storage.check()
        return us

    def _op(self, name: str) -> Callable[..., None]:
        return dispatch.implementation(name, self._backend, self.device)

    def _score(self, layer: int, slot: int) -> None:
        batch = self.batch
        self._op("decode_index_score_sharded")(
            *(batch.index_q, batch.layers[layer], batch.block_table, batch.seq_lens, batch.score_out),
            layout=batch.layout,
            decode_query_len=batch.query_len,
            enable_pdl=self._enable_pdl,
        )

    def _destination(self, slot: int) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        """The arguments of a publication that say where to and how."""
        storage = self.storage
        bases = storage.tagged_recv_bases if self._tagged else storage.recv_bases
        options = {
            "slot": slot,
            "capacity": storage.capacity,
            "force_begin_blocks": FORCED_BEGIN,
            "force_end_blocks": FORCED_END,
            "spin_limit": self._spin_limit,
            "generations": storage.publish_generations if self._tagged else None,
            "enable_pdl": self._enable_pdl,
        }
        return (self.batch.num_valid, bases, storage.errors), options

    def _publish(self, layer: int, slot: int) -> None:
        tensors, options = self._destination(slot)
        self._op("topk_select_publish")(
            self.batch.score_out,
            *tensors,
            **options,
            rank=self.batch.rank,
            world_size=self.batch.world_size,
            heads_per_rank=self.storage.heads_per_rank,
            index_scale=self.batch.scale,
            index_offset=self.batch.offset,
        )

    def _fused(self) -> Callable[[int, int], None]:
        batch = self.batch
        pool = torch.empty(decode_pool_bytes(batch.tokens, NUM_HEADS), dtype=torch.uint8, device=self.device)

        def score_publish(layer: int, slot: int) -> None:
            tensors, options = self._destination(slot)
            num_valid, bases, errors = tensors
            self._op("decode_score_publish")(
                *(batch.index_q, batch.layers[layer], batch.block_table, batch.seq_lens, num_valid),
                *(pool, bases, errors),
                **options,
                layout=batch.layout,
                decode_query_len=batch.query_len,
            )

        return score_publish

    def _select(self) -> Callable[[int, int], None]:
        """Select the rank's own heads into rows of its own, as on one rank of one with so many heads."""
        heads = self.storage.heads_per_rank
        scores = self.batch.score_out[:, self.batch.rank * heads :][:, :heads]
        bases = self.storage.tagged_recv_bases[self.batch.rank :][:1]
        generations = self.storage.publish_generations

        def select(layer: int, slot: int) -> None:
            (num_valid, _, errors), options = self._destination(slot)
            self._op("topk_select_publish")(
                *(scores, num_valid, bases, errors),
                **{**options, "generations": generations},
                rank=0,
                world_size=1,
                heads_per_rank=heads,
                index_scale=self.batch.scale,
                index_offset=self.batch.offset,
            )

        return select

    def selected(self, slot: int) -> Tensor:
        """int32 `[T, hpr, 16]`: what `select` has stored into its rows of a slot set."""
        heads, tokens = self.storage.heads_per_rank, self.batch.tokens
        rows = self.storage.tagged_recv.flatten(0, 3)[slot * heads * tokens :][: heads * tokens]
        return rows.view(heads, tokens, -1)[..., TOP_K:].to(torch.int32).transpose(0, 1)

    def _merge(self, layer: int, slot: int) -> None:
        storage = self.storage
        self._op("merge_candidates")(
            (storage.tagged_recv if self._tagged else storage.recv)[slot],
            *(self.batch.num_valid, self.output, storage.errors),
            init_blocks=FORCED_BEGIN,
            local_blocks=FORCED_END,
            spin_limit=self._spin_limit,
            enable_pdl=self._enable_pdl,
            expected_generations=storage.expected_generations[slot] if self._tagged else None,
            prefill=False,
            slot=slot,
        )
