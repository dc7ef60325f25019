"""Measure the decode scorer and write `benchmarks/results/decode_score_<name>.json`.

python benchmarks/decode_score.py --name h200 [--device cuda] [--backend triton ...] [--commit HASH]

Rows are printed as they come; on Ctrl-C or SIGTERM what is there is written. The plot is made from
the JSON by `python benchmarks/plots.py`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from msa_icp.bench import decode_score, results
from msa_icp.bench.command import kernel_backends, sizes_up_to

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = results.parser(__doc__, RESULTS)
    parser.add_argument("--query-len", type=int, nargs="*", default=decode_score.QUERY_LENS)
    parser.add_argument("--layout", nargs="*", default=tuple(decode_score.LAYOUTS))
    parser.add_argument("--max-bytes", type=float, default=1e12, help="leave out larger launches")
    args = parser.parse_args()

    device = torch.device(args.device)
    names = args.backend or kernel_backends(device)
    sizes = sizes_up_to(args.max_bytes)
    measured = []
    rows = decode_score.rows(device, names, sizes=sizes, layouts=args.layout, query_lens=args.query_len)
    with results.until_interrupted():
        for row in rows:
            measured.append(row)
            ratio = "" if row.of_plain_read is None else f"  plain read / ours {row.of_plain_read:5.2f}"
            print(
                f"{row.backend:7} {row.layout} q{row.query_len} {row.batch:3} x {row.keys!s:11} "
                f"{row.bytes / 1e6:6.1f} MB {row.us:10.2f} us {row.bytes / row.us / 1e3:8.1f} GB/s{ratio}",
                flush=True,
            )
    results.write(args, "decode_score", measured)


if __name__ == "__main__":
    main()
