"""Publish and merge of all ranks together: orders, steps, slot sets, failures (contract, section 6)."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    HEADS,
    SHORT_SPIN,
    assert_failed,
    assert_same,
    merge,
    publish,
    random_scores,
    signed,
    snapshot,
)

import msa_icp
from msa_icp import reference, verify
from msa_icp.cases import poisoned
from msa_icp.verify import padded

pytestmark = pytest.mark.exchange
worlds = pytest.mark.parametrize("world_size", [2, 4])
forms = pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
TOKENS, COLUMNS, FORCE = 3, 24, (1, 2)
NUM_VALID = [24, 9, 0]


def group_of(world_size, device, capacity=TOKENS):
    return msa_icp.ReceiveStorage.in_process(world_size, capacity=capacity, device=device)


def step_scores(world_size, step):
    return [random_scores(TOKENS, COLUMNS, seed=100 * step + rank) for rank in range(world_size)]


def truth(scores, num_valid=NUM_VALID):
    """`[T][4]` padded ids: every rank's Top16 of its scores of the same blocks, merged."""
    return [
        [
            padded(
                reference.merge(
                    [
                        (b, float(mine[t, h, b]))
                        for mine in scores
                        for b in reference.select(mine[t, h], num_valid[t], *FORCE)
                    ],
                    num_valid[t],
                    *FORCE,
                )
            )
            for h in range(HEADS)
        ]
        for t in range(len(num_valid))
    ]


def put(group, rank, scores, backend, **rest):
    device = group[0].device
    publish(group[rank], scores[rank].to(device), NUM_VALID, backend=backend, force=FORCE, **rest)


def take(group, rank, backend, **rest):
    return merge(group[rank], NUM_VALID, backend=backend, force=FORCE, **rest)


def assert_merged(got, scores, rank, hpr):
    expected = [heads[rank * hpr : (rank + 1) * hpr] for heads in truth(scores)]
    assert got.tolist() == expected


# ---------------------------------------------------------------- when everybody comes


@forms
@worlds
def test_any_rank_first_over_many_steps(backend, device, world_size, tagged):
    orders = list(itertools.permutations(range(world_size)))
    steps = 3 if verify.is_slow(backend, device) else 24
    group = group_of(world_size, device)
    for step in range(steps):
        slot = step % 3
        scores = step_scores(world_size, step)
        for rank in orders[step % len(orders)]:
            put(group, rank, scores, backend, slot=slot, tagged=tagged)
        for rank in orders[-1 - step % len(orders)]:
            got = take(group, rank, backend, slot=slot, tagged=tagged)
            assert_merged(got, scores, rank, group[0].heads_per_rank)
    for storage in group:
        storage.check()
        assert not storage.recv[..., 32].any()
        per_slot = [len(range(s, steps, 3)) if tagged else 0 for s in range(3)]
        for slot, count in enumerate(per_slot):
            assert (storage.publish_generations[slot] == count).all()
            assert (storage.expected_generations[slot] == count).all()


@forms
def test_a_fast_rank_is_a_layer_ahead(backend, device, tagged):
    """Rank 0 publishes the next layer before the others merge this one, with two slot sets in turn."""
    group = group_of(4, device)
    layers = [step_scores(4, layer) for layer in range(4)]
    put(group, 0, layers[0], backend, slot=0, tagged=tagged)
    for layer, scores in enumerate(layers):
        slot = layer % 2
        for rank in (1, 2, 3):
            put(group, rank, scores, backend, slot=slot, tagged=tagged)
        assert_merged(take(group, 0, backend, slot=slot, tagged=tagged), scores, 0, 1)
        if layer + 1 < len(layers):
            put(group, 0, layers[layer + 1], backend, slot=1 - slot, tagged=tagged)
        for rank in (3, 1, 2):
            assert_merged(take(group, rank, backend, slot=slot, tagged=tagged), scores, rank, 1)
    for storage in group:
        storage.check()


@forms
def test_slot_sets_are_apart(backend, device, tagged):
    """All three are published before the first is merged; they are merged in another order."""
    group = group_of(2, device)
    layers = [step_scores(2, layer) for layer in range(3)]
    for slot, rank in itertools.product(range(3), range(2)):
        put(group, rank, layers[slot], backend, slot=slot, tagged=tagged)
    for slot, rank in itertools.product((1, 2, 0), range(2)):
        assert_merged(take(group, rank, backend, slot=slot, tagged=tagged), layers[slot], rank, 2)


