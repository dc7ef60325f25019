"""The plan of a prefill window: what the words mean, on the host and on the device (contract, section 7)."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import msa_icp
from msa_icp import dispatch, geometry, verify
from msa_icp.prefill_cases import RECORDED_SHAPES, prefill_case, rows_apart
from msa_icp.prefill_plan import plan_words

H200_MULTIPROCESSORS = 132


# ---------------------------------------------------------------- the words, written down a second time


@dataclass(frozen=True)
class Item:
    segment: int
    index: int
    units: int
    tokens: int | None = field(default=None, compare=False)  # no part of the word

    @property
    def unit_cost(self) -> int:
        """In eighths of a unit that 64 tokens look at."""
        return 4 + math.ceil(self.tokens / 16)


def items_of(qo_lens, kv_lens, qo_offset, columns=10**9) -> list[Item]:
    """Items of 64 tokens, each of as many units of 4 blocks as its last token sees, at least one."""
    items = []
    for s, (tokens, keys, first) in enumerate(zip(qo_lens, kv_lens, qo_offset, strict=True)):
        for index in range(math.ceil(max(0, tokens) / 64)):
            last = min(64 * index + 63, tokens - 1)
            blocks = min(columns, math.ceil(min(keys, first + last + 1) / 128))
            items.append(Item(s, index, max(1, math.ceil(blocks / 4)), last + 1 - 64 * index))
    return items


def shares_of(items: list[Item], workers: int) -> list[list[tuple[int, int]]]:
    """The (item, unit) pairs of every worker: one goes to the last share that begins at its end or before.

    An item but the first costs a unit of 64 tokens before its own.
    """
    ends, cost = [], 0
    for i, item in enumerate(items):
        cost += 8 if i else 0
        for unit in range(item.units):
            cost += item.unit_cost
            ends.append((cost, (i, unit)))
    shares: list[list[tuple[int, int]]] = [[] for _ in range(workers)]
    for end, pair in ends:
        # The begin of share s is s * cost // workers.
        share = max(s for s in range(workers) if s * cost // workers < end)
        shares[share].append(pair)
    return shares


def unpack_info(word: int) -> Item:
    return Item(word & 0xFFFF, word >> 16 & 0xFFFF, word >> 32)


def unpack_range(word: int) -> tuple[tuple[int, int], tuple[int, int]]:
    fields = [(word >> shift) & 0xFFFF for shift in (0, 16, 32, 48)]
    return (fields[0], fields[1]), (fields[2], fields[3])


def walk(items: list[Item], begin: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The (item, unit) pairs from begin to before end."""
    found = []
    while begin != end:
        item, unit = begin
        found.append(begin)
        begin = (item, unit + 1) if unit + 1 < items[item].units else (item + 1, 0)
    return found


def assert_words(work_range, work_info, items, workers):
    assert [unpack_info(w) for w in work_info[: len(items)].tolist()] == items
    ranges = [unpack_range(w) for w in work_range.tolist()]
    assert len(ranges) == workers
    assert [walk(items, *r) for r in ranges] == shares_of(items, workers)
    ends = [(0, 0), *[end for _, end in ranges]]
    assert [begin for begin, _ in ranges] == ends[:-1]
    assert ends[-1] == (len(items), 0)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


WINDOWS = {
    "one token": ((1,), (1,), (0,)),
    "empty": ((0, 0), (5, 0), (0, 0)),
    "a fresh prompt": ((700,), (700,), (0,)),
    "items and segments": ((64, 0, 65, 1, 0, 128), (64, 9, 1000, 513, 0, 512), (0, 9, 935, 512, 0, 384)),
    "before the last keys": ((70,), (5000,), (10,)),
    "a long prefix": ((20, 40), (9000, 5000), (8980, 4960)),
    "past the keys": ((70, 70), (0, 600), (0, 580)),
    "recorded": (
        tuple(q for q, _ in RECORDED_SHAPES),
        tuple(q + p for q, p in RECORDED_SHAPES),
        tuple(p for _, p in RECORDED_SHAPES),
    ),
}


