"""Measure the decode scorer and write `benchmarks/results/decode_score_<name>.json`.

python benchmarks/decode_score.py --name h200 [--device cuda] [--backend triton ...] [--commit HASH]

The plot is made from the JSON by `python benchmarks/plots.py`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
from pathlib import Path

import torch

from msa_icp.bench import decode_score
from msa_icp.bench.command import kernel_backends, sizes_up_to

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", required=True, help="of the card, in the file's name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", nargs="*", help="default: every kernel backend of the device")
    parser.add_argument("--query-len", type=int, nargs="*", default=decode_score.QUERY_LENS)
    parser.add_argument("--layout", nargs="*", default=tuple(decode_score.LAYOUTS))
    parser.add_argument("--max-bytes", type=float, default=1e12, help="leave out larger launches")
    parser.add_argument("--commit", help="what is measured; default: git's HEAD")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()

    device = torch.device(args.device)
    commit = (
        args.commit or subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    )
    names = args.backend or kernel_backends(device)
    sizes = sizes_up_to(args.max_bytes)
    measured = []
    for row in decode_score.rows(device, names, sizes=sizes, layouts=args.layout, query_lens=args.query_len):
        measured.append(row)
        ratio = "" if row.of_plain_read is None else f"  plain read / ours {row.of_plain_read:5.2f}"
        print(
            f"{row.backend:7} {row.layout} q{row.query_len} {row.batch:3} x {row.keys!s:11} "
            f"{row.bytes / 1e6:6.1f} MB {row.us:10.2f} us {row.bytes / row.us / 1e3:8.1f} GB/s{ratio}",
            flush=True,
        )
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"decode_score_{args.name}.json"
    date = datetime.date.today().isoformat()
    path.write_text(
        json.dumps(decode_score.document(device, measured, date=date, commit=commit), indent=1) + "\n"
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
