"""The words of a graph that say where its query is: found, and changed when the query moves."""

from __future__ import annotations

import struct

import driver_stand_in
import pytest
import torch
from driver_stand_in import Driver, Graph, Node
from facade import Decode
from test_indexer import batch

from msa_icp import cases
from msa_icp.indexer import graph_query, graphs

STAGED = torch.zeros((6, 4, 128), dtype=torch.uint8)
BYTES = STAGED.numel()


def word(value):
    return struct.pack("Q", value)


def of_triton(query, scale=7):
    """Pointers and numbers, each a parameter of its own."""
    return word(query), word(1 << 40), struct.pack("i", scale)


def of_cuda(query):
    """One struct of words, and an odd end that holds none."""
    return (word(5) + word(query) + word(1 << 40) + b"tail",)


@pytest.fixture
def driver(monkeypatch):
    made = Driver([])
    driver_stand_in.install(monkeypatch, made)
    return made


def test_the_kernels_of_a_graph_that_read_the_query(driver):
    here = STAGED.data_ptr()
    driver.graph += [
        Node(*of_triton(here)),
        Node(),
        Node(*of_cuda(here + 512), by_kernel=True),
        Node(word(here + BYTES), word(here - 1)),  # just outside
        Node(struct.pack("i", 3)),
        Node(word(here), packed=True),
    ]
    untouched = [node.parameters for node in driver.graph[3:]]
    words = graph_query.QueryWords(Graph(), STAGED)
    assert words.count == 2
    query = torch.zeros_like(STAGED)
    for at in (query, query, STAGED):
        words.read_from(at)
        assert driver.graph[0].parameters == of_triton(at.data_ptr())
        assert driver.graph[2].parameters == of_cuda(at.data_ptr() + 512)
    assert [node.sets for node in driver.graph] == [2, 0, 2, 0, 0, 0]  # once for every move
    assert [node.parameters for node in driver.graph[3:]] == untouched


def test_nothing_is_set_while_the_query_stays(driver):
    driver.graph.append(Node(*of_cuda(STAGED.data_ptr())))
    graph_query.QueryWords(Graph(), STAGED).read_from(STAGED)
    assert driver.graph[0].sets == 0


def test_what_the_driver_refuses_is_told_and_tried_again(driver):
    driver.graph.append(Node(*of_cuda(STAGED.data_ptr())))
    words, query = graph_query.QueryWords(Graph(), STAGED), torch.zeros_like(STAGED)
    driver.refuse = True
    for at in (query, query, STAGED):
        with pytest.raises(RuntimeError, match=r"CUDA_ERROR_INVALID_VALUE: invalid argument"):
            words.read_from(at)
    driver.refuse = False
    words.read_from(query)
    assert driver.graph[0].parameters == of_cuda(query.data_ptr())


@pytest.mark.parametrize(("readers", "found"), [(1, True), (2, False)])
def test_a_graph_that_hides_a_reader_has_its_query_copied(driver, monkeypatch, readers, found):
    driver.graph += [Node(*of_triton(STAGED.data_ptr())), Node(word(STAGED.data_ptr()), packed=True)]
    monkeypatch.setattr(graphs, "can_be_moved", lambda: True)
    words = graphs.query_words(Graph(), STAGED, STAGED, readers)
    assert (words is not None) == found


def test_a_query_that_lies_otherwise_is_copied(driver, monkeypatch):
    driver.graph.append(Node(*of_triton(STAGED.data_ptr())))
    monkeypatch.setattr(graphs, "can_be_moved", lambda: True)
    apart = torch.zeros((6, 8, 128), dtype=torch.uint8)[:, ::2]
    assert graphs.query_words(Graph(), STAGED, apart, 1) is None


@pytest.mark.parametrize(
    ("cuda", "version", "can"), [("13.0", 12040, True), ("13.0", 12030, False), (None, 13000, False)]
)
def test_what_a_query_can_be_moved_with(driver, monkeypatch, cuda, version, can):
    driver.version = version
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert graph_query.can_be_moved.__wrapped__() is can


def test_an_old_torch_and_a_missing_driver(driver, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with monkeypatch.context() as patched:
        patched.setitem(__import__("sys").modules, "cuda.bindings", None)
        assert not graph_query.can_be_moved.__wrapped__()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    assert not graph_query.can_be_moved.__wrapped__()


@pytest.mark.exchange
def test_a_graph_of_the_device_shows_every_reader(backend, device, monkeypatch):
    """A layer that is replayed reads its query where it is: nothing is copied, and the result is right."""
    if device == "cpu" or not graph_query.can_be_moved():
        pytest.skip("no graph whose query can be moved")
    ranks = Decode(batch(), backend, device)
    for plan in ranks.plans:
        plan.warmup()
    found = []
    own = graphs.query_words
    monkeypatch.setattr(graphs, "query_words", lambda *a: found.append(own(*a)) or found[-1])
    steps = [
        plan.layer_graphs(capture_after=0).begin_step(decode=step, decode_tokens=ranks.case.tokens)
        for plan, step in zip(ranks.plans[:1], ranks.steps(tagged=True)[:1], strict=True)
    ]
    for seed in range(3):
        queries = cases.exact(ranks.queries.shape, seed=seed).to(device)
        steps[0].run(0, queries, ranks.keys[0], slot=0)
        torch.cuda.synchronize()
    assert len(found) == 1
    assert found[0] is not None
    assert found[0]._address == queries.data_ptr()
