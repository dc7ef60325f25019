"""Run as a program: every op with all its tensors between pages that crash when they are touched.

    python guarded.py BACKEND end|start N [cuda]    every N-th call; prints the name of each before it runs
    python guarded.py control-read|control-write|control-torch|control-input|control-gpu-WHERE   must crash

`end`: every tensor ends where a PROT_NONE page begins; `start`: it begins where one ends. What an op only
reads is read-only memory. On a GPU nothing is mapped to the page, and all that is mapped can be written. The
results are compared with those in ordinary memory.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import cuda_emulation
import guarded_prefill
import guards
import torch
from guards import guarded, run
from helpers import HEADS, random_scores
from torch import Tensor

import msa_icp
from msa_icp import cases, geometry, verify


def layouts() -> Iterator[tuple[int, int, int]]:
    for world_size, page_size in cases.LAYOUTS:
        for rank in (0, world_size - 1):
            yield world_size, page_size, rank


def decode_batches(world_size: int, page_size: int) -> Iterator[cases.DecodeCase]:
    """Lengths of one token, a page, a part of a page; tables without a spare column; the last page used."""
    pitch = page_size // world_size * 128 + 16
    for name, lens, query_len in (
        ("one token", (1,), 1),
        ("one page", (page_size,), 1),
        ("odd query", (page_size + 5, 3), 3),
        ("padding", (0, 700, 0, 129), 2),
        ("all padding", (0, 0), 1),
        ("longest query", (5 * page_size - 1,), 8),
    ):
        case = cases.decode_case(
            name,
            world_size,
            page_size,
            seq_lens=lens,
            decode_query_len=query_len,
            spare_columns=0,
            pitch=pitch,
        )
        yield case
        # Without the pages that nobody owns, so that live ids reach the end of the shard.
        owned = sorted(set(case.block_table.flatten().tolist()) & set(range(case.cache.shape[0])))
        table = torch.full_like(case.block_table, -1)
        for new, old in enumerate(owned):
            table[case.block_table == old] = new
        tight = case.cache.view(torch.uint8)[owned].view(cases.FP8)
        yield replace(case, name=name + ", tight", cache=tight, block_table=table, pitch=None)
        yield replace(
            case,
            name=name + ", narrow table",
            block_table=case.block_table[:, : max(1, case.block_table.shape[1] // 2)].contiguous(),
        )


def decode_inputs(case: cases.DecodeCase, rank: int) -> dict[str, Tensor]:
    return {
        "index_q": case.index_q,
        "index_k": case.shard(rank),
        "block_table": case.block_table,
        "seq_lens": case.seq_lens,
    }


def storages(world_size: int, capacity: int, where: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Guarded rows of every rank, their legacy and their tagged addresses."""
    layout = msa_icp.msa_icp_comm_layout(world_size, 4 // world_size, capacity)
    words = [
        guarded(torch.zeros(layout["storage_words"], dtype=torch.int32), where, read_only=False)
        for _ in range(world_size)
    ]
    bases = torch.tensor([w.data_ptr() for w in words])
    return words, bases, bases + layout["tagged_offset_bytes"]


def calls(backend: str, where: str) -> Iterator[Callable[[], None]]:
    for world_size, page_size, rank in layouts():
        shape = {"rank": rank, "world_size": world_size, "page_size": page_size}
        for case in decode_batches(world_size, page_size):
            yield partial(score, where, backend, case, shape)
        yield partial(write_keys, where, backend, shape)
        if not verify.no_prefill(backend):
            yield from guarded_prefill.calls(backend, where, world_size, page_size, rank)
    if not verify.no_prefill(backend, ["topk_select_prefill"]):
        for tokens, columns in ((1, 1), (3, 17), (2, 40)):
            yield partial(guarded_prefill.prefill_select, where, backend, tokens, columns)
    for world_size in (2, 4):
        for tagged in (False, True):
            for tokens, columns in ((1, 1), (3, 17), (2, 40)):
                yield partial(exchange, where, backend, world_size, tagged, tokens, columns)
            for page_size in (128, 256):
                for case in decode_batches(world_size, page_size):
                    yield partial(fused, where, backend, case, tagged)


def label(shape: dict[str, int]) -> str:
    return f"W={shape['world_size']} P={shape['page_size']} rank {shape['rank']}"


def score(where: str, backend: str, case: cases.DecodeCase, shape: dict[str, int]) -> None:
    columns = 4 * -(-max(1, case.block_table.shape[1]) // 4)
    run(
        f"score, {label(shape)}, {case.name}",
        where,
        msa_icp.msa_icp_decode_index_score_sharded,
        decode_inputs(case, shape["rank"]),
        {"score_out": cases.poisoned((case.tokens, HEADS, columns), torch.float32)},
        **shape,
        decode_query_len=case.decode_query_len,
        max_decode_query_len=8,
        backend=backend,
    )


def write_keys(where: str, backend: str, shape: dict[str, int]) -> None:
    rows = shape["page_size"] // shape["world_size"]
    positions = torch.tensor([0, 1, 127, 3 * shape["page_size"] - 1, 7, -1, 2**31 - 1], dtype=torch.int32)
    run(
        f"write_index_keys, {label(shape)}",
        where,
        msa_icp.write_index_keys,
        {
            "keys": cases.full_range((7, 128), 1),
            "positions": positions,
            "request_index": torch.tensor([0, 0, 0, 0, 5, 0, 0], dtype=torch.int32),
            "block_table": torch.tensor([[1, 7, 2]], dtype=torch.int32),
        },
        {"index_k": cases.full_range((3, rows, 128), 2)},
        **shape,
        backend=backend,
    )


def exchange(where: str, backend: str, world_size: int, tagged: bool, tokens: int, columns: int) -> None:
    hpr = 4 // world_size
    form = f"{'tagged' if tagged else 'legacy'} W={world_size}, {tokens} x {columns}"
    layout = msa_icp.msa_icp_comm_layout(world_size, hpr, tokens)
    words, legacy, tagged_bases = storages(world_size, tokens, where)
    num_valid = guarded(torch.tensor([10**6, 5, 0][:tokens], dtype=torch.int32), where, read_only=True)
    errors = guarded(torch.zeros(1, dtype=torch.int32), where, read_only=False)
    generations = torch.zeros(layout["generations_shape"], dtype=torch.int32)
    slot = 2  # the last row of the last slot set ends at the guard
    for rank in range(world_size):
        print(f"publish, {form} rank {rank}", flush=True)
        msa_icp.msa_icp_topk_select_publish(
            guarded(random_scores(tokens, columns, rank), where, read_only=True),
            num_valid,
            guarded(tagged_bases if tagged else legacy, where, read_only=True),
            errors,
            slot=slot,
            rank=rank,
            world_size=world_size,
            heads_per_rank=hpr,
            capacity=tokens,
            force_begin_blocks=1,
            force_end_blocks=1,
            spin_limit=1,
            generations=guarded(generations, where, read_only=False) if tagged else None,
            backend=backend,
        )
    for rank in range(world_size):
        legacy_words = layout["tagged_offset_bytes"] // 4
        if tagged:
            recv = words[rank][legacy_words:].view(torch.int64).view(layout["tagged_shape"])[slot]
        else:
            recv = words[rank][:legacy_words].view(layout["legacy_shape"])[slot]
        for prefill in (True, False) if not tagged else (False,):
            if prefill:
                recv_slot = guarded(recv, where, read_only=True)
            else:
                recv_slot = recv if tagged else guarded(recv, where, read_only=False)
            print(f"merge, {form} rank {rank}{', prefill' if prefill else ''}", flush=True)
            output = guarded(cases.poisoned((tokens, hpr, 16), torch.int32), where, read_only=False)
            expected = torch.zeros((hpr, tokens), dtype=torch.int32)
            msa_icp.msa_icp_merge_candidates(
                recv_slot,
                num_valid,
                output,
                errors,
                init_blocks=1,
                local_blocks=1,
                spin_limit=1,
                expected_generations=guarded(expected, where, read_only=False) if tagged else None,
                prefill=prefill,
                backend=backend,
            )
            assert not (output == cases.POISON).any()
    assert errors.tolist() == [0]


def fused(where: str, backend: str, case: cases.DecodeCase, tagged: bool) -> None:
    world_size, page_size = case.world_size, case.page_size
    form = f"{'tagged' if tagged else 'legacy'} W={world_size} P={page_size}"
    print(f"fused, {form}, {case.name}", flush=True)
    tokens = case.tokens
    layout = msa_icp.msa_icp_comm_layout(world_size, 4 // world_size, tokens)
    _, legacy, tagged_bases = storages(world_size, tokens, where)
    rank = world_size - 1
    inputs = decode_inputs(case, rank) | {
        "num_valid_pages": case.num_valid_pages(),
        "recv_bases": tagged_bases if tagged else legacy,
    }
    pool = torch.zeros(geometry.decode_pool_bytes(tokens, 4), dtype=torch.uint8)
    generations = torch.zeros(layout["generations_shape"], dtype=torch.int32)
    msa_icp.msa_icp_decode_score_publish(
        **{k: guarded(t, where, read_only=True) for k, t in inputs.items()},
        pool=guarded(pool, where, read_only=False),
        errors=guarded(torch.zeros(4, dtype=torch.int32), where, read_only=False),
        rank=rank,
        world_size=world_size,
        page_size=page_size,
        decode_query_len=case.decode_query_len,
        slot=2,
        capacity=tokens,
        force_begin_blocks=0,
        force_end_blocks=1,
        spin_limit=1,
        generations=guarded(generations, where, read_only=False) if tagged else None,
        backend=backend,
    )


def control_on_gpu(where: str) -> None:
    """A kernel reads the bytes before or behind."""
    import gpu_guards
    import late_kernels

    ten = gpu_guards.guarded(torch.zeros(10, dtype=torch.int32), where)
    assert ten.sum() == 0
    print("about to crash", flush=True)
    seen = torch.zeros(40, dtype=torch.uint8, device="cuda")
    late_kernels.read(seen, ten.data_ptr() + (16 if where == "end" else -16))
    torch.cuda.synchronize()


def control(kind: str) -> None:
    """What must crash, or the guards guard nothing."""
    if kind.startswith("control-gpu-"):
        control_on_gpu(kind.removeprefix("control-gpu-"))
        return
    ten = guarded(torch.zeros(10, dtype=torch.int32), "end", read_only=kind == "control-input")
    assert ten.sum() == 0
    print("about to crash", flush=True)
    if kind == "control-read":
        print(ctypes.c_byte.from_address(ten.data_ptr() + 40).value)
    elif kind == "control-write":
        ctypes.c_byte.from_address(guarded(ten, "start", read_only=False).data_ptr() - 1).value = 1
    elif kind == "control-torch":
        raw = (ctypes.c_byte * 44).from_address(ten.data_ptr())
        print(torch.frombuffer(raw, dtype=torch.int32).sum())
    else:
        ten.fill_(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if cuda_emulation.REQUESTED:
        cuda_emulation.install()
    if sys.argv[1].startswith("control"):
        control(sys.argv[1])
    else:
        guards.device = (*sys.argv, "cpu")[4]
        for number, call in enumerate(calls(sys.argv[1], sys.argv[2])):
            if number % int(sys.argv[3]) == 0:
                call()
                if guards.device == "cuda":
                    torch.cuda.synchronize()  # an error names the last call that was printed
    print("done", flush=True)
