"""The ranks of a multi-GPU run: a process each, which its parent gives one task after another.

The parent starts the ranks, and a rank that has failed or ended does not take the others along: what they
found is what the run is about. They leave together, when the parent says so: a rank that leaves looks dead to
one that has not come as far. A rank ends when its parent is gone.

The ranks of a group meet over gloo; NCCL is made by the parts that need it, where every rank has a card.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from msa_icp import dispatch, symmetric_memory
from msa_icp.child_processes import end_with_parent, how_it_ended

GROUP_TIMEOUT = timedelta(seconds=180)
"""How long ranks wait for each other in a collective: for the first compilation of a kernel, too."""
GRACE_S = 30.0
"""How long the others may take to notice that a rank has failed; their waits are shorter."""
SILENCE_S = 240.0
"""Ranks that say nothing for so long hang."""
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", symmetric_memory.NO_MULTICAST: "1"}
"""NVLink multicast stays off: what needs it could not run on a shared host."""

OWN_CARDS, ONE_CARD, PROCESSOR = "a card for every rank", "cards shared by ranks", "the processor"
"""Where ranks run."""


@dataclass(frozen=True)
class Setting:
    """What a run is told once."""

    world_size: int
    device: str
    """"cpu" or "cuda"."""
    backends: tuple[str, ...]

    @property
    def place(self) -> str:
        """One of OWN_CARDS, ONE_CARD and PROCESSOR. Raises ValueError where the ranks cannot run."""
        if self.device == "cpu":
            return PROCESSOR
        cards = torch.cuda.device_count()
        if cards >= self.world_size:
            return OWN_CARDS
        if cards == 0 or os.environ.get(symmetric_memory.ONE_CARD) != "1":
            raise ValueError(
                f"{self.world_size} ranks need as many cards, there are {cards}; with "
                f"{symmetric_memory.ONE_CARD}=1 they share what there is (correctness and faults)"
            )
        return ONE_CARD


# ---------------------------------------------------------------- a rank's process


class Rank:
    """What a task knows of its rank: `number` of `setting.world_size`, its `device`, and the parent."""

    def __init__(self, number: int, setting: Setting, parent: Connection) -> None:
        self.number, self.setting, self._parent = number, setting, parent
        self.world_size = setting.world_size
        self.place = setting.place
        self._nccl: dist.ProcessGroup | None = None
        self.device = torch.device("cpu")
        if setting.device == "cuda":
            self.device = torch.device("cuda", number % torch.cuda.device_count())

    def say(self, text: str) -> None:
        """A line of progress, of rank 0."""
        if self.number == 0:
            self._parent.send(("say", text))

    def row(self, row: dict[str, Any]) -> None:
        """A row of the document, of rank 0."""
        if self.number == 0:
            self._parent.send(("row", row))

    def gather(self, mine: Any) -> list[Any]:
        """Collective: what every rank gives, in order of rank."""
        everybody: list[Any] = [None] * self.world_size
        dist.all_gather_object(everybody, mine)
        return everybody

    def go_on(self, until: float) -> bool:
        """Collective: whether rank 0's `time.time()` is before `until`."""
        return bool(self.gather(time.time() < until)[0])

    def prefill_group(self) -> dist.ProcessGroup | None:
        """Collective: the group that brings prefill's rows; None is the default one, of gloo, on a CPU.

        NCCL where every rank has a card. It is never taken down: that would wait for graphs and for ranks.
        """
        if self.device.type == "cuda" and self._nccl is None:
            self._nccl = dist.new_group(backend="nccl")
        return self._nccl

    @property
    def graphs(self) -> bool:
        """Whether the device has CUDA graphs."""
        return self.device.type == "cuda"


def join(rank: Rank, store: str) -> None:
    """Task: enter the group that meets in `store`, having left the one before.

    Nothing is warmed up: a run takes a few of the kernels, and on a machine that has none yet compiling all
    of them takes longer than the run. So what is run begins with a round in which its kernels load, and waits
    are long.
    """
    for backend in rank.setting.backends:
        dispatch.resolve(backend, rank.device)
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank.graphs:
        torch.cuda.set_device(rank.device)
        torch.cuda._sleep(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank.number,
        world_size=rank.world_size,
        timeout=GROUP_TIMEOUT,
    )
    dist.barrier()


