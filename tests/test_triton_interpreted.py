"""What only the interpreter can show of the Triton kernels: what each program reads, how often and when.

The interpreter runs one program after another, and every access of memory is a call of its builder.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections import Counter

import pytest
import torch
from helpers import HEADS, merge, publish, random_scores, score

import msa_icp
from msa_icp import cases
from msa_icp.cases import bits

if msa_icp.backends("cpu")["triton"] is not None:
    pytest.skip("Triton is not interpreted here", allow_module_level=True)
interpreter = importlib.import_module("triton.runtime.interpreter")
scorer = importlib.import_module("msa_icp.triton_backend.decode_index_score_sharded")
pdl = importlib.import_module("msa_icp.triton_backend.pdl")
on_triton = pytest.mark.parametrize("device", ["cpu"], ids=["triton-cpu"])


# ---------------------------------------------------------------- how often


@pytest.fixture
def reads(monkeypatch):
    """How often each address has been read, atomically or not."""
    counts = Counter()

    def counted(method, pointers_at):
        original = getattr(interpreter.InterpreterBuilder, method)

        def call(self, *arguments):
            counts.update(arguments[pointers_at].data.ravel().tolist())
            return original(self, *arguments)

        monkeypatch.setattr(interpreter.InterpreterBuilder, method, call)

    counted("create_masked_load", 0)
    counted("create_atomic_rmw", 1)
    return counts


@on_triton
@pytest.mark.parametrize("failed", [0, 1, -1])
@pytest.mark.parametrize("op", ["publish", "merge", "merge tagged"])
def test_polls_of_a_wait(reads, device, op, failed):
    """As many as the limit says and, after a failure, one (contract, section 6)."""
    limit, tagged = 9, op == "merge tagged"
    group = msa_icp.ReceiveStorage.in_process(2, capacity=1, device=device)
    storage = group[0]
    storage.errors[0] = failed
    if op == "publish":
        words = group[1].recv[0, 0, 1, 0, 32:]  # for head 3 of rank 0, and not taken yet
        words[0] = 1
        publish(storage, random_scores(1, 4, seed=0), [4], backend="triton", spin_limit=limit)
    else:
        row = (storage.tagged_recv if tagged else storage.recv)[0, 1, 0, 0]
        words = row if tagged else row[32:]
        merge(storage, [4], backend="triton", tagged=tagged, spin_limit=limit)
    assert reads[words.data_ptr()] == (limit if failed == 0 else 1)


# ---------------------------------------------------------------- when


class LatePredecessor:
    """A predecessor that each program of a dependent launch finds running, and ended once it has waited.

    `pieces` are what it writes: tensors of bytes that hold NaN until then.
    """

    def __init__(self, monkeypatch, pieces):
        self.pieces = [(piece, piece.clone()) for piece in pieces]
        self.programs, self.unfinished, self.running = 0, 0, False
        original = interpreter.InterpreterBuilder.set_grid_idx

        def begin_program(builder, x, y, z):
            original(builder, x, y, z)
            self.end_program()
            self.programs += 1
            self.running = True
            for piece, _ in self.pieces:
                piece.fill_(cases.NAN_BYTE)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", begin_program)
        monkeypatch.setattr(pdl, "gdc_wait", self.wait)
        monkeypatch.setattr(pdl, "gdc_launch_dependents", lambda: None)

    def wait(self):
        self.running = False
        for piece, written in self.pieces:
            piece.copy_(written)

    def end_program(self):
        self.unfinished += self.running


def dependent_plan(monkeypatch, **schedule):
    """Make the scorer think that it has a device with dependent launch; the plans that it then makes."""
    plans, make = [], scorer.plan.__wrapped__

    def plan(*arguments):
        plans.append(make(*arguments))
        return plans[-1]

    target = dataclasses.replace(scorer.target_of(torch.device("cpu")), dependent_launch=True)
    monkeypatch.setattr(scorer, "target_of", lambda device: target)
    monkeypatch.setattr(scorer, "SCHEDULE", dataclasses.replace(scorer.SCHEDULE, **schedule))
    monkeypatch.setattr(scorer, "plan", plan)
    return plans


EARLY = {
    "all early": {"registers": 4, "wide_registers": 4},
    "gaps": {"registers": 128, "wide_registers": 128},
    "one gap": {"registers": 256, "wide_registers": 256, "gaps": 1},
    "no gaps": {"registers": 128, "wide_registers": 128, "gaps": 0},
    "none early": {"registers": 256, "wide_registers": 256, "gaps_below": 0},
    "a loop": {"programs": 4},
}
"""Schedules for a device of one multiprocessor: where programs read before they wait, and where not."""


@on_triton
@pytest.mark.parametrize("name", EARLY)
@pytest.mark.parametrize(("world_size", "page_size", "query_len"), [(4, 128, 1), (2, 256, 3)])
def test_programs_that_start_early(monkeypatch, device, name, world_size, page_size, query_len):
    """The bits of the plain form; nothing that the predecessor may still write is read before it ended.

    That is everything but lengths, table, and keys in pages below the new tokens (contract, section 11). And
    every program waits, whether it has a tile or not.
    """
    case = cases.decode_case(
        "",
        world_size,
        page_size,
        seq_lens=(1, 0, page_size * 4, page_size * 5 + 2),
        decode_query_len=query_len,
        keys=cases.full_range,
        queries=cases.full_range,
        spare_columns=0,
    )
    query, shard = case.index_q.clone(), case.shard(1)
    # As many columns as the last request needs, so that the last program of a grid has something to write.
    expected, got = (cases.poisoned((case.tokens, HEADS, 8), torch.float32, device) for _ in range(2))
    score(case, 1, "triton", device, out=expected, index_q=query, index_k=shard)
    assert torch.isfinite(expected[-1, 0, :5]).all()

    new_pages = [
        int(case.block_table[b, column])
        for b, seq_len in enumerate(case.seq_lens.tolist())
        for column in range(max(0, seq_len - query_len) // page_size, -(-seq_len // page_size))
    ]
    plans = dependent_plan(monkeypatch, **EARLY[name])
    pieces = [query.view(torch.uint8), *(shard.view(torch.uint8)[page] for page in new_pages)]
    late = LatePredecessor(monkeypatch, pieces)
    score(case, 1, "triton", device, out=got, index_q=query, index_k=shard, enable_pdl=True)
    late.end_program()
    assert torch.equal(bits(got), bits(expected))
    assert late.unfinished == 0, "programs that did not wait"
    (plan,) = plans
    constants = dict(zip(plan.kernel.constants, plan.constants, strict=True))
    early = {"all early": scorer.ALL, "none early": scorer.NONE, "a loop": scorer.NONE}
    assert constants["EARLY"] == early.get(name, scorer.FIRST_WAVE).value
    assert constants["DEPENDENT"]
    assert constants["ONE_TILE"] == (name != "a loop")
    assert plan.gaps == {"gaps": 2, "one gap": 1}.get(name, 0)
    assert late.programs >= 4
    if name in ("gaps", "one gap", "no gaps"):
        assert plan.early < late.programs - plan.gaps, "no program is of a later wave"
