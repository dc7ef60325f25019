"""Writing new keys into a rank's shard."""

from __future__ import annotations

import pytest
import torch
from helpers import interpreted_only_if, wide_record
from hypothesis import given
from hypothesis import strategies as st

import msa_icp
from msa_icp import cases, reference
from msa_icp.cases import FP8, LAYOUTS

layouts = pytest.mark.parametrize(("world_size", "page_size"), LAYOUTS)


def raw(tensor):
    return tensor.cpu().view(torch.uint8)


def places(position, request, table, pages, *, rank, world_size, page_size):
    """(page, row) of a key on this rank by search through the reference's positions, None: nowhere."""
    if position < 0 or not 0 <= request < table.shape[0]:
        return None
    column = position // page_size
    if column >= table.shape[1] or not 0 <= int(table[request, column]) < pages:
        return None
    for row in range(page_size // world_size):
        where = reference.key_position(column, row, rank=rank, world_size=world_size, page_size=page_size)
        if where == position:
            return int(table[request, column]), row
    return None


def write(keys, positions, requests, table, shard, backend, **layout):
    device = shard.device
    msa_icp.write_index_keys(
        keys.to(device),
        torch.as_tensor(positions, dtype=torch.int32, device=device),
        torch.as_tensor(requests, dtype=torch.int32, device=device),
        table.to(device),
        shard,
        backend=backend,
        **layout,
    )


@layouts
def test_writing_every_key_makes_the_shard(backend, device, world_size, page_size):
    cache = cases.full_range((4, page_size, 128), seed=1, nan=True)
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    keys = raw(cache)[table.long()].reshape(-1, 128).view(FP8)
    positions = torch.arange(2 * page_size, dtype=torch.int32).repeat(2)
    requests = torch.arange(2, dtype=torch.int32).repeat_interleave(2 * page_size)
    order = torch.randperm(4 * page_size, generator=cases.generator(3))
    for rank in range(world_size):
        layout = {"rank": rank, "world_size": world_size, "page_size": page_size}
        shard = cases.bytes_of((4, page_size // world_size, 128), 0x11).to(device)
        write(raw(keys)[order].view(FP8), positions[order], requests[order], table, shard, backend, **layout)
        expected = msa_icp.shard_index_keys(cache, rank=rank, world_size=world_size)
        assert torch.equal(raw(shard), raw(expected))


def check_against_search(backend, device, keys, positions, requests, table, pages, pitch, **layout):
    rows = layout["page_size"] // layout["world_size"]
    before = cases.full_range((pages, rows, 128), seed=9, nan=True)
    shard = cases.strided(before, (pitch, 128, 1), device=device)
    whole = shard.view(torch.uint8).as_strided((shard.untyped_storage().nbytes(),), (1,))
    expected = cases.strided(before, (pitch, 128, 1))
    written = 0
    for key, position, request in zip(raw(keys), positions, requests, strict=True):
        where = places(position, request, table, pages, **layout)
        if where is not None:
            raw(expected)[where] = key
            written += 1
    write(keys, positions, requests, table, shard, backend, **layout)
    expected_bytes = expected.view(torch.uint8).as_strided((expected.untyped_storage().nbytes(),), (1,))
    assert torch.equal(whole.cpu(), expected_bytes)  # also the bytes between the pages
    return written


@layouts
def test_keys_without_a_place_are_skipped(backend, device, world_size, page_size):
    table = torch.tensor([[1, 2**31 - 1, 0], [-1, 2, 3], [-(2**31), 4, 5]], dtype=torch.int32)[:, :2]
    positions = [0, -1, -(2**31), 2**31 - 1, 2 * page_size, page_size, 5, page_size + 5, 5, 5, 5]
    requests = [0, 0, 0, 0, 0, 0, 1, 1, 3, -1, 2**31 - 1]
    positions += list(range(page_size - 3, page_size + 3))
    requests += [1] * 6
    keys = cases.full_range((len(positions), 128), seed=4, nan=True)
    written = [
        check_against_search(
            backend,
            device,
            keys,
            positions,
            requests,
            table,
            4,
            page_size // world_size * 128 + 32,
            rank=rank,
            world_size=world_size,
            page_size=page_size,
        )
        for rank in range(world_size)
    ]
    # Position 0 of request 0; of request 1 the second page: page_size + 5 and three of the last six.
    assert sum(written) == 5


def test_nothing_to_write(backend, device):
    layout = {"rank": 0, "world_size": 2, "page_size": 128}
    shard = cases.exact((2, 64, 128), 0).to(device)
    before = raw(shard).clone()
    none = torch.empty((0, 3), dtype=torch.int32)
    some = torch.zeros((1, 1), dtype=torch.int32)
    write(cases.exact((0, 128), 1), [], [], some, shard, backend, **layout)
    write(cases.exact((2, 128), 1), [0, 1], [0, 0], none, shard, backend, **layout)
    write(cases.exact((2, 128), 1), [0, 1], [0, 0], some, shard[:0], backend, **layout)
    assert torch.equal(raw(shard), before)


def test_two_keys_for_one_row_leave_one_of_them_whole(backend, device):
    layout = {"rank": 1, "world_size": 4, "page_size": 128}
    keys = torch.arange(1, 65, dtype=torch.uint8)[:, None].expand(64, 128).contiguous().view(FP8)
    shard = cases.bytes_of((1, 32, 128), 0).to(device)
    write(keys, [5] * 64, [0] * 64, torch.zeros((1, 1), dtype=torch.int32), shard, backend, **layout)
    row = raw(shard)[0, 1]
    assert (row == row[0]).all()
    assert 1 <= int(row[0]) <= 64
    assert int((raw(shard) != 0).any(-1).sum()) == 1


@pytest.mark.parametrize("pitch", [1 << 20, (1 << 20) + 16])
def test_big_pitch(backend, device, pitch):
    interpreted_only_if(backend == "triton", backend, device)
    pages = 4100
    record = wide_record(pages * pitch, device)
    shard = record.view(FP8).as_strided((pages, 32, 128), (pitch, 128, 1))
    ids = [2047, 2048, 4095, 4099, 1]
    keys = cases.full_range((5, 128), seed=1)
    table = torch.tensor([ids], dtype=torch.int32)
    positions = [128 * column + 4 * 7 + 2 for column in range(5)]
    write(keys, positions, [0] * 5, table, shard, backend, rank=2, world_size=4, page_size=128)
    for key, page in zip(raw(keys), ids, strict=True):
        assert torch.equal(record[page * pitch + 7 * 128 : page * pitch + 8 * 128].cpu(), key)


@given(
    data=st.data(),
    layout=st.sampled_from([(w, p, r) for w, p in LAYOUTS for r in range(w)]),
    columns=st.integers(1, 3),
)
def test_any_keys(backend, device, data, layout, columns):
    world_size, page_size, rank = layout
    pages = data.draw(st.integers(1, 5))
    ids = st.integers(-1, pages)
    table = torch.tensor(
        data.draw(st.lists(st.lists(ids, min_size=columns, max_size=columns), min_size=1, max_size=3)),
        dtype=torch.int32,
    )
    # Every key a row of its own: distinct (page, position in the page).
    seen, positions, requests = set(), [], []
    for position, request in data.draw(
        st.lists(st.tuples(st.integers(-2, columns * page_size + 2), st.integers(-1, 3)), max_size=20)
    ):
        where = places(position, request, table, pages, rank=rank, world_size=world_size, page_size=page_size)
        if where is None or where not in seen:
            seen.add(where)
            positions.append(position)
            requests.append(request)
    keys = cases.full_range((len(positions), 128), seed=len(positions), nan=True)
    pitch = page_size // world_size * 128 + 16 * data.draw(st.integers(0, 3))
    check_against_search(
        backend,
        device,
        keys,
        positions,
        requests,
        table,
        pages,
        pitch,
        rank=rank,
        world_size=world_size,
        page_size=page_size,
    )
