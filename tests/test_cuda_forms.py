"""However the CUDA scorer cuts its work the bits are the same, and it waits where it must.

The late memory and the faults need the emulator (EMULATE_CUDA=1), which knows what a thread may not have
seen yet.
"""

from __future__ import annotations

import importlib
import itertools

import cuda_emulation
import pytest
import torch
from cuda_emulation import Late
from helpers import HEADS, score

import msa_icp
from msa_icp import cases, verify
from msa_icp.bench import tune_decode_score as tune
from msa_icp.cases import LAYOUTS, bits, poisoned
from msa_icp.cuda_backend.decode_index_score_sharded import Form
from msa_icp.cuda_backend.loader import Variant

EMULATED = cuda_emulation.REQUESTED
DEVICES = [d for d in ("cpu", "cuda") if msa_icp.backends(d)["cuda"] is None]
if not DEVICES:
    pytest.skip("the CUDA backend serves no device here", allow_module_level=True)
scorer = importlib.import_module("msa_icp.cuda_backend.decode_index_score_sharded")

on_devices = pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"cuda-{device}")
layouts = pytest.mark.parametrize(("world_size", "page_size"), LAYOUTS)
FORMS = {
    "one round": (Form(1, 4, 2, False, 0), 1),
    "one round, with gaps": (Form(1, 4, 1, False, 3), 1),
    "loops": (Form(2, 4, 2, False, 0), 32),
    "loops, with gaps": (Form(2, 3, 1, False, 3), 3),
    "together": (Form(1, 4, 1, True, 1), 1),
    "together, loops": (Form(2, 4, 1, True, 0), 4),
}
"""A form, and the rounds of a CTA."""


def choose(monkeypatch, form):
    monkeypatch.setattr(scorer, "SCHEDULE", tune.everywhere(*FORMS[form]))


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


MANY_ROUNDS = [(2, 2), (30, 2), (32, 2), (36, 2), (36, 3), (36, 5), (70, 1)]
"""Rounds of a CTA, and query tokens: of one, two and four groups."""


@on_devices
@layouts
@pytest.mark.parametrize(("rounds", "query_len"), MANY_ROUNDS)
def test_a_cta_of_many_rounds(monkeypatch, device, world_size, page_size, rounds, query_len):
    """Requests that end in every one of its rounds, behind the last and before the first."""
    round_columns = 128 * world_size // page_size
    together = query_len > 2
    form = Form(2, 4, 1 if together else 2, together, 1)
    monkeypatch.setattr(scorer, "SCHEDULE", tune.everywhere(form, rounds))
    # Two CTAs a request: score rows have four more columns.
    longest = page_size * max(4, round_columns * rounds * 2 - 4)
    lens = tuple(min(longest, longest * part // 10 + 3) for part in range(1, 11))
    case = cases.decode_case(
        "", world_size, page_size, seq_lens=(0, *lens), decode_query_len=query_len, spare_columns=0
    )
    wrong = verify.score_differences(case, 1, score(case, 1, "cuda", device, enable_pdl=True), bitwise=True)
    assert not wrong.any(), wrong.nonzero()[:5]


@pytest.fixture
def few_multiprocessors(monkeypatch):
    monkeypatch.setattr(scorer.Kernel, "multiprocessors", staticmethod(lambda device: 4))


def test_a_plan_covers_every_round_and_no_more(few_multiprocessors):
    device = torch.device("cpu")
    for requests, columns, query_len in itertools.product((1, 3, 64, 1025), (4, 252, 8192), (1, 4, 8)):
        for (world_size, page_size), dependent in itertools.product(LAYOUTS, (False, True)):
            work = scorer.plan(
                scorer.SCHEDULE, requests, columns, (page_size, world_size), query_len, dependent, device
            )
            rounds = -(-columns * (page_size // world_size) // 128)
            stages = dict(work.kernel.variant.constants)["STAGES"]
            assert work.ctas == work.stride * requests + work.gaps
            assert (work.stride - 1) * work.rounds < rounds <= work.stride * work.rounds
            assert work.rounds == 1 or stages > 1
            assert work.gaps <= work.stride * requests
            assert dependent or work.gaps == 0


@pytest.mark.parametrize("requests", [1, 2, 3, 7, 640, 1023, 2048, 100_003])
def test_rounds_are_found_without_a_division(requests):
    words = scorer.Plan(None, requests, 0, 5, 1, 0).words
    reciprocal = words[1] % 2**64
    if requests > 1:
        for index in (0, 1, requests - 1, requests, 12345 * requests - 1, 12345 * requests, 2**31 - 1):
            assert index * reciprocal >> 64 == index // requests
    assert words == (5, words[1], 1, 0)


@pytest.mark.parametrize("requests", [1, 31, 32, 4096, 4097, 2**31 - 1])
@pytest.mark.parametrize("columns", [4, 8192, 12288])
def test_no_launch_is_too_large_for_a_device(few_multiprocessors, requests, columns):
    for layout, query_len in itertools.product(((128, 4), (256, 2)), (1, 4, 8)):
        for dependent in (False, True):
            work = scorer.plan(
                scorer.SCHEDULE, requests, columns, layout, query_len, dependent, torch.device("cpu")
            )
            rounds = -(-columns * (layout[0] // layout[1]) // 128)
            assert work.ctas <= min(2**31 - 1, max(2 * requests * rounds, 1))
            if requests * rounds >= 65536:
                assert work.ctas - work.gaps <= max(scorer.SCHEDULE.most_ctas, requests)


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
    plausible = [torch.full_like(part, 0x38) for part in late]  # 1.0
    pieces = [Late(part, before, part.clone()) for part, before in zip(late, plausible, strict=True)]
    monkeypatch.setattr(cuda_emulation, "LATE", pieces)
    out = poisoned((case.tokens, HEADS, case.score_columns), torch.float32, device)
    changes = {"index_q": q, "index_k": keys, "block_table": table, "seq_lens": lens, "enable_pdl": True}
    score(case, 1, "cuda", device, out, **changes)
    wrong = verify.score_differences(case, 1, out, bitwise=True)
    assert not wrong.any(), wrong.nonzero()[:5]


FAULTS = {
    "the queries are read before the wait": (
        "one round",
        "  make_ready(source);\n",
        "  make_ready(source);\n  scorer.take();\n",
        ("  meet_warp();\n  scorer.take();\n", "  meet_warp();\n"),
    ),
    "the newest page is copied before the wait": (
        "one round",
        "    if (history) {\n      copy_to_shared",
        "    if (true) {\n      copy_to_shared",
        ("if (lane < kStages && has_keys && !history) {", "if (false) {"),
    ),
    "a gap ends without waiting": (
        "one round, with gaps",
        "if (share.gap) {\n    wait_for_predecessor();",
        "if (share.gap) {",
    ),
    "a gap takes the place of a round": ("one round, with gaps", "? index / 2 :", "? index :"),
    "an empty CTA ends without waiting": (
        "one round",
        "if (first_column >= written) {\n    wait_for_predecessor();",
        "if (first_column >= written) {",
    ),
    "keys are read before they have arrived": (
        "one round",
        "      wait_for(&arrived[warp][stage], parity >> stage & 1);\n",
        "",
    ),
    "a stage's second copy is not waited for": ("loops", "parity ^= 1u << stage;", ""),
    "a copy is announced and never started": (
        "one round",
        "if (lane < kStages && has_keys && !history) {",
        "if (false) {",
    ),
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
