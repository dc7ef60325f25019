"""The argument rules of the prefill functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from rules import (
    Rule,
    as_type,
    backend_rules,
    elsewhere,
    every_other,
    extra_dimension,
    flag_rules,
    forced_rules,
    integer_rules,
    longer,
    shifted,
    tensor_rules,
    valid_pages_rules,
    with_strides,
)


def worded(value: Any) -> str:
    """How a message words a value that is no number of the wanted kind."""
    return re.escape(str(value))


def changed_plan(**fields: Any) -> Callable[[Any], Any]:
    """The plan with other fields: a value, or a function of the right one."""

    def change(plan: Any) -> Any:
        values = {k: v(getattr(plan, k)) if callable(v) else v for k, v in fields.items()}
        return replace(plan, **values)

    change.__qualname__ = "plan " + " ".join(fields)
    return change


def plan_rules(call: str) -> list[Rule]:
    def rule(name: str, was: str, **fields: Any) -> Rule:
        return (call, "plan", changed_plan(**fields), rf"plan\.{name}", was)

    segment_tensors = ("kv_segment_lens", "qo_segment_offsets", "kv_segment_offsets", "qo_offset")
    return [
        (call, "plan", None, "plan", "NoneType"),
        (call, "plan", vars, "plan", "dict"),
        rule("batch", "2", batch=2),
        rule("batch", "3.0", batch=3.0),
        rule("qo_segment_lens", "torch.int64", qo_segment_lens=as_type(torch.int64)),
        rule("qo_segment_lens", "NoneType", qo_segment_lens=None),
        *[rule(name, r"\[\d\]", **{name: longer(0)}) for name in segment_tensors],
        *[rule(name, "torch.int64", **{name: as_type(torch.int64)}) for name in segment_tensors],
        *[rule(name, "strides", **{name: every_other}) for name in segment_tensors],
        *[rule(name, "on meta|on cpu", **{name: elsewhere}) for name in segment_tensors],
        rule("num_qo_heads", "8", num_qo_heads=8),
        rule("total_q", "0", total_q=0),
        rule("total_q", "True", total_q=True),
        rule("max_query_len", "6", max_query_len=6),
        rule("columns", "0", columns=0),
        rule("columns", "65536", columns=65536),
        rule("packed_work_range", "torch.int32", packed_work_range=as_type(torch.int32)),
        rule("packed_work_range", "0", packed_work_range=lambda t: t[:0]),
        rule("packed_work_range", "on meta|on cpu", packed_work_range=elsewhere),
        rule("packed_work_info", "torch.int32", packed_work_info=as_type(torch.int32)),
        rule("packed_work_info", "11", packed_work_info=lambda t: t[:11]),
        rule("packed_work_info", "strides", packed_work_info=every_other),
    ]


def window_rules(call: str) -> list[Rule]:
    """What both prefill scorers read: 5 tokens, 3 segments, 3 blocks, pages of 256 keys over two ranks."""
    return [
        *tensor_rules(
            call,
            "q",
            (as_type(torch.uint8), "torch.uint8"),
            (as_type(torch.float8_e5m2), "torch.float8_e5m2"),
            (longer(0), r"\[6, 4, 128\]"),
            (longer(0, -1), r"\[4, 4, 128\]"),
            (longer(1, -1), r"\[5, 3, 128\]"),
            (longer(2, -64), r"\[5, 4, 64\]"),
            (extra_dimension, r"\[1, 5, 4, 128\]"),
            (every_other, r"strides \(1024, 256, 2\)"),
            (with_strides(128, 5 * 128, 1), "strides"),
            (shifted(8), "address"),
        ),
        *tensor_rules(
            call,
            "k",
            (as_type(torch.uint8), "torch.uint8"),
            (as_type(torch.float8_e5m2), "torch.float8_e5m2"),
            (longer(2), r"129\]"),
            (extra_dimension, r"\[1, "),
            (every_other, r", 256, 2\)"),
            (with_strides(128 * 256, 256, 1), r"\(32768, 256, 1\)"),
            (with_strides(128 * 128 + 8, 128, 1), "16392"),
            (with_strides(128 * 128 - 16, 128, 1), "16368"),
            (with_strides(0, 128, 1), "0"),
            (shifted(8), "address"),
        ),
        (call, "k", longer(1), r"k\.shape\[1\]", "129"),
        (call, "k", longer(1, -96), r"k\.shape\[1\]", "32"),
        *tensor_rules(
            call,
            "block_table",
            (as_type(torch.int64), "torch.int64"),
            (longer(0), r"\[4, 4\]"),
            (lambda t: t[0], r"\[4\]"),
            (every_other, "2"),
        ),
        (call, "block_table", lambda t: t[:, :1], r"block_table\.shape\[1\]", "1"),
        *plan_rules(call),
        *integer_rules(call, "rank", -1, 2),
        *integer_rules(call, "tp", 0, 1, 3, 8),
        (call, "tp", 4, r"k\.shape\[1\]", "128"),
        *flag_rules(call, "compact"),
        *flag_rules(call, "enable_pdl"),
        *backend_rules(call),
    ]


def carrier_rules(call: str, tokens: int) -> list[Rule]:
    words = tokens * 33
    return [
        *tensor_rules(
            call,
            "carrier",
            (as_type(torch.int64), "torch.int64"),
            (longer(0, -1), rf"\[3, {tokens}, 33\]"),
            (longer(1), rf"\[4, {tokens + 1}, 33\]"),
            (longer(2, -1), rf"\[4, {tokens}, 32\]"),
            (lambda t: t.transpose(0, 1).contiguous(), rf"\[{tokens}, 4, 33\]"),  # token-major
        ),
        (call, "carrier", every_other, r"carrier\.stride\(-1\)", "2"),
        (call, "carrier", with_strides(words, 32, 1), r"carrier\.stride\(1\)", "32"),
        (
            call,
            "carrier",
            with_strides(tokens * 33 - 1, 33, 1),
            r"carrier\.stride\(0\)",
            str(tokens * 33 - 1),
        ),
        (call, "carrier", with_strides(33, 4 * 33, 1), r"carrier\.stride\(0\)", "33"),  # token-major
    ]


def segment_rules(call: str, *names: str) -> list[Rule]:
    """Those of the query lengths of the three segments, and of `names`, whose shapes must fit to them."""
    return [
        *tensor_rules(
            call,
            "qo_segment_lens",
            (as_type(torch.int64), "torch.int64"),
            (extra_dimension, r"\[1, 3\]"),
            first=True,
        ),
        (call, "qo_segment_lens", longer(0), "kv_segment_lens", r"\[3\]"),
        (call, "qo_segment_lens", lambda t: t[:0], r"qo_segment_lens\.shape\[0\]", "0"),
        *[
            rule
            for name in names
            for rule in tensor_rules(
                call,
                name,
                (as_type(torch.int64), "torch.int64"),
                (longer(0), r"\[[45]\]"),
                (longer(0, -1), r"\[[23]\]"),
                (extra_dimension, r"\[1, [34]\]"),
            )
        ],
    ]


OFFSETS = ("qo_segment_offsets", "kv_segment_offsets")
HUGE = torch.tensor([2**31 - 1, 1, 0], dtype=torch.int32)
NEGATIVE = torch.tensor([0, -1, 5], dtype=torch.int32)

PREFILL_RULES: list[Rule] = [
    *window_rules("prefill-score"),
    *tensor_rules(
        "prefill-score",
        "max_score",
        (as_type(torch.float16), "torch.float16"),
        (longer(0), r"\[6, 4, 4\]"),
        (longer(1), r"\[5, 5, 4\]"),
        (lambda t: t[0], r"\[4, 4\]"),
    ),
    ("prefill-score", "max_score", every_other, r"max_score\.stride\(-1\)", "2"),
    ("prefill-score", "max_score", with_strides(16, 3, 1), r"max_score\.stride\(1\)", "3"),
    ("prefill-score", "max_score", with_strides(15, 4, 1), r"max_score\.stride\(0\)", "15"),
    ("prefill-score", "max_score", with_strides(4, 20, 1), r"max_score\.stride\(0\)", "4"),  # head-major
    ("prefill-score", "max_score", longer(2, -2), r"max_score\.shape\[2\]", "2"),
    ("prefill-score", "max_score", lambda t: t.requires_grad_(), r"max_score\.requires_grad", "True"),
    *[
        ("prefill-score", "sm_scale", value, "sm_scale", worded(value))
        for value in (float("nan"), float("inf"), float("-inf"), None, "1", True, 1j)
    ],
    ("prefill-score", "sm_scale", 10**400, "sm_scale", "of type int, too large for a float"),
    *flag_rules("prefill-score", "initialize"),
    *tensor_rules(
        "prefill-select",
        "scores",
        (as_type(torch.float64), "torch.float64"),
        (longer(1), r"\[6, 5, 20\]"),
        (lambda t: t[0], r"\[4, 20\]"),
        first=True,
    ),
    ("prefill-select", "scores", every_other, r"scores\.stride\(-1\)", "2"),
    ("prefill-select", "scores", with_strides(100, 19, 1), r"scores\.stride\(1\)", "19"),
    ("prefill-select", "scores", with_strides(79, 20, 1), r"scores\.stride\(0\)", "79"),
    ("prefill-select", "scores", longer(2, -20), r"scores\.shape\[2\]", "0"),
    ("prefill-select", "scores", longer(0), "num_valid_pages", "6"),
    *valid_pages_rules("prefill-select"),
    *carrier_rules("prefill-select", 6),
    *forced_rules("prefill-select", "force_begin_blocks", "force_end_blocks"),
    *integer_rules("prefill-select", "index_scale", 0, 3, -1),
    *integer_rules("prefill-select", "index_offset", -1, 1, 2),
    *backend_rules("prefill-select"),
    *window_rules("prefill-fused"),
    *[
        (call, argument, change, name, was.replace("7", "6").replace("[5", "[4").replace("1, 6", "1, 5"))
        for call, argument, change, name, was in valid_pages_rules("prefill-fused")
    ],
    ("prefill-fused", "compact", False, "compact", "False"),
    *tensor_rules(
        "prefill-fused",
        "pool",
        (as_type(torch.int8), "torch.int8"),
        (extra_dimension, r"\[1, "),
        (every_other, "strides"),
        (shifted(8), "address"),
    ),
    ("prefill-fused", "pool", longer(0, -8), r"pool\.shape\[0\]", r"\d+"),
    ("prefill-fused", "pool", longer(0, 4), r"pool\.shape\[0\]", r"\d+"),
    *carrier_rules("prefill-fused", 5),
    *forced_rules("prefill-fused", "force_begin_blocks", "force_end_blocks"),
    *segment_rules("device-plan", "kv_segment_lens", *OFFSETS, "qo_offset"),
    ("device-plan", "qo_segment_lens", every_other, "qo_segment_lens", "strides"),
    *[("device-plan", name, every_other, name, "strides") for name in (*OFFSETS, "qo_offset")],
    *integer_rules("device-plan", "num_qo_heads", 0, 2, 8),
    *integer_rules("device-plan", "total_q", 0, -1, 2**31),
    *integer_rules("device-plan", "max_query_len", 0, 10),
    *integer_rules("device-plan", "max_seq_len", 0, -1, 65535 * 128 + 1),
    ("device-plan", "total_q", 64 * 65535, "total_q", "65537 items"),
    *[
        rule
        for name, dtype, wrong in (
            ("packed_work_range", torch.int64, (longer(0), r"\[\d+\]")),
            ("packed_work_info", torch.int64, (extra_dimension, r"\[1, 12\]")),
            ("workspace", torch.uint8, (extra_dimension, r"\[1, 33554432\]")),
        )
        for rule in tensor_rules(
            "device-plan",
            name,
            (as_type(torch.int32 if dtype != torch.int32 else torch.int64), "torch.int32"),
            wrong,
        )
    ],
    ("device-plan", "packed_work_range", lambda t: t[:0], "packed_work_range", r"\[0\]"),
    ("device-plan", "packed_work_info", lambda t: t[:11], r"packed_work_info\.shape\[0\]", "11"),
    ("device-plan", "packed_work_info", every_other, "packed_work_info", "strides"),
    ("device-plan", "workspace", lambda t: t[1:], r"workspace\.shape\[0\]", "33554431"),
    *backend_rules("device-plan"),
    *segment_rules("host-plan", "kv_segment_lens", "qo_offset"),
    ("host-plan", "qo_segment_lens", elsewhere, "qo_segment_lens", "on meta"),
    ("host-plan", "qo_segment_lens", lambda t: NEGATIVE, "qo_segment_lens", "-1"),
    ("host-plan", "kv_segment_lens", lambda t: NEGATIVE, "kv_segment_lens", "-1"),
    ("host-plan", "qo_offset", lambda t: NEGATIVE, "qo_offset", "-1"),
    ("host-plan", "qo_segment_lens", lambda t: HUGE, "qo_segment_lens", str(2**31)),
    ("host-plan", "kv_segment_lens", lambda t: HUGE, "kv_segment_lens", str(2**31)),
    ("host-plan", "qo_offset", lambda t: HUGE, r"qo_offset \+ qo_segment_lens", str(2**31 + 2)),
    *integer_rules("host-plan", "num_qo_heads", 0, 2, 8),
    *[("host-plan", "device", value, "device", worded(value)) for value in ("abacus", "meta", 1.5)],
    ("host-plan", "device", "cuda:99", "device", "cuda:99"),
    *backend_rules("host-plan"),
    *integer_rules("score-columns", "max_seq_len", 0, -5),
    *integer_rules("score-columns", "page_size", 64, 0),
    *[
        rule
        for call, heads in (("plan-storage", "num_qo_heads"), ("prefill-pool", "num_heads"))
        for rule in (
            *integer_rules(call, "total_q", 0, -1, 2**31),
            *integer_rules(call, "batch", 0, -1, 65537),
            (call, "total_q", 64 * 65535, "total_q", "65537 items"),
            *integer_rules(call, heads, 0, 2, 8),
            *[(call, "device", value, "device", worded(value)) for value in ("abacus", "meta", None)],
        )
    ],
]
