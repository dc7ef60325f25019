"""What can go wrong with a replay, and the exit code of each kind."""

from __future__ import annotations


class ReplayError(Exception):
    """One sentence for the user; the command line prints it and ends with `exit_code`."""

    exit_code = 1


class UsageError(ReplayError):
    """An option, a trace or a size that cannot be replayed: nothing was started."""

    exit_code = 2


class TraceError(UsageError):
    """A trace that cannot be read; names the file, the line where there is one, and what is wrong."""

    def __init__(self, path: object, line: int | None, problem: str) -> None:
        where = f"{path}" if line is None else f"{path}, line {line}"
        super().__init__(f"{where}: {problem}")


class RankFailure(ReplayError):
    """Ranks died or raised: a line for each, the cause first, and the trace of the cause."""

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.trace = trace
