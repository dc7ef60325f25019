"""The names that callers import: signatures to the letter, docstrings, no hidden dependency."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import msa_icp

SIGNATURES = {
    "msa_icp_decode_index_score_sharded": (
        "index_q, index_k, block_table, seq_lens, score_out, *, rank, world_size, page_size, "
        "decode_query_len, max_decode_query_len, enable_pdl=False, backend='cake'"
    ),
    "msa_icp_decode_score_columns": "max_model_len, page_size",
    "msa_icp_topk_select_publish": (
        "scores, num_valid_pages, recv_bases, errors, *, slot, rank, world_size, heads_per_rank, capacity, "
        "force_begin_blocks, force_end_blocks, spin_limit=67108864, enable_pdl=False, generations=None, "
        "index_scale=1, index_offset=0, backend='cake'"
    ),
    "msa_icp_merge_candidates": (
        "recv_slot, num_valid_pages, output, errors, *, init_blocks, local_blocks, spin_limit=67108864, "
        "enable_pdl=False, expected_generations=None, prefill=False, backend='cake'"
    ),
    "msa_icp_decode_score_publish": (
        "index_q, index_k, block_table, seq_lens, num_valid_pages, pool, recv_bases, errors, *, rank, "
        "world_size, page_size, decode_query_len, slot, capacity, force_begin_blocks, force_end_blocks, "
        "spin_limit=67108864, generations=None, enable_pdl=True, backend='cake'"
    ),
    "msa_icp_decode_pool_bytes": "*, max_decode_tokens, num_heads=4",
    "msa_icp_comm_layout": "world_size, heads_per_rank, capacity",
    "msa_icp_index_score_sharded_plan": (
        "qo_segment_lens, kv_segment_lens, num_qo_heads, *, qo_offset, device=None, backend='cake'"
    ),
    "msa_icp_index_score_sharded_plan_device": (
        "qo_segment_lens, kv_segment_lens, qo_segment_offsets, kv_segment_offsets, qo_offset, num_qo_heads, "
        "*, total_q, max_query_len, max_seq_len, packed_work_range, packed_work_info, workspace, "
        "backend='cake'"
    ),
    "msa_icp_index_score_plan_storage": "*, num_qo_heads, total_q, batch, device",
    "msa_icp_index_score_columns": "max_seq_len, page_size",
    "msa_icp_index_score_sharded": (
        "q, k, block_table, plan, *, rank, max_score, sm_scale=1.0, initialize=True, tp=2, compact=False, "
        "enable_pdl=False, backend='cake'"
    ),
    "msa_icp_topk_select_prefill": (
        "scores, num_valid_pages, carrier, *, force_begin_blocks=0, force_end_blocks=0, index_scale=1, "
        "index_offset=0, backend='cake'"
    ),
    "msa_icp_prefill_score_select": (
        "q, k, block_table, plan, num_valid_pages, pool, carrier, *, rank, tp=2, compact=False, "
        "force_begin_blocks=0, force_end_blocks=0, enable_pdl=False, backend='cake'"
    ),
    "msa_icp_prefill_pool_bytes": "*, total_q, batch, device, num_heads=4",
    "merge_received": (
        "comm, num_valid_pages, output, *, slot, tagged, init_blocks, local_blocks, spin_limit=67108864, "
        "enable_pdl=False, backend='cake'"
    ),
    "register_comm": "comm",
    "exchange_prefill": "carrier, received, group=None",
    "write_index_keys": (
        "keys, positions, request_index, block_table, index_k, *, rank, world_size, page_size, backend='cake'"
    ),
    "shard_index_keys": "cache, *, rank, world_size",
    "num_valid_pages": "seq_lens, decode_query_len, out=None",
    "backends": "device",
    "is_supported": "device",
    "warmup": "device, backend='cake', *, page_size=None, world_size=None",
    "prepare_msa_icp_indexer": (
        "*, world_size, rank, num_index_heads, page_size, init_blocks, local_blocks, max_decode_tokens, "
        "max_decode_query_len, max_num_batched_tokens, max_num_seqs, max_model_len, num_sparse_layers, "
        "device, backend='cake', spin_limit=67108864"
    ),
    "install": "",
    "uninstall": "",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    signature = inspect.signature(getattr(msa_icp, name))
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    got = str(inspect.Signature(bare))
    assert got == f"({SIGNATURES[name]})"


@pytest.mark.parametrize("name", sorted(msa_icp.__all__))
def test_public_names_are_documented(name):
    assert len(inspect.getdoc(getattr(msa_icp, name)) or "") > 30


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in SIGNATURES
        if name.startswith(("msa_icp_", "write", "shard", "exchange", "merge", "register"))
    ],
)
def test_docstrings_name_every_argument_and_the_errors(name):
    text = inspect.getdoc(getattr(msa_icp, name))
    for parameter in inspect.signature(getattr(msa_icp, name)).parameters:
        assert parameter in text, parameter
    assert "Raises:" in text
    assert "ValueError" in text


def test_the_plan_is_a_frozen_dataclass_of_the_fields_of_the_contract():
    names = [field.name for field in dataclasses.fields(msa_icp.MSAIcpScorePlan)]
    assert names == [
        *("qo_segment_lens", "kv_segment_lens", "qo_segment_offsets", "kv_segment_offsets", "qo_offset"),
        *("packed_work_range", "packed_work_info", "workspace"),
        *("total_q", "num_qo_heads", "batch", "max_query_len", "columns"),
    ]
    plan = msa_icp.MSAIcpScorePlan(*[None] * 8, *[1] * 5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.total_q = 2


def test_the_package_is_typed():
    assert Path(msa_icp.__file__).with_name("py.typed").exists()


def test_only_torch_is_needed():
    """Everything that an extra brings may be missing: the import and a decode step work."""
    program = """
import sys
for name in ("numpy", "triton", "rich", "typer", "click", "matplotlib", "psutil"):
    sys.modules[name] = None
import msa_icp, msa_icp.reference, msa_icp.cases
from msa_icp import cases
case = cases.decode_case("", 2, 128, seq_lens=(300,))
from msa_icp import verify
merged = verify.exchange(case, None, tagged=True, backend="torch", device="cpu")
assert merged[0][1].shape == (1, 2, 16)
assert msa_icp.backends("cpu")["torch"] is None
assert "msa_icp.cli" not in sys.modules
assert "torch._dynamo" not in sys.modules  # a second to import, which torch.compile alone should cost
print("done")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == "done", ended.stderr


def test_a_backend_imports_no_entry_point():
    """Data flows one way: api, checks, dispatch, one backend's op."""
    package = Path(msa_icp.__file__).parent
    for path in package.glob("*_backend/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level >= 2:
                names = {node.module} if node.module else {alias.name for alias in node.names}
                assert not names & {"api", "checks", "dispatch", "storage"}, path
    for path in (package / "api").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert "backend" not in (node.module or ""), path
