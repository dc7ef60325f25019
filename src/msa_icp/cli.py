"""The command line: options in, exit code out. What the commands do is elsewhere.

Exit codes: 0, all well; 1, a rank failed or a selection was wrong; 2, the command cannot be carried
out as it was given.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any

import torch

try:
    import typer
    from rich.console import Console

    from .dispatch import resolve
    from .replay import terminal
    from .replay.errors import ReplayError, UsageError
    from .replay.options import MAX_CHUNK, MAX_CONTEXT, ReplayOptions
except ModuleNotFoundError as missing:
    print(f"msa-icp: {missing}; the command line needs: pip install 'msa-icp[cli]'", file=sys.stderr)
    raise SystemExit(2) from None

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Index context parallelism for MiniMax sparse attention.",
)

# What typer raises for a command line that it cannot make sense of; it exports only this subclass.
_CommandLineError: Any = typer.BadParameter.__mro__[1]

_DEFAULT = ReplayOptions()

WorldSize = Annotated[int, typer.Option(help="Ranks: 2 or 4.")]
PageSize = Annotated[int, typer.Option(help="Tokens in a page: 128 or 256.")]
Backend = Annotated[str, typer.Option(help="'auto', or a name that `msa-icp doctor` lists.")]
Report = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Write summary.json and two pictures into this folder.")
]


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="A Mooncake trace (JSON lines) or an Azure LLM trace (CSV).")],
    world_size: WorldSize = _DEFAULT.world_size,
    page_size: PageSize = _DEFAULT.page_size,
    query_len: Annotated[
        int, typer.Option(help="New tokens of a request in one decode step: 1 to 8.")
    ] = _DEFAULT.query_len,
    sparse_layers: Annotated[
        int, typer.Option(help="Sparse attention layers; each has its own keys.")
    ] = _DEFAULT.sparse_layers,
    max_context: Annotated[
        int, typer.Option(help=f"Requests that outgrow this many tokens are skipped; at most {MAX_CONTEXT}.")
    ] = _DEFAULT.max_context,
    requests: Annotated[
        int | None, typer.Option(help="Replay the first so many requests; default: all.")
    ] = None,
    decode_steps: Annotated[
        int | None, typer.Option(help="End after so many decode steps; default: when all are done.")
    ] = None,
    max_batch: Annotated[
        int, typer.Option(help="The most requests that decode together.")
    ] = _DEFAULT.max_batch,
    cache_tokens: Annotated[
        int | None, typer.Option(help="Tokens that the paged cache holds; default: enough for any batch.")
    ] = None,
    chunk_tokens: Annotated[
        int, typer.Option(help=f"The most prompt tokens that enter in one step; at most {MAX_CHUNK}.")
    ] = _DEFAULT.chunk_tokens,
    prefill_tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="The last N tokens of each prompt go through the indexer, those before are taken as cached; "
            f"{MAX_CONTEXT}: whole prompts.",
        ),
    ] = _DEFAULT.prefill_tokens,
    step_ms: Annotated[
        float, typer.Option(help="Time of a step on the clock of arrivals.")
    ] = _DEFAULT.step_ms,
    backend: Backend = _DEFAULT.backend,
    tagged: Annotated[
        bool, typer.Option("--tagged/--legacy", help="Form of the exchanged Top16 rows.")
    ] = _DEFAULT.tagged,
    check_every: Annotated[
        int, typer.Option(metavar="N", help="Check every N-th step and chunk against the reference; 0: none.")
    ] = _DEFAULT.check_every,
    check_rows: Annotated[
        int, typer.Option(help="The most (token, head, layer) rows to check in each of them.")
    ] = _DEFAULT.check_rows,
    init_blocks: Annotated[
        int, typer.Option(help="First blocks that are always selected.")
    ] = _DEFAULT.init_blocks,
    local_blocks: Annotated[
        int, typer.Option(help="Newest blocks that are always selected.")
    ] = _DEFAULT.local_blocks,
    seed: Annotated[int, typer.Option(help="Other keys and queries.")] = _DEFAULT.seed,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="All ranks in this process, not each in its own.")
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            help="cpu; cuda: a GPU for each rank where there are enough, else (and with --in-process) "
            "all ranks share cuda:0; cuda:N: all ranks share that one."
        ),
    ] = _DEFAULT.device,
    report: Report = None,
) -> int:
    """Replay a serving trace over ranks that each hold their share of the index keys.

    Ctrl-C ends it after the step at hand, with everything done so far.
    """
    options = ReplayOptions(
        world_size=world_size,
        page_size=page_size,
        query_len=query_len,
        sparse_layers=sparse_layers,
        max_context=max_context,
        decode_steps=decode_steps,
        requests=requests,
        max_batch=max_batch,
        cache_tokens=cache_tokens,
        chunk_tokens=chunk_tokens,
        prefill_tokens=prefill_tokens,
        step_ms=step_ms,
        backend=backend,
        tagged=tagged,
        check_every=check_every,
        check_rows=check_rows,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        seed=seed,
        in_process=in_process,
        device=device,
    )
    return terminal.replay_trace(trace, options, report)


@app.command()
def demo(
    world_size: WorldSize = 4,
    page_size: PageSize = 128,
    report: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for summary.json and two pictures.")
    ] = Path("msa-icp-demo"),
) -> int:
    """Replay the trace that comes with the package: about a minute on two cores."""
    options = ReplayOptions(
        world_size=world_size,
        page_size=page_size,
        sparse_layers=3,
        max_batch=8,
        cache_tokens=48 * 1024,
        chunk_tokens=128,
        prefill_tokens=256,
        check_rows=32,
    )
    with as_file(files("msa_icp") / "data" / "sample_trace.jsonl") as trace:
        return terminal.replay_trace(trace, options, report)


@app.command()
def doctor(
    compile_for: Annotated[
        str | None,
        typer.Option(
            "--compile",
            metavar="ARCH",
            help="Compile every CUDA kernel for this architecture (sm_90a); needs no GPU.",
        ),
    ] = None,
) -> int:
    """Say which backends this machine has, and why it lacks the others."""
    from . import doctor

    if compile_for is not None:
        return doctor.compile_kernels(Console(), compile_for)
    return doctor.run(Console())


@app.command()
def verify(
    backend: Annotated[
        str | None, typer.Option(help="Only this backend; default: all that are there.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the tensors.")] = "cpu",
    only: Annotated[
        str | None, typer.Option(help="Only 'decode' batches or only 'prefill' windows; default: both.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Cases of up to 8 tokens on one layout (W = 4, P = 128).")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where a backend raised an exception.")
    ] = False,
) -> int:
    """Compare every backend with the reference, on random and nasty cases."""
    from . import verify

    _device(device)
    if only not in (None, *verify.KINDS):
        raise UsageError(f"--only must be {' or '.join(verify.KINDS)}, was {only}")
    try:
        return verify.run(backend, device, only=only, quick=quick, traces=traceback)
    except ValueError as error:
        raise UsageError(str(error)) from None


@app.command()
def bench(
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="One or more; default: the kernels of the device.")
    ] = None,
    layout: Annotated[
        list[str] | None, typer.Option(help="P128W2, P128W4, P256W2 or P256W4, one or more; default: all.")
    ] = None,
    query_len: Annotated[list[int] | None, typer.Option(help="1 to 8, one or more; default: 1.")] = None,
    max_mb: Annotated[
        float | None, typer.Option(help="Leave out larger launches; default: 100 on a CPU, none on a GPU.")
    ] = None,
) -> int:
    """Time the decode scorer, on a GPU beside the plain read of the same bytes."""
    from .bench import command
    from .bench.decode_score import LAYOUTS

    where = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    names = backend or command.kernel_backends(where)
    try:
        for name in names:
            resolve(name, where)
    except ValueError as error:
        raise UsageError(str(error)) from None
    for name in layout or ():
        if name not in LAYOUTS:
            raise UsageError(f"--layout must be one of {', '.join(LAYOUTS)}, was {name}")
    for length in query_len or ():
        if not 1 <= length <= 8:
            raise UsageError(f"--query-len must be from 1 to 8, was {length}")
    largest = max_mb if max_mb is not None else (100 if where.type == "cpu" else 1e6)
    command.run(where, names, layout or list(LAYOUTS), query_len or [1], largest * 1e6)
    return 0


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device must be a device of torch, was {name}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    try:
        return app(arguments, standalone_mode=False) or 0
    except _CommandLineError as error:
        return _complain(f"{error.format_message()} Try: msa-icp --help", 2)
    except ReplayError as error:
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)


def _complain(sentence: str, exit_code: int) -> int:
    print(f"msa-icp: {sentence}", file=sys.stderr)
    return exit_code