@forms
def test_fewer_tokens_then_more(backend, device, tagged):
    """Tokens that a step leaves out keep their counters and their ready words."""
    group = group_of(2, device)
    for step, tokens in enumerate((3, 1, 2, 3, 1, 3)):
        scores = step_scores(2, step)
        for rank in range(2):
            publish(
                group[rank],
                scores[rank][:tokens].to(device),
                NUM_VALID[:tokens],
                backend=backend,
                tagged=tagged,
                force=FORCE,
            )
        for rank in range(2):
            got = merge(group[rank], NUM_VALID[:tokens], backend=backend, tagged=tagged, force=FORCE)
            expected = [heads[rank * 2 : rank * 2 + 2] for heads in truth(scores)[:tokens]]
            assert got.tolist() == expected
    if tagged:
        assert group[0].publish_generations[0, 0].tolist() == [6, 4, 3]
        assert group[1].expected_generations[0, 1].tolist() == [6, 4, 3]


@pytest.mark.parametrize("start", [2**31 - 2, 2**32 - 2])
def test_generations_wrap_through_steps(backend, device, start):
    group = group_of(2, device)
    for storage in group:
        storage.publish_generations.fill_(signed(start))
        storage.expected_generations.fill_(signed(start))
    for step in range(4):
        scores = step_scores(2, step)
        for rank in range(2):
            put(group, rank, scores, backend, slot=1, tagged=True)
        for rank in range(2):
            assert_merged(take(group, rank, backend, slot=1, tagged=True), scores, rank, 2)
    assert (group[0].publish_generations[1] == signed(start + 4)).all()
    assert (group[0].expected_generations[1] == signed(start + 4)).all()


@worlds
def test_prefill_merges_the_same_rows(backend, device, world_size):
    """What the all-to-all brings is the rows of decode: equal but for padding tokens."""
    group = group_of(world_size, device)
    scores = step_scores(world_size, 7)
    for rank in range(world_size):
        put(group, rank, scores, backend)
    for storage in group:
        received = storage.recv[0].clone()
        received[..., 32] = 0
        output = poisoned((TOKENS, storage.heads_per_rank, 16), torch.int32, device)
        msa_icp.msa_icp_merge_candidates(
            received,
            torch.tensor(NUM_VALID, dtype=torch.int32, device=device),
            output,
            storage.errors,
            init_blocks=FORCE[0],
            local_blocks=FORCE[1],
            prefill=True,
            backend=backend,
        )
        decoded = take(group, storage.rank, backend)
        assert (decoded[2] == -1).all()
        decoded[2, :, 0] = 0
        assert torch.equal(output.cpu(), decoded)


@forms
def test_one_poll_is_enough_when_everybody_is_there(backend, device, tagged):
    group = group_of(2, device)
    scores = step_scores(2, 0)
    for rank in range(2):
        put(group, rank, scores, backend, tagged=tagged, spin_limit=1)
    for rank in range(2):
        assert_merged(take(group, rank, backend, tagged=tagged, spin_limit=1), scores, rank, 2)


# ---------------------------------------------------------------- when somebody does not


@forms
@pytest.mark.parametrize("dead", [0, 1, 2, 3])
def test_a_publisher_that_never_comes(backend, device, tagged, dead):
    group = group_of(4, device)
    scores = step_scores(4, 0)
    for rank in range(4):
        if rank != dead:
            put(group, rank, scores, backend, slot=2, tagged=tagged)
    for storage in group:
        if storage.rank == dead:
            continue
        before = snapshot(group)
        got = take(group, storage.rank, backend, slot=2, tagged=tagged, spin_limit=SHORT_SPIN)
        assert (got == -1).all()
        assert_failed(storage.errors, TOKENS, 2, 1 << dead, range(TOKENS))
        before[storage.rank][4][:] = storage.errors.cpu()
        if tagged:
            before[storage.rank][3][2] = 1  # as if it had matched
        assert_same(before, snapshot(group))  # no ready word is cleared
        with pytest.raises(msa_icp.IcpTimeoutError, match=rf"rank {dead} ") as caught:
            storage.check()
        error = caught.value
        assert (error.slot, error.ranks, error.count) == (2, (dead,), TOKENS)
        assert error.token == storage.errors[3]