# ---------------------------------------------------------------- the host's plan


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("workers", [1, 2, 3, H200_MULTIPROCESSORS])
def test_words(window, workers):
    qo, kv, first = WINDOWS[window]
    total_q, longest = max(1, sum(qo)), max(1, *kv)
    work_range, work_info = plan_words(
        int32(*qo), int32(*kv), int32(*first), total_q=total_q, max_seq_len=longest, workers=workers
    )
    assert_words(work_range, work_info, items_of(qo, kv, first), workers)
    assert len(work_info) == geometry.prefill_items(total_q, len(qo))


def test_the_host_plan():
    qo, kv, first = WINDOWS["items and segments"]
    torch.set_num_threads(2)
    lens = torch.tensor([64, 1, 0, 1, 65, 1, 1, 1, 0, 1, 128], dtype=torch.int32)[::2]  # any stride
    assert lens.tolist() == list(qo)
    tensors = [lens, int32(*kv), int32(*first)]
    plan = msa_icp.msa_icp_index_score_sharded_plan(*tensors[:2], 4, qo_offset=tensors[2], device="cpu")
    for t in tensors:
        t.fill_(9)  # the plan has its own
    assert plan.qo_segment_lens.tolist() == list(qo)
    assert plan.kv_segment_lens.tolist() == list(kv)
    assert plan.qo_offset.tolist() == list(first)
    assert plan.qo_segment_offsets.tolist() == [0, 64, 64, 129, 130, 130, 258]
    assert plan.kv_segment_offsets.tolist() == [0, 64, 73, 1073, 1586, 1586, 2098]
    assert (plan.total_q, plan.batch, plan.num_qo_heads, plan.max_query_len) == (258, 6, 4, 128)
    assert plan.columns == 8
    assert_words(plan.packed_work_range, plan.packed_work_info, items_of(qo, kv, first), 2)
    sizes = msa_icp.msa_icp_index_score_plan_storage(num_qo_heads=4, total_q=258, batch=6, device="cpu")
    assert sizes == {"work_range_numel": 2, "work_info_numel": 32, "workspace_bytes": 2**25}
    assert plan.packed_work_range.shape == (2,)
    assert plan.packed_work_info.shape == (32,)
    assert plan.workspace.shape == (2**25,)
    kinds = [torch.int32] * 5 + [torch.int64] * 2 + [torch.uint8]
    found = [t for t in vars(plan).values() if isinstance(t, torch.Tensor)]
    assert [t.dtype for t in found] == kinds
    assert all(t.is_contiguous() for t in found)


def test_an_empty_window():
    plan = msa_icp.msa_icp_index_score_sharded_plan(int32(0, 0), int32(0, 0), 4, qo_offset=int32(0, 7))
    assert (plan.total_q, plan.max_query_len, plan.columns) == (1, 1, 1)
    assert not plan.packed_work_range.any()


def test_the_default_device():
    plan = msa_icp.msa_icp_index_score_sharded_plan(int32(3), int32(3), 4, qo_offset=int32(0))
    for t in vars(plan).values():
        if isinstance(t, torch.Tensor):
            assert t.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("max_seq_len", "page_size", "columns"),
    [(1, 128, 1), (128, 128, 1), (129, 128, 2), (129, 256, 1), (257, 256, 2), (1 << 20, 256, 4096)],
)
def test_columns(max_seq_len, page_size, columns):
    assert msa_icp.msa_icp_index_score_columns(max_seq_len, page_size) == columns


def test_pool_bytes():
    torch.set_num_threads(3)
    sizes = {"total_q": 130, "batch": 5, "device": "cpu"}
    assert msa_icp.msa_icp_prefill_pool_bytes(**sizes) == (3 + 4 + 2) * 64 * 4 * 16 * 8


# ---------------------------------------------------------------- what the plan is for


