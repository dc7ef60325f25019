"""The chains that are timed compute what they stand for, on every backend that exchanges here."""

from __future__ import annotations

import json
import math

import pytest
import torch
from helpers import signed
from loading import benchmark

from msa_icp import IcpTimeoutError, ReceiveStorage, cases, reference, verify
from msa_icp.bench import batch, chain, decode_chain, exchange, producer
from msa_icp.cases import LAYOUTS
from msa_icp.geometry import NUM_HEADS, ShardLayout

CPU = torch.device("cpu")
LENS = (2500, 256, 3000, 130)
"""Ends inside a page and at one; fewer blocks than ranks, more than 16."""
INTERPRETED = (("chain", "tagged", 4, 128), ("chain", "legacy", 2, 256), ("page_strided", "tagged", 4, 256))
"""What an interpreter has time for."""


def exact_bytes(count, seed):
    return cases.exact((count,), seed).view(torch.uint8)


class Group:
    """All ranks' batches of one way, over one cache: random keys, and a newest key and query a request."""

    def __init__(self, way, world_size, page_size, device):
        self.layouts = [ShardLayout(world_size, rank, page_size) for rank in range(world_size)]
        columns = [math.ceil(keys / page_size) for keys in LENS]
        pages = sum(columns)
        self.cache = exact_bytes(pages * page_size * 128, 1).view(pages, page_size, 128)
        self.table = batch.block_table(columns, pages)
        maker = decode_chain.WAYS[way][0]
        self.batches = []
        for layout in self.layouts:
            pool = self.cache.clone()
            if maker is batch.sharded:
                position = layout.key_position(0, torch.arange(layout.rows))
                pool = self.cache[:, position].contiguous()
            self.batches.append(maker(pool.flatten().to(device), LENS, layout, 1))
        first = self.batches[0]
        q = exact_bytes(first.new_q.numel(), 2).view(batch.FP8).view(first.new_q.shape)
        keys = exact_bytes(first.new_keys.numel(), 3).view(batch.FP8).view(first.new_keys.shape)
        for each in self.batches:
            each.new_q.view(torch.uint8).copy_(q.view(torch.uint8))
            each.new_keys.view(torch.uint8).copy_(keys.view(torch.uint8))
        self.q, self.keys = q, keys

    def truth(self, rank):
        """int32 `[T, hpr, 16]` of the whole cache with the newest keys in it."""
        heads = NUM_HEADS // len(self.layouts)
        rows = []
        for request, length in enumerate(LENS):
            columns = math.ceil(length / self.cache.shape[1])
            keys = self.cache[self.table[request, :columns].long()].reshape(-1, 128)[:length].clone()
            keys[-1] = self.keys[request].view(torch.uint8)
            q = self.q[request : request + 1]
            forced = (chain.FORCED_BEGIN, chain.FORCED_END)
            ids = reference.select_unsharded(q, keys.view(batch.FP8), [length - 1], *forced)[0]
            rows.append([(own + [-1] * 16)[:16] for own in ids[rank * heads :][:heads]])
        return torch.tensor(rows, dtype=torch.int32)

    def peers_rows(self, rank, form, backend):
        """What every rank sends to `rank`: int32 `[W, hpr, T, 32]`."""
        sent = []
        for peer, its in enumerate(self.batches):
            other = chain.Chain(its, backend, ("produce", "score", "publish"), form=form)
            other.layer(0)
            own = other.group[rank]
            sent.append(own.tagged_recv[0, peer] if form == "tagged" else own.recv[0, peer, ..., :32])
        words = torch.stack(sent).cpu()
        return words.apply_(signed).to(torch.int32) if form == "tagged" else words


@pytest.mark.exchange
@pytest.mark.parametrize(("world_size", "page_size"), LAYOUTS)
@pytest.mark.parametrize("way", ["chain", "chain_fused", "page_strided"])
@pytest.mark.parametrize("form", producer.FORMS)
def test_a_chain_selects_the_right_blocks(backend, device, world_size, page_size, way, form):
    slow = verify.is_slow(backend, device)
    if slow and (way, form, world_size, page_size) not in INTERPRETED:
        pytest.skip("too much for interpreted kernels")
    group = Group(way, world_size, page_size, device)
    rank = world_size - 1
    rows = group.peers_rows(rank, form, backend).to(device)
    own = chain.Chain(group.batches[rank], backend, decode_chain.WAYS[way][1], form=form, peers_rows=rows)
    right = group.truth(rank)
    for index in range(2 if slow else 4):  # each slot set, and the first one again
        own.output.fill_(-2)
        own.layer(index)
        own.storage.check()
        assert torch.equal(own.output.cpu(), right), index
    its = group.batches[rank]
    assert torch.equal(its.index_q.view(torch.uint8), its.new_q.view(torch.uint8))
    mine = its.key_rows >= 0
    keys = its.layers[0].view(torch.uint8).view(-1, 128)
    # The newest block is selected whatever its score, so the selection does not tell.
    assert torch.equal(keys[its.key_rows[mine]], its.new_keys.view(torch.uint8)[mine])
    assert mine.any()


