"""`msa-icp verify`: every backend of this machine against the FP64 reference.

Random and nasty batches (`msa_icp.cases`) go through the whole decode path of all ranks: scores,
selection and exchange in both row forms, the fused form, the merge. Scores may differ from the canonical ones
by the bound of section 3 of the contract, and not at all where the sums are exact in FP32;
everything after the scores is compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import api, cases, dispatch, reference
from .cases import DecodeCase, bits, poisoned
from .storage import ReceiveStorage

if TYPE_CHECKING:
    from rich.console import Console

KERNEL_BACKENDS = ("triton", "cuda")
"""On a CPU they run interpreted or emulated."""
BITWISE = ("torch",)
"""Backends that compute canonical scores for all inputs."""
CPU_EXCHANGE_ONLY = ("torch",)
"""Backends that publish and merge CPU tensors alone (section 12 of the contract)."""
FORMS = ((False, False), (False, True), (True, False), (True, True))
"""(tagged, fused)"""
FORMS_IF_SLOW = ((False, False), (True, True))
NEG_INF_BITS = -(2**23)
SPIN_LIMIT = 1 << 20


# ---------------------------------------------------------------- what is true


@dataclass(frozen=True)
class Truth:
    """What the scores of one rank must be: float64 `[T, 4, cols]`, equal where the sums are exact."""

    canonical: Tensor  # float32
    written: Tensor  # bool
    low: Tensor
    high: Tensor


def score_truth(case: DecodeCase, rank: int, *, bounds: bool = True) -> Truth:
    """The canonical scores of a rank, and, with `bounds`, between which scores a kernel's may lie.

    A kernel's score is near the canonical score of the row that it picks (section 3), whichever that is:
    at least that of the best row less its bound, at most the largest row plus bound.
    """
    canonical, written = reference.shard_scores(
        case.index_q,
        case.shard(rank),
        case.block_table,
        case.seq_lens,
        rank=rank,
        world_size=case.world_size,
        page_size=case.page_size,
        decode_query_len=case.decode_query_len,
        cols=case.score_columns,
    )
    low, high = canonical.double(), canonical.double()
    if not bounds:
        return Truth(canonical, written, low, high)
    shard = case.shard(rank).to(torch.float64)
    for t, column in (canonical > reference.NEG_INF).any(1).nonzero().tolist():
        request, j = divmod(t, case.decode_query_len)
        position = int(case.seq_lens[request]) - case.decode_query_len + j
        rows = [
            i
            for i in range(shard.shape[1])
            if reference.key_position(
                column, i, rank=rank, world_size=case.world_size, page_size=case.page_size
            )
            <= position
        ]
        keys = shard[int(case.block_table[request, column]), rows]
        query = case.index_q[t].to(torch.float64)
        exact, bound = query @ keys.T, 2.0**-17 * (query.abs() @ keys.abs().T)
        low[t, :, column] = (exact - bound).nan_to_num(reference.NEG_INF).amax(-1)
        high[t, :, column] = (exact + bound).nan_to_num(reference.NEG_INF).amax(-1)
    return Truth(canonical, written, low, high)


def expected_row(score_row: Tensor, num_valid: int, case: DecodeCase, rank: int) -> list[int]:
    """The 32 words that a rank publishes for one float32 score row `[K]` on the CPU."""
    scale, offset = case.index_scale, case.index_offset(rank)
    ids = reference.select(score_row, num_valid, case.init_blocks, case.local_blocks, scale, offset)
    words = bits(score_row).tolist()
    pad = 16 - len(ids)
    chosen = [words[(block - offset) // scale] for block in ids]
    return chosen + [NEG_INF_BITS] * pad + ids + [-1] * pad


def padded(ids: Sequence[int]) -> list[int]:
    """Selected ids as a merge writes them."""
    return [*ids, *[-1] * (16 - len(ids))]


def score_differences(case: DecodeCase, rank: int, out: Tensor, *, bitwise: bool) -> Tensor:
    """Where a score buffer that was `cases.poisoned` differs from what it must hold: bool `[T, 4, cols]`."""
    truth = score_truth(case, rank, bounds=not bitwise)
    got = bits(out)
    if bitwise:
        wrong = got != bits(truth.canonical)
    else:
        value = out.detach().cpu().double()
        empty = truth.canonical == reference.NEG_INF
        wrong = ~((value >= truth.low) & (value <= truth.high)) | (empty != (value == reference.NEG_INF))
        wrong |= got == -(2**31)  # -0.0
    return torch.where(truth.written, wrong, got != cases.POISON)


# ---------------------------------------------------------------- a backend's answers


def run_scores(case: DecodeCase, rank: int, backend: str, device: str) -> Tensor:
    """The scores of one rank in a poisoned buffer."""
    table, lens, _ = case.metadata(device)
    out = poisoned((case.tokens, cases.HEADS, case.score_columns), torch.float32, device)
    api.msa_icp_decode_index_score_sharded(
        case.index_q.to(device),
        case.shard(rank, device),
        table,
        lens,
        out,
        rank=rank,
        world_size=case.world_size,
        page_size=case.page_size,
        decode_query_len=case.decode_query_len,
        max_decode_query_len=8,
        backend=backend,
    )
    return out


def exchange(
    case: DecodeCase, scores: list[Tensor] | None, *, tagged: bool, backend: str, device: str
) -> list[tuple[Tensor, Tensor]]:
    """All ranks publish (fused where `scores` is None), then all merge.

    Returns for every rank the words that it received, int64 `[W, hpr, T, 32]` without their tags, and
    its merged ids, int32 `[T, hpr, 16]`.
    """
    with ReceiveStorage.in_process(case.world_size, capacity=case.tokens + 1, device=device) as group:
        for storage in group:
            own = None if scores is None else scores[storage.rank]
            publish(case, storage, own, tagged=tagged, backend=backend)
        answers = []
        for storage in group:
            recv = storage.tagged_recv if tagged else storage.recv
            words = recv[0, :, :, : case.tokens, :32].to(torch.int64) & 0xFFFFFFFF
            answers.append((words.cpu(), merge(case, storage, tagged=tagged, backend=backend)))
            storage.check()
        return answers


def publish(
    case: DecodeCase, storage: ReceiveStorage, scores: Tensor | None, *, tagged: bool, backend: str
) -> None:
    """One rank's publish into slot set 0; the fused form where there are no scores."""
    rank, device = storage.rank, storage.device
    table, lens, num_valid = case.metadata(device)
    common: dict[str, Any] = {
        "slot": 0,
        "rank": rank,
        "world_size": case.world_size,
        "capacity": storage.capacity,
        "force_begin_blocks": case.init_blocks,
        "force_end_blocks": case.local_blocks,
        "spin_limit": SPIN_LIMIT,
        "generations": storage.publish_generations if tagged else None,
        "backend": backend,
    }
    bases = storage.tagged_recv_bases if tagged else storage.recv_bases
    if scores is not None:
        api.msa_icp_topk_select_publish(
            scores[..., : case.block_table.shape[1]],
            num_valid,
            bases,
            storage.errors,
            heads_per_rank=storage.heads_per_rank,
            index_scale=case.index_scale,
            index_offset=case.index_offset(rank),
            **common,
        )
        return
    pool_bytes = api.msa_icp_decode_pool_bytes(max_decode_tokens=max(1, case.tokens))
    api.msa_icp_decode_score_publish(
        case.index_q.to(device),
        case.shard(rank, device),
        table,
        lens,
        num_valid,
        torch.full((pool_bytes,), cases.NAN_BYTE, dtype=torch.uint8, device=device),
        bases,
        storage.errors,
        page_size=case.page_size,
        decode_query_len=case.decode_query_len,
        **common,
    )