@forms
def test_one_late_row_among_many(backend, device, tagged):
    """Only head 1, token 1 of rank 1 is missing at rank 0: everything else is merged as ever."""
    group = group_of(2, device)
    scores = step_scores(2, 0)
    for rank in range(2):
        put(group, rank, scores, backend, tagged=tagged)
    if tagged:
        group[0].tagged_recv[0, 1, 1, 1] = 0
    else:
        group[0].recv[0, 1, 1, 1, 32] = 0
    got = take(group, 0, backend, tagged=tagged, spin_limit=SHORT_SPIN).tolist()
    expected = [heads[:2] for heads in truth(scores)]
    expected[1][1] = [-1] * 16
    assert got == expected
    assert group[0].errors.tolist() == [1, 1, 2, 1]
    if tagged:
        assert group[0].expected_generations[0].tolist() == [[1, 1, 1]] * 2
    else:
        # The other rank's row of that (token, head) is not cleared either.
        assert group[0].recv[0, :, :, :, 32].tolist() == [[[0, 0, 0], [0, 1, 0]], [[0, 0, 0], [0, 0, 0]]]


@forms
def test_several_ranks_missing(backend, device, tagged):
    group = group_of(4, device)
    scores = step_scores(4, 0)
    for rank in (0, 2):
        put(group, rank, scores, backend, slot=1, tagged=tagged)
    take(group, 2, backend, slot=1, tagged=tagged, spin_limit=SHORT_SPIN)
    assert_failed(group[2].errors, TOKENS, 1, 0b1010, range(TOKENS))
    with pytest.raises(msa_icp.IcpTimeoutError) as caught:
        group[2].check()
    assert caught.value.ranks == (1, 3)


def test_a_living_rank_that_went_on_is_not_blamed(backend, device):
    """Tagged rows of living ranks may be overwritten before our limit ends: only the dead one was missing.

    After a failure the others wait one poll a layer, so they are back in this slot set at once.
    """
    group = group_of(4, device)
    for step in range(3):
        for rank in (0, 1, 3):
            if step == 0 or rank != 0:
                put(group, rank, step_scores(4, step), backend, tagged=True)
    got = take(group, 0, backend, tagged=True, spin_limit=SHORT_SPIN)
    assert (got == -1).all()
    assert_failed(group[0].errors, TOKENS, 0, 1 << 2, range(TOKENS))


def test_only_ranks_that_went_on(backend, device):
    """All rows had come, two were overwritten before we looked: nobody was missing, but the rows are lost."""
    group = group_of(4, device)
    for step in range(2):
        for rank in range(4) if step == 0 else (1, 3):
            put(group, rank, step_scores(4, step), backend, tagged=True)
    got = take(group, 0, backend, tagged=True, spin_limit=SHORT_SPIN)
    assert (got == -1).all()
    assert_failed(group[0].errors, TOKENS, 0, 0, range(TOKENS))
    with pytest.raises(msa_icp.IcpTimeoutError, match="overwritten by a newer use of the slot set") as caught:
        group[0].check()
    assert caught.value.ranks == ()


@forms
@pytest.mark.parametrize("half", [put, take])
def test_ctrl_c_in_a_wait_is_a_failure(tagged, half, monkeypatch):
    """On a CPU, where a wait is Python's: what it left out of step is found by a check."""
    group = group_of(2, "cpu")
    scores = step_scores(2, 0)
    put(group, 0, scores, "torch", slot=1, tagged=tagged)
    if half is put and tagged:
        pytest.skip("a tagged publish waits for nobody")

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("msa_icp.torch_backend.waiting._yield", interrupt)
    arguments = (scores, "torch") if half is put else ("torch",)  # its own rows have not been merged
    with pytest.raises(KeyboardInterrupt):
        half(group, 0, *arguments, slot=1, tagged=tagged)
    assert group[0].errors[:2].tolist() == [TOKENS * (4 if half is put else 2), 2]
    with pytest.raises(msa_icp.IcpTimeoutError) as caught:
        group[0].check()
    assert caught.value.ranks == ((0,) if half is put else (1,))
    if tagged:
        assert group[0].expected_generations[1].tolist() == [[1] * TOKENS] * 2


