"""What only a GPU shows: graphs, dependent launch, streams, large memory, the ends of allocations."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import HEADS, score
from late_kernels import WriteLate, read

import msa_icp
from msa_icp import cases, verify
from msa_icp.cases import LAYOUTS, bits
from msa_icp.prefill_cases import PrefillCase, prefill_case

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
KERNELS = [name for name, why in msa_icp.backends(DEVICE).items() if why is None and name != "torch"]
kernels = pytest.mark.parametrize("kernel", KERNELS)
needs_late = pytest.mark.skipif("cuda" not in KERNELS, reason="its kernels are written for 9.0")
layouts = pytest.mark.parametrize(("world_size", "page_size"), LAYOUTS)
LENGTHS = ((3000, 1, 700, 0), (0, 0, 0, 0), (5, 2900, 0, 1300), (3000, 3000, 3000, 3000))


class Chain:
    """Buffers of all ranks of one layer, at fixed addresses: what a captured graph works on."""

    def __init__(self, world_size: int, page_size: int, query_len: int, kernel: str, *, tagged: bool) -> None:
        self.case = cases.decode_case(
            "", world_size, page_size, seq_lens=LENGTHS[3], decode_query_len=query_len
        )
        self.kernel, self.tagged = kernel, tagged
        case, tokens = self.case, self.case.tokens
        self.q = case.index_q.to(DEVICE)
        self.shards = [case.shard(rank, DEVICE) for rank in range(world_size)]
        self.table, self.lens, self.num_valid = case.metadata(DEVICE)
        self.scores = [
            cases.poisoned((tokens, HEADS, case.score_columns), torch.float32, DEVICE) for _ in self.shards
        ]
        self.group = msa_icp.ReceiveStorage.in_process(world_size, capacity=tokens + 3, device=DEVICE)
        self.outputs = [
            cases.poisoned((tokens, HEADS // world_size, 16), torch.int32, DEVICE) for _ in self.shards
        ]

    def run(self, slot: int, enable_pdl: bool = True) -> None:
        """Score and publish on every rank, then merge on every rank."""
        case = self.case
        for rank, storage in enumerate(self.group):
            msa_icp.msa_icp_decode_index_score_sharded(
                self.q,
                self.shards[rank],
                self.table,
                self.lens,
                self.scores[rank],
                rank=rank,
                world_size=case.world_size,
                page_size=case.page_size,
                decode_query_len=case.decode_query_len,
                max_decode_query_len=8,
                enable_pdl=enable_pdl,
                backend=self.kernel,
            )
            msa_icp.msa_icp_topk_select_publish(
                self.scores[rank],
                self.num_valid,
                storage.tagged_recv_bases if self.tagged else storage.recv_bases,
                storage.errors,
                slot=slot,
                rank=rank,
                world_size=case.world_size,
                heads_per_rank=storage.heads_per_rank,
                capacity=storage.capacity,
                force_begin_blocks=case.init_blocks,
                force_end_blocks=case.local_blocks,
                generations=storage.publish_generations if self.tagged else None,
                index_scale=case.index_scale,
                index_offset=case.index_offset(rank),
                spin_limit=1 << 20,
                enable_pdl=enable_pdl,
                backend=self.kernel,
            )
        for storage, output in zip(self.group, self.outputs, strict=True):
            msa_icp.msa_icp_merge_candidates(
                (storage.tagged_recv if self.tagged else storage.recv)[slot],
                self.num_valid,
                output,
                storage.errors,
                init_blocks=case.init_blocks,
                local_blocks=case.local_blocks,
                expected_generations=storage.expected_generations[slot] if self.tagged else None,
                spin_limit=1 << 20,
                enable_pdl=enable_pdl,
                backend=self.kernel,
            )

    def change(self, lengths: tuple[int, ...], seed: int) -> None:
        """New lengths, other pages, other queries, in the same buffers."""
        generator = cases.generator(seed)
        case = self.case
        live = case.block_table[:, : -(-LENGTHS[3][0] // case.page_size)]
        moved = case.block_table.clone()
        moved[:, : live.shape[1]] = live.flatten()[torch.randperm(live.numel(), generator=generator)].view_as(
            live
        )
        self.case = case = dataclasses.replace(
            case,
            index_q=cases.exact(case.index_q.shape, seed),
            block_table=moved,
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
        )
        self.q.copy_(case.index_q)
        self.table.copy_(case.block_table)
        self.lens.copy_(case.seq_lens)
        self.num_valid.copy_(case.num_valid_pages())

    def check(self) -> None:
        """The merged ids are those of the unsharded reference, and no wait has failed."""
        for storage in self.group:
            storage.check()
        merged = torch.cat([output.cpu() for output in self.outputs], dim=1).tolist()
        assert merged == verify.unsharded(self.case)


@kernels
@layouts
@pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
@pytest.mark.parametrize("query_len", [1, 3])
def test_a_replayed_graph_sees_the_new_contents(kernel, world_size, page_size, tagged, query_len):
    chain = Chain(world_size, page_size, query_len, kernel, tagged=tagged)
    chain.run(0)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for slot in (1, 2, 0):
            chain.run(slot)
    for seed, lengths in enumerate((*LENGTHS, LENGTHS[1], LENGTHS[0])):
        chain.change(lengths, seed)
        before = [scores.clone() for scores in chain.scores]
        graph.replay()
        chain.check()
        for rank, scores in enumerate(chain.scores):
            truth = verify.score_truth(chain.case, rank, bounds=False)
            kept = torch.where(truth.written, bits(truth.canonical), bits(before[rank].cpu()))
            assert torch.equal(bits(scores.cpu()), kept)


@kernels
@layouts
@pytest.mark.parametrize("enable_pdl", [False, True])
def test_a_late_predecessor(kernel, world_size, page_size, enable_pdl):
    """The kernels before write the query and the newest keys late; an all-padding batch runs in between."""
    chain = Chain(world_size, page_size, 2, kernel, tagged=True)
    empty = torch.zeros_like(chain.lens)
    lens = chain.lens
    wrong_q, right_q = torch.zeros_like(chain.q), chain.q.clone()
    right = [shard.clone() for shard in chain.shards]

    def step(slot: int) -> None:
        chain.q.copy_(wrong_q)
        for shard in chain.shards:
            shard.zero_()
        chain.lens = empty
        chain.run((slot + 1) % 3, enable_pdl)
        chain.lens = lens
        torch.cuda._sleep(200_000)
        for shard, keys in zip(chain.shards, right, strict=True):
            shard.copy_(keys)
        torch.cuda._sleep(100_000)
        chain.q.copy_(right_q)
        chain.run(slot, enable_pdl)

    step(0)
    chain.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(2)
        step(1)
    for _ in range(5):
        for output in chain.outputs:
            output.fill_(-7)
        graph.replay()
        chain.check()


class Late:
    """A scorer behind a kernel that releases it at once, then writes the query and the newest pages."""

    def __init__(self, world_size: int, page_size: int, query_len: int, kernel: str) -> None:
        chain = self.chain = Chain(world_size, page_size, query_len, kernel, tagged=True)
        rank = self.rank = world_size - 1
        self.right = chain.case.shard(rank, DEVICE)
        self.keys, self.scores = chain.shards[rank], chain.scores[rank]
        self.padding = torch.zeros_like(chain.lens)
        self.q = chain.q.clone()
        self.newest = []
        for request, seq_len in enumerate(chain.case.seq_lens.tolist()):
            first, last = (max(0, seq_len - back) // page_size for back in (query_len, 1))
            for column in range(first, last + 1):
                self.newest.append(int(chain.case.block_table[request, column]))
        self.write = WriteLate(
            [(chain.q, self.q), *((self.keys[page], self.right[page]) for page in self.newest)]
        )

    def forget(self) -> None:
        """What the writer will write is not there."""
        self.chain.q.view(torch.uint8).fill_(cases.NAN_BYTE)
        for page in self.newest:
            self.keys[page].view(torch.uint8).zero_()
        self.scores.copy_(cases.poisoned(self.scores.shape, torch.float32, DEVICE))

    def score(self, lens: torch.Tensor, enable_pdl: bool) -> None:
        chain = self.chain
        msa_icp.msa_icp_decode_index_score_sharded(
            chain.q,
            self.keys,
            chain.table,
            lens,
            self.scores,
            rank=self.rank,
            world_size=chain.case.world_size,
            page_size=chain.case.page_size,
            decode_query_len=chain.case.decode_query_len,
            max_decode_query_len=8,
            enable_pdl=enable_pdl,
            backend=chain.kernel,
        )

    def check(self) -> None:
        truth = verify.score_truth(self.chain.case, self.rank, bounds=False)
        poison = cases.poisoned(self.scores.shape, torch.float32)
        right = torch.where(truth.written, bits(truth.canonical), bits(poison))
        assert torch.equal(bits(self.scores.cpu()), right)


@needs_late
@kernels
@layouts
@pytest.mark.parametrize("query_len", [1, 2, 8])
@pytest.mark.parametrize("between", [False, True], ids=["", "padding between"])
@pytest.mark.parametrize("enable_pdl", [False, True])
def test_a_predecessor_that_releases_and_then_writes(
    kernel, world_size, page_size, query_len, between, enable_pdl
):
    """The query and the newest pages are read after the wait, and a batch of padding waits as well."""
    late = Late(world_size, page_size, query_len, kernel)
    late.score(late.padding, enable_pdl)  # loads the kernel

    def step() -> None:
        late.forget()
        late.write()
        if between:
            late.score(late.padding, enable_pdl)
        late.score(late.chain.lens, enable_pdl)

    for _ in range(3):
        step()
        late.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        graph.replay()
        late.check()


@needs_late
def test_a_reader_that_does_not_wait_is_too_early():
    """The control: behind that kernel there is time enough to read what has not been written."""
    late = Late(4, 128, 1, "cuda")
    late.write()  # loads the kernel
    seen = torch.zeros_like(late.q)
    read(seen, late.q.data_ptr())  # loads the kernel
    for where in ("eager", "graph"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph) if where == "graph" else contextlib.nullcontext():
            late.forget()
            late.write()
            read(seen, late.chain.q.data_ptr(), dependent=True)
        if where == "graph":
            seen.view(torch.uint8).zero_()
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(late.chain.q.view(torch.uint8), late.q.view(torch.uint8))
        assert (seen.view(torch.uint8) == cases.NAN_BYTE).all(), where


@kernels
def test_no_allocation_and_no_synchronization(kernel):
    chain = Chain(4, 128, 1, kernel, tagged=True)
    chain.run(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for slot in (1, 2, 0):
            chain.run(slot)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"] == before
    chain.check()


@kernels
def test_runs_on_the_current_stream(kernel):
    chain = Chain(2, 256, 1, kernel, tagged=False)
    chain.run(0)
    chain.change(LENGTHS[2], 7)
    queries = chain.q.clone()
    chain.q.zero_()
    stream = torch.cuda.Stream(DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        chain.q.copy_(queries)
        chain.run(1)
    assert not stream.query()  # behind the sleep, so on that stream
    stream.synchronize()
    chain.check()


def test_a_second_stream_is_refused_while_a_slot_set_is_in_flight():
    storage = msa_icp.ReceiveStorage.in_process(2, capacity=1, device=DEVICE)[0]
    other = torch.cuda.Stream(DEVICE)
    with storage.slot_set(1):
        torch.cuda._sleep(50_000_000)
    with (
        torch.cuda.stream(other),
        pytest.raises(RuntimeError, match="slot set 1 is in flight"),
        storage.slot_set(1),
    ):
        pass
    with storage.slot_set(1):
        pass  # the same stream waits for itself
    torch.cuda.synchronize()
    with torch.cuda.stream(other), storage.slot_set(1):
        pass


@kernels
@layouts
def test_a_pool_of_ten_gigabytes(kernel, world_size, page_size):
    """A megabyte a page: the offsets of the last pages pass 2**32 and 2**33."""
    case = cases.decode_case(
        "", world_size, page_size, seq_lens=(20 * page_size + 9, page_size), decode_query_len=2
    )
    pitch, pages = 1_048_576 + 48, 9_600
    pool = torch.empty(pages * pitch, dtype=torch.uint8, device=DEVICE)
    shard = case.shard(0, DEVICE)
    far = torch.linspace(pages - 1, pages // 7, shard.shape[0]).to(torch.int64)
    view = pool.as_strided((pages, *shard.shape[1:]), (pitch, 128, 1))
    view[far.to(DEVICE)] = shard.view(torch.uint8)
    expected = score(case, 0, kernel, "cuda")
    table = case.block_table.clone()
    live = (table >= 0) & (table < far.shape[0])
    table[live] = far[table[live].long()].to(torch.int32)
    got = score(case, 0, kernel, "cuda", index_k=view.view(cases.FP8), block_table=table.to(DEVICE))
    assert torch.equal(bits(got), bits(expected))
    assert torch.isfinite(got[0, 0, :20]).all()


@kernels
@pytest.mark.parametrize("only", [None, (4, 256)], ids=["all", "W4-P256"])
def test_nothing_is_loaded_after_warmup(kernel, only):
    """In a process of its own: after `warmup`, of one layout too, everything can be captured at once."""
    _in_a_process(f"test_cuda.capture_everything({kernel!r}, {only!r})")


@kernels
def test_tensors_at_the_ends_of_their_allocations(kernel):
    """Without torch's caching every tensor is an allocation of its own, of 2 MiB, and ends where that does.

    In test_guard_pages.py nothing at all is mapped behind them.
    """
    _in_a_process(f"test_cuda.run_at_the_ends({kernel!r})", PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def capture_everything(kernel: str, only: tuple[int, int] | None) -> None:
    """Capture every op in every layout (or in one), query length and form without running one before."""
    world, page = only or (None, None)
    msa_icp.warmup(DEVICE, kernel, world_size=world, page_size=page)
    for world_size, page_size in [only] if only else LAYOUTS:
        for query_len in (1, 2, 4, 8):
            for tagged in (False, True):
                chain = Chain(world_size, page_size, query_len, kernel, tagged=tagged)
                for enable_pdl in (False, True):
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        chain.run(0, enable_pdl)
                    graph.replay()
                    chain.check()
        for qo_lens in ((2,), (40,), (40, *[0] * 64)):
            capture_windows(prefill_case("", world_size, page_size, qo_lens=qo_lens), kernel)


def capture_windows(case: PrefillCase, kernel: str) -> None:
    """Capture every op of a window that the backend has, without having run one before."""
    compact, hpr, tokens = case.fused_compact, HEADS // case.world_size, case.total_q
    plans, fuses = (
        not verify.no_prefill(kernel, [op])
        for op in ("index_score_sharded_plan_device", "prefill_score_select")
    )
    counts, metadata = case.num_valid_pages().to(DEVICE), case.metadata(DEVICE)
    plan = verify.prefill.plan_on_host(
        case, kernel, DEVICE
    )  # tensor code, whose words a graph then writes anew
    size = msa_icp.msa_icp_prefill_pool_bytes(total_q=tokens, batch=plan.batch, device=DEVICE)
    pool = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    inputs = (case.index_q.to(DEVICE), case.shard(0, DEVICE), case.table(DEVICE), plan)
    shard = {"rank": 0, "tp": case.world_size, "compact": compact, "backend": kernel}
    scores = cases.poisoned((tokens, HEADS, case.score_columns(compact)), torch.float32, DEVICE)
    carriers = [cases.poisoned((HEADS, tokens, 33), torch.int32, DEVICE) for _ in range(2)]
    received = torch.zeros(case.world_size, hpr, tokens, 33, dtype=torch.int32, device=DEVICE)
    output = torch.zeros(tokens, hpr, 16, dtype=torch.int32, device=DEVICE)
    errors = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    for enable_pdl in (False, True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            if plans:
                msa_icp.msa_icp_index_score_sharded_plan_device(
                    **metadata,
                    num_qo_heads=HEADS,
                    total_q=tokens,
                    max_query_len=plan.max_query_len,
                    max_seq_len=case.max_seq_len,
                    packed_work_range=plan.packed_work_range,
                    packed_work_info=plan.packed_work_info,
                    workspace=plan.workspace,
                    backend=kernel,
                )
            msa_icp.msa_icp_index_score_sharded(
                *inputs, max_score=scores, initialize=False, enable_pdl=enable_pdl, **shard
            )
            msa_icp.msa_icp_topk_select_prefill(
                scores,
                counts,
                carriers[0],
                index_scale=case.index_scale,
                index_offset=case.index_offset(0),
                backend=kernel,
            )
            if fuses:
                msa_icp.msa_icp_prefill_score_select(
                    *inputs, counts, pool, carriers[1], enable_pdl=enable_pdl, **shard
                )
            msa_icp.msa_icp_merge_candidates(
                received,
                counts,
                output,
                errors,
                init_blocks=0,
                local_blocks=0,
                prefill=True,
                backend=kernel,
            )
        graph.replay()
        wrong = verify.prefill.score_differences(
            case, 0, scores, compact=compact, initialize=False, bitwise=True
        )
        assert not wrong.any()
        if fuses:
            assert torch.equal(*carriers)


def run_at_the_ends(kernel: str) -> None:
    """One decode step of every layout with each tensor against the end of a 2 MiB mapping."""
    for world_size, page_size in LAYOUTS:
        for query_len in (1, 5):
            chain = Chain(world_size, page_size, query_len, kernel, tagged=True)
            chain.q = _at_the_end(chain.q)
            chain.table, chain.lens, chain.num_valid = map(
                _at_the_end, (chain.table, chain.lens, chain.num_valid)
            )
            chain.shards = [_at_the_end(shard) for shard in chain.shards]
            chain.scores = [_at_the_end(scores) for scores in chain.scores]
            chain.outputs = [_at_the_end(output) for output in chain.outputs]
            chain.run(0)
            torch.cuda.synchronize()
            chain.check()


def _at_the_end(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.numel() * tensor.element_size()
    mapping = torch.empty(-(-size // (2 << 20)) * (2 << 20), dtype=torch.uint8, device=DEVICE)
    moved = mapping[-size:].view(tensor.dtype).view(tensor.shape)
    return moved.copy_(tensor)


def _in_a_process(call: str, **environment: str) -> None:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", f"import test_cuda; {call}"],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