def merge(case: DecodeCase, storage: ReceiveStorage, *, tagged: bool, backend: str) -> Tensor:
    """One rank's merge of slot set 0, on the CPU."""
    out = poisoned((case.tokens, storage.heads_per_rank, 16), torch.int32, storage.device)
    api.msa_icp_merge_candidates(
        (storage.tagged_recv if tagged else storage.recv)[0],
        case.metadata(storage.device)[2],
        out,
        storage.errors,
        init_blocks=case.init_blocks,
        local_blocks=case.local_blocks,
        spin_limit=SPIN_LIMIT,
        expected_generations=storage.expected_generations[0] if tagged else None,
        backend=backend,
    )
    return out.cpu()


# ---------------------------------------------------------------- comparing


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

    def compare(self, what: str, wrong: Tensor) -> int:
        """Count the compared elements; note how many differ, and where the first one is."""
        if bool(wrong.any()):
            first = wrong.nonzero()[0].tolist()
            self.differences.append(f"{what}: {int(wrong.sum())} of {wrong.numel()}, the first at {first}")
        return wrong.numel()


def check_case(result: Result, case: DecodeCase, backend: str, device: str) -> None:
    """Compare one case with the reference and add to `result`."""
    world, layout = case.world_size, f"W={case.world_size} P={case.page_size}"
    bitwise = case.exact or backend in BITWISE
    result.layouts += 1
    scores = []
    for rank in range(world):
        out = run_scores(case, rank, backend, device)
        scores.append(out)
        wrong = score_differences(case, rank, out, bitwise=bitwise)
        result.scores += result.compare(f"scores, {layout} rank {rank}", wrong)
    reason = no_exchange(backend, device)
    if reason is not None:
        result.skipped = f"no exchange: {reason}"
        return
    rows, merged = exchange_truth(case, [out.detach().cpu() for out in scores], bitwise=bitwise)
    for tagged, fused in FORMS_IF_SLOW if is_slow(backend, device) else FORMS:
        form = f"{'tagged' if tagged else 'legacy'}{', fused' if fused else ''}, {layout}"
        received = exchange(case, None if fused else scores, tagged=tagged, backend=backend, device=device)
        for owner, (got_rows, got_merged) in enumerate(received):
            where = f"{form} rank {owner}"
            result.rows += result.compare(f"received rows, {where}", (got_rows != rows[owner]).any(-1))
            result.merged += result.compare(f"merged, {where}", (got_merged != merged[owner]).any(-1))


