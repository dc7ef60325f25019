"""However the CUDA scorer cuts its work the bits are the same, and it waits where it must.

The late memory and the faults need the emulator (EMULATE_CUDA=1), which knows what a thread may not have
seen yet.
"""

from __future__ import annotations

import dataclasses
import importlib

import cuda_emulation
import pytest
import torch
from helpers import HEADS, score

import msa_icp
from msa_icp import cases, verify
from msa_icp.cases import LAYOUTS, bits, poisoned
from msa_icp.cuda_backend.loader import Variant
from msa_icp.geometry import ShardLayout

EMULATED = cuda_emulation.REQUESTED
DEVICES = [d for d in ("cpu", "cuda") if msa_icp.backends(d)["cuda"] is None]
if not DEVICES:
    pytest.skip("the CUDA backend serves no device here", allow_module_level=True)
scorer = importlib.import_module("msa_icp.cuda_backend.decode_index_score_sharded")

on_devices = pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"cuda-{device}")
layouts = pytest.mark.parametrize(("world_size", "page_size"), LAYOUTS)
LAYOUT = ShardLayout(world_size=4, rank=0, page_size=128)
FORMS = {
    "one piece": {"two_pieces_from": 2**31, "packed_from": 2**31, "together": ()},
    "two pieces": {"two_pieces_from": 0, "packed_from": 2**31, "together": ()},
    "together": {"two_pieces_from": 2**31, "packed_from": 2**31, "together": (1, 2, 4)},
    "together, two pieces": {"two_pieces_from": 0, "packed_from": 2**31, "together": (1, 2, 4)},
    "packed": {"packed_from": 0},
}


def choose(monkeypatch, form):
    monkeypatch.setattr(scorer, "SCHEDULE", dataclasses.replace(scorer.SCHEDULE, **FORMS[form]))
    scorer.short_kernel.cache_clear()  # kernels know nothing of a schedule that has changed


@on_devices
@layouts
@pytest.mark.parametrize("query_len", [1, 8])
def test_every_form_gives_the_same_bits(monkeypatch, device, world_size, page_size, query_len):
    case = cases.decode_case(
        "",
        world_size,
        page_size,
        seq_lens=(page_size * 18 + 5, 0, page_size * 2, 1, page_size * 7 - 1),
        decode_query_len=query_len,
        keys=cases.full_range,
        queries=cases.full_range,
    )
    found = []
    for form in FORMS:
        choose(monkeypatch, form)
        found += [score(case, 1, "cuda", device, enable_pdl=enable_pdl) for enable_pdl in (False, True)]
    wrong = verify.score_differences(case, 1, found[0], bitwise=False)
    assert not wrong.any(), wrong.nonzero()[:5]
    for other in found[1:]:
        assert torch.equal(bits(other), bits(found[0]))


@on_devices
@pytest.mark.parametrize(("world_size", "page_size"), [(4, 128), (2, 256)])
def test_a_share_longer_than_a_look_at_the_table(monkeypatch, device, world_size, page_size):
    """Over 32 columns a warp, of several requests: it looks at the table again while copies are in flight."""
    choose(monkeypatch, "packed")
    few = dataclasses.replace(scorer.SCHEDULE, packed_resident=((1, 1), (2, 1), (4, 1)))
    monkeypatch.setattr(scorer, "SCHEDULE", few)
    monkeypatch.setattr(cuda_emulation.Kernel, "multiprocessors", staticmethod(lambda device: 1))
    scorer.packed_kernel.cache_clear()
    lens = (page_size * 90 + 7, page_size * 3, 0, page_size * 75)
    case = cases.decode_case("", world_size, page_size, seq_lens=lens, decode_query_len=2)
    out = score(case, 1, "cuda", device, enable_pdl=True)
    scorer.packed_kernel.cache_clear()
    wrong = verify.score_differences(case, 1, out, bitwise=True)
    assert not wrong.any(), wrong.nonzero()[:5]


@on_devices
@pytest.mark.parametrize("requests", [127, 128, 129, 1024])
def test_a_packed_list_of_many_requests(monkeypatch, device, requests):
    """More requests than threads, and as many as the list takes; most of them empty or one page long."""
    lens = [(0, 1, 5, 130, 0, -3)[i % 6] for i in range(requests)]
    case = cases.decode_case("", 4, 128, seq_lens=lens)
    choose(monkeypatch, "packed")
    kernel, _ = scorer._launch(requests, 4, LAYOUT, 1, torch.device(device))
    assert kernel.variant.source == "decode_index_score_packed"
    wrong = verify.score_differences(case, 0, score(case, 0, "cuda", device), bitwise=True)
    assert not wrong.any(), wrong.nonzero()[:5]


