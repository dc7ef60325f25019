"""Every rule for every argument: the message names it, says what it must be and what it was.

And nothing is written: all tensors of the call, and all storages behind it, keep their bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import CALLS, EXCHANGE, score_call
from helpers import assert_same, snapshot
from torch import Tensor

import msa_icp
from msa_icp import verify

# ---------------------------------------------------------------- how a tensor can be wrong


def no_tensor(_: Tensor) -> Any:
    return None


def listed(t: Tensor) -> Any:
    return t.shape


def as_type(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.zeros(t.shape, dtype=dtype, device=t.device)


def elsewhere(t: Tensor) -> Tensor:
    """The same tensor on another device (on a CPU: one that holds nothing)."""
    return t.to("cpu" if t.device.type != "cpu" else "meta")


def longer(dim: int, by: int = 1) -> Callable[[Tensor], Tensor]:
    def change(t: Tensor) -> Tensor:
        shape = list(t.shape)
        shape[dim] += by
        return torch.zeros(shape, dtype=t.dtype, device=t.device)

    return change


def extra_dimension(t: Tensor) -> Tensor:
    return t[None]


def with_strides(*stride: int) -> Callable[[Tensor], Tensor]:
    """The same shape at other strides, over zeros."""

    def change(t: Tensor) -> Tensor:
        extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, stride, strict=True))
        return torch.zeros(extent, dtype=t.dtype, device=t.device).as_strided(t.shape, stride)

    return change


def every_other(t: Tensor) -> Tensor:
    """The same shape, each last dimension with gaps."""
    return torch.zeros((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype, device=t.device)[..., ::2]


def shifted(by: int) -> Callable[[Tensor], Tensor]:
    """The same shape and strides, `by` bytes past a 16-byte boundary."""

    def change(t: Tensor) -> Tensor:
        size = t.untyped_storage().nbytes() + 64
        memory = torch.zeros(size, dtype=torch.uint8, device=t.device)[by:]
        return memory[: (size - by) // t.itemsize * t.itemsize].view(t.dtype).as_strided(t.shape, t.stride())

    return change


# ---------------------------------------------------------------- the rules

Rule = tuple[str, str, Any, str, str]
"""Call, argument, what it becomes (a function of the right value, or a value), and what the message says:
the name, and what it was."""


def tensor_rules(
    call: str,
    argument: str,
    *wrong: tuple[Callable[[Tensor], Any], str],
    first: bool = False,
    optional: bool = False,
) -> list[Rule]:
    """Rules that every tensor has, and those given. The first one of a call says what the device is."""
    common = [(listed, "Size")]
    if not optional:
        common.append((no_tensor, "NoneType"))
    if not first:
        common.append((elsewhere, "on meta|on cpu"))
    return [(call, argument, change, argument, was) for change, was in [*common, *wrong]]


def integer_rules(call: str, argument: str, *values: Any, optional: bool = False) -> list[Rule]:
    common = (True, 1.0, "1", *(() if optional else (None,)))
    return [(call, argument, value, argument, re.escape(str(value))) for value in [*common, *values]]


def decode_rules(call: str) -> list[Rule]:
    return [
        *tensor_rules(
            call,
            "index_q",
            (as_type(torch.uint8), "torch.uint8"),
            (as_type(torch.float8_e5m2), "torch.float8_e5m2"),
            (as_type(torch.float8_e4m3fnuz), "torch.float8_e4m3fnuz"),
            (longer(0), r"\[7, 4, 128\]"),
            (longer(0, -2), r"\[4, 4, 128\]"),
            (longer(1, -1), r"\[6, 3, 128\]"),
            (longer(2, -64), r"\[6, 4, 64\]"),
            (extra_dimension, r"\[1, 6, 4, 128\]"),
            (every_other, r"strides \(1024, 256, 2\)"),
            (with_strides(1024, 128, 1), "strides"),
            (with_strides(128, 6 * 128, 1), "strides"),
            (shifted(8), "address"),
            first=True,
        ),
        *k_rules(call),
        *tensor_rules(
            call,
            "block_table",
            (as_type(torch.int64), "torch.int64"),
            (longer(0), r"\[4, 6\]"),
            (lambda t: t[0], r"\[6\]"),
            (every_other, "2"),
            (with_strides(1, 3), "3"),
        ),
        (call, "block_table", lambda t: t[:, :0], r"block_table\.shape\[1\]", "0"),
        *tensor_rules(
            call,
            "seq_lens",
            (as_type(torch.int64), "torch.int64"),
            (extra_dimension, r"\[1, 3\]"),
            (every_other, "strides"),
        ),
        *layout_rules(call),
        *integer_rules(call, "decode_query_len", 0, -1, 9),
    ]


def k_rules(call: str) -> list[Rule]:
    return [
        *tensor_rules(
            call,
            "index_k",
            (as_type(torch.uint8), "torch.uint8"),
            (as_type(torch.float8_e5m2), "torch.float8_e5m2"),
            (longer(1), r"65, 128\]"),
            (longer(1, -32), r"32, 128\]"),
            (longer(2), r"129\]"),
            (extra_dimension, r"\[1, "),
            (every_other, r", 256, 2\)"),
            (with_strides(64 * 256, 256, 1), r"\(16384, 256, 1\)"),
            (with_strides(64 * 128 + 8, 128, 1), "8200"),
            (with_strides(64 * 128 - 16, 128, 1), "8176"),
            (with_strides(0, 128, 1), "0"),
            (shifted(8), "address"),
        )
    ]


def layout_rules(call: str) -> list[Rule]:
    return [
        *integer_rules(call, "rank", -1, 2, 4),
        *integer_rules(call, "world_size", 0, 1, 3, 8),
        *integer_rules(call, "page_size", 0, 64, 127, 512),
    ]


def target_rules(call: str) -> list[Rule]:
    return [
        *tensor_rules(
            call,
            "recv_bases",
            (as_type(torch.int32), "torch.int32"),
            (longer(0), r"\[3\]"),
            (longer(0, -1), r"\[1\]"),
            (every_other, "strides"),
        ),
        *tensor_rules(
            call,
            "errors",
            (as_type(torch.int64), "torch.int64"),
            (extra_dimension, r"\[1, 4\]"),
            (every_other, "strides"),
        ),
        (call, "errors", lambda t: t[:0], r"errors\.shape\[0\]", "0"),
        *tensor_rules(
            call,
            "generations",
            (as_type(torch.int64), "torch.int64"),
            (longer(0, -1), r"\[2, 4, 6\]"),
            (longer(1, -2), r"\[3, 2, 6\]"),
            (longer(2), r"\[3, 4, 7\]"),
            (every_other, "strides"),
            optional=True,
        ),
        *integer_rules(call, "slot", -1, 3),
        *integer_rules(call, "capacity", 0, -1),
        *integer_rules(call, "spin_limit", 0, -1, 2**31),
        *forced_rules(call, "force_begin_blocks", "force_end_blocks"),
        *flag_rules(call, "enable_pdl"),
    ]


def forced_rules(call: str, begin: str, end: str) -> list[Rule]:
    both = re.escape(f"{begin} + {end}")
    return [
        *integer_rules(call, begin, -1),
        *integer_rules(call, end, -1),
        (call, begin, 15, both, "17"),
        (call, end, 16, both, "17"),
    ]


def flag_rules(call: str, argument: str) -> list[Rule]:
    return [(call, argument, value, argument, re.escape(repr(value))) for value in (1, 0, None, "yes")]


def valid_pages_rules(call: str, argument: str = "num_valid_pages") -> list[Rule]:
    return tensor_rules(
        call,
        argument,
        (as_type(torch.int64), "torch.int64"),
        (longer(0), r"\[7\]"),
        (longer(0, -1), r"\[5\]"),
        (extra_dimension, r"\[1, 6\]"),
        (every_other, "strides"),
    )


def backend_rules(call: str) -> list[Rule]:
    return [
        (call, "backend", value, "backend", re.escape(repr(value)))
        for value in ("numpy", "", "Torch", "cake ", None, 3)
    ]


RULES: list[Rule] = [
    *decode_rules("score"),
    *tensor_rules(
        "score",
        "score_out",
        (as_type(torch.float16), "torch.float16"),
        (as_type(torch.int32), "torch.int32"),
        (longer(0), r"\[7, 4, 8\]"),
        (longer(0, -3), r"\[3, 4, 8\]"),
        (longer(1), r"\[6, 5, 8\]"),
        (lambda t: t[0], r"\[4, 8\]"),
    ),
    ("score", "score_out", every_other, r"score_out\.stride\(-?\d\)", "2"),
    ("score", "score_out", with_strides(64, 7, 1), r"score_out\.stride\(1\)", "7"),
    ("score", "score_out", with_strides(31, 8, 1), r"score_out\.stride\(0\)", "31"),
    ("score", "score_out", with_strides(8, 48, 1), r"score_out\.stride\(0\)", "8"),  # head-major
    ("score", "score_out", longer(2, -8), r"score_out\.shape\[2\]", "0"),
    ("score", "score_out", longer(2, 1), r"score_out\.shape\[2\]", "9"),
    ("score", "score_out", longer(2, -2), r"score_out\.shape\[2\]", "6"),
    ("score", "score_out", longer(2, 8188), r"score_out\.shape\[2\]", "8196"),
    *integer_rules("score", "max_decode_query_len", 0, 9, 33),
    ("score", "max_decode_query_len", 1, "decode_query_len", "2"),
    *flag_rules("score", "enable_pdl"),
    *backend_rules("score"),
    *tensor_rules(
        "publish",
        "scores",
        (as_type(torch.float64), "torch.float64"),
        (as_type(torch.bfloat16), "torch.bfloat16"),
        (longer(1), r"\[6, 5, 20\]"),
        (longer(1, -2), r"\[6, 2, 20\]"),
        (lambda t: t[0], r"\[4, 20\]"),
        first=True,
    ),
    ("publish", "scores", every_other, r"scores\.stride\(-?\d\)", "2"),
    ("publish", "scores", with_strides(100, 19, 1), r"scores\.stride\(1\)", "19"),
    ("publish", "scores", with_strides(79, 20, 1), r"scores\.stride\(0\)", "79"),
    ("publish", "scores", with_strides(20, 120, 1), r"scores\.stride\(0\)", "20"),
    ("publish", "scores", longer(2, -20), r"scores\.shape\[2\]", "0"),
    ("publish", "scores", longer(2, 12268), r"scores\.shape\[2\]", "12288"),
    ("publish", "scores", longer(0), r"num_valid_pages|scores\.shape\[0\]", "6|7"),
    *valid_pages_rules("publish"),
    *target_rules("publish"),
    ("publish", "generations", lambda t: t[:, :2], "generations", r"\[3, 2, 6\]"),
    *integer_rules("publish", "rank", -1, 2),
    *integer_rules("publish", "world_size", 1, 3, 8),
    *integer_rules("publish", "heads_per_rank", 0, 1, 4),
    *integer_rules("publish", "index_scale", 0, 3, -1),
    *integer_rules("publish", "index_offset", -1, 1, 2),
    *backend_rules("publish"),
    *tensor_rules(
        "merge",
        "recv_slot",
        (as_type(torch.int64), "torch.int64"),
        (as_type(torch.float32), "torch.float32"),
        (longer(3), r"34\]"),
        (longer(3, -1), r"32\]"),
        (lambda t: t[0], r"\[2, 6, 33\]"),
        first=True,
    ),
    ("merge", "recv_slot", longer(0), r"recv_slot\.shape\[0\]", "3"),
    ("merge", "recv_slot", longer(1), r"recv_slot\.shape\[1\]", "3"),
    ("merge", "recv_slot", longer(1, -1), r"recv_slot\.shape\[1\]", "1"),
    ("merge", "recv_slot", every_other, r"recv_slot\.stride\(-1\)", "2"),
    ("merge", "recv_slot", longer(2, -1), r"output\.shape\[0\]", "6"),
    ("merge tagged", "recv_slot", as_type(torch.int32), "recv_slot", "torch.int32"),
    ("merge tagged", "recv_slot", longer(3), "recv_slot", r"33\]"),
    ("merge tagged", "recv_slot", every_other, r"recv_slot\.stride\(-1\)", "2"),
    *tensor_rules(
        "merge",
        "output",
        (as_type(torch.int64), "torch.int64"),
        (longer(1), r"\[6, 3, 16\]"),
        (longer(2), r"\[6, 2, 17\]"),
        (lambda t: t[0], r"\[2, 16\]"),
        (lambda t: t.transpose(0, 1).contiguous(), r"\[2, 6, 16\]"),  # head-major
    ),
    ("merge", "output", every_other, r"output\.stride\(-1\)", "2"),
    ("merge", "output", with_strides(16, 8, 1), "output", r"\(16, 8, 1\)"),
    ("merge", "output", with_strides(0, 16, 1), "output", r"\(0, 16, 1\)"),
    *valid_pages_rules("merge"),
    *[r for r in target_rules("merge") if r[1] in ("errors", "spin_limit")],
    *forced_rules("merge", "init_blocks", "local_blocks"),
    *flag_rules("merge", "enable_pdl"),
    *flag_rules("merge", "prefill"),
    *tensor_rules(
        "merge tagged",
        "expected_generations",
        (as_type(torch.int64), "torch.int64"),
        (longer(0), r"\[3, 6\]"),
        (longer(1), r"\[2, 7\]"),
        (extra_dimension, r"\[1, 2, 6\]"),
        (every_other, "strides"),
        optional=True,
    ),
    ("merge tagged", "prefill", True, "expected_generations|prefill", "."),
    ("merge prefill", "enable_pdl", True, "enable_pdl", "True"),
    *backend_rules("merge"),
    *decode_rules("fused"),
    *valid_pages_rules("fused"),
    *tensor_rules(
        "fused",
        "pool",
        (as_type(torch.int8), "torch.int8"),
        (extra_dimension, r"\[1, "),
        (every_other, "strides"),
        (shifted(8), "address"),
    ),
    ("fused", "pool", longer(0, -8), r"pool\.shape\[0\]", "393208"),
    ("fused", "pool", longer(0, 4), r"pool\.shape\[0\]", "393220"),
    *target_rules("fused"),
    *backend_rules("fused"),
    *tensor_rules(
        "write",
        "keys",
        (as_type(torch.uint8), "torch.uint8"),
        (longer(1, -1), r"\[5, 127\]"),
        (extra_dimension, r"\[1, 5, 128\]"),
        (every_other, "strides"),
        (shifted(8), "address"),
        first=True,
    ),
    *[
        (call, argument, change, argument, was)
        for call, argument in (("write", "positions"), ("write", "request_index"))
        for change, was in (
            (no_tensor, "NoneType"),
            (elsewhere, "on meta|on cpu"),
            (as_type(torch.int64), "torch.int64"),
            (longer(0), r"\[6\]"),
            (extra_dimension, r"\[1, 5\]"),
            (every_other, "strides"),
        )
    ],
    *tensor_rules("write", "block_table", (as_type(torch.int64), "torch.int64"), (every_other, "2")),
    *k_rules("write"),
    *layout_rules("write"),
    *backend_rules("write"),
    ("shard", "cache", no_tensor, "cache", "NoneType"),
    ("shard", "cache", as_type(torch.uint8), "cache", "torch.uint8"),
    ("shard", "cache", extra_dimension, "cache", r"\[1, 2, 256, 128\]"),
    ("shard", "cache", longer(2), "cache", r"129\]"),
    ("shard", "cache", longer(1), r"cache\.shape\[1\]", "257"),
    *integer_rules("shard", "rank", -1, 4),
    *integer_rules("shard", "world_size", 1, 3, 8),
    ("valid pages", "seq_lens", no_tensor, "seq_lens", "NoneType"),
    ("valid pages", "seq_lens", as_type(torch.int64), "seq_lens", "torch.int64"),
    ("valid pages", "seq_lens", extra_dimension, "seq_lens", r"\[1, 2\]"),
    ("valid pages", "seq_lens", every_other, "seq_lens", "strides"),
    *integer_rules("valid pages", "decode_query_len", 0, 9),
    ("valid pages", "out", as_type(torch.int64), "out", "torch.int64"),
    ("valid pages", "out", longer(0), "out", r"\[5\]"),
    ("valid pages", "out", every_other, "out", "strides"),
    ("valid pages", "out", elsewhere, "out", "on meta|on cpu"),
    *integer_rules("columns", "max_model_len", 0, -5),
    *integer_rules("columns", "page_size", 64, 0),
    *integer_rules("pool bytes", "max_decode_tokens", 0, -1),
    *integer_rules("pool bytes", "num_heads", 0, 2, 8),
    *integer_rules("comm layout", "world_size", 1, 3, 8),
    *integer_rules("comm layout", "heads_per_rank", 0, 1, 4),
    *integer_rules("comm layout", "capacity", 0, -1),
    *integer_rules("storage", "world_size", 1, 3, 8),
    *integer_rules("storage", "heads_per_rank", 0, 1, 4, optional=True),
    *integer_rules("storage", "capacity", 0, -1),
    ("storage", "device", "meta", "device", "meta"),
]


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
    if name.split()[0] in EXCHANGE and (reason := verify.no_exchange(backend, device)):
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
    if call.split()[0] in EXCHANGE and (reason := verify.no_exchange(backend, device)):
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


def test_integers_of_other_types_are_integers(backend, device):
    """What an engine computes with numpy or torch sizes is an integer too."""
    call = score_call(device, backend)
    call.arguments["rank"] = call.arguments["seq_lens"].shape.numel() - 2
    call.function(**call.arguments)


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
