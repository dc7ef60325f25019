"""Measure a layer of the decode chain in four ways, and what publish and merge add to a chain; writes
`benchmarks/results/decode_chain_<name>.json`.

python benchmarks/decode_chain.py --name h200 [--quick] [--minutes 4] [--backend cuda] [--context 8192 ...]

Rows are printed as they come. When the minutes are over, or on Ctrl-C or SIGTERM, what is there is written.
The plot is made from the JSON by `python benchmarks/plots.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from msa_icp.bench import decode_chain, exchange, results
from msa_icp.bench.command import kernel_backends

RESULTS = Path(__file__).parent / "results"
QUICK = {"context": (8192, 131072, 1048576), "batch": (1, 32, 256), "world_size": (4,), "page_size": (128,)}


def main() -> None:
    parser = results.parser(__doc__, RESULTS, judged=True)
    parser.add_argument("--part", nargs="+", choices=("exchange", "chain"), default=("exchange", "chain"))
    parser.add_argument(
        "--way", nargs="+", choices=tuple(decode_chain.WAYS), default=tuple(decode_chain.WAYS)
    )
    parser.add_argument("--context", nargs="+", type=int, default=decode_chain.CONTEXTS)
    parser.add_argument("--batch", nargs="+", type=int, default=decode_chain.BATCHES)
    parser.add_argument("--world-size", nargs="+", type=int, default=(4, 2))
    parser.add_argument("--page-size", nargs="+", type=int, default=(128, 256))
    parser.add_argument("--columns", nargs="+", type=int, default=exchange.COLUMNS)
    parser.add_argument("--tokens", type=int, default=exchange.TOKENS, help="of publish and merge alone")
    parser.add_argument("--quick", action="store_true", help="few contexts and batches, W = 4, P = 128")
    parser.add_argument("--minutes", type=float, default=1e9, help="end after so long with what is there")
    args = parser.parse_args()
    if args.quick:
        vars(args).update(QUICK)

    device = torch.device(args.device)
    names = args.backend or kernel_backends(device)
    stop = time.monotonic() + 60 * args.minutes
    speed = results.judge(args)
    measured: list[exchange.Row | decode_chain.Row] = []
    with results.until_interrupted():
        if "exchange" in args.part:
            take(exchange_rows(device, names, args), measured, stop)
        if "chain" in args.part:
            take(chain_rows(device, names, args), measured, stop)
    summary([row for row in measured if isinstance(row, decode_chain.Row)])
    results.write(args, "decode_chain", measured, plain_read_tb_s=speed)


def summary(chains: list[decode_chain.Row]) -> None:
    """Where each way begins to pay, and where the fused form does."""
    for other, world_size, page_size, requests, context in decode_chain.begins_to_pay(chains):
        since = "not within what was measured" if context is None else f"from {context} keys on"
        print(f"ahead of {other} at W {world_size}, pages of {page_size}, {requests} requests: {since}")
    for (backend, world_size, page_size, context), ratios in decode_chain.fused_ratios(chains).items():
        by_batch = "  ".join(f"{requests}: {ratio:.2f}" for requests, ratio in ratios.items())
        print(f"fused / plain, {backend} W{world_size} P{page_size} context {context}, by batch:  {by_batch}")


def take(
    rows: Iterator[exchange.Row | decode_chain.Row],
    measured: list[exchange.Row | decode_chain.Row],
    stop: float,
) -> None:
    """Collect rows, printing each, until the time is over."""
    for row in rows:
        measured.append(row)
        print(words(row), flush=True)
        if time.monotonic() > stop:
            print("time is over", flush=True)
            return


def exchange_rows(device: torch.device, names: list[str], args: argparse.Namespace) -> Iterator[exchange.Row]:
    return exchange.rows(device, names, world_sizes=args.world_size, columns=args.columns, tokens=args.tokens)


def chain_rows(
    device: torch.device, names: list[str], args: argparse.Namespace
) -> Iterator[decode_chain.Row]:
    return decode_chain.rows(
        device,
        names,
        contexts=args.context,
        batches=args.batch,
        world_sizes=args.world_size,
        page_sizes=args.page_size,
        ways=args.way,
    )


def words(row: exchange.Row | decode_chain.Row) -> str:
    """A row for a reader."""
    if isinstance(row, exchange.Row):
        return (
            f"{row.backend:7} W{row.W} {row.tokens} tokens x {row.columns:5} columns {row.form:6} "
            f"publish {row.publish_us:6.2f} merge {row.merge_us:6.2f} both {row.us:6.2f} us"
        )
    return (
        f"{row.backend:7} W{row.W} P{row.page_size} {row.requests:4} x {row.context:8} "
        f"{row.what:13} {row.us:9.2f} us"
    )


if __name__ == "__main__":
    main()
