"""Calls with the defaults of a test, and what the storages hold afterwards."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import msa_icp
from msa_icp import cases, reference, verify
from msa_icp.cases import bits, poisoned

HEADS = 4
SPIN_LIMIT = 1 << 20
SHORT_SPIN = 64
NEG_INF = -(2**23)
"""Bits of -inf."""
PARTS = ("recv", "tagged_recv", "publish_generations", "expected_generations", "errors")


def interpreted_only_if(wanted: bool, backend: str, device: str) -> None:
    """Skip a variant of a test for interpreted kernels, which run some of them."""
    if verify.is_slow(backend, device) and not wanted:
        pytest.skip("too much for interpreted kernels")


def wide_record(count: int, device: str) -> Tensor:
    """`count` bytes that are spent only where they are touched.

    On a CPU 2 GiB before them can be read, too: a kernel whose offset wraps reads zeros there and gives wrong
    results, where it would end the process.
    """
    before = 1 << 31 if device == "cpu" else 0
    return cases.sparse_bytes(before + count, device)[before:]


def words_of(scores: Sequence[float] | Tensor, ids: Sequence[int]) -> list[int]:
    """The 32 words of a row, written as section 5 of the contract says: scores, ids, padding last."""
    raw = bits(torch.as_tensor(scores, dtype=torch.float32)).tolist() if len(ids) else []
    pad = 16 - len(ids)
    return raw + [NEG_INF] * pad + list(ids) + [-1] * pad


def selected_words(
    row: Tensor, num_valid: int, force: tuple[int, int] = (0, 0), scale: int = 1, offset: int = 0
) -> list[int]:
    """The 32 words that publish must store for one score row `[K]`."""
    row = row.cpu()
    ids = reference.select(row, num_valid, *force, scale, offset)
    return words_of(row[[(block - offset) // scale for block in ids]] if ids else [], ids)


def signed(word: int) -> int:
    """A 32-bit word as an int32."""
    return (word + 2**31) % 2**32 - 2**31


def tag(generation: int, words: Sequence[int]) -> list[int]:
    """The words of a tagged row as int64."""
    return [(signed(generation) << 32) | (word & 0xFFFFFFFF) for word in words]


def assert_failed(errors: Tensor, count: int, slot: int, mask: int, tokens: Sequence[int]) -> None:
    """The error words after `count` failures, the first of them of one of `tokens`.

    On a CPU that is the lowest one; on a GPU all rows are waited for at once, and any may be first.
    """
    words = errors.tolist()
    assert words[:3] == [count, slot + 1, mask]
    assert words[3] in (tokens if errors.is_cuda else [min(tokens)])


def publish(
    storage: msa_icp.ReceiveStorage,
    scores: Tensor,
    num_valid: Sequence[int] | Tensor,
    *,
    backend: str,
    slot: int = 0,
    tagged: bool = False,
    force: tuple[int, int] = (0, 0),
    scale: int = 1,
    offset: int = 0,
    spin_limit: int = SPIN_LIMIT,
    errors: Tensor | None = None,
    enable_pdl: bool = False,
) -> None:
    """`msa_icp_topk_select_publish` from one rank's storage."""
    msa_icp.msa_icp_topk_select_publish(
        scores,
        torch.as_tensor(num_valid, dtype=torch.int32, device=scores.device),
        storage.tagged_recv_bases if tagged else storage.recv_bases,
        storage.errors if errors is None else errors,
        slot=slot,
        rank=storage.rank,
        world_size=storage.world_size,
        heads_per_rank=storage.heads_per_rank,
        capacity=storage.capacity,
        force_begin_blocks=force[0],
        force_end_blocks=force[1],
        spin_limit=spin_limit,
        enable_pdl=enable_pdl,
        generations=storage.publish_generations if tagged else None,
        index_scale=scale,
        index_offset=offset,
        backend=backend,
    )