def test_a_comm_behind_a_header_names_its_slot(backend, device):
    """Where the rows lie tells nothing there: the name of the slot set does."""
    layout = msa_icp.msa_icp_comm_layout(2, 2, TOKENS)
    words = torch.zeros(2 * 2 * TOKENS * 33 + layout["storage_words"], dtype=torch.int32, device=device)
    words = words[2 * 2 * TOKENS * 33 :]
    legacy = layout["tagged_offset_bytes"] // 4
    comm = SimpleNamespace(
        recv=words[:legacy].view(layout["legacy_shape"]),
        tagged_recv=words[legacy:].view(torch.int64).view(layout["tagged_shape"]),
        expected_generations=torch.zeros(layout["expected_shape"], dtype=torch.int32, device=device),
        errors=torch.zeros(4, dtype=torch.int32, device=device),
    )
    num_valid = torch.full((1,), 9, dtype=torch.int32, device=device)
    output = torch.zeros(1, 2, 16, dtype=torch.int32, device=device)
    numbers = {"init_blocks": 0, "local_blocks": 0, "spin_limit": SHORT_SPIN, "backend": backend}
    for tagged in (False, True):
        for slot in range(3):
            comm.errors.zero_()
            msa_icp.merge_received(comm, num_valid, output, slot=slot, tagged=tagged, **numbers)
            assert comm.errors.tolist() == [2, slot + 1, 3, 0]


@forms
def test_the_first_failure_stays(backend, device, tagged):
    group = group_of(2, device)
    scores = step_scores(2, 0)
    put(group, 0, scores, backend, slot=2, tagged=tagged)
    take(group, 0, backend, slot=2, tagged=tagged, spin_limit=SHORT_SPIN)
    assert_failed(group[0].errors, TOKENS * 2, 2, 2, range(TOKENS))
    first = group[0].errors.tolist()
    take(group, 0, backend, slot=0, tagged=tagged, spin_limit=SHORT_SPIN)
    assert group[0].errors.tolist() == [TOKENS * 4, *first[1:]]


@pytest.mark.parametrize("words", [1, 2, 3, 4, 6])
def test_error_words_of_any_number(backend, device, words):
    group = group_of(2, device)
    errors = torch.zeros(words + 2, dtype=torch.int32, device=device)
    errors[words:] = 77
    take(group, 1, backend, slot=1, spin_limit=SHORT_SPIN, errors=errors[:words])
    if words >= 4:
        assert_failed(errors, TOKENS * 2, 1, 0b11, range(TOKENS))
        assert errors[4:].tolist() == [*[0, 0][: words - 4], 77, 77]
    else:
        assert errors.tolist() == [*[TOKENS * 2, 0, 0][:words], 77, 77]


def test_a_late_publish_stores_nothing(backend, device):
    """Rank 1 of 4 has not merged slot set 1; its row, and nothing else, is left out."""
    group = group_of(4, device)
    old, new = step_scores(4, 0), step_scores(4, 1)
    put(group, 3, old, backend, slot=1)
    for rank in (0, 2, 3):
        group[rank].recv[1, 3, :, :, 32] = 0
    before = snapshot(group)
    put(group, 3, new, backend, slot=1, spin_limit=SHORT_SPIN)
    after = snapshot(group)
    assert_failed(group[3].errors, TOKENS, 1, 1 << 1, range(TOKENS))
    assert torch.equal(after[1][0], before[1][0])
    for rank in (0, 2, 3):
        assert (after[rank][0][1, 3, 0, :, 32] == 1).all()
        assert not torch.equal(after[rank][0], before[rank][0])
    with pytest.raises(msa_icp.IcpTimeoutError, match="rank 1 "):
        group[3].check()


def test_a_late_publish_of_one_token(backend, device):
    group = group_of(2, device)
    group[1].recv[0, 0, 1, 2, 32] = 1
    put(group, 0, step_scores(2, 0), backend, spin_limit=SHORT_SPIN)
    assert group[0].errors.tolist() == [1, 1, 2, 2]
    assert group[1].recv[0, 0, :, :, 32].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert not group[1].recv[0, 0, 1, 2, :32].any()


def test_any_ready_word_but_zero_holds_a_publish_back(backend, device):
    group = group_of(2, device)
    group[1].recv[0, 0, 1, 2, 32] = -5
    put(group, 0, step_scores(2, 0), backend, spin_limit=SHORT_SPIN)
    assert group[0].errors.tolist() == [1, 1, 2, 2]
    assert group[1].recv[0, 0, 1, 2, 32] == -5


def test_a_tagged_publish_never_waits(backend, device):
    group = group_of(2, device)
    for step in range(3):
        put(group, 0, step_scores(2, step), backend, tagged=True, spin_limit=1)
    group[0].check()
    assert (group[0].publish_generations[0] == 3).all()


