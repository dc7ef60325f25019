"""Our names against the FlashInfer that is installed: signatures, fields, sizes (docs/integration.md).

Skipped where FlashInfer is not installed, but for the tests of the comparison itself. Its sources are read,
not imported, so `pip install --no-deps flashinfer-python==0.7.4` is enough, on any machine.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from inspect import Parameter
from pathlib import Path

import flashinfer_source as source
import pytest
import torch
from facade import Decode, Prefill
from test_indexer import batch, window
from test_indexer_steps import prefill_step

import msa_icp
from msa_icp import indexer

installed = pytest.mark.skipif(source.MISSING is not None, reason=source.MISSING or "")

FUNCTIONS = sorted(
    name
    for name in (source.functions(source.FUNCTIONS) if source.MISSING is None else {"not installed": None})
    if not name.startswith("_")
)
CLASSES = (
    "MSAIcpIndexerPlan",
    "MSAIcpPrefillStep",
    "MSAIcpDecodeStep",
    "MSAIcpLayerGraphs",
    "MSAIcpGraphStep",
)
METHODS = [
    (of, name)
    for of in CLASSES
    for name in (source.methods(source.classes(source.FACADE)[of]) if source.MISSING is None else ())
]
THEIRS_ALONE = {
    "MSAIcpIndexerPlan": {"arch"},
    "MSAIcpPrefillStep": {"device_index", "local_kwargs"},
    "MSAIcpDecodeStep": {"args", "device_index", "kwargs"},
    "MSAIcpLayerGraphs": {"device_index"},
    "MSAIcpGraphStep": {"cache", "decode", "decode_tokens", "exchange", "exchange_key", "prefill"},
}
"""Public attributes of FlashInfer's objects that ours have not; docs/integration.md lists them."""


def differences(theirs: list[Parameter], ours: list[Parameter]) -> list[str]:
    """Where a call that theirs takes could fail with ours, or mean another thing.

    Ours may have optional keyword-only parameters more, after all of theirs that have a name.
    """
    named = [p for p in theirs if p.kind is not Parameter.VAR_KEYWORD]
    extra = [p for p in ours[len(named) :] if p.kind is not Parameter.VAR_KEYWORD]
    found = [
        f"{p.name} is one more, and required or positional"
        for p in extra
        if p.kind is not Parameter.KEYWORD_ONLY or p.default is Parameter.empty
    ]
    for a, b in itertools.zip_longest(named, ours[: len(named)]):
        if b is None or (a.name, a.kind) != (b.name, b.kind):
            found.append(f"theirs has {a.kind.description} {a}, ours {b}")
        elif (a.default, type(a.default)) != (b.default, type(b.default)):
            found.append(f"{a.name}: the default is {a.default!r}, ours {b.default!r}")
    if len(named) < len(theirs) and not any(p.kind is Parameter.VAR_KEYWORD for p in ours):
        found.append(f"theirs takes {theirs[-1]}")
    return found


def bare(function) -> list[Parameter]:
    return [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]


# ---------------------------------------------------------------- the names of flashinfer.msa_ops


@installed
def test_every_name_is_there_in_both():
    assert source.exported("cake_icp_indexer") == set(FUNCTIONS)
    ours = {name for name in msa_icp.__all__ if name.startswith(("msa_icp_", "prepare_msa_icp"))}
    assert ours == set(FUNCTIONS)


@installed
@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_of_functions(name):
    theirs = source.parameters(source.functions(source.FUNCTIONS)[name])
    assert differences(theirs, bare(getattr(msa_icp, name))) == []


@installed
def test_fields_of_the_score_plan():
    """Theirs has `uniform` more, which its planner sets for its own kernels."""
    theirs = source.fields(source.classes(source.KERNELS)["MSAIcpScorePlan"])
    ours = [
        (f.name, f.default is not dataclasses.MISSING) for f in dataclasses.fields(msa_icp.MSAIcpScorePlan)
    ]
    assert theirs == [*ours, ("uniform", True)]


# ---------------------------------------------------------------- the facade


@installed
@pytest.mark.parametrize(("of", "name"), METHODS)
def test_signatures_of_methods(of, name):
    theirs = source.parameters(source.methods(source.classes(source.FACADE)[of])[name])
    assert differences(theirs, bare(getattr(getattr(indexer, of), name))) == []


@installed
def test_the_methods_that_an_engine_calls_are_among_them():
    expected = {
        "MSAIcpIndexerPlan": {"decode", "check_comm", "warmup", "prefill_local", "prepare_decode_step"},
        "MSAIcpPrefillStep": {"local", "merge", "record"},
        "MSAIcpDecodeStep": {"run", "record"},
        "MSAIcpLayerGraphs": {"begin_step", "clear"},
        "MSAIcpGraphStep": {"run"},
    }
    for of, names in expected.items():
        assert names <= {name for cls, name in METHODS if cls == of}, of


