"""The merge of decode by communicator, for eager callers and for functions that `torch.compile` traces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import checks, geometry, receive_rows
from .decode import merge_rows


def merge_received(
    comm: Any,
    num_valid_pages: Tensor,
    output: Tensor,
    *,
    slot: int,
    tagged: bool,
    init_blocks: int,
    local_blocks: int,
    spin_limit: int = 1 << 26,
    enable_pdl: bool = False,
    backend: str = "cake",
) -> None:
    """Merge the rows of one slot set of a communicator: `msa_icp_merge_candidates` by name (section 6; ours).

    The rows are not an argument: peers write into them, so nothing may copy them. In a function that
    `torch.compile` traces they stand in the graph as the integer `comm.recv_address`, or
    `comm.tagged_recv_address`.

    Args:
        comm: a `ReceiveStorage`, or an object with the same fields, to which `register_comm` has given the
            two addresses if it is for a compiled function.
        num_valid_pages, output, init_blocks, local_blocks, spin_limit, enable_pdl, backend: as for
            `msa_icp_merge_candidates`.
        slot: slot set, 0 to 2.
        tagged: merge the tagged rows and advance `comm.expected_generations[slot]`; else the legacy rows.

    Written: `output`, `comm.errors`, and what `msa_icp_merge_candidates` writes of the slot set.

    Raises:
        ValueError: as for `msa_icp_merge_candidates`; from a compiled function, when it runs, also where
            nothing is known at the address: no `register_comm`, or the storage is closed.
    """
    if is_dynamo_compiling():
        torch.ops.msa_icp.merge_received(
            comm.tagged_recv_bases if tagged else comm.recv_bases,
            num_valid_pages,
            output,
            comm.errors,
            comm.expected_generations if tagged else None,
            address=getattr(comm, "tagged_recv_address" if tagged else "recv_address", 0),
            slot=slot,
            init_blocks=init_blocks,
            local_blocks=local_blocks,
            spin_limit=spin_limit,
            enable_pdl=enable_pdl,
            backend=backend,
        )
        return
    checks.flag("tagged", tagged)
    merge_slot_set(
        _field(comm, "tagged_recv" if tagged else "recv"),
        num_valid_pages,
        output,
        _field(comm, "errors"),
        _field(comm, "expected_generations") if tagged else None,
        slot=slot,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        spin_limit=spin_limit,
        enable_pdl=enable_pdl,
        backend=backend,
    )


def _field(comm: Any, name: str) -> Tensor:
    value = getattr(comm, name, None)
    if not isinstance(value, Tensor):
        checks.refuse(f"comm.{name}", "a torch.Tensor", type(value).__name__)
    return value


def merge_slot_set(
    rows: Tensor,
    num_valid_pages: Tensor,
    output: Tensor,
    errors: Tensor,
    expected_generations: Tensor | None,
    *,
    slot: int,
    init_blocks: int,
    local_blocks: int,
    spin_limit: int,
    enable_pdl: bool,
    backend: str,
) -> None:
    """`msa_icp_merge_candidates` on one slot set of rows and counters of all of them."""
    own = checks.integer("slot", slot, 0, geometry.SLOT_SETS - 1)
    if not rows.dim() or rows.shape[0] != geometry.SLOT_SETS:
        must_be = f"the {geometry.SLOT_SETS} slot sets of a receive storage that is open"
        checks.refuse(
            "comm.recv" if expected_generations is None else "comm.tagged_recv", must_be, list(rows.shape)
        )
    merge_rows(
        rows[own],
        num_valid_pages,
        output,
        errors,
        slot=own,
        prefill=False,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        spin_limit=spin_limit,
        enable_pdl=enable_pdl,
        expected_generations=None if expected_generations is None else expected_generations[own],
        backend=backend,
    )


def register_comm(comm: Any) -> None:
    """Let compiled functions merge what lies in a caller's own receive storage (section 6; ours).

    A `ReceiveStorage` needs no such call. Call it once, outside the compiled function, and again when a
    field has become another tensor.

    Args:
        comm: an object with `recv`, int32 `legacy_shape`, and `tagged_recv`, int64 `tagged_shape` of
            `msa_icp_comm_layout`, contiguous and on one device. The tensors must live as long as compiled
            functions merge from them; nothing here keeps them alive.

    Written: the attributes `comm.recv_address` and `comm.tagged_recv_address`.

    Raises:
        ValueError: a field is no such tensor.
    """
    checks.comm_rows(comm)
    comm.recv_address = receive_rows.announce(comm.recv)
    comm.tagged_recv_address = receive_rows.announce(comm.tagged_recv)
