"""What the benchmark scripts share: options of the JSON document, an end that loses nothing, the document."""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from . import ruler
from .measure import versions


def parser(
    description: str | None, results: Path, *, backends: bool = True, judged: bool = False
) -> argparse.ArgumentParser:
    """The options that every script has.

    `results` is where documents go, `backends`: they can be chosen, `judged`: the script asks `judge`.
    """
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--name", help="of the card, in the file's name; without it nothing is written")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    if backends:
        made.add_argument("--backend", nargs="+", help="default: every kernel backend of the device")
    made.add_argument("--commit", help="what is measured; default: git's HEAD")
    made.add_argument("--out", type=Path, default=results)
    if judged:
        made.add_argument("--keep-slow", action="store_true", help="measure and write on a slow card, too")
    return made


def judge(args: argparse.Namespace) -> float | None:
    """Print the plain read of 268 MB and return its TB/s, None where it cannot be measured.

    Where it is slower than the card's rule allows, the run would be thrown away: the script ends here with
    exit code 1, before anything is measured or written, unless `--keep-slow` is given.
    """
    found = ruler.judge(torch.device(args.device))
    print(found, flush=True)
    if found.too_slow and not args.keep_slow:
        print("nothing is measured and nothing is written; --keep-slow does both anyway", flush=True)
        raise SystemExit(1)
    return found.speed


@contextmanager
def until_interrupted() -> Iterator[None]:
    """What is measured in here ends with Ctrl-C or SIGTERM (a time limit's); what follows is done anyway.

    For the main thread. After a SIGTERM the next ones are ignored: `timeout` sends two, and the second must
    not end the writing.
    """
    before = signal.signal(signal.SIGTERM, _end_as_with_ctrl_c)
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        if signal.getsignal(signal.SIGTERM) == _end_as_with_ctrl_c:
            signal.signal(signal.SIGTERM, before)


def _end_as_with_ctrl_c(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def heading(device: torch.device, commit: str | None) -> dict[str, Any]:
    """What a document's figures hold for: card, versions, date, and the commit (default: git's HEAD)."""
    if commit is None:
        commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    return {**versions(device), "date": datetime.date.today().isoformat(), "commit": commit}


def write(args: argparse.Namespace, stem: str, measured: Sequence[Any], **facts: Any) -> None:
    """Write rows (dataclasses), and what they hold for, to `<stem>_<name>.json`. Without a name, or
    without rows, nothing is.
    """
    if args.name is None:
        return
    if not measured:
        print("nothing was measured: nothing is written", flush=True)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{stem}_{args.name}.json"
    document = {
        **heading(torch.device(args.device), args.commit),
        **facts,
        "rows": [asdict(row) for row in measured],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path}", flush=True)
