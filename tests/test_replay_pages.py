"""The page allocator against a model of it, and the rules that a serving engine relies on."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_icp.replay.pages import PageAllocator

# Keys as prefix chains make them: the key of a page names everything before it.
CHAINS = [[("a", 0), ("a", 1), ("a", 2)], [("a", 0), ("a", 1), ("b", 2)], [("c", 0), ("c", 1)], []]


@settings(deadline=None, max_examples=200)
@given(
    pages=st.integers(1, 9),
    moves=st.lists(
        st.tuples(st.sampled_from(["enter", "leave"]), st.integers(0, 3), st.integers(0, 2)), max_size=40
    ),
)
def test_pages_are_held_by_whom_they_were_given_to(pages, moves):
    allocator = PageAllocator(range(100, 100 + pages))
    contents: dict[int, object] = {}  # what a reader of the page would find
    requests: list[tuple[list, list[int]]] = []  # keys, pages
    for move, which, private in moves:
        if move == "leave":
            if requests:
                keys, held = requests.pop(which % len(requests))
                allocator.release(held)
        else:
            keys = CHAINS[which]
            before = allocator.available
            cost = allocator.cost(keys)
            if cost + private > before:
                if cost > before:
                    with pytest.raises(ValueError, match="are available"):
                        allocator.acquire_shared(keys)
                continue
            held = []
            for key, (page, fresh) in zip(keys, allocator.acquire_shared(keys), strict=True):
                if fresh:
                    contents[page] = key
                assert contents[page] == key, "a page that is not fresh holds its key's contents"
                held.append(page)
            for number in range(private):
                page = allocator.acquire_private()
                assert allocator.references(page) == 1
                contents[page] = (len(requests), number, object())
                held.append(page)
            assert allocator.available == before - cost - private
            requests.append((keys, held))

        references = Counter(page for _, held in requests for page in held)
        assert set(references) <= set(range(100, 100 + pages))
        assert all(allocator.references(page) == count for page, count in references.items())
        assert allocator.in_use == len(references)
        assert allocator.in_use + allocator.available == pages
        for keys, held in requests:
            assert len(set(held)) == len(held)
            for column, page in enumerate(held):
                sharers = [k for k, h in requests if page in h]
                if column < len(keys):
                    assert contents[page] == keys[column], "a page in use keeps its contents"
                    assert all(other[: column + 1] == keys[: column + 1] for other in sharers)
                else:
                    assert len(sharers) == 1, "a private page has one holder"


def test_a_prefix_that_nobody_holds_is_found_again_until_its_pages_are_needed():
    allocator = PageAllocator(range(3))
    first = allocator.acquire_shared(["x", "y"])
    assert [fresh for _, fresh in first] == [True, True]
    allocator.release(page for page, _ in reversed(first))
    assert allocator.acquire_shared(["x", "y"]) == [(page, False) for page, _ in first]
    allocator.release(page for page, _ in reversed(first))
    assert allocator.available == 3

    taken = [allocator.acquire_private(), allocator.acquire_private()]
    assert allocator.reused == 1, "the free page goes first, then the tail of the prefix"
    assert taken[1] == first[1][0]
    assert allocator.acquire_shared(["x"]) == [(first[0][0], False)]
    with pytest.raises(ValueError, match="1 pages are wanted, 0 are available"):
        allocator.acquire_private()


def test_fresh_pages_are_not_taken_from_the_prefix_that_is_being_acquired():
    allocator = PageAllocator(range(2))
    ((page, _),) = allocator.acquire_shared(["y"])
    allocator.release([page])
    allocator.release([allocator.acquire_private()])
    (fresh, is_fresh), (found, found_fresh) = allocator.acquire_shared(["x", "y"])
    assert (is_fresh, found_fresh) == (True, False)
    assert found == page != fresh


def test_a_page_is_released_once():
    allocator = PageAllocator(range(1))
    page = allocator.acquire_private()
    allocator.release([page])
    with pytest.raises(ValueError, match=f"page {page} is not in use"):
        allocator.release([page])