@pytest.mark.parametrize(
    "shapes",
    [*((shape,) for shape in RECORDED_SHAPES), RECORDED_SHAPES],
    ids=[*(f"{tokens}/{prefix}" for tokens, prefix in RECORDED_SHAPES), "mixed"],
)
def test_19_every_multiprocessor_has_its_share(shapes):
    """Short queries over long cached prefixes, alone and beside whole prompts.

    Of one item no share has more than a unit (512 keys) above another; of several a share costs what the mean
    does, but for less than a unit and a start at either end of it.
    """
    qo, first = zip(*shapes, strict=True)
    kv = tuple(map(sum, shapes))
    work_range, work_info = plan_words(
        int32(*qo),
        int32(*kv),
        int32(*first),
        total_q=sum(qo),
        max_seq_len=max(kv),
        workers=H200_MULTIPROCESSORS,
    )
    items = items_of(qo, kv, first)
    assert_words(work_range, work_info, items, H200_MULTIPROCESSORS)
    shares = [walk(items, *unpack_range(w)) for w in work_range.tolist()]
    assert sum(map(len, shares)) == sum(item.units for item in items)
    if len(items) == 1:
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    costs = [sum(items[i].unit_cost + 8 * (i > 0 and u == 0) for i, u in share) for share in shares]
    mean = sum(costs) / len(costs)
    assert max(costs) < mean + 16
    assert min(costs) > mean - 16


@pytest.mark.parametrize("window", WINDOWS)
def test_pieces_have_numbers_of_their_own(window):
    """Slot `item + worker` of the fused form's pool: distinct, and all within the pool."""
    qo, kv, first = WINDOWS[window]
    items, total_q = items_of(qo, kv, first), max(1, sum(qo))
    for workers in (1, 7, H200_MULTIPROCESSORS):
        work_range, _ = plan_words(
            int32(*qo), int32(*kv), int32(*first), total_q=total_q, max_seq_len=max(1, *kv), workers=workers
        )
        shares = [walk(items, *unpack_range(word)) for word in work_range.tolist()]
        slots = [i + s for s, share in enumerate(shares) for i in {i for i, _ in share}]
        assert len(slots) == len(set(slots))
        slot_bytes = 64 * 4 * 16 * 8
        pool = geometry.prefill_pool_bytes(total_q, len(qo), workers, 4)
        assert all((slot + 1) * slot_bytes <= pool for slot in slots)


# ---------------------------------------------------------------- the device's plan


def device_plan(case, backend, device, workers):
    """The words of the backend's op for any number of workers, on the CPU; the rest of the storage is 5."""
    where = torch.device(device)
    work_range = torch.full((workers,), 5, dtype=torch.int64, device=where)
    capacity = geometry.work_info_numel(case.total_q, len(case.qo_lens), 4)
    work_info = torch.full((capacity,), 5, dtype=torch.int64, device=where)
    dispatch.resolve(backend, where).index_score_sharded_plan_device(
        **case.metadata(device),
        total_q=case.total_q,
        max_query_len=case.total_q,
        max_seq_len=case.max_seq_len,
        packed_work_range=work_range,
        packed_work_info=work_info,
        workspace=torch.empty(2**25, dtype=torch.uint8, device=where),
    )
    return work_range.cpu(), work_info.cpu()


def window_case(window, **rest):
    qo, kv, first = window
    case = prefill_case("", 2, 128, qo_lens=[0 for _ in qo], kv_lens=[0 for _ in kv], **rest)
    offsets = torch.tensor([0, *qo]).cumsum(0).to(torch.int32)
    total_q = max(1, sum(qo)) + rest.get("spare_tokens", 0)
    query = torch.zeros(1, dtype=torch.uint8).expand(total_q, 4, 128)  # a size and nothing else
    fields = {"qo_lens": int32(*qo), "kv_lens": int32(*kv), "qo_offset": int32(*first)}
    longest = max(1, *kv) + rest.get("spare_keys", 0)
    return replace(case, index_q=query, qo_offsets=offsets, max_seq_len=longest, **fields)


@pytest.mark.prefill
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("workers", [1, 2, H200_MULTIPROCESSORS])
def test_device_words_equal_the_hosts(backend, device, window, workers):
    case = window_case(WINDOWS[window])
    got = device_plan(case, backend, device, workers)
    assert_words(*got, items_of(*WINDOWS[window]), workers)


@pytest.mark.prefill
@pytest.mark.parametrize("workers", [1, 5])
def test_bounds_larger_than_the_metadata_change_no_word(backend, device, workers):
    window = WINDOWS["items and segments"]
    got = device_plan(window_case(window, spare_tokens=1000, spare_keys=10**6), backend, device, workers)
    assert_words(*got, items_of(*window), workers)
    apart = rows_apart(window_case(window, spare_tokens=99))
    assert_words(*device_plan(apart, backend, device, workers), items_of(*window), workers)