@on_devices
def test_more_requests_than_the_list_takes(monkeypatch, device):
    choose(monkeypatch, "packed")
    kernel, _ = scorer._launch(1025, 8192, LAYOUT, 1, torch.device(device))
    assert kernel.variant.source == "decode_index_score_sharded"


def late_batch(world_size, page_size, query_len):
    """A case, its inputs, and those parts of them that the predecessor may still write."""
    case = cases.decode_case(
        "",
        world_size,
        page_size,
        seq_lens=(page_size * 6 + 1, page_size * 5, 3, page_size * 9 + query_len - 1),
        decode_query_len=query_len,
    )
    table, lens, _ = case.metadata("cpu")
    keys, q = case.shard(1, "cpu"), case.index_q.clone()
    late = []
    for request, seq_len in enumerate(case.seq_lens):
        for column in range(case.block_table.shape[1]):
            starts, ends = column * page_size, (column + 1) * page_size
            if starts < seq_len and ends > seq_len - query_len:
                late.append(keys[int(table[request, column])].view(torch.uint8))
    late.append(q.view(torch.uint8))
    return case, keys, q, table, lens, late


@pytest.mark.skipif(not EMULATED, reason="the emulator alone knows the moment of the wait")
@pytest.mark.parametrize("device", ["cpu"], ids=["cuda-cpu"])
@layouts
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("query_len", [1, 2, 8])
def test_what_the_predecessor_writes_late_is_not_touched_early(
    monkeypatch, device, world_size, page_size, form, query_len
):
    choose(monkeypatch, form)
    case, keys, q, table, lens, late = late_batch(world_size, page_size, query_len)
    after = [part.clone() for part in late]
    for part in late:
        part.fill_(0x38)  # 1.0: plausible, and wrong
    monkeypatch.setattr(cuda_emulation, "LATE", list(zip(late, after, strict=True)))
    out = poisoned((case.tokens, HEADS, case.score_columns), torch.float32, device)
    changes = {"index_q": q, "index_k": keys, "block_table": table, "seq_lens": lens, "enable_pdl": True}
    score(case, 1, "cuda", device, out, **changes)
    wrong = verify.score_differences(case, 1, out, bitwise=True)
    assert not wrong.any(), wrong.nonzero()[:5]


FAULTS = {
    "the queries are read before the wait": (
        "one piece",
        "  // Earlier, the next launch's CTAs would take the places of this one's late ones.\n",
        "  Scorer early;\n  early.take(with, request, lane);\n",
        ("  Scorer scorer;\n  scorer.take(with, request, lane);\n", "  Scorer& scorer = early;\n"),
    ),
    "the newest page is copied before the wait": (
        "one piece",
        "if (has_keys && history) start_copy();",
        "if (has_keys) start_copy();",
        ("if (has_keys && !history) start_copy();", ""),
    ),
    "the newest page is copied early into a ring": (
        "packed",
        "if (from_lane(ahead.history, piece / kPagePieces)) {",
        "if (from_lane(ahead.history, piece / kPagePieces) || true) {",
    ),
    "an empty CTA ends without waiting": (
        "one piece",
        "if (first_column >= written) {\n    wait_for_predecessor();",
        "if (first_column >= written) {",
    ),
    "keys are read before they have arrived": (
        "one piece",
        "if (here) wait_for(&arrived[warp][piece], 0);",
        "",
    ),
    "a stage's second copy is not waited for": ("packed", "parity ^= 1u << stage;", ""),
}  # fmt: skip
"""What goes wrong, in which form, a text of the source, what takes its place, and more such pairs."""


@pytest.mark.skipif(not EMULATED, reason="the emulator finds what a GPU may get away with")
@pytest.mark.parametrize("device", ["cpu"], ids=["cuda-cpu"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_finds(monkeypatch, device, fault):
    form, text, replacement, *more = FAULTS[fault]
    real = Variant.text

    def faulty(self, *arguments):
        source = real(self, *arguments)
        for old, new in ((text, replacement), *more):
            if source.count(old) != 1:
                raise LookupError(f"{old!r} is there {source.count(old)} times")
            source = source.replace(old, new)
        return source

    monkeypatch.setattr(Variant, "text", faulty)
    cuda_emulation.library.cache_clear()
    try:
        test_what_the_predecessor_writes_late_is_not_touched_early(monkeypatch, device, 2, 256, form, 1)
    except (AssertionError, RuntimeError):
        return
    finally:
        cuda_emulation.library.cache_clear()
    pytest.fail("nobody noticed")
