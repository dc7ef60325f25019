"""One valid call of every function, as keyword arguments that a test can change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from helpers import HEADS, random_scores
from torch import Tensor

import msa_icp
from msa_icp import cases, prefill_cases, verify
from msa_icp.cases import poisoned

COMM_FIELDS = (
    *("recv", "tagged_recv", "recv_bases", "tagged_recv_bases"),
    *("publish_generations", "expected_generations", "errors"),
)


@dataclass
class Call:
    """A call that works, as keyword arguments."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    group: tuple[msa_icp.ReceiveStorage, ...] = field(default_factory=tuple)

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}


def decode_arguments(device: str, query_len: int = 2) -> dict[str, Any]:
    case = cases.decode_case("", 2, 128, seq_lens=(300, 40, 7), decode_query_len=query_len)
    table, lens, _ = case.metadata(device)
    return {
        "index_q": case.index_q.to(device),
        "index_k": case.shard(1, device),
        "block_table": table,
        "seq_lens": lens,
        "rank": 1,
        "world_size": 2,
        "page_size": 128,
        "decode_query_len": query_len,
    }


def score_call(device: str, backend: str) -> Call:
    arguments = decode_arguments(device)
    arguments["score_out"] = poisoned((6, HEADS, 8), torch.float32, device)
    arguments |= {"max_decode_query_len": 4, "enable_pdl": False, "backend": backend}
    return Call(msa_icp.msa_icp_decode_index_score_sharded, arguments)


def target(storage: msa_icp.ReceiveStorage, tagged: bool) -> dict[str, Any]:
    return {
        "recv_bases": storage.tagged_recv_bases if tagged else storage.recv_bases,
        "errors": storage.errors,
        "slot": 1,
        "rank": storage.rank,
        "world_size": storage.world_size,
        "capacity": storage.capacity,
        "force_begin_blocks": 1,
        "force_end_blocks": 2,
        "spin_limit": 100,
        "enable_pdl": False,
        "generations": storage.publish_generations if tagged else None,
    }


def publish_call(device: str, backend: str, tagged: bool = True) -> Call:
    group = msa_icp.ReceiveStorage.in_process(2, capacity=6, device=device)
    arguments = {
        "scores": random_scores(6, 20, seed=0).to(device),
        "num_valid_pages": torch.full((6,), 20, dtype=torch.int32, device=device),
        "heads_per_rank": 2,
        "index_scale": 1,
        "index_offset": 0,
        "backend": backend,
        **target(group[1], tagged),
    }
    return Call(msa_icp.msa_icp_topk_select_publish, arguments, group)


def merge_call(device: str, backend: str, tagged: bool = False, prefill: bool = False) -> Call:
    group = msa_icp.ReceiveStorage.in_process(2, capacity=6, device=device)
    storage = group[0]
    storage.recv[1, ..., 32] = 1
    arguments = {
        "recv_slot": (storage.tagged_recv if tagged else storage.recv)[1],
        "num_valid_pages": torch.full((6,), 20, dtype=torch.int32, device=device),
        "output": poisoned((6, 2, 16), torch.int32, device),
        "errors": storage.errors,
        "init_blocks": 1,
        "local_blocks": 2,
        "spin_limit": 100,
        "enable_pdl": False,
        "expected_generations": storage.expected_generations[1] if tagged else None,
        "prefill": prefill,
        "backend": backend,
    }
    return Call(msa_icp.msa_icp_merge_candidates, arguments, group)


def merge_received_call(device: str, backend: str) -> Call:
    """The same rows as in `merge_call`, by their communicator."""
    call = merge_call(device, backend)
    for name in ("recv_slot", "errors", "expected_generations", "prefill"):
        del call.arguments[name]
    arguments = {**call.arguments, "comm": call.group[0], "slot": 1, "tagged": False}
    return Call(msa_icp.merge_received, arguments, call.group)


def own_comm(storage: msa_icp.ReceiveStorage, **changes: Any) -> SimpleNamespace:
    """A caller's own communicator: the fields of a storage, some of them changed."""
    return SimpleNamespace(**{name: getattr(storage, name) for name in COMM_FIELDS} | changes)


