"""What both parts of `msa-icp verify` compare with: true scores, differences, and what a backend can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import cases, dispatch, reference
from ..cases import bits
from ..storage import ReceiveStorage

KERNEL_BACKENDS = ("triton", "cuda")
"""On a CPU they run interpreted or emulated."""
BITWISE = ("torch",)
"""Backends that compute canonical scores for all inputs."""
CPU_EXCHANGE_ONLY = ("torch",)
"""Backends that publish and merge CPU tensors alone (section 12 of the contract)."""
PREFILL_OPS = (
    "index_score_sharded_plan_device",
    "index_score_sharded",
    "topk_select_prefill",
    "prefill_score_select",
)
PREFILL_STEPS = ("index_score_sharded", "topk_select_prefill")
"""What makes a carrier in two steps, along the plan of whichever backend has one."""


@dataclass(frozen=True)
class Truth:
    """What the scores of one rank must be: float64 `[T, 4, cols]`, equal where the sums are exact."""

    canonical: Tensor  # float32
    written: Tensor  # bool
    low: Tensor
    high: Tensor


def differences(truth: Truth, out: Tensor, *, bitwise: bool) -> Tensor:
    """Where a score buffer that was `cases.poisoned` is not what it must be."""
    got = bits(out)
    if bitwise:
        wrong = got != bits(truth.canonical)
    else:
        value = out.detach().cpu().double()
        empty = truth.canonical == reference.NEG_INF
        wrong = ~((value >= truth.low) & (value <= truth.high)) | (empty != (value == reference.NEG_INF))
        wrong |= got == -(2**31)  # -0.0
    return torch.where(truth.written, wrong, got != cases.POISON)


def padded(ids: Sequence[int]) -> list[int]:
    """Selected ids as a merge writes them."""
    return [*ids, *[-1] * (16 - len(ids))]


@dataclass(frozen=True)
class Failure:
    """An exception of a backend in a case: the layout, what it said, and where it was raised."""

    layout: str
    message: str
    trace: str


@dataclass
class Result:
    """One case on one backend, over the layouts that it ran with."""

    case: str
    backend: str
    layouts: int = 0
    scores: int = 0
    rows: int = 0
    merged: int = 0
    skipped: str = ""
    differences: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """For a reader."""
        return "failed" if self.failures else str(len(self.differences) or "none")

    def compare(self, what: str, wrong: Tensor) -> int:
        """Count the compared elements; note how many differ, and where the first one is."""
        if bool(wrong.any()):
            first = wrong.nonzero()[0].tolist()
            self.differences.append(f"{what}: {int(wrong.sum())} of {wrong.numel()}, the first at {first}")
        return wrong.numel()


def is_slow(backend: str, device: str) -> bool:
    """Whether kernels run in an interpreter or an emulator, hundreds of times slower than compiled ones."""
    return backend in KERNEL_BACKENDS and device == "cpu"


def no_exchange(backend: str, device: str) -> str | None:
    """Why this backend cannot publish and merge on the device in this process; None where it can."""
    if backend in CPU_EXCHANGE_ONLY and torch.device(device).type != "cpu":
        return f"the {backend} backend publishes and merges CPU tensors only"
    try:
        ReceiveStorage.in_process(2, capacity=1, device=device).close()
    except ValueError as error:
        return str(error)
    return None


def no_prefill(backend: str, ops: Sequence[str] = PREFILL_OPS) -> str | None:
    """Why this backend does not do these prefill ops; None where it does."""
    lacking = [op for op in ops if op not in dispatch.package(backend).__all__]
    return f"the {backend} backend has no {', '.join(lacking)}" if lacking else None
