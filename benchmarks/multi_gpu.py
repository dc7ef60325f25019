"""Run the exchange on 2 or 4 GPUs of one host; writes `benchmarks/results/multi_gpu_<name>.json`.

python benchmarks/multi_gpu.py --name h200x4 [--quick] [--parts correctness,latency] [--minutes 8]

Correctness of the exchange and of prefill's all-to-all; what publish and merge add to a chain over NVLink;
the decode chain against a replicated indexer; the prefill chain; and a rank that is killed. The script starts
the ranks itself. Lines are printed as they come, and the file is written with each of them: Ctrl-C,
SIGTERM or the end of the minutes loses nothing. It ends with 1 if anything was wrong. The plot is made from
the file by `python benchmarks/plots.py`.

With --device cpu ranks are processes that share memory. With one card and
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 they share it; what is timed there says nothing about NVLink.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from msa_icp.bench import results
from msa_icp.bench.command import kernel_backends
from msa_icp.bench.multi_gpu import runner
from msa_icp.bench.multi_gpu.team import Setting

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = results.parser(__doc__, RESULTS)
    parser.add_argument("--ranks", type=int, choices=(2, 4), help="default: 4 where there are as many cards")
    parser.add_argument("--parts", help=f"some of {','.join(runner.PARTS)}; default: all that mean something")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, about three minutes on GPUs")
    parser.add_argument("--steps", type=int, help="of each combination of the exchange's correctness")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin nothing new after so long")
    parser.add_argument("--plant", action="store_true", help="send a wrong row: correctness must fail")
    args = parser.parse_args()
    kind = torch.device(args.device).type
    ranks = args.ranks or (4 if kind == "cuda" and torch.cuda.device_count() >= 4 else 2)
    backends = tuple(args.backend or kernel_backends(torch.device(kind)))
    setting = Setting(ranks, kind, backends)
    try:
        parts = args.parts.split(",") if args.parts else runner.parts_for(setting.place)
    except ValueError as error:
        parser.error(str(error))
    if unknown := set(parts) - set(runner.PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}; there are {', '.join(runner.PARTS)}")
    which = runner.sizes(kind, args.quick)
    if args.steps:
        which = replace(which, steps=args.steps)
    path = None if args.name is None else args.out / f"multi_gpu_{args.name}.json"
    document = runner.Document(runner.facts(setting, args.commit, which), path)
    return _run(setting, parts, which, document, args)


def _run(setting: Setting, parts: Any, which: runner.Sizes, document: runner.Document, args: Any) -> int:
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)

    say(f"{document.facts['card']}: {document.facts['timings']}")
    with results.until_interrupted():
        until = time.time() + 60 * args.minutes
        runner.run(setting, parts, which, document, plant=args.plant, until=until, say=say)
    for line in runner.summary(document):
        say(line)
    for line in document.wrong:
        say(f"WRONG: {line}")
    if document.path is not None:
        say(f"wrote {document.path}")
    unfinished = [name for name in parts if not document.parts.get(name, {}).get("complete")]
    if unfinished:
        say(f"not complete: {', '.join(unfinished)}")
    return int(bool(document.wrong or unfinished))


if __name__ == "__main__":
    sys.exit(main())