@pytest.mark.exchange
@pytest.mark.parametrize(("world_size", "page_size"), LAYOUTS)
def test_a_replicated_rank_selects_the_right_blocks(backend, device, world_size, page_size):
    if verify.is_slow(backend, device) and (world_size, page_size) != (2, 256):
        pytest.skip("too much for interpreted kernels")
    group = Group("replicated", world_size, page_size, device)
    for rank in (0, world_size - 1):
        own = chain.Chain(group.batches[rank], backend, chain.SELECTED)
        for index in range(2):
            own.layer(index)
            assert torch.equal(own.selected(index).cpu(), group.truth(rank)), (rank, index)


@pytest.mark.exchange
def test_a_consumer_reads_the_scores(backend, device):
    group = Group("chain", 4, 128, device)
    own = chain.Chain(group.batches[3], backend, chain.CONSUMED, form=None)
    own.layer(0)
    assert torch.equal(own.steps[-1].output, group.batches[3].score_out[..., 0])


@pytest.mark.exchange
@pytest.mark.parametrize("form", producer.FORMS)
def test_ranks_of_a_group_exchange_their_own_rows(backend, device, form):
    """With the storage of a group a producer makes nobody's rows: the peers do, and a merge takes theirs."""
    group = Group("chain", 2, 128, device)
    storages = ReceiveStorage.in_process(2, capacity=len(LENS), device=device)

    def chains(*steps):
        return [
            chain.Chain(its, backend, steps, form=form, storage=storages[its.rank]) for its in group.batches
        ]

    for own in chains("produce", "score"):
        own.layer(0)
    assert not any(storage.recv.any() or storage.tagged_recv.any() for storage in storages)
    for own in chains("publish"):
        own.layer(0)
    for rank, own in enumerate(chains("merge")):
        own.layer(0)
        own.storage.check()
        assert torch.equal(own.output.cpu(), group.truth(rank))


def test_a_row_that_nobody_makes_is_noticed(monkeypatch):
    monkeypatch.setattr(chain, "SPIN_LIMIT", 4)
    group = Group("chain", 4, 128, "cpu")
    for form in producer.FORMS:
        with pytest.raises(IcpTimeoutError, match="rank 0, 1, 2 did not come"):
            chain.Chain(group.batches[3], "torch", ("score", "publish", "merge"), form=form).time()