@pytest.mark.prefill
def test_metadata_beyond_the_bounds_is_cut_off(backend, device):
    """Lengths and positions of any sign and size: items stop at the capacity, units at the columns."""
    big = 2**31 - 1
    for qo, kv, first in (
        ((-5, 70, -big), (300, -9, 7), (0, 0, 0)),
        ((big, big, big), (big, big, big), (big, 0, -big)),
        ((3, 1, 2), (big, 700, -1), (big, -600, big)),
        ((-1, -1, -1), (1, 1, 1), (0, 0, 0)),
    ):
        case = window_case(((90, 0, 9), (700, 700, 700), (0, 0, 0)))
        case = replace(case, qo_lens=int32(*qo), kv_lens=int32(*kv), qo_offset=int32(*first), sliced=True)
        capacity = geometry.prefill_items(99, 3)
        few = [min(n, 64 * (capacity + 1)) for n in qo]
        items = items_of(few, kv, first, columns=case.blocks)[:capacity]
        # An item that is cut off may be the last but one of a segment: its last token is that of a full item.
        assert_words(*device_plan(case, backend, device, 3), items, 3)


@st.composite
def segments(draw):
    near = st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129, 192, 511, 512, 513, 1024])
    count = draw(st.integers(1, 7))
    lens = draw(st.lists(near | st.integers(0, 300), min_size=count, max_size=count))
    kv = draw(st.lists(near | st.integers(0, 9000), min_size=count, max_size=count))
    first = draw(st.lists(near | st.integers(0, 9000), min_size=count, max_size=count))
    return (tuple(lens), tuple(kv), tuple(first)), draw(st.integers(1, 40))


@pytest.mark.prefill
@given(drawn=segments())
def test_any_segments(backend, device, drawn):
    window, workers = drawn
    assert_words(*device_plan(window_case(window), backend, device, workers), items_of(*window), workers)


@pytest.mark.prefill
def test_the_device_plan_is_the_callers_storage(backend, device):
    case = prefill_case("", 2, 256, qo_lens=(3, 0, 70), kv_lens=(300, 40, 70), spare_tokens=5, sliced=True)
    plan = verify.prefill.plan_on_device(case, backend, device)
    assert (plan.total_q, plan.batch, plan.max_query_len, plan.columns) == (78, 3, 78, 3)
    again = msa_icp.msa_icp_index_score_sharded_plan_device(
        plan.qo_segment_lens,
        plan.kv_segment_lens,
        plan.qo_segment_offsets,
        plan.kv_segment_offsets,
        plan.qo_offset,
        4,
        total_q=78,
        max_query_len=70,
        max_seq_len=300,
        packed_work_range=plan.packed_work_range,
        packed_work_info=plan.packed_work_info,
        workspace=plan.workspace,
        backend=backend,
    )
    for name, value in vars(plan).items():
        if isinstance(value, torch.Tensor):
            assert getattr(again, name) is value
    assert again.max_query_len == 70


@pytest.mark.prefill
def test_the_device_plan_writes_nothing_but_its_words(backend, device):
    """Words past the storage that it needs keep their values, and so does the metadata."""
    case = window_case(WINDOWS["items and segments"], sliced=True)
    before = {name: t.clone() for name, t in case.metadata(device).items()}
    numel = geometry.work_info_numel(case.total_q, 6, 4)
    memory = torch.full((numel + 8,), 5, dtype=torch.int64, device=device)
    shares = msa_icp.msa_icp_index_score_plan_storage(num_qo_heads=4, total_q=1, batch=1, device=device)
    work_range = torch.full((shares["work_range_numel"] + 8,), 5, dtype=torch.int64, device=device)
    metadata = case.metadata(device)
    msa_icp.msa_icp_index_score_sharded_plan_device(
        **metadata,
        num_qo_heads=4,
        total_q=case.total_q,
        max_query_len=case.total_q,
        max_seq_len=case.max_seq_len,
        packed_work_range=work_range[4:-4],
        packed_work_info=memory[4:-4],
        workspace=torch.empty(2**25, dtype=torch.uint8, device=device),
        backend=backend,
    )
    for words in (memory, work_range):
        assert words[:4].tolist() == words[-4:].tolist() == [5] * 4
    assert_words(
        work_range[4:-4].cpu(),
        memory[4:-4].cpu(),
        items_of(*WINDOWS["items and segments"]),
        shares["work_range_numel"],
    )
    for name, t in metadata.items():
        assert torch.equal(t, before[name]), name


