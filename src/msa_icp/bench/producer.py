"""What surrounds the scorer in a chain: who writes the queries and the newest keys, who reads the scores, and
what the other ranks do meanwhile.

One rank is measured with the peers' rows already there. Somebody must make them so at every layer: the tags
of a tagged row, the ready words of a legacy one. The producer does it, so that it costs no launch; the stores
add to the producer what a peer's stores over NVLink would not.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from msa_icp import ReceiveStorage, triton_backend
from msa_icp.geometry import HEAD_DIM, NUM_HEADS, TOP_K
from msa_icp.rows import PAD_ID, PAD_SCORE_BITS, READY, READY_WORD

from .batch import Batch

FORMS = ("legacy", "tagged")


def kernels(device: torch.device) -> ModuleType | None:
    """The small kernels where they run; None on a CPU without Triton's interpreter, which has tensor code.

    Raises RuntimeError on a GPU without Triton.
    """
    reason = triton_backend.unavailable(device)
    if reason is None:
        return importlib.import_module("msa_icp.bench.producer_kernel")
    if device.type != "cpu":
        raise RuntimeError(f"the chain's producer is a Triton kernel: {reason}")
    return None


class Producer:
    """Writes `batch.index_q`, the newest keys and, if `form` is given, the peers' rows in `storage`.

    `owners` are the storages of all ranks, which must be this process's if `form` is given.
    """

    def __init__(
        self,
        batch: Batch,
        storage: ReceiveStorage,
        owners: Sequence[ReceiveStorage],
        form: str | None,
        enable_pdl: bool,
    ) -> None:
        self._batch, self._own, self._owners, self._form = batch, storage, owners, form
        self._enable_pdl = enable_pdl
        self._kernels = kernels(batch.new_q.device)
        self._bases = storage.tagged_recv_bases if form == "tagged" else storage.recv_bases
        self._own_keys = (batch.key_rows >= 0).nonzero().squeeze(1)
        self._peers = torch.tensor([r for r in range(batch.world_size) if r != batch.rank])

    def __call__(self, layer: int, slot: int) -> None:
        """One launch for layer `layer` of the chain."""
        batch = self._batch
        index_k = batch.layers[layer]
        if self._kernels is None:
            self._with_torch(index_k, slot)
            return
        module = self._kernels
        form = (None, *FORMS).index(self._form)
        module.produce(
            batch.new_q,
            batch.new_keys,
            batch.index_q,
            index_k,
            batch.key_rows,
            self._bases,
            self._own.expected_generations[slot],
            slot=slot,
            rank=batch.rank,
            form=(module.NO_ROWS, module.LEGACY_ROWS, module.TAGGED_ROWS)[form],
            enable_pdl=self._enable_pdl,
        )

    def _with_torch(self, index_k: Tensor, slot: int) -> None:
        batch, own, peers = self._batch, self._own, self._peers
        batch.index_q.copy_(batch.new_q)
        mine = self._own_keys
        index_k.view(torch.uint8).view(-1, HEAD_DIM)[batch.key_rows[mine]] = batch.new_keys.view(torch.uint8)[
            mine
        ]
        if self._form == "tagged":
            tags = (own.expected_generations[slot] + 1).to(torch.int64) << 32
            rows = own.tagged_recv[slot]
            rows[peers] = tags[..., None] | (rows[peers] & 0xFFFFFFFF)
        elif self._form == "legacy":
            own.recv[slot, peers, ..., READY_WORD] = READY
            for owner in self._owners:
                owner.recv[slot, batch.rank, ..., READY_WORD] = 0


def put_peers_rows(storage: ReceiveStorage, words: Tensor) -> None:
    """Store int32 `[W, hpr, capacity, 32]` into every slot set's rows, without tags and ready words.

    The storage's own rank's part is stored as well; its publish overwrites it.
    """
    storage.recv[..., :READY_WORD] = words
    storage.tagged_recv.copy_(words.to(torch.int64) & 0xFFFFFFFF)


def made_up_rows(num_valid: Tensor, world_size: int) -> Tensor:
    """Rows that peers may have sent, int32 `[W, hpr, T, 32]`: random scores of blocks spread evenly."""
    heads, tokens = NUM_HEADS // world_size, num_valid.shape[0]
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn((world_size, heads, tokens, TOP_K), generator=generator) * 1000
    valid = num_valid.cpu().to(torch.int64)[:, None]
    place, rank = torch.arange(TOP_K), torch.arange(world_size)[:, None, None, None]
    few = valid <= TOP_K
    ids = torch.where(few, place, place * (valid // TOP_K) + rank % (valid // TOP_K).clamp(min=1))
    ids = ids.expand(scores.shape)
    there = ids < valid
    bits = torch.where(there, scores.view(torch.int32), PAD_SCORE_BITS)
    return torch.cat((bits, torch.where(there, ids, PAD_ID).to(torch.int32)), dim=-1).to(num_valid.device)


class Consumer:
    """A small kernel that needs every score row: it takes the first score of each."""

    def __init__(self, batch: Batch, enable_pdl: bool) -> None:
        self._scores, self._enable_pdl = batch.score_out, enable_pdl
        self.output = torch.empty((batch.tokens, NUM_HEADS), device=batch.score_out.device)
        self._kernels = kernels(batch.score_out.device)

    def __call__(self, layer: int, slot: int) -> None:
        """One launch."""
        if self._kernels is None:
            self.output.copy_(self._scores[..., 0])
        else:
            self._kernels.consume(self._scores, self.output, enable_pdl=self._enable_pdl)
