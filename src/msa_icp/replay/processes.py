"""A process for each rank, and the parent that watches over them.

The ranks meet in a gloo group on 127.0.0.1, those on GPUs too. They talk to each other through it once a
step (a reduced flag, which says whether to go on and lines them up) and in each layer of a step in which
prompts enter (from GPUs by way of `through_host.py`), and through the receive storage in each layer of a
step in which somebody decodes. Each has a pipe to the parent: rank 0 tells its progress and hears of Ctrl-C,
all send their result or what went wrong. A rank ends when its parent is gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import msa_icp

from .. import symmetric_memory
from ..child_processes import end_with_parent, how_it_ended
from .engine import Counts
from .errors import RankFailure
from .interrupt import Interrupt, ignored
from .loop import run_steps
from .plan import Plan, threads_per_rank
from .rank import Progress, Rank, RankResult
from .synth import Synth
from .through_host import ThroughHost

HOST = "127.0.0.1"
GROUP_TIMEOUT = timedelta(minutes=5)
"""How long ranks wait for each other's scores and checks."""
GRACE_SECONDS = 30.0
"""After the first failure, how long the other ranks may take to notice; their waits are shorter."""
PROGRESS_SECONDS = 0.1


@dataclass(frozen=True)
class _Done:
    result: RankResult
    counts: Counts


@dataclass(frozen=True)
class _Failed:
    problem: str
    trace: str
    blame: int
    """How likely another failure is the cause of this one: `DIED`, `RAISED`, or `LEFT_ALONE`."""


DIED, RAISED, LEFT_ALONE = range(3)


class PeerGone(RuntimeError):
    """The other ranks cannot be reached any more."""


# ---------------------------------------------------------------- a rank's process


def _rank_main(plan: Plan, rank: int, port: int, threads: int, parent: Connection) -> None:
    end_with_parent()
    torch.set_num_threads(threads)
    try:
        parent.send(_run_rank(plan, rank, port, parent))
    except Exception as error:
        blame = LEFT_ALONE if isinstance(error, msa_icp.IcpTimeoutError | PeerGone) else RAISED
        trace = traceback.format_exc() if blame == RAISED else ""
        parent.send(_Failed(f"{type(error).__name__}: {error}", trace, blame))


def _take_device(plan: Plan, rank: int) -> torch.device:
    """This rank's device, from now on the current one of its process."""
    device = torch.device(plan.devices[rank])
    if device.type == "cuda":
        if plan.share_a_card:
            os.environ[symmetric_memory.ONE_CARD] = "1"
        torch.cuda.set_device(device)
    return device


def _exchange_prefill(carrier: Tensor, received: Tensor) -> None:
    try:
        msa_icp.exchange_prefill(carrier, received)
    except RuntimeError as error:
        raise PeerGone(f"the other ranks cannot be reached: {error}") from error


def _run_rank(plan: Plan, rank: int, port: int, parent: Connection) -> _Done:
    device = _take_device(plan, rank)
    store = TCPStore(HOST, port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=plan.options.world_size, timeout=GROUP_TIMEOUT
    )
    last_told = 0.0

    def go_on() -> bool:
        stop = torch.tensor([int(rank == 0 and parent.poll())])
        try:
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        except RuntimeError as error:
            raise PeerGone("the other ranks cannot be reached") from error
        return not stop.item()

    def exchange(ranks: Sequence[Rank]) -> None:
        (one,) = ranks
        with one.watch("prefill", "exchange"):
            if through_host is None:
                _exchange_prefill(one.prefill.carrier, one.prefill.received)
            else:
                through_host.exchange(_exchange_prefill)

    def tell(progress: Progress) -> None:
        nonlocal last_told
        if rank == 0 and time.monotonic() - last_told > PROGRESS_SECONDS:
            last_told = time.monotonic()
            parent.send(progress)

    try:
        synth = Synth(plan.requests, plan.options.seed)
        with msa_icp.ReceiveStorage.create(capacity=plan.options.capacity, device=device) as storage:
            one = Rank(plan, synth, storage)  # every kernel is loaded before anybody waits
            on_gpu = device.type == "cuda"
            through_host = ThroughHost(one.prefill, pinned=storage.device.type == "cuda") if on_gpu else None
            counts = run_steps(plan, [one], exchange, go_on, tell)
            return _Done(one.result(), counts)
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------- the parent


