"""Serving engines set a default dtype and a default device; no result may depend on either."""

from __future__ import annotations

import contextlib
import itertools
import threading

import pytest
import torch
from calls import CALLS, unserved
from helpers import PARTS, assert_same, interpreted_only_if, snapshot

import msa_icp
from msa_icp import verify

DEFAULTS = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "device": lambda: torch.device("meta"),
    "inference": lambda: torch.inference_mode(),
    "deterministic": lambda: deterministic(),
}


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def results(call, returned):
    """Everything that a call may have written, as bytes; addresses are not results."""
    tensors = call.tensors() | ({"returned": returned} if isinstance(returned, torch.Tensor) else {})
    if isinstance(returned, msa_icp.MSAIcpScorePlan):
        tensors |= {name: t for name, t in vars(returned).items() if isinstance(t, torch.Tensor)}
        del tensors["workspace"]
    tensors.pop("recv_bases", None)
    if "errors" in tensors:  # its token is that of whichever row failed first
        tensors["errors"] = tensors["errors"][:3]
    return {name: t.detach().cpu().contiguous().view(torch.uint8) for name, t in tensors.items()}


def assert_same_outcome(usual, expected, unusual, got):
    """Two calls have returned the same, and written the same."""
    if isinstance(expected, (int, dict)):
        assert got == expected
    before, after = results(usual, expected), results(unusual, got)
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(value, after[key]), key
    groups = snapshot(usual.group), snapshot(unusual.group)
    for parts in itertools.chain(*groups):
        parts[PARTS.index("errors")] = parts[PARTS.index("errors")][:3]  # as above
    assert_same(*groups)


FLOATS = {
    "score": "index_q index_k",
    "publish": "scores",
    "fused": "index_q index_k",
    "write": "keys",
    "prefill-score": "q k",
    "prefill-select": "scores",
    "prefill-fused": "q k",
}


@pytest.mark.parametrize(("name", "arguments"), FLOATS.items(), ids=lambda value: value.replace(" ", "-"))
def test_inputs_that_require_a_gradient_change_no_bit(backend, device, name, arguments):
    """A query that comes out of a projection whose weights have not been frozen."""
    if reason := unserved(name, backend, device):
        pytest.skip(reason)
    usual, unusual = CALLS[name](device, backend), CALLS[name](device, backend)
    expected = usual.function(**usual.arguments)
    for argument in arguments.split():
        unusual.arguments[argument].requires_grad_()
    assert_same_outcome(usual, expected, unusual, unusual.function(**unusual.arguments))


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("name", CALLS)
def test_defaults_change_no_bit(backend, device, name, default):
    if reason := unserved(name, backend, device):
        pytest.skip(reason)
    usual, unusual = CALLS[name](device, backend), CALLS[name](device, backend)
    expected = usual.function(**usual.arguments)
    with DEFAULTS[default]():
        got = unusual.function(**unusual.arguments)
    assert_same_outcome(usual, expected, unusual, got)


@pytest.mark.parametrize("name", CALLS)
def test_what_was_made_in_inference_mode_serves_outside_of_it(backend, device, name):
    """PyTorch would not write there; a kernel does, and so must tensor code."""
    interpreted_only_if(name in ("score", "merge", "prefill-score initialize"), backend, device)
    if reason := unserved(name, backend, device):
        pytest.skip(reason)
    usual = CALLS[name](device, backend)
    with torch.inference_mode():
        unusual = CALLS[name](device, backend)
    assert_same_outcome(
        usual, usual.function(**usual.arguments), unusual, unusual.function(**unusual.arguments)
    )


@pytest.mark.parametrize("default", DEFAULTS)
def test_storage_and_warmup(backend, device, default):
    with DEFAULTS[default]():
        msa_icp.warmup(device, backend)
        if verify.no_exchange(backend, device):
            return
        group = msa_icp.ReceiveStorage.in_process(2, capacity=1, device=device)
        for storage in group:
            assert storage.recv.device.type == storage.recv_bases.device.type == torch.device(device).type
            storage.check()
        group.reset()


@pytest.mark.exchange
def test_a_storage_outlives_the_inference_mode_it_was_made_in(backend, device):
    with torch.inference_mode():
        group = msa_icp.ReceiveStorage.in_process(2, capacity=1, device=device)
    for storage in group:
        storage.publish_generations += 1
        storage.recv.zero_()
        storage.errors.zero_()
    group.reset()


def test_inference_mode_and_then_without(backend, device):
    """What a backend keeps from a call in inference mode must serve a call outside of it."""
    failures: list[BaseException] = []

    def body():
        try:
            for mode in (True, False, True):
                for name in ("score", "write", "host-plan", "prefill-score", "prefill-fused"):
                    if unserved(name, backend, device):
                        continue
                    with torch.inference_mode(mode):
                        call = CALLS[name](device, backend)
                        call.function(**call.arguments)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body)  # scratch memory belongs to a thread, so take a new one
    thread.start()
    thread.join()
    assert not failures, failures[0]