def _rank_main(number: int, setting: Setting, parent: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business
    os.environ.update(NO_MULTICAST)
    end_with_parent()
    torch.set_num_threads(1)
    rank: Rank | None = None
    while (task := parent.recv()) is not None:
        function, arguments = task
        try:
            rank = rank or Rank(number, setting, parent)
            parent.send(("done", function(rank, *arguments)))
        except Exception as error:
            parent.send(("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    os._exit(0)  # not through the teardown of a group that has lost a rank


# ---------------------------------------------------------------- the parent


class RanksFailed(RuntimeError):
    """Ranks died, raised or hang: what each of them said, the cause first."""


class _Member:
    """A rank's process as the parent sees it."""

    def __init__(self, number: int, setting: Setting) -> None:
        # Quicker, but not for CUDA: whatever asks for the cards before the fork spoils them for the child.
        fork = setting.device == "cpu" and "forkserver" in multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if fork else "spawn")
        if fork:
            context.set_forkserver_preload(["torch", "torch.distributed", "msa_icp"])
        self.number = number
        self.connection, theirs = context.Pipe()
        arguments = (number, setting, theirs)
        self.process: BaseProcess = context.Process(
            target=_rank_main, args=arguments, name=f"msa-icp-rank-{number}"
        )
        self.process.start()
        theirs.close()
        self.outcome: tuple[str, Any] | None = None

    def give(self, task: object) -> None:
        self.outcome = None
        with contextlib.suppress(BrokenPipeError):  # `listen` will say how it ended
            self.connection.send(task)

    def listen(self, hear: Callable[[str, Any], None]) -> bool:
        """Take what the process has sent; whether there was anything. At its end `outcome` is set."""
        alive = self.process.is_alive()  # asked first: what it sent before it ended is in the pipe
        heard = False
        try:
            while self.outcome is None and self.connection.poll():
                kind, content = self.connection.recv()
                heard = True
                if kind in ("done", "failed"):
                    self.outcome = kind, content
                else:
                    hear(kind, content)
        except (EOFError, ConnectionResetError):
            self.process.join(timeout=5)
            alive = self.process.is_alive()
        if not alive and self.outcome is None:
            self.outcome = "died", how_it_ended(self.process.exitcode)
            heard = True
        return heard

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()


class Team:
    """The processes of a group's ranks; a context manager. `hear(kind, content)` gets what they say."""

    def __init__(self, setting: Setting, hear: Callable[[str, Any], None]) -> None:
        self.setting = setting
        self._hear = hear
        self._folder = tempfile.TemporaryDirectory(prefix="msa-icp-")
        self._groups = 0
        self._members: list[_Member] = []
        self._spare: _Member | None = None
        try:
            for number in range(setting.world_size):  # one by one: those that run already are known
                self._members.append(_Member(number, setting))
            self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        self._groups += 1
        self.run(join, str(Path(self._folder.name) / f"store-{self._groups}"))

    def run(self, task: Callable[..., Any], *arguments: Any, dying: Collection[int] = ()) -> list[Any]:
        """What `task(rank, *arguments)` returned on every rank, None of those in `dying`, which must die.

        Raises RanksFailed; the team is of no use then.
        """
        for member in self._members:
            member.give((task, arguments))
        self._listen(dying)
        wrong = [m for m in self._members if _kind(m) != ("died" if m.number in dying else "done")]
        if wrong:
            order = {"died": 0, "failed": 1, "hangs": 2, "done": 3}
            wrong.sort(key=lambda m: order[_kind(m)])
            raise RanksFailed("\n".join(f"rank {m.number} {_words(m)}" for m in wrong))
        return [m.outcome[1] if m.outcome and m.number not in dying else None for m in self._members]

    def _listen(self, dying: Collection[int]) -> None:
        """Until every rank has an outcome, or takes too long after another has failed."""
        heard, deadline = time.monotonic(), None
        while running := [m for m in self._members if m.outcome is None]:
            handles = [m.connection for m in running] + [m.process.sentinel for m in running]
            multiprocessing.connection.wait(handles, timeout=0.2)
            now = time.monotonic()
            for member in running:
                if member.listen(self._hear):
                    heard = now
            failed = [m for m in self._members if _kind(m) in ("died", "failed") and m.number not in dying]
            if deadline is None and failed:
                deadline = now + GRACE_S
            if now > heard + SILENCE_S or (deadline is not None and now > deadline):
                for member in running:
                    member.outcome = member.outcome or ("hangs", "did not come to an end")

    def prepare(self, number: int) -> None:
        """Start the process that is to take the place of rank `number`."""
        self._spare = _Member(number, self.setting)

    def replace(self) -> None:
        """Put the prepared process in its place; all ranks make a new group."""
        assert self._spare is not None
        self._members[self._spare.number].end()
        self._members[self._spare.number] = self._spare
        self._spare = None
        self._join()

    def close(self) -> None:
        """Let the ranks leave, together; one in the middle of a task is killed."""
        members = [*self._members, *([self._spare] if self._spare else [])]
        idle = [member for member in members if member.outcome is not None]
        for member in idle:
            member.give(None)
        until = time.monotonic() + 5
        for member in idle:
            member.process.join(max(0.0, until - time.monotonic()))
        for member in members:
            member.end()
        self._folder.cleanup()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _kind(member: _Member) -> str:
    return member.outcome[0] if member.outcome else ""


def _words(member: _Member) -> str:
    kind, content = member.outcome or ("", "")
    if kind == "died":
        return str(content)
    return {"failed": f"failed: {content}", "hangs": str(content), "done": "lived on, and was to die"}[kind]
