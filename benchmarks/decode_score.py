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
    parser = results.parser(__doc__, RESULTS, judged=True)
    parser.add_argument("--query-len", type=int, nargs="*", default=decode_score.QUERY_LENS)
    parser.add_argument("--layout", nargs="*", default=tuple(decode_score.LAYOUTS))
    parser.add_argument("--max-bytes", type=float, default=1e12, help="leave out larger launches")
    args = parser.parse_args()

    device = torch.device(args.device)
    names = args.backend or kernel_backends(device)
    sizes = sizes_up_to(args.max_bytes)
    speed = results.judge(args)
    print(decode_score.HEADING, flush=True)
    measured = []
    rows = decode_score.rows(device, names, sizes=sizes, layouts=args.layout, query_lens=args.query_len)
    with results.until_interrupted():
        for row in rows:
            measured.append(row)
            print(decode_score.words(row), flush=True)
    results.write(args, "decode_score", measured, plain_read_tb_s=speed)


if __name__ == "__main__":
    main()