@pytest.fixture
def objects():
    """One of ours of each class."""
    ranks, windows = Decode(batch(), "torch", "cpu"), Prefill(window(), "torch", "cpu")
    plan, decode = ranks.plans[0], ranks.steps(tagged=True)[0]
    graphs = plan.layer_graphs()
    made = (
        *(plan, prefill_step(windows), decode, graphs),
        graphs.begin_step(decode=decode, decode_tokens=ranks.case.tokens),
    )
    return {type(one).__name__: one for one in made}


@installed
@pytest.mark.parametrize("of", CLASSES)
def test_attributes_of_the_facades_objects(of, objects):
    theirs = source.attributes(source.FACADE, of)
    assert theirs >= {"MSAIcpIndexerPlan": {"comm_layout"}, "MSAIcpGraphStep": set()}.get(of, {"indexer"})
    assert {name for name in theirs if not hasattr(objects[of], name)} == THEIRS_ALONE[of]


@pytest.mark.parametrize("of", CLASSES)
def test_the_page_lists_the_attributes_that_are_theirs_alone(of, objects):
    page = (Path(__file__).parent.parent / "docs" / "integration.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith(f"| attributes of `{of}`")]
    assert set(re.findall(r"`(\w+)`", line.split("|")[2])) == THEIRS_ALONE[of]
    assert not any(hasattr(objects[of], name) for name in THEIRS_ALONE[of])


# ---------------------------------------------------------------- sizes

LENGTHS = (1, 127, 128, 129, 255, 256, 257, 511, 512, 513, 40_000, 1 << 20, (1 << 20) + 1, 1 << 23)
PAGES = (128, 256)


@installed
def test_columns():
    theirs = source.run_sizes(processors=1)
    for length, page in itertools.product(LENGTHS, PAGES):
        assert msa_icp.msa_icp_index_score_columns(length, page) == theirs.index_score_columns(length, page)
        assert msa_icp.msa_icp_decode_score_columns(length, page) == theirs.decode_score_columns(length, page)


@installed
def test_receive_storage():
    theirs = source.run_sizes(processors=1)
    for world_size, capacity in itertools.product((2, 4), (1, 3, 64, 512)):
        arguments = world_size, 4 // world_size, capacity
        assert msa_icp.msa_icp_comm_layout(*arguments) == theirs.comm_layout(*arguments)


@installed
def test_pools_and_plan_storage():
    """A CPU's multiprocessors are the threads of torch."""
    theirs = source.run_sizes(processors=torch.get_num_threads())
    for tokens in (1, 7, 512):
        ours = msa_icp.msa_icp_decode_pool_bytes(max_decode_tokens=tokens)
        assert ours == theirs.decode_pool_bytes(max_decode_tokens=tokens)
    for total_q, segments in itertools.product((1, 64, 65, 128, 129, 8192), (1, 2, 300)):
        sizes = {"total_q": total_q, "batch": segments}
        ours = msa_icp.msa_icp_prefill_pool_bytes(**sizes, device="cpu")
        assert ours == theirs.prefill_pool_bytes(**sizes, device="cuda:0")
        ours = msa_icp.msa_icp_index_score_plan_storage(num_qo_heads=4, **sizes, device="cpu")
        assert ours == theirs.index_score_plan_storage(num_qo_heads=4, **sizes, device="cuda:0")


# ---------------------------------------------------------------- the comparison itself


@pytest.mark.parametrize(
    ("ours", "same"),
    [
        (lambda a, b=1, *, c, d=None: 0, True),
        (lambda a, b=1, *, c, d=None, e=3: 0, True),
        (lambda a, b=1, *, c, d=None, **rest: 0, True),
        (lambda a, b=1, *, c, d=None, e: 0, False),
        (lambda a, b=1, *, c, e=0, d=None: 0, False),
        (lambda a, b=1, *rest, c, d=None: 0, False),
        (lambda a, b=1, e=0, *, c, d=None: 0, False),
        (lambda a, b=True, *, c, d=None: 0, False),
        (lambda a, b, *, c, d=None: 0, False),
        (lambda a, b=1, *, c=0, d=None: 0, False),
        (lambda a, b=1, c=0, *, d=None: 0, False),
        (lambda b, a=1, *, c, d=None: 0, False),
        (lambda a, b=1, *, c: 0, False),
        (lambda x, /, b=1, *, c, d=None: 0, False),
    ],
)
def test_the_comparison_sees_what_differs(ours, same):
    def theirs(a, b=1, *, c, d=None):
        return 0

    assert (differences(bare(theirs), bare(ours)) == []) == same


def test_the_comparison_wants_free_keywords_where_theirs_takes_them():
    def theirs(a, *, debug=False, **local_kwargs):
        return 0

    assert differences(bare(theirs), bare(lambda a, *, debug=False, **local_kwargs: 0)) == []
    assert differences(bare(theirs), bare(lambda a, *, debug=False, more=1, **rest: 0)) == []
    assert differences(bare(theirs), bare(lambda a, *, debug=False: 0)) != []