def register_call(device: str, backend: str) -> Call:
    group = msa_icp.ReceiveStorage.in_process(2, capacity=6, device=device)
    return Call(msa_icp.register_comm, {"comm": own_comm(group[0])}, group)


def fused_call(device: str, backend: str, tagged: bool = True) -> Call:
    group = msa_icp.ReceiveStorage.in_process(2, capacity=6, device=device)
    pool = torch.full((6 * HEADS * 128 * 16 * 8,), 0x5A, dtype=torch.uint8, device=device)
    arguments = {
        **decode_arguments(device),
        "num_valid_pages": torch.full((6,), 3, dtype=torch.int32, device=device),
        "pool": pool,
        "backend": backend,
        **target(group[1], tagged),
    }
    return Call(msa_icp.msa_icp_decode_score_publish, arguments, group)


def write_call(device: str, backend: str) -> Call:
    arguments = decode_arguments(device)
    for name in ("index_q", "seq_lens", "decode_query_len"):
        del arguments[name]
    arguments |= {
        "keys": cases.exact((5, 128), 3).to(device),
        "positions": torch.arange(5, dtype=torch.int32, device=device),
        "request_index": torch.zeros(5, dtype=torch.int32, device=device),
        "backend": backend,
    }
    return Call(msa_icp.write_index_keys, arguments)


WINDOW = {"qo_lens": (3, 0, 2), "kv_lens": (300, 40, 130)}


def window_arguments(device: str, backend: str) -> dict[str, Any]:
    """Queries, shard, table and plan of a window of 5 tokens and 3 columns, two ranks, pages of 256 keys."""
    case = prefill_cases.prefill_case("", 2, 256, **WINDOW, spare_columns=2)
    return {
        "q": case.index_q.to(device),
        "k": case.shard(1, device),
        "block_table": case.table(device),
        "plan": verify.prefill.plan_on_host(case, backend, device),
        "rank": 1,
        "tp": 2,
        "backend": backend,
    }


def host_plan_call(device: str, backend: str) -> Call:
    case = prefill_cases.prefill_case("", 2, 256, **WINDOW)
    arguments = {
        "qo_segment_lens": case.qo_lens,
        "kv_segment_lens": case.kv_lens,
        "num_qo_heads": HEADS,
        "qo_offset": case.qo_offset,
        "device": device,
        "backend": backend,
    }
    return Call(msa_icp.msa_icp_index_score_sharded_plan, arguments)


def device_plan_call(device: str, backend: str) -> Call:
    case = prefill_cases.prefill_case("", 2, 256, **WINDOW)
    sizes = msa_icp.msa_icp_index_score_plan_storage(num_qo_heads=HEADS, total_q=9, batch=3, device=device)
    arguments = {
        **case.metadata(device),
        "num_qo_heads": HEADS,
        "total_q": 9,
        "max_query_len": 4,
        "max_seq_len": 700,
        "packed_work_range": torch.full((sizes["work_range_numel"],), -7, device=device),
        "packed_work_info": torch.full((sizes["work_info_numel"],), -9, device=device),
        "workspace": torch.zeros(sizes["workspace_bytes"], dtype=torch.uint8, device=device),
        "backend": backend,
    }
    return Call(msa_icp.msa_icp_index_score_sharded_plan_device, arguments)


def prefill_score_call(device: str, backend: str, initialize: bool = False) -> Call:
    arguments = window_arguments(device, backend)
    arguments |= {
        "max_score": poisoned((5, HEADS, 4), torch.float32, device),
        "sm_scale": 0.5,
        "initialize": initialize,
        "compact": False,
        "enable_pdl": False,
    }
    return Call(msa_icp.msa_icp_index_score_sharded, arguments)


def prefill_select_call(device: str, backend: str) -> Call:
    arguments = {
        "scores": random_scores(6, 20, seed=0).to(device),
        "num_valid_pages": torch.full((6,), 20, dtype=torch.int32, device=device),
        "carrier": poisoned((HEADS, 6, 33), torch.int32, device),
        "force_begin_blocks": 1,
        "force_end_blocks": 2,
        "index_scale": 1,
        "index_offset": 0,
        "backend": backend,
    }
    return Call(msa_icp.msa_icp_topk_select_prefill, arguments)