def test_what_the_ways_read():
    """A rank reads 1/W of a page, every W-th block, or everything; a newest key has one owner, or all."""
    for world_size, page_size in LAYOUTS:
        groups = {way: Group(way, world_size, page_size, "cpu").batches for way in decode_chain.WAYS}
        blocks = sum(math.ceil(length / 128) for length in LENS)
        pages = sum(math.ceil(length / page_size) for length in LENS)
        assert sum(each.k_bytes for each in groups["page_strided"]) == blocks * 128 * 128
        assert {each.k_bytes for each in groups["replicated"]} == {blocks * 128 * 128}
        assert {each.k_bytes for each in groups["chain"]} == {pages * page_size * 128 // world_size}
        for way in ("chain", "page_strided"):
            owners = torch.stack([each.key_rows >= 0 for each in groups[way]]).sum(0)
            assert owners.tolist() == [1] * len(LENS)
        assert all((each.key_rows >= 0).all() for each in groups["replicated"])


@pytest.mark.parametrize("valid", [0, 1, 15, 16, 17, 100, 8192])
def test_made_up_rows_are_candidates(valid):
    rows = producer.made_up_rows(torch.tensor([valid], dtype=torch.int32), 4)
    assert rows.shape == (4, 1, 1, 32)
    for rank in range(4):
        ids = rows[rank, 0, 0, 16:].tolist()
        there = [block for block in ids if block >= 0]
        assert ids == there + [-1] * (16 - len(there))
        assert len(there) == min(16, valid)
        assert there == sorted(set(there))
        assert all(block < valid for block in there)


def test_block_tables():
    columns = [5, 3, 9]
    for order in batch.PAGE_ORDERS:
        table = batch.block_table(columns, 17, order, prefix=4)
        live = [table[row, :count].tolist() for row, count in enumerate(columns)]
        assert all((table[row, count:] == 0).all() for row, count in enumerate(columns))
        if order == "shared prefix":
            assert live[0][:4] == live[2][:4]
            assert live[0][:2] == live[1][:2]
            newest = [own[-1] for own in live]
            assert all(sum(own.count(page) for own in live) == 1 for page in newest)
        else:
            together = [page for own in live for page in own]
            assert sorted(together) == list(range(17))
            assert (together == sorted(together)) == (order == "disjoint")
    few = batch.block_table(columns, 6)
    assert sorted(few[few.new_tensor([0]).long(), :5].flatten().tolist()) != [0, 0, 0, 0, 0]
    assert few.max() == 5


def test_layers_of_a_pool_that_is_too_small():
    pool = torch.arange(100, dtype=torch.uint8)
    assert [part[0].item() for part in batch.layers_of(pool, 30, 5)] == [0, 30, 60, 0, 30]
    assert [part.numel() for part in batch.layers_of(pool, 1000, 2)] == [100, 100]


def test_rows_of_the_exchange():
    rows = list(exchange.rows(CPU, ["torch"], world_sizes=(2,), columns=(64,), tokens=2))
    assert [row.form for row in rows] == list(producer.FORMS)
    for row in rows:
        assert (row.what, row.W, row.page_size, row.tokens, row.context) == ("publish+merge", 2, 128, 2, 8192)
        assert row.us == pytest.approx(row.publish_us + row.merge_us, abs=0.01)


def chain_row(what, context, us, backend="triton", requests=1):
    return decode_chain.Row(what, backend, 4, 128, requests, context, us)


def test_where_sharding_begins_to_pay():
    rows = [
        *(chain_row("chain", context, us) for context, us in ((1, 10.0), (2, 11.0), (4, 12.0))),
        *(chain_row("chain", context, 9.0, "cuda") for context in (2, 4)),
        *(chain_row("replicated", context, us) for context, us in ((1, 8.0), (2, 9.5), (4, 30.0))),
        *(chain_row("page_strided", context, us) for context, us in ((1, 20.0), (2, 8.0), (4, 8.0))),
        chain_row("chain", 1, 5.0, requests=2),
    ]
    found = {(other, requests): first for other, _, _, requests, first in decode_chain.begins_to_pay(rows)}
    assert found == {
        ("replicated", 1): 2,
        ("page_strided", 1): None,
        ("replicated", 2): None,
        ("page_strided", 2): None,
    }


def test_where_the_fused_form_is_faster():
    rows = [
        *(chain_row("chain", 1, 10.0, backend, batch) for backend in ("cuda", "triton") for batch in (1, 2)),
        chain_row("chain_fused", 1, 5.0, "cuda", 1),
        chain_row("chain_fused", 1, 20.0, "cuda", 2),
        chain_row("chain_fused", 1, 8.0, "triton", 2),
    ]
    assert decode_chain.fused_ratios(rows) == {
        ("cuda", 4, 128, 1): {1: 0.5, 2: 2.0},
        ("triton", 4, 128, 1): {2: 0.8},
    }


def test_the_script_writes_what_was_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv",
        "decode_chain --name toy --device cpu --backend torch --context 512 2048 --batch 1 2 --world-size 4 "
        f"--page-size 128 --columns 8 --tokens 2 --commit abc --out {tmp_path}".split(),
    )
    benchmark("decode_chain").main()
    document = json.loads((tmp_path / "decode_chain_toy.json").read_text())
    assert {"card", "torch", "triton", "date", "commit", "plain_read_tb_s", "rows"} == document.keys()
    assert document["commit"] == "abc"
    by_what = {}
    for row in document["rows"]:
        assert {"what", "backend", "W", "page_size", "context", "us"} <= row.keys()
        by_what[row["what"]] = by_what.get(row["what"], 0) + 1
    assert by_what == {"publish+merge": 2, **dict.fromkeys(decode_chain.WAYS, 4)}
    out = capsys.readouterr().out
    assert "ahead of replicated at W 4, pages of 128, 2 requests" in out
    assert "fused / plain, torch W4 P128 context 2048, by batch:  1: " in out
    picture = tmp_path / "chain.png"
    benchmark("plots").decode_chain(document, picture)
    assert picture.stat().st_size > 10_000


def test_the_script_ends_in_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv",
        "decode_chain --name toy --device cpu --backend torch --minutes 0 --context 512 --batch 1 "
        f"--columns 8 --tokens 2 --commit abc --out {tmp_path}".split(),
    )
    benchmark("decode_chain").main()
    assert "time is over" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "decode_chain_toy.json").read_text())["rows"]) == 2  # one of each part
