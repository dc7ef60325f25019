"""`msa-icp bench`: the decode scorer on this machine, as a table."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from msa_icp.dispatch import backends

from . import decode_score, ruler
from .measure import versions


def kernel_backends(device: torch.device) -> list[str]:
    """The backends to measure: on a GPU the kernels, on a CPU whatever serves it."""
    served = [name for name, reason in backends(device).items() if reason is None]
    return [name for name in served if device.type == "cpu" or name != "torch"]


def sizes_up_to(max_bytes: float) -> list[decode_score.Size]:
    """The batch sizes whose launches read at most so many bytes."""
    layout = decode_score.LAYOUTS["P128W4"]
    return [size for size in decode_score.SIZES if size.k_bytes(layout) <= max_bytes]


def run(
    device: torch.device,
    names: Sequence[str],
    layouts: Sequence[str],
    query_lens: Sequence[int],
    max_bytes: float,
) -> None:
    """Measure and print; a row is printed as soon as it is there."""
    facts = versions(device)
    judgement = ruler.judge(device)
    _say(f"Decode scorer, {facts['card']}, torch {facts['torch']}, triton {facts['triton']}")
    _say(str(judgement))
    _say(decode_score.HEADING)
    sizes = sizes_up_to(max_bytes)
    for row in decode_score.rows(device, list(names), sizes=sizes, layouts=layouts, query_lens=query_lens):
        _say(decode_score.words(row))
    if judgement.too_slow:
        _say(f"Throw these figures away: {judgement}")


def _say(line: str) -> None:
    print(line, flush=True)