def test_a_tagged_group_goes_on_after_a_late_merge(backend, device):
    """The counter has advanced as if the row had come: the next generation matches again."""
    group = group_of(2, device)
    put(group, 0, step_scores(2, 0), backend, tagged=True)
    assert (take(group, 0, backend, tagged=True, spin_limit=SHORT_SPIN) == -1).all()
    put(group, 1, step_scores(2, 0), backend, tagged=True)
    take(group, 1, backend, tagged=True)
    scores = step_scores(2, 1)
    for rank in range(2):
        put(group, rank, scores, backend, tagged=True)
    for rank in range(2):
        assert_merged(take(group, rank, backend, tagged=True), scores, rank, 2)


@forms
def test_after_a_failure_there_is_one_poll(backend, device, tagged):
    """With a limit of minutes, a step of many layers after a failure is over at once."""
    group = group_of(2, device)
    group[0].errors[0] = 1
    scores = step_scores(2, 0)
    began = time.monotonic()
    for layer in range(4):
        put(group, 0, scores, backend, slot=layer % 2, tagged=tagged, spin_limit=2**31 - 1)
        got = take(group, 0, backend, slot=layer % 2, tagged=tagged, spin_limit=2**31 - 1)
        assert (got == -1).all()
    assert time.monotonic() - began < (60 if verify.is_slow(backend, device) else 10)
    merged = 4 * TOKENS * 2
    published = 0 if tagged else 2 * TOKENS * 4  # layers 2 and 3 find both slot sets taken
    assert int(group[0].errors[0]) == 1 + merged + published
    assert group[0].errors[1:].tolist() == [0, 0, 0]  # the first failure was somebody else's


@forms
def test_after_a_failure_that_one_poll_still_counts(backend, device, tagged):
    """Who is there is still served: a failure makes waits short and does not switch the exchange off."""
    group = group_of(2, device)
    group[0].errors[0] = 5
    scores = step_scores(2, 0)
    for rank in range(2):
        put(group, rank, scores, backend, tagged=tagged)
    assert_merged(take(group, 0, backend, tagged=tagged), scores, 0, 2)
    assert group[0].errors.tolist() == [5, 0, 0, 0]


@forms
def test_reset_after_a_failure(backend, device, tagged):
    group = group_of(2, device)
    for step in range(2):
        put(group, 0, step_scores(2, step), backend, slot=step, tagged=tagged)
        take(group, 0, backend, slot=step, tagged=tagged, spin_limit=SHORT_SPIN)
    group.reset()
    for part in itertools.chain(*snapshot(group)):
        assert not part.any()
    scores = step_scores(2, 9)
    for rank in range(2):
        put(group, rank, scores, backend, tagged=tagged)
    for rank in range(2):
        assert_merged(take(group, rank, backend, tagged=tagged), scores, rank, 2)
        group[rank].check()


def test_the_slot_of_a_view_with_fewer_tokens(backend, device):
    """A merge may take the first rows of a slot set only; its place in the storage still names it."""
    for slot in range(3):
        group = group_of(2, device, capacity=8)
        output = torch.empty((1, 2, 16), dtype=torch.int32, device=device)
        msa_icp.msa_icp_merge_candidates(
            group[0].recv[slot][:, :, :4],
            torch.ones(1, dtype=torch.int32, device=device),
            output,
            group[0].errors,
            init_blocks=0,
            local_blocks=0,
            spin_limit=SHORT_SPIN,
            backend=backend,
        )
        assert group[0].errors.tolist() == [2, slot + 1, 0b11, 0]


# ---------------------------------------------------------------- ranks that run at the same time


def cpu_and_fast(backend, device):
    if device != "cpu" or verify.is_slow(backend, device):
        pytest.skip("threads of one process: compiled code on a CPU")


