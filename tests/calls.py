"""One valid call of every function, as keyword arguments that a test can change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from helpers import HEADS, random_scores
from torch import Tensor

import msa_icp
from msa_icp import cases
from msa_icp.cases import poisoned


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


def sizes_call(name: str, **arguments: Any) -> Callable[[str, str], Call]:
    return lambda device, backend: Call(getattr(msa_icp, name), dict(arguments))


CALLS: dict[str, Callable[[str, str], Call]] = {
    "score": score_call,
    "publish": publish_call,
    "publish legacy": lambda d, b: publish_call(d, b, tagged=False),
    "merge": merge_call,
    "merge tagged": lambda d, b: merge_call(d, b, tagged=True),
    "merge prefill": lambda d, b: merge_call(d, b, prefill=True),
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
    "comm layout": sizes_call("msa_icp_comm_layout", world_size=2, heads_per_rank=2, capacity=3),
    "storage": lambda d, b: Call(
        msa_icp.ReceiveStorage.in_process,
        {"world_size": 2, "capacity": 3, "heads_per_rank": 2, "device": d},
    ),
}
EXCHANGE = {"publish", "merge", "fused", "storage"}
