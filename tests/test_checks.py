"""Every rule for every argument: the message names it, says what it must be and what it was.

And nothing is written: all tensors of the call, and all storages behind it, keep their bits.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from calls import CALLS, COMM_FIELDS, EXCHANGE, score_call, unserved
from helpers import assert_same, snapshot
from rules import Rule
from rules_decode import DECODE_RULES
from rules_prefill import PREFILL_RULES

import msa_icp
from msa_icp import verify

RULES = DECODE_RULES + PREFILL_RULES


def label(rule: Rule) -> str:
    change = rule[2]
    what = getattr(change, "__qualname__", None) or repr(change)
    return f"{rule[0]}-{rule[1]}-{what.split('.')[0]}"


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_rule(backend, device, rule):
    call_name, argument, change, name, was = rule
    if call_name.split()[0] in EXCHANGE and (reason := verify.no_exchange(backend, device)):
        pytest.skip(reason)
    call = CALLS[call_name](device, backend)
    right = call.arguments[argument]
    call.arguments[argument] = change(right) if callable(change) else change
    before = {k: t.detach().cpu().clone() for k, t in call.tensors().items() if t.device.type != "meta"}
    storages = snapshot(call.group)
    with pytest.raises(ValueError, match=": ") as caught:
        call.function(**call.arguments)
    message = str(caught.value)
    assert re.fullmatch(rf"(?s)({name})([. ][^:]*)?: must be .+, was .*({was}).*", message), message
    for k, old in before.items():
        new = call.arguments[k].detach().cpu().contiguous().view(torch.uint8)
        assert torch.equal(new, old.contiguous().view(torch.uint8)), k
    assert_same(storages, snapshot(call.group))


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_are_valid_before_something_is_changed(backend, device, name):
    if reason := unserved(name, backend, device):
        pytest.skip(reason)
    call = CALLS[name](device, backend)
    call.function(**call.arguments)


def test_all_arguments_have_a_rule():
    """Every parameter of every function is in the table, so a new one cannot be forgotten."""
    for name, make in CALLS.items():
        ruled = {rule[1] for rule in RULES if rule[0].split()[0] == name.split()[0]}
        if name in ("columns", "pool bytes", "comm layout", "valid pages"):
            ruled = {rule[1] for rule in RULES if rule[0] == name}
        assert set(make("cpu", "cake").arguments) == ruled, name


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("score", {"rank": 0}),
        ("score", {"decode_query_len": 2, "max_decode_query_len": 8}),
        ("publish", {"force_begin_blocks": 16, "force_end_blocks": 0}),
        ("publish", {"index_scale": 2, "index_offset": 1, "slot": 2, "spin_limit": 2**31 - 1}),
        ("publish", {"enable_pdl": True}),
        ("merge", {"init_blocks": 0, "local_blocks": 16, "spin_limit": 1}),
        ("merge prefill", {}),
        ("fused", {"enable_pdl": True, "force_begin_blocks": 0}),
    ],
)
def test_the_ends_of_every_range_are_allowed(backend, device, call, arguments):
    if reason := unserved(call, backend, device):
        pytest.skip(reason)
    made = CALLS[call](device, backend)
    made.function(**{**made.arguments, **arguments})


def test_capacity_of_a_publish(backend, device):
    if reason := verify.no_exchange(backend, device):
        pytest.skip(reason)
    for name, what in (("publish legacy", "scores"), ("fused legacy", "index_q")):
        call = CALLS[name](device, backend)
        call.arguments["capacity"] = 5
        with pytest.raises(ValueError, match=rf"^{what}\.shape\[0\]: must be .*5.*, was 6$"):
            call.function(**call.arguments)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("index_q", "seq_lens.shape[0] * decode_query_len"),
        ("block_table", "seq_lens.shape[0]"),
        ("score_out", "seq_lens.shape[0] * decode_query_len"),
    ],
)
def test_a_wrong_batch_size_says_what_it_was_compared_with(name, source):
    call = score_call("cpu", "torch")
    value = call.arguments[name]
    call.arguments[name] = torch.cat([value, value])
    sentence = rf"^{name}: must be of shape \[.+\] \(the first is {re.escape(source)}\), was \[.+\]$"
    with pytest.raises(ValueError, match=sentence):
        call.function(**call.arguments)
    call.arguments[name] = value[..., None]
    with pytest.raises(ValueError, match=rf"^{name}: must be of shape \[[^(]+$"):
        call.function(**call.arguments)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "register"])
def test_integers_of_numpy_are_integers(backend, device, name, kind):
    """What an engine computes with NumPy is an integer too: everything is written as with Python's own."""
    if unserved(name, backend, device):
        pytest.skip(unserved(name, backend, device))
    written = []
    for convert in (int, kind):
        call = CALLS[name](device, backend)
        numbers = {key: convert(value) for key, value in call.arguments.items() if type(value) is int}
        assert numbers
        call.function(**{**call.arguments, **numbers})
        tensors = {key: value for key, value in call.tensors().items() if "bases" not in key}
        for number, storage in enumerate(call.group):
            tensors |= {
                f"{number} {field}": getattr(storage, field) for field in COMM_FIELDS if "bases" not in field
            }
        # Of rows that wait side by side any may be the first to fail, so its token is left out.
        tensors |= {key: value[..., :3] for key, value in tensors.items() if key.endswith("errors")}
        written.append(
            {key: value.detach().cpu().contiguous().view(torch.uint8) for key, value in tensors.items()}
        )
    for key, right in written[0].items():
        assert torch.equal(written[1][key], right), key


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["publish", "merge", "fused"])
def test_the_torch_backend_exchanges_cpu_tensors_only(name):
    call = CALLS[name]("cpu", "torch")
    moved = {k: t.cuda() for k, t in call.tensors().items()}
    with pytest.raises(ValueError, match="torch"):
        call.function(**{**call.arguments, **moved, "backend": "torch"})


def test_backends_and_is_supported():
    assert msa_icp.backends("cpu")["torch"] is None
    assert msa_icp.is_supported("cpu")
    assert msa_icp.is_supported(torch.device("cpu"))
    assert not msa_icp.is_supported("meta")
    for reason in msa_icp.backends("meta").values():
        assert isinstance(reason, str)
        assert reason
    msa_icp.warmup("cpu")
    with pytest.raises(ValueError, match="backend: no backend serves meta"):
        msa_icp.warmup("meta")
    with pytest.raises(ValueError, match="backend: 'torch' does not serve meta"):
        msa_icp.warmup("meta", "torch")
    with pytest.raises(ValueError, match="backend: must be one of"):
        msa_icp.warmup("cpu", "numpy")