def merge(
    storage: msa_icp.ReceiveStorage,
    num_valid: Sequence[int] | Tensor,
    *,
    backend: str,
    slot: int = 0,
    tagged: bool = False,
    force: tuple[int, int] = (0, 0),
    spin_limit: int = SPIN_LIMIT,
    errors: Tensor | None = None,
    enable_pdl: bool = False,
) -> Tensor:
    """`msa_icp_merge_candidates` into a poisoned output, `[T, hpr, 16]` on the CPU."""
    num_valid = torch.as_tensor(num_valid, dtype=torch.int32, device=storage.device)
    output = poisoned((num_valid.shape[0], storage.heads_per_rank, 16), torch.int32, storage.device)
    msa_icp.msa_icp_merge_candidates(
        (storage.tagged_recv if tagged else storage.recv)[slot],
        num_valid,
        output,
        storage.errors if errors is None else errors,
        init_blocks=force[0],
        local_blocks=force[1],
        spin_limit=spin_limit,
        enable_pdl=enable_pdl,
        expected_generations=storage.expected_generations[slot] if tagged else None,
        backend=backend,
    )
    return output.cpu()


def polls_in(seconds: float, world_size: int, backend: str, device: torch.device) -> int:
    """How many polls a merge makes in this time, measured: a limit that does not depend on the clock rate."""
    with msa_icp.ReceiveStorage.in_process(world_size, capacity=2, device=device) as group:
        storage, polls = group[0], 1 << 12
        merge(storage, [1, 1], backend=backend, spin_limit=1)  # loads the kernel
        while True:
            storage.errors.zero_()  # or it would give up after one poll
            began = time.perf_counter()
            merge(storage, [1, 1], backend=backend, spin_limit=polls)
            took = time.perf_counter() - began
            if took > 0.02:  # against which the time of a launch is little
                return min(int(polls * seconds / took), 2**31 - 1)
            polls *= 4


def score(
    case: cases.DecodeCase, rank: int, backend: str, device: str, out: Tensor | None = None, **changes: object
) -> Tensor:
    """`msa_icp_decode_index_score_sharded` of a case into `out`, by default a poisoned buffer."""
    table, lens, _ = case.metadata(device)
    if out is None:
        out = poisoned((case.tokens, HEADS, case.score_columns), torch.float32, device)
    arguments = {
        "index_q": case.index_q.to(device),
        "index_k": case.shard(rank, device),
        "block_table": table,
        "seq_lens": lens,
        "score_out": out,
        "rank": rank,
        "world_size": case.world_size,
        "page_size": case.page_size,
        "decode_query_len": case.decode_query_len,
        "max_decode_query_len": 8,
        "backend": backend,
    }
    msa_icp.msa_icp_decode_index_score_sharded(**{**arguments, **changes})
    return out


def snapshot(group: Sequence[msa_icp.ReceiveStorage]) -> list[list[Tensor]]:
    """Copies of everything that the ranks' storages hold, on the CPU."""
    return [[t.detach().cpu().clone() for t in (getattr(s, part) for part in PARTS)] for s in group]


def assert_same(left: list[list[Tensor]], right: list[list[Tensor]]) -> None:
    """Two snapshots are equal; else name the rank, the part and where it differs."""
    for rank, (x, y) in enumerate(zip(left, right, strict=True)):
        for part, a, b in zip(PARTS, x, y, strict=True):
            assert torch.equal(a, b), f"rank {rank}: {part} differs at {(a != b).nonzero()[:4].tolist()}"


def random_scores(tokens: int, columns: int, seed: int, *, nasty: bool = True) -> Tensor:
    """float32 `[tokens, 4, columns]`: few distinct values, so ties; and NaN, infinities, both zeros."""
    gen = cases.generator(seed)
    scores = torch.randint(-6, 7, (tokens, HEADS, columns), generator=gen).float()
    if nasty:
        kinds = torch.randint(0, 12, scores.shape, generator=gen)
        for kind, value in enumerate((float("nan"), float("-inf"), float("inf"), -0.0)):
            scores[kinds == kind] = value
    return scores