@pytest.mark.prefill
def test_13_a_captured_plan_follows_its_metadata(backend, device):
    """A graph plans what the metadata holds when it is replayed: long, empty, short, hostile, long."""
    if device == "cpu":
        pytest.skip("graphs are a GPU's")
    case = prefill_case("", 2, 128, qo_lens=(130, 3, 65), kv_lens=(9000, 40, 700))
    metadata = case.metadata(device)
    arguments = {
        **metadata,
        "num_qo_heads": 4,
        "total_q": case.total_q,
        "max_query_len": case.total_q,
        "max_seq_len": case.max_seq_len,
        **storage_for(device, case.total_q, 3),
        "backend": backend,
    }
    msa_icp.msa_icp_index_score_sharded_plan_device(**arguments)  # loads the kernel, which a capture cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        msa_icp.msa_icp_index_score_sharded_plan_device(**arguments)
    for qo, kv, first in (
        ((130, 3, 65), (9000, 40, 700), (8870, 37, 635)),
        ((0, 0, 0), (0, 40, 0), (0, 0, 0)),
        ((0, 1, 64), (7, 40, 64), (7, 39, 0)),
        ((-5, 2**31 - 1, 3), (2**31 - 1, -9, 2**31 - 1), (5, -7, 2**31 - 1)),
        ((130, 3, 65), (9000, 40, 700), (8870, 37, 635)),
    ):
        for name, values in (("qo_segment_lens", qo), ("kv_segment_lens", kv), ("qo_offset", first)):
            metadata[name].copy_(int32(*values))
        graph.replay()
        words = plan_words(
            *(int32(*values) for values in (qo, kv, first)),
            total_q=case.total_q,
            max_seq_len=case.max_seq_len,
            workers=arguments["packed_work_range"].shape[0],
        )
        items = min(len(words[1]), len(items_of([min(n, 10**4) for n in qo], kv, first)))
        assert torch.equal(arguments["packed_work_range"].cpu(), words[0])
        assert torch.equal(arguments["packed_work_info"][:items].cpu(), words[1][:items])


class NothingOnTheHost(TorchDispatchMode):
    """Fails on what reads a value or whose shape depends on one: neither can be captured in a graph."""

    FORBIDDEN = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "repeat_interleave",
        "unique",
        "is_nonzero",
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        assert name not in self.FORBIDDEN, name
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), name
        return func(*args, **(kwargs or {}))


def test_the_torch_backend_reads_no_value_on_the_host():
    case = window_case(WINDOWS["recorded"])
    with NothingOnTheHost():
        device_plan(case, "torch", "cpu", 7)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NothingOnTheHost():
        int(case.qo_lens[0])


# ---------------------------------------------------------------- limits


def storage_for(device, total_q, batch):
    sizes = msa_icp.msa_icp_index_score_plan_storage(
        num_qo_heads=4, total_q=total_q, batch=batch, device=device
    )
    return {
        "packed_work_range": torch.zeros(sizes["work_range_numel"], dtype=torch.int64, device=device),
        "packed_work_info": torch.zeros(sizes["work_info_numel"], dtype=torch.int64, device=device),
        "workspace": torch.empty(sizes["workspace_bytes"], dtype=torch.uint8, device=device),
    }


def plan_of_sizes(backend, device, batch, total_q, max_seq_len):
    """A device plan of one long segment and `batch - 1` empty ones, with the given bounds."""
    lens = torch.zeros(batch, dtype=torch.int32, device=device)
    lens[-1] = 1
    offsets = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    return msa_icp.msa_icp_index_score_sharded_plan_device(
        lens,
        lens,
        offsets,
        offsets,
        lens,
        4,
        total_q=total_q,
        max_query_len=1,
        max_seq_len=max_seq_len,
        **storage_for(device, min(total_q, 64), 1 if batch > 65536 else batch),
        backend=backend,
    )


