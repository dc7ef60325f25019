"""The whole path of all ranks through FlashInfer's names, as an engine that knows nothing of us goes it.

`python flashinfer_chain.py` does it over the FlashInfer that is installed. It ends with NOT_HERE where that
cannot be imported.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import msa_icp
from msa_icp import cases, prefill_cases
from msa_icp.verify import decode, prefill
from msa_icp.verify.comparison import Result

NOT_HERE = 77
LENGTHS = (1, 3000, 0, 2500)
SIZES = {
    "msa_icp_comm_layout": (4, 1, 8),
    "msa_icp_decode_score_columns": (1 << 20, 128),
    "msa_icp_index_score_columns": (5000, 256),
}
"""Functions that the path itself does not need, and arguments."""


class Engine:
    """Takes every function from FlashInfer and names no backend; notes what it has called."""

    def __init__(self, msa_ops: ModuleType) -> None:
        self.msa_ops = msa_ops
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self.msa_ops, name)

        def call(*args: Any, backend: str = "", **kwargs: Any) -> Any:
            self.called.add(name)
            return function(*args, **kwargs)

        return call


def check(msa_ops: ModuleType) -> set[str]:
    """Decode batches and prefill windows on the CPU against the reference; the names of what was called."""
    engine = Engine(msa_ops)
    result = Result("through flashinfer.msa_ops", "torch")
    with mock.patch.object(decode, "api", engine), mock.patch.object(prefill, "api", engine):
        for world_size, page_size in ((4, 128), (2, 256)):
            batch = cases.decode_case("", world_size, page_size, seq_lens=LENGTHS, decode_query_len=2)
            decode.check_case(result, batch, "torch", "cpu")
            window = next(prefill_cases.random_cases(world_size, page_size))
            prefill.check_case(result, window, "torch", "cpu")
            plan = prefill.plan_on_host(window, "torch", "cpu")
            assert isinstance(plan, msa_icp.MSAIcpScorePlan)
            assert facade(engine, batch) == decode.unsharded(batch)
    assert not result.differences, result.differences
    assert not result.skipped, result.skipped
    assert min(result.scores, result.rows, result.merged) > 0
    for name, arguments in SIZES.items():
        assert getattr(engine, name)(*arguments) == getattr(msa_icp, name)(*arguments), name
    return engine.called


def facade(engine: Engine, case: cases.DecodeCase) -> list[list[list[int]]]:
    """`[T][4]` ids of one layer through `prepare_msa_icp_indexer`, a thread a rank."""
    table, lens, num_valid = case.metadata()
    outputs: list[Tensor | None] = [None] * case.world_size

    def layer(comm: msa_icp.ReceiveStorage) -> None:
        plan = engine.prepare_msa_icp_indexer(
            world_size=case.world_size,
            rank=comm.rank,
            num_index_heads=cases.HEADS,
            page_size=case.page_size,
            init_blocks=case.init_blocks,
            local_blocks=case.local_blocks,
            max_decode_tokens=case.tokens,
            max_decode_query_len=case.decode_query_len,
            max_num_batched_tokens=case.tokens,
            max_num_seqs=len(LENGTHS),
            max_model_len=4096,
            num_sparse_layers=2,
            device="cpu",
        )
        scores = cases.poisoned(plan.decode_scores_shape(), torch.float32)
        output = cases.poisoned((case.tokens, plan.heads_per_rank, 16), torch.int32)
        tensors = case.index_q, case.shard(comm.rank), table, lens, num_valid, scores, output
        plan.decode(*tensors, comm=comm, slot=0, tagged=True, decode_query_len=case.decode_query_len)
        outputs[comm.rank] = output

    with msa_icp.ReceiveStorage.in_process(case.world_size, capacity=case.tokens) as group:
        threads = [threading.Thread(target=layer, args=(comm,)) for comm in group]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for comm in group:
            comm.check()
    return torch.cat([output for output in outputs if output is not None], dim=1).tolist()


def main() -> int:
    try:
        from flashinfer import msa_ops
    except (ImportError, OSError) as error:
        print(f"flashinfer.msa_ops cannot be imported here: {error}")
        return NOT_HERE
    torch.set_num_threads(1)  # every rank has a thread of its own, and they wait for each other
    before = {name: getattr(msa_ops, name) for name in msa_ops.__all__}
    msa_icp.install()
    called = check(msa_ops)
    msa_icp.uninstall()
    assert {name: getattr(msa_ops, name) for name in msa_ops.__all__} == before
    print(*sorted(called))
    return 0


if __name__ == "__main__":
    sys.exit(main())