@dataclass
class _Worker:
    rank: int
    process: SpawnProcess
    connection: Connection
    done: _Done | None = None
    failed: _Failed | None = None

    @property
    def ended(self) -> bool:
        return self.done is not None or self.failed is not None

    def listen(self, progress: Callable[[Progress], None]) -> None:
        """Take what the process has sent, and note when it is gone without a word."""
        alive = self.process.is_alive()  # asked first: what it sent before it ended is in the pipe
        try:
            while not self.ended and self.connection.poll():
                message = self.connection.recv()
                if isinstance(message, Progress):
                    progress(message)
                elif isinstance(message, _Done):
                    self.done = message
                else:
                    self.failed = message
        except (EOFError, ConnectionResetError):
            self.process.join(timeout=5)
            alive = self.process.is_alive()
        if not alive and not self.ended:
            self.failed = _Failed(how_it_ended(self.process.exitcode), "", DIED)

    def ask_to_stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is gone, and `listen` will say how
            self.connection.send(None)


def run_processes(
    plan: Plan, interrupt: Interrupt, progress: Callable[[Progress], None]
) -> tuple[list[RankResult], Counts]:
    """Run every rank in a process of its own. Raises RankFailure; in any case no process is left."""
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    workers: list[_Worker] = []
    try:
        with ignored():
            # One by one: should a start fail, those that run already are known.
            workers.extend(_start(plan, rank, store.port) for rank in range(plan.options.world_size))
        _supervise(workers, interrupt, progress)
    finally:
        _take_down(workers)
    if any(worker.failed for worker in workers):
        raise _failure(workers)
    done = [worker.done for worker in workers if worker.done is not None]
    return [one.result for one in done], done[0].counts


def _start(plan: Plan, rank: int, port: int) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_rank_main,
        args=(plan, rank, port, threads_per_rank(plan.options), theirs),
        name=f"msa-icp-rank-{rank}",
    )
    process.start()
    theirs.close()
    return _Worker(rank, process, ours)


def _supervise(workers: list[_Worker], interrupt: Interrupt, progress: Callable[[Progress], None]) -> None:
    told_to_stop, deadline = False, None
    while running := [worker for worker in workers if not worker.ended]:
        multiprocessing.connection.wait(
            [worker.connection for worker in running] + [worker.process.sentinel for worker in running],
            timeout=PROGRESS_SECONDS,
        )
        for worker in running:
            worker.listen(progress)
        if interrupt.requested and not told_to_stop:
            workers[0].ask_to_stop()
            told_to_stop = True
        if deadline is None and any(worker.failed for worker in workers):
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            for worker in running:
                if not worker.ended:
                    worker.failed = _Failed("did not end in time", "", LEFT_ALONE)
                    worker.process.kill()


def _take_down(workers: list[_Worker]) -> None:
    for worker in workers:
        if not worker.ended:
            worker.process.kill()
    for worker in workers:
        worker.process.join(timeout=10)
        if worker.process.is_alive():  # it has sent its last word, and does not end
            worker.process.kill()
            worker.process.join()
        worker.connection.close()
        worker.process.close()


def _failure(workers: list[_Worker]) -> RankFailure:
    """What went wrong, the likely cause first."""
    failures = sorted(
        ((worker.rank, worker.failed) for worker in workers if worker.failed),
        key=lambda one: (one[1].blame, one[0]),
    )
    ranks_of: dict[str, list[int]] = {}
    for rank, failed in failures:
        ranks_of.setdefault(failed.problem, []).append(rank)
    sentences = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {problem}"
        for problem, ranks in ranks_of.items()
    ]
    return RankFailure("\n".join(sentences), failures[0][1].trace)