@pytest.mark.parametrize(
    ("batch", "total_q", "max_seq_len", "message"),
    [
        (65537, 1, 1, r"qo_segment_lens\.shape\[0\]: must be at most 65536 segments, was 65537"),
        (65536, 65536, 1, r"total_q: must be .*65535 items, was 65536 in 65536 segments, 65536 items"),
        (1, 64 * 65535 + 1, 1, r"total_q: must be .*65535 items, was .* 65536 items"),
        (1, 64, 65535 * 128 + 1, r"max_seq_len: must be at most 8388480 keys, 65535 columns, was 8388481"),
        (1, 64 * 32769, 65535 * 128, r"total_q and max_seq_len: must be .*2147483647, was 32769 \* 65535"),
    ],
)
def test_limits_of_the_device_plan(backend, device, batch, total_q, max_seq_len, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        plan_of_sizes(backend, device, batch, total_q, max_seq_len)


@pytest.mark.parametrize(
    ("qo", "kv", "message"),
    [
        ([0] * 65537, [0] * 65537, r"qo_segment_lens\.shape\[0\]: must be at most 65536 segments"),
        ([1] * 65536, [1] * 65536, r"qo_segment_lens: must be .*65535 items"),
        ([1], [65535 * 128 + 1], r"kv_segment_lens: must be at most 8388480 keys"),
        ([64 * 32769], [65535 * 128], r"qo_segment_lens and kv_segment_lens: must be .*2147483647"),
    ],
)
def test_limits_of_the_host_plan(qo, kv, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        msa_icp.msa_icp_index_score_sharded_plan(int32(*qo), int32(*kv), 4, qo_offset=int32(*[0] * len(qo)))


def test_the_ends_of_the_limits():
    many = int32(*[1] * 65535, 0)
    plan = msa_icp.msa_icp_index_score_sharded_plan(many, many, 4, qo_offset=torch.zeros_like(many))
    assert unpack_info(int(plan.packed_work_info[65534])) == Item(65534, 0, 1)
    assert unpack_range(int(plan.packed_work_range[-1]))[1] == (65535, 0)
    wide = msa_icp.msa_icp_index_score_sharded_plan(
        int32(64 * 32768), int32(65535 * 128), 4, qo_offset=int32(65535 * 128 - 64 * 32768)
    )
    assert wide.columns == 65535
    assert unpack_info(int(wide.packed_work_info[32767])) == Item(0, 32767, 16384)


@pytest.mark.prefill
def test_the_ends_of_the_limits_on_the_device(backend, device):
    """65535 items, and items of 16384 units: the largest words that there are."""
    ones = torch.ones(65535, dtype=torch.int32)
    case = window_case(((1,), (1,), (0,)))
    query = torch.zeros(1, dtype=torch.uint8).expand(65535, 4, 128)
    many = replace(
        case,
        qo_lens=ones,
        kv_lens=ones,
        qo_offset=ones - 1,
        qo_offsets=torch.arange(65536).int(),
        index_q=query,
    )
    work_range, work_info = device_plan(many, backend, device, 132)
    assert unpack_info(int(work_info[65534])) == Item(65534, 0, 1)
    assert unpack_range(int(work_range[-1])) == ((65534 * 131 // 132 + 1, 0), (65535, 0))
    window = ((64 * 32768,), (65535 * 128,), (65535 * 128 - 64 * 32768,))
    work_range, work_info = device_plan(window_case(window), backend, device, 132)
    last = unpack_info(int(work_info[32767]))
    assert last == Item(0, 32767, 16384)
    first_units, costs = [], 0  # where each item's first unit begins, in plain integers of any size
    for index in range(32768):
        blocks = 65535 * 128 - 64 * 32768 + 64 * (index + 1)
        units = math.ceil(math.ceil(blocks / 128) / 4)
        assert unpack_info(int(work_info[index])) == Item(0, index, units)
        first_units.append(costs + (8 if index else 0))
        costs = first_units[-1] + 8 * units
    for share in range(132):
        bound = share * costs // 132
        item = bisect.bisect_right([at - (8 if i else 0) for i, at in enumerate(first_units)], bound) - 1
        unit = max(0, bound - first_units[item]) // 8
        assert unpack_range(int(work_range[share]))[0] == (item, unit)