def in_threads(*bodies):
    """Run the bodies at the same time; raise what the first of them raised."""
    errors: list[BaseException] = []

    def guarded(body):
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@forms
@worlds
@pytest.mark.large
def test_ranks_in_threads(backend, device, world_size, tagged):
    """Every rank runs its layers at its own pace, held back by nothing but the exchange."""
    cpu_and_fast(backend, device)
    group = group_of(world_size, device)
    layers = [step_scores(world_size, layer) for layer in range(20)]

    def rank_body(rank):
        def run():
            for layer, scores in enumerate(layers):
                time.sleep((rank * 7 + layer * 3) % 5 / 2000)
                with group[rank].slot_set() as slot:
                    put(group, rank, scores, backend, slot=slot, tagged=tagged, spin_limit=1 << 26)
                    got = take(group, rank, backend, slot=slot, tagged=tagged, spin_limit=1 << 26)
                assert_merged(got, scores, rank, group[0].heads_per_rank)
                group[rank].check()

        return run

    in_threads(*(rank_body(rank) for rank in range(world_size)))


@forms
@pytest.mark.large
def test_a_merge_that_has_to_wait(backend, device, tagged):
    cpu_and_fast(backend, device)
    group = group_of(2, device)
    scores = step_scores(2, 0)
    put(group, 0, scores, backend, tagged=tagged)

    def late():
        time.sleep(0.2)
        put(group, 1, scores, backend, tagged=tagged)

    def waiting():
        assert_merged(take(group, 0, backend, tagged=tagged, spin_limit=1 << 26), scores, 0, 2)

    in_threads(late, waiting)
    group[0].check()


@pytest.mark.large
def test_a_publish_that_has_to_wait(backend, device):
    cpu_and_fast(backend, device)
    group = group_of(2, device)
    scores = [step_scores(2, step) for step in range(2)]
    for rank in range(2):
        put(group, rank, scores[0], backend)

    def late():
        for rank in range(2):
            time.sleep(0.1)
            assert_merged(take(group, rank, backend), scores[0], rank, 2)

    in_threads(late, lambda: put(group, 0, scores[1], backend, spin_limit=1 << 26))
    group[0].check()
    put(group, 1, scores[1], backend)
    for rank in range(2):
        assert_merged(take(group, rank, backend), scores[1], rank, 2)


def done_before_the_end(waiting, done):
    """Whether `done()` is true at some time while `waiting()` still runs in another thread."""
    finished = threading.Event()
    seen = threading.Event()

    def watch():
        while not finished.wait(0.002):
            if done():
                seen.set()
                return

    def wait():
        try:
            waiting()
        finally:
            finished.set()

    in_threads(wait, watch)
    return seen.is_set()


@pytest.mark.large
def test_a_row_that_nobody_takes_does_not_hold_up_the_others(backend, device):
    """Rank 1 is gone; rank 0's own rows are free, and must be there long before the wait for rank 1 ends.

    Otherwise whoever waits for them blames a rank that is alive.
    """
    cpu_and_fast(backend, device)
    group = group_of(2, device)
    group[1].recv[0, 0, :, :, 32] = 1
    assert done_before_the_end(
        lambda: put(group, 0, step_scores(2, 0), backend, spin_limit=1 << 20),
        lambda: bool((group[0].recv[0, 0, :, :, 32] == 1).all()),
    ), "the rows of a living owner came only when the wait for the dead one was over"
    assert_failed(group[0].errors, TOKENS * 2, 0, 2, range(TOKENS))


@pytest.mark.large
def test_a_row_that_does_not_come_does_not_hold_up_the_others(backend, device):
    """Rows that all ranks have sent are taken at once, so that their publishers need not wait."""
    cpu_and_fast(backend, device)
    group = group_of(2, device)
    scores = step_scores(2, 0)
    for rank in range(2):
        put(group, rank, scores, backend)
    group[0].recv[0, 1, 1, 2, 32] = 0
    assert done_before_the_end(
        lambda: take(group, 0, backend, spin_limit=1 << 20),
        lambda: not group[0].recv[0, :, 0, :, 32].any(),
    ), "the rows of head 0 were cleared only when the wait for the row of head 1 was over"
    assert group[0].errors.tolist() == [1, 1, 2, 2]


@pytest.mark.large
@forms
def test_a_step_with_a_dead_peer_ends_in_one_limit(backend, device, tagged):
    cpu_and_fast(backend, device)
    group = group_of(4, device)
    scores = step_scores(4, 0)

    def layer(slot):
        began = time.monotonic()
        put(group, 0, scores, backend, slot=slot, tagged=tagged, spin_limit=1 << 17)
        take(group, 0, backend, slot=slot, tagged=tagged, spin_limit=1 << 17)
        return time.monotonic() - began

    first = layer(0)
    rest = sum(layer(n % 3) for n in range(1, 7))
    assert rest < max(first, 0.05), (first, rest)
