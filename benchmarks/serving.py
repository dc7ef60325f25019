"""Measure the scorer as a serving engine meets it; writes `benchmarks/results/serving_<name>.json`.

python benchmarks/serving.py --name h200 [--quick] [--part mix chain replay long-table first-call]

Rows are printed as they come. When the minutes are over, or on Ctrl-C or SIGTERM, what is there is written.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from msa_icp import cuda_backend
from msa_icp.bench import decode_score, first_call, long_table, results, serving
from msa_icp.bench.batch import PAGE_ORDERS
from msa_icp.bench.command import kernel_backends
from msa_icp.bench.decode_score import LAYOUTS

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = results.parser(__doc__, RESULTS, judged=True)
    parser.add_argument("--part", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--requests", nargs="+", type=int, default=(32, 256), help="of the production mix")
    parser.add_argument("--layout", nargs="+", default=("P128W4", "P256W2"))
    parser.add_argument("--query-len", nargs="+", type=int, default=(1, 2, 4, 8))
    parser.add_argument("--order", nargs="+", choices=PAGE_ORDERS, default=PAGE_ORDERS)
    parser.add_argument("--max-bytes", type=float, default=1e12, help="leave out larger serving chains")
    parser.add_argument("--quick", action="store_true", help="P128W4 and query length 1 alone")
    parser.add_argument("--minutes", type=float, default=1e9, help="end after so long with what is there")
    args = parser.parse_args()
    if args.quick:
        args.layout, args.query_len = ("P128W4",), (1,)

    device = torch.device(args.device)
    names = args.backend or kernel_backends(device)
    stop = time.monotonic() + 60 * args.minutes
    speed = results.judge(args)
    measured: list[Any] = []
    with results.until_interrupted():
        for part in args.part:
            for row in PARTS[part](device, names, args):
                measured.append(row)
                print("  ".join(f"{key} {value}" for key, value in asdict(row).items()), flush=True)
                if time.monotonic() > stop:
                    break
            if time.monotonic() > stop:
                print("time is over", flush=True)
                break
    results.write(args, "serving", measured, plain_read_tb_s=speed)


def _mix(device: torch.device, names: list[str], args: argparse.Namespace) -> Iterator[Any]:
    return serving.production_mix(
        device,
        names,
        requests=args.requests,
        layouts=args.layout,
        query_lens=args.query_len,
        orders=args.order,
    )


def _chain(device: torch.device, names: list[str], args: argparse.Namespace) -> Iterator[Any]:
    sizes = [size for size in decode_score.SIZES if size.k_bytes(LAYOUTS[args.layout[0]]) <= args.max_bytes]
    return serving.serving_chain(device, names, sizes=sizes, layouts=args.layout)


def _long_table(device: torch.device, names: list[str], args: argparse.Namespace) -> Iterator[Any]:
    layouts = [LAYOUTS[name] for name in args.layout]
    sizes = [
        size
        for size in (*decode_score.SIZES, *long_table.MORE_SIZES)
        if max(map(size.k_bytes, layouts)) <= args.max_bytes
    ]
    return long_table.rows(device, names, sizes=sizes, layouts=args.layout)


def _replay(device: torch.device, names: list[str], args: argparse.Namespace) -> Iterator[Any]:
    if device.type == "cpu":  # which has no graphs
        return iter(())
    return serving.layer_replay(device, names)


def _first_call(device: torch.device, names: list[str], args: argparse.Namespace) -> Iterator[Any]:
    if device.type == "cpu":
        names = [] if cuda_backend.not_installed() else ["cuda"]
    return first_call.rows(device, names)


PARTS: dict[str, Callable[[torch.device, list[str], argparse.Namespace], Iterator[Any]]] = {
    "mix": _mix,
    "chain": _chain,
    "replay": _replay,
    "long-table": _long_table,
    "first-call": _first_call,
}


if __name__ == "__main__":
    main()
