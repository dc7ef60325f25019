"""A call like an accepted one is not checked again; one that differs in anything that a rule looks at is.

Every bad call here comes right behind its good twin, often in the same tensors, changed in place.
"""

from __future__ import annotations

import enum
import fractions
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from calls import CALLS, Call
from rules import every_other
from rules_decode import DECODE_RULES
from test_checks import label
from torch import Tensor

import msa_icp
from msa_icp import checks, verify
from msa_icp.checks import remember

CHECKS = {
    "score": checks.decode_score,
    "publish": checks.publish,
    "merge": checks.merge,
    "merge tagged": checks.merge,
    "fused": checks.score_publish,
    "write": checks.write_keys,
}
NAMES = sorted({rule[0] for rule in DECODE_RULES} & {*CHECKS, "merge prefill"})
SIXTEEN = 16


def checked(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The check of an entry point and arguments that it accepts."""
    arguments = CALLS[name]("cpu", "torch").arguments
    del arguments["backend"]
    return CHECKS[name], arguments


def refusal(check: Callable[..., Any], arguments: dict[str, Any]) -> str | None:
    """What the check has against the arguments; None where it accepts them."""
    try:
        check(**arguments)
    except ValueError as error:
        refused = error
    else:
        return None
    assert refused.__context__ is None  # no trace of the look-up
    return str(refused)


def assert_as_if_never_seen(name: str, arguments: dict[str, Any]) -> str | None:
    """The remembering check says of a call what the rules alone say, each time it is asked."""
    check = CHECKS[name]
    expected = refusal(check.__wrapped__, arguments)
    for _ in range(3):
        assert refusal(check, arguments) == expected
    return expected


def tensors_of(name: str) -> list[str]:
    return [key for key, value in checked(name)[1].items() if isinstance(value, Tensor)]


TENSORS = [(name, argument) for name in CHECKS for argument in tensors_of(name)]
NUMBERS = [
    (name, argument)
    for name in CHECKS
    for argument, value in checked(name)[1].items()
    if isinstance(value, int)
]


@pytest.mark.parametrize("rule", [rule for rule in DECODE_RULES if rule[0] in NAMES], ids=label)
def test_every_rule_holds_behind_a_call_that_was_accepted(rule):
    name, argument, change, _, _ = rule
    if argument == "backend":
        return
    name = "merge" if name == "merge prefill" else name
    check, arguments = checked(name)
    if rule[0] == "merge prefill":
        arguments["prefill"] = True
    assert refusal(check, arguments) is None
    assert refusal(check, arguments) is None
    value = arguments[argument]
    arguments[argument] = change(value) if callable(change) else change
    assert assert_as_if_never_seen(name, arguments) is not None


# ---------------------------------------------------------------- numbers that equal an accepted one


class Level(enum.IntEnum):
    ZERO, ONE, TWO = 0, 1, 2


@pytest.mark.parametrize(("name", "argument"), NUMBERS)
def test_numbers_that_equal_an_accepted_one(name, argument):
    check, arguments = checked(name)
    value = arguments[argument]
    for small in () if isinstance(value, bool) else (0, 1):  # what True or False equals, where it is allowed
        if refusal(check, {**arguments, argument: small}) is None:
            value = arguments[argument] = small
    assert refusal(check, arguments) is None
    impostors = [float(value), complex(value), fractions.Fraction(value), np.float64(value)]
    impostors.append(torch.tensor(value))
    if isinstance(value, bool):
        impostors.append(int(value))
    elif value in (0, 1):
        impostors.append(bool(value))
    for impostor in impostors:
        assert impostor == value
        refused = assert_as_if_never_seen(name, {**arguments, argument: impostor})
        assert refused is not None
        assert refused.startswith(argument), impostor
    if not isinstance(value, bool):
        for same in (np.int64(value), np.uint8(value % 256), *([Level(value)] if value <= 2 else [])):
            assert_as_if_never_seen(name, {**arguments, argument: same})


def test_an_integer_that_changes_its_mind():
    """An object that equals itself for ever, but not what it was when it was accepted."""

    class Fickle(int):
        value = 1

        def __int__(self) -> int:
            return self.value

    check, arguments = checked("write")
    arguments["rank"] = fickle = Fickle(1)
    assert refusal(check, arguments) is None
    fickle.value = 2
    assert assert_as_if_never_seen("write", arguments) is not None


# ---------------------------------------------------------------- tensors that change in place


def resized(t: Tensor) -> Tensor:
    return t.resize_(t.shape[0] + 1, *t.shape[1:])


def set_elsewhere(t: Tensor) -> Tensor:
    """Other memory and strides in the same object: every second element."""
    memory = torch.zeros((*t.shape, 2), dtype=t.dtype)
    return t.set_(memory[..., 0])


def misaligned(t: Tensor) -> Tensor:
    """Memory one element off in the same object, at the same shape and strides."""
    memory = torch.zeros(t.untyped_storage().nbytes() // t.itemsize + 16, dtype=t.dtype)
    return t.set_(memory.untyped_storage(), 1, t.shape, t.stride())


def other_data(t: Tensor) -> Tensor:
    t.data = torch.zeros(t.shape, dtype=torch.int16)
    return t


def squeezed_in(t: Tensor) -> Tensor:
    return t.unsqueeze_(0)


IN_PLACE = (resized, set_elsewhere, misaligned, other_data, squeezed_in)


@pytest.mark.parametrize(("name", "argument"), TENSORS)
@pytest.mark.parametrize("change", IN_PLACE)
def test_a_tensor_that_is_changed_in_place(name, argument, change):
    check, arguments = checked(name)
    value = arguments[argument] = arguments[argument].clone(memory_format=torch.preserve_format)
    assert refusal(check, arguments) is None
    assert refusal(check, arguments) is None
    changed = change(value)
    assert changed is arguments[argument]
    refused = assert_as_if_never_seen(name, arguments)
    if change in (other_data, squeezed_in):
        assert refused is not None
        assert argument in refused


@pytest.mark.parametrize(
    ("name", "argument"),
    [("score", "index_q"), ("score", "index_k"), ("fused", "pool"), ("write", "keys"), ("write", "index_k")],
)
def test_a_misaligned_view_of_the_same_shape(name, argument):
    check, arguments = checked(name)
    value = arguments[argument]
    for offset in (0, 1, 2, 4, 8, 16):
        memory = torch.zeros(value.untyped_storage().nbytes() + 64, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % 64 :][offset:].view(value.dtype)
        arguments[argument] = memory.as_strided(value.shape, value.stride())
        assert assert_as_if_never_seen(name, arguments) == (
            None
            if offset % SIXTEEN == 0
            else f"{argument}: must be 16-byte aligned, was at address {arguments[argument].data_ptr():#x}"
        )
        assert refusal(check, {**arguments, argument: value}) is None


def test_an_output_that_starts_to_require_a_gradient():
    check, arguments = checked("score")
    for _ in range(2):
        arguments["score_out"].requires_grad_(False)
        assert refusal(check, arguments) is None
        arguments["score_out"].requires_grad_(True)
        refused = assert_as_if_never_seen("score", arguments)
        assert refused == "score_out.requires_grad: must be False: it is written in place, was True"


@pytest.mark.parametrize(("name", "argument"), TENSORS)
def test_tensors_that_are_not_dense_or_elsewhere(name, argument):
    check, arguments = checked(name)
    assert refusal(check, arguments) is None
    value = arguments[argument]
    sparse = torch.sparse_coo_tensor(size=value.shape, dtype=value.dtype, check_invariants=False)
    for impostor in (sparse, value.to("meta"), value.tolist() if value.numel() < 100 else "a tensor"):
        assert assert_as_if_never_seen(name, {**arguments, argument: impostor}) is not None
        assert refusal(check, arguments) is None


def test_a_sparse_tensor_of_an_accepted_shape_and_strides():
    """PyTorch gives a sparse tensor the strides 0, which a dense one of a single element may have."""
    check, arguments = checked("write")
    arguments["keys"] = arguments["keys"][:1]
    for name in ("positions", "request_index"):
        arguments[name] = arguments[name].as_strided((1,), (0,))
    assert refusal(check, arguments) is None
    arguments["positions"] = sparse = arguments["positions"].to_sparse()
    assert sparse.stride() == (0,)
    refused = assert_as_if_never_seen("write", arguments)
    assert refused == "positions: must be a strided (dense) tensor, was torch.sparse_coo"


# ---------------------------------------------------------------- what may answer differently next time


class Moody(Tensor):
    """A subclass that answers as it likes."""

    contiguous = True

    def is_contiguous(self, *_: Any) -> bool:
        return self.contiguous


@pytest.mark.parametrize(("name", "argument"), TENSORS)
def test_a_subclass_is_checked_in_every_call(name, argument):
    check, arguments = checked(name)
    plain = arguments[argument]
    arguments[argument] = moody = plain.as_subclass(Moody)
    assert assert_as_if_never_seen(name, arguments) is None
    asks = refusal(check.__wrapped__, {**arguments, argument: every_other(plain)}) or ""
    moody.contiguous = False
    refused = assert_as_if_never_seen(name, arguments)
    assert (refused is not None) == ("must be contiguous" in asks)
    arguments[argument] = torch.nn.Parameter(plain, requires_grad=False)
    assert assert_as_if_never_seen(name, arguments) is None


# ---------------------------------------------------------------- what is remembered


class Recorder(Tensor):
    """Writes down what is asked of a tensor."""

    asked: ClassVar[set[str]] = set()
    moduli: ClassVar[set[int]] = set()

    class Address(int):
        def __mod__(self, divisor: int) -> int:
            Recorder.moduli.add(divisor)
            return int(self) % divisor

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = function.__name__
        cls.asked.add(function.__self__.__name__ if name == "__get__" else name)
        with torch._C.DisableTorchFunctionSubclass():
            answer = function(*args, **(kwargs or {}))
        return cls.Address(answer) if name == "data_ptr" else answer


@pytest.mark.parametrize("name", CHECKS)
def test_the_rules_look_at_nothing_that_is_not_remembered(name):
    """What follows from shape and strides, and what `remember` itself looks at."""
    check, arguments = checked(name)
    Recorder.asked, Recorder.moduli = set(), set()
    recorded = {k: v.as_subclass(Recorder) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    check.__wrapped__(**recorded)
    facts = {"shape", "stride", "dtype", "device", "data_ptr", "requires_grad"}
    assert {"shape", "stride", "dtype", "device"} <= Recorder.asked
    assert Recorder.asked <= facts | {"layout", "dim", "numel", "is_contiguous"}
    assert all(SIXTEEN % modulus == 0 for modulus in Recorder.moduli)


@pytest.mark.parametrize("name", CHECKS)
def test_an_accepted_call_reaches_no_rule(name, monkeypatch):
    check, arguments = checked(name)
    first = check(**arguments)
    other = checked(name)[1]  # other tensors of the same kind

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("a rule")

    monkeypatch.setattr(checks.decode, "tensor", refuse)
    assert refusal(check.__wrapped__, other) == "a rule"
    assert check(**other) is first


@pytest.fixture
def calls_of_a_rule() -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
    """A remembering check of one tensor and one number, and the calls that reached its rules."""
    reached: list[tuple[Any, ...]] = []

    @remember.remember
    def check(t: Any, u: Any, *, n: Any, m: Any) -> int:
        """Not too small."""
        reached.append((tuple(t.shape), n, m))
        if t.shape[0] > 5000:
            raise ValueError("t: must be small")
        return len(reached)

    return check, reached


def test_an_accepted_call_is_found_again_and_a_refused_one_is_not(calls_of_a_rule):
    check, reached = calls_of_a_rule
    t = torch.zeros(3)
    assert [check(t, None, n=1, m=2), check(t + 1, None, n=1, m=2), check(t, None, m=2, n=1)] == [1, 1, 1]
    assert check(t, None, n=2, m=1) == 2
    assert check(t, t, n=1, m=2) == 3
    for _ in range(2):
        with pytest.raises(ValueError, match="small"):
            check(torch.zeros(5001), None, n=1, m=2)
    assert len(reached) == 5
    assert check.__doc__ == "Not too small."
    assert check.__name__ == "check"


def test_the_memory_is_bounded(calls_of_a_rule):
    check, reached = calls_of_a_rule
    t = torch.zeros(remember.LIMIT + 10)
    for round_ in (1, 2):
        for size in range(remember.LIMIT + 9):
            check(t[:size], None, n=1, m=2)
        assert len(check.__globals__["accepted"]) <= remember.LIMIT
        assert len(reached) > round_ * remember.LIMIT


def test_each_call_gets_its_own_layout():
    check, arguments = checked("write")
    keys = {4: arguments["index_k"].new_zeros(3, 32, 128), 2: arguments["index_k"]}
    for _ in range(2):
        for world_size in (2, 4):
            for rank in range(world_size):
                shard = check(
                    **{**arguments, "rank": rank, "world_size": world_size, "index_k": keys[world_size]}
                )
                assert (shard.world_size, shard.rank, shard.page_size) == (world_size, rank, 128)


# ---------------------------------------------------------------- through the entry points


@pytest.mark.parametrize("name", CHECKS)
def test_a_second_call_through_the_entry_point(backend, device, name):
    """Nothing of the first call stays but the verdict: a bad second one is refused and writes nothing."""
    if name not in ("score", "write") and (reason := verify.no_exchange(backend, device)):
        pytest.skip(reason)
    call: Call = CALLS[name](device, backend)
    call.function(**call.arguments)
    first = next(iter(call.tensors()))
    wrong = {**call.arguments, first: call.arguments[first][None]}
    with pytest.raises(ValueError, match=first):
        call.function(**wrong)
    with pytest.raises(ValueError, match="backend: must be one of"):
        call.function(**{**call.arguments, "backend": ["cake"]})


def test_a_compiled_program_calls_the_entry_points():
    """The checks run when the graph does, as ever. An op takes True for 1: its schema says integer."""
    call = CALLS["write"]("cpu", "torch")
    step = torch.compile(msa_icp.write_index_keys, backend="eager")
    expected = call.arguments["index_k"].clone()
    call.function(**{**call.arguments, "index_k": expected})
    for _ in range(3):
        step(**call.arguments)
    assert torch.equal(call.arguments["index_k"].view(torch.uint8), expected.view(torch.uint8))
    with pytest.raises(ValueError, match="rank: must be an integer from 0 to 1, was 2"):
        step(**{**call.arguments, "rank": 2})
