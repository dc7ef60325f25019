"""Measure prefill windows and write `benchmarks/results/prefill_<name>.json`.

python benchmarks/prefill.py --name h200 [--device cuda] [--backend triton ...] [--commit HASH]

The sizes of the goals in every layout, and the recorded shapes in one. The plot is made from the JSON by
`python benchmarks/plots.py`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from msa_icp.bench import prefill
from msa_icp.bench.command import kernel_backends
from msa_icp.bench.decode_score import LAYOUTS

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", required=True, help="of the card, in the file's name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", nargs="*", help="default: every kernel backend of the device")
    parser.add_argument("--what", nargs="*", default=prefill.WHATS, choices=prefill.WHATS)
    parser.add_argument("--layout", nargs="*", default=tuple(LAYOUTS), help="of the sizes")
    parser.add_argument("--recorded-layout", nargs="*", default=("P128W4",), help="of the recorded shapes")
    parser.add_argument(
        "--max-pairs", type=float, default=1e12, help="leave out windows of more token-key pairs"
    )
    parser.add_argument("--commit", help="what is measured; default: git's HEAD")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()

    device = torch.device(args.device)
    commit = (
        args.commit or subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    )
    names = args.backend or kernel_backends(device)

    def measure(windows: Sequence[prefill.Window], layouts: Sequence[str]) -> Iterator[prefill.Row]:
        small = [w for w in windows if sum(t * (t + p) for t, p in w.segments) <= args.max_pairs]
        return prefill.rows(device, names, windows=small, layouts=layouts, whats=args.what)

    measured = []
    for row in itertools.chain(
        measure(prefill.SIZES, args.layout), measure(prefill.RECORDED, args.recorded_layout)
    ):
        measured.append(row)
        print(
            f"{row.what:6} {row.backend:7} {row.layout} {row.window:16} {row.query_tokens:6} tokens "
            f"{row.us:10.2f} us {row.tflops:7.1f} TFLOP/s ({row.tflops / row.bf16_tflops:4.2f} of bf16), "
            f"limit / ours {row.limit_us / row.us:4.2f}, units {row.units[0]} - {row.units[2]}",
            flush=True,
        )
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"prefill_{args.name}.json"
    date = datetime.date.today().isoformat()
    path.write_text(json.dumps(prefill.document(device, measured, date=date, commit=commit), indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
