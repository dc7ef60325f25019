"""Measure prefill windows and write `benchmarks/results/prefill_<name>.json`.

python benchmarks/prefill.py --name h200 [--device cuda] [--backend triton ...] [--commit HASH]

The sizes of the goals in every layout, and the recorded shapes in one. Rows are printed as they come; on
Ctrl-C or SIGTERM what is there is written. The plot is made from the JSON by `python benchmarks/plots.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from msa_icp.bench import prefill, results
from msa_icp.bench.command import kernel_backends
from msa_icp.bench.decode_score import LAYOUTS

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = results.parser(__doc__, RESULTS, judged=True)
    parser.add_argument("--what", nargs="*", default=prefill.WHATS, choices=prefill.WHATS)
    parser.add_argument("--layout", nargs="*", default=tuple(LAYOUTS), help="of the sizes")
    parser.add_argument("--recorded-layout", nargs="*", default=("P128W4",), help="of the recorded shapes")
    parser.add_argument(
        "--max-pairs", type=float, default=1e12, help="leave out windows of more token-key pairs"
    )
    args = parser.parse_args()

    device = torch.device(args.device)
    names = args.backend or kernel_backends(device)
    speed = results.judge(args)

    def measure(windows: Sequence[prefill.Window], layouts: Sequence[str]) -> Iterator[prefill.Row]:
        small = [w for w in windows if sum(t * (t + p) for t, p in w.segments) <= args.max_pairs]
        return prefill.rows(device, names, windows=small, layouts=layouts, whats=args.what)

    measured = []
    sizes, recorded = measure(prefill.SIZES, args.layout), measure(prefill.RECORDED, args.recorded_layout)
    with results.until_interrupted():
        for row in itertools.chain(sizes, recorded):
            measured.append(row)
            print(
                f"{row.what:6} {row.backend:7} {row.layout} {row.window:16} {row.query_tokens:6} tokens "
                f"{row.us:10.2f} us {row.tflops:7.1f} TFLOP/s ({row.tflops / row.bf16_tflops:4.2f} of bf16), "
                f"limit / ours {row.limit_us / row.us:4.2f}, units {row.units[0]} - {row.units[2]}, "
                f"cost {row.costs[1]:.1f}, at most {row.costs[2]:.1f}",
                flush=True,
            )
    results.write(args, "prefill", measured, plain_read_tb_s=speed)


if __name__ == "__main__":
    main()
