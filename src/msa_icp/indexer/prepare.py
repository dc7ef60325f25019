"""Making the facade."""

from __future__ import annotations

import torch

from .plan import MSAIcpIndexerPlan


def prepare_msa_icp_indexer(
    *,
    world_size: int,
    rank: int,
    num_index_heads: int,
    page_size: int,
    init_blocks: int,
    local_blocks: int,
    max_decode_tokens: int,
    max_decode_query_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    num_sparse_layers: int,
    device: torch.device | str | None,
    backend: str = "cake",
    spin_limit: int = 1 << 26,
) -> MSAIcpIndexerPlan:
    """This rank's indexer, from the serving limits (section 8). Every rank of a group takes the same ones.

    Args:
        world_size, rank: ranks of the group, 2 or 4, and which one this is.
        num_index_heads: index heads of the whole group; 4.
        page_size: keys of a page over all ranks, 128 or 256.
        init_blocks, local_blocks: blocks selected in any case at the begin and the end; sum <= 16.
        max_decode_tokens: most tokens of a decode batch: the capacity of the receive storage.
        max_decode_query_len: most query tokens of a request in decode, 1 to 8.
        max_num_batched_tokens: most prefill tokens of a step.
        max_num_seqs: most segments of a prefill window.
        max_model_len: keys of the longest context.
        num_sparse_layers: sparse layers of a step; tagged rows need two.
        device: any that a backend serves; "cuda" and None are the current one, None without a GPU the CPU.
        backend: "cake" or "auto" for the best of the device, or a backend's name (section 12); the same on
            every rank.
        spin_limit: polls that a wait for a peer takes at most (ours), `0 < spin_limit < 2**31`.

    Allocates the storage of the prefill plans (32 MiB of workspace and some KiB a window), and the fused
    decode form's pool where `fused_decode_min_batch` is set. All other buffers are the caller's, of the
    shapes that the plan's methods tell.

    Raises:
        ValueError: an argument breaks a rule, or no backend serves the device.
    """
    return MSAIcpIndexerPlan(
        world_size=world_size,
        rank=rank,
        num_index_heads=num_index_heads,
        page_size=page_size,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        max_decode_tokens=max_decode_tokens,
        max_decode_query_len=max_decode_query_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        num_sparse_layers=num_sparse_layers,
        device=device,
        backend=backend,
        spin_limit=spin_limit,
    )