def prefill_fused_call(device: str, backend: str) -> Call:
    arguments = window_arguments(device, backend)
    size = msa_icp.msa_icp_prefill_pool_bytes(total_q=5, batch=3, device=device)
    arguments |= {
        "num_valid_pages": torch.full((5,), 3, dtype=torch.int32, device=device),
        "pool": torch.full((size,), 0x5A, dtype=torch.uint8, device=device),
        "carrier": poisoned((HEADS, 5, 33), torch.int32, device),
        "compact": True,
        "force_begin_blocks": 1,
        "force_end_blocks": 2,
        "enable_pdl": False,
    }
    return Call(msa_icp.msa_icp_prefill_score_select, arguments)


def sizes_call(name: str, **arguments: Any) -> Callable[[str, str], Call]:
    return lambda device, backend: Call(getattr(msa_icp, name), dict(arguments))


CALLS: dict[str, Callable[[str, str], Call]] = {
    "score": score_call,
    "publish": publish_call,
    "publish legacy": lambda d, b: publish_call(d, b, tagged=False),
    "merge": merge_call,
    "merge tagged": lambda d, b: merge_call(d, b, tagged=True),
    "merge prefill": lambda d, b: merge_call(d, b, prefill=True),
    "received": merge_received_call,
    "register": register_call,
    "fused": fused_call,
    "fused legacy": lambda d, b: fused_call(d, b, tagged=False),
    "write": write_call,
    "shard": lambda d, b: Call(
        msa_icp.shard_index_keys,
        {"cache": cases.exact((2, 256, 128), 0).to(d), "rank": 1, "world_size": 4},
    ),
    "valid pages": lambda d, b: Call(
        msa_icp.num_valid_pages,
        {
            "seq_lens": torch.tensor([5, 6], dtype=torch.int32, device=d),
            "decode_query_len": 2,
            "out": poisoned((4,), torch.int32, d),
        },
    ),
    "columns": sizes_call("msa_icp_decode_score_columns", max_model_len=1000, page_size=128),
    "pool bytes": sizes_call("msa_icp_decode_pool_bytes", max_decode_tokens=3, num_heads=4),
    "host-plan": host_plan_call,
    "device-plan": device_plan_call,
    "prefill-score": prefill_score_call,
    "prefill-score initialize": lambda d, b: prefill_score_call(d, b, initialize=True),
    "prefill-select": prefill_select_call,
    "prefill-fused": prefill_fused_call,
    "score-columns": sizes_call("msa_icp_index_score_columns", max_seq_len=1000, page_size=256),
    "plan-storage": lambda d, b: Call(
        msa_icp.msa_icp_index_score_plan_storage,
        {"num_qo_heads": HEADS, "total_q": 200, "batch": 3, "device": d},
    ),
    "prefill-pool": lambda d, b: Call(
        msa_icp.msa_icp_prefill_pool_bytes, {"total_q": 200, "batch": 3, "device": d, "num_heads": HEADS}
    ),
    "comm layout": sizes_call("msa_icp_comm_layout", world_size=2, heads_per_rank=2, capacity=3),
    "storage": lambda d, b: Call(
        msa_icp.ReceiveStorage.in_process,
        {"world_size": 2, "capacity": 3, "heads_per_rank": 2, "device": d},
    ),
}
EXCHANGE = {"publish", "merge", "received", "fused", "storage"}
PREFILL = {
    "device-plan": "index_score_sharded_plan_device",
    "prefill-score": "index_score_sharded",
    "prefill-select": "topk_select_prefill",
    "prefill-fused": "prefill_score_select",
}
"""The op of a call that not every backend has."""


def unserved(name: str, backend: str, device: str) -> str | None:
    """Why a call cannot run on a backend and device; None where it can."""
    kind = name.split()[0]
    if kind in EXCHANGE:
        return verify.no_exchange(backend, device)
    return verify.no_prefill(backend, [PREFILL[kind]]) if kind in PREFILL else None