def no_exchange(backend: str, device: str) -> str | None:
    """Why this backend cannot publish and merge on the device in this process; None where it can."""
    if backend in CPU_EXCHANGE_ONLY and torch.device(device).type != "cpu":
        return f"the {backend} backend publishes and merges CPU tensors only"
    try:
        ReceiveStorage.in_process(2, capacity=1, device=device).close()
    except ValueError as error:
        return str(error)
    return None


def exchange_truth(
    case: DecodeCase, scores: Sequence[Tensor], *, bitwise: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """What every owner must receive and merge, from scores that have been checked.

    Returns the words, int64 `[W, hpr, T, 32]`, and the merged ids, int32 `[T, hpr, 16]`, of every rank.
    """
    world, hpr = case.world_size, cases.HEADS // case.world_size
    num_valid = case.num_valid_pages().tolist()
    columns = case.block_table.shape[1]
    words = [
        [
            [
                expected_row(scores[rank][t, head, :columns], num_valid[t], case, rank)
                for t in range(case.tokens)
            ]
            for head in range(cases.HEADS)
        ]
        for rank in range(world)
    ]
    rows = torch.tensor(words, dtype=torch.int64).view(world, cases.HEADS, case.tokens, 32)
    merged = [
        [merged_row(rows[:, h, t], n, case) for h in range(cases.HEADS)] for t, n in enumerate(num_valid)
    ]
    ids = torch.tensor(merged, dtype=torch.int32).view(case.tokens, cases.HEADS, 16)
    if bitwise and case.whole:
        ids = torch.tensor(unsharded(case), dtype=torch.int32).view(case.tokens, cases.HEADS, 16)
    own = [slice(rank * hpr, (rank + 1) * hpr) for rank in range(world)]
    return [rows[:, heads] & 0xFFFFFFFF for heads in own], [ids[:, heads] for heads in own]


def merged_row(words: Tensor, num_valid: int, case: DecodeCase) -> list[int]:
    """The merge of the rows `[W, 32]` that an owner received."""
    scores = words[:, :16].to(torch.int32).view(torch.float32).flatten().tolist()
    candidates = zip(words[:, 16:].flatten().tolist(), scores, strict=True)
    return padded(reference.merge(list(candidates), num_valid, case.init_blocks, case.local_blocks))


def unsharded(case: DecodeCase) -> list[list[list[int]]]:
    """`[T][4]` padded ids: the selection of one rank with all keys, for `whole` cases."""
    selected: list[list[list[int]]] = []
    for request, seq_len in enumerate(case.seq_lens.tolist()):
        tokens = slice(request * case.decode_query_len, (request + 1) * case.decode_query_len)
        positions = [
            seq_len - case.decode_query_len + j if seq_len > 0 else -1 for j in range(case.decode_query_len)
        ]
        keys = case.sequence_keys(request)
        chosen = reference.select_unsharded(
            case.index_q[tokens], keys, positions, case.init_blocks, case.local_blocks
        )
        selected += [[padded(ids) for ids in heads] for heads in chosen]
    return selected


# ---------------------------------------------------------------- the command


def is_slow(backend: str, device: str) -> bool:
    """Whether kernels run in an interpreter or an emulator, hundreds of times slower than compiled ones."""
    return backend in KERNEL_BACKENDS and device == "cpu"


def batches() -> Iterator[DecodeCase]:
    """Every case with every layout."""
    for world_size, page_size in cases.LAYOUTS:
        yield from cases.random_cases(world_size, page_size)
        yield from cases.nasty_cases(world_size, page_size)


def run(backend: str | None, device: str) -> int:
    """Check one backend, or with None every one that serves `device`; print a table.

    Returns 0 where everything is equal and 1 on any difference. Raises ValueError for a backend that is
    unknown or does not serve the device, with the reason, and ImportError without rich.
    """
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError("verify prints with rich; install it with: pip install 'msa-icp[cli]'") from error
    where = torch.device(device)
    if backend is None:
        names = [name for name, reason in dispatch.backends(where).items() if reason is None]
        if not names:
            dispatch.resolve("auto", where)  # raises with every backend's reason
    else:
        dispatch.resolve(backend, where)
        names = [backend]
    console = Console()
    results = _check_all(names, device, console)
    _print(results, device, console)
    wrong = [result for result in results if result.differences]
    return 1 if wrong else 0


def _check_all(names: Sequence[str], device: str, console: Console) -> list[Result]:
    from rich.progress import track

    results: dict[tuple[str, str], Result] = {}
    for case in track(list(batches()), "Comparing with the reference", console=console, transient=True):
        for name in names:
            if is_slow(name, device) and (case.large or case.world_size * case.page_size != 512):
                continue  # interpreted: the small cases on two layouts take minutes as it is
            result = results.setdefault((case.name, name), Result(case.name, name))
            check_case(result, case, name, device)
    return list(results.values())


def _print(results: Sequence[Result], device: str, console: Console) -> None:
    from rich.table import Table

    table = Table(title=f"Backends on {device} against the FP64 reference")
    table.add_column("Case", overflow="fold")
    table.add_column("Backend")
    for title in ("Layouts", "Scores", "Rows", "Merged", "Differences"):
        table.add_column(title, justify="right")
    for r in results:
        verdict = str(len(r.differences)) if r.differences else "none"
        table.add_row(r.case, r.backend, *map(str, (r.layouts, r.scores, r.rows, r.merged, verdict)))
    console.print(table)
    for reason in sorted({f"{r.backend}: {r.skipped}" for r in results if r.skipped}):
        console.print(f"Not compared, {reason}")
    for r in results:
        for difference in r.differences:
            console.print(f"{r.case}, {r.backend}: {difference}", style="red")
    total = sum(r.scores + r.rows + r.merged for r in results)
    wrong = sum(bool(r.differences) for r in results)
    console.print(
        f"{total} scores and rows compared in {len(results)} cases: "
        + (f"{wrong} cases differ" if wrong else "all equal")
    )
