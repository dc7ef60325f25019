"""Draw the plots of docs/performance.md from the JSON files in `benchmarks/results/`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

RESULTS = Path(__file__).parent / "results"
COLORS = {"P128W2": "#4477aa", "P128W4": "#ee6677", "P256W2": "#228833", "P256W4": "#ccbb44"}


def main() -> None:
    for path in sorted(RESULTS.glob("decode_score_*.json")):
        document = json.loads(path.read_text())
        if any(row["plain_read_us"] is not None for row in document["rows"]):
            decode_score(document, path.with_suffix(".png"))
    for path in sorted(RESULTS.glob("prefill_*.json")):
        prefill(json.loads(path.read_text()), path.with_suffix(".png"))


def prefill(document: dict[str, Any], to: Path) -> None:
    """Limit / ours of every window, a colour a layout; hatched: the fused form."""
    rows = [row for row in document["rows"] if row["what"] != "select"]
    windows = list(dict.fromkeys(row["window"] for row in rows))
    figure, panel = plt.subplots(figsize=(12, 4), layout="constrained")
    for place, window in enumerate(windows):
        own = [row for row in rows if row["window"] == window]
        for number, row in enumerate(own):
            panel.bar(
                place + (number + 0.5) / len(own) * 0.8 - 0.4,
                max(row["operations_us"], row["plain_read_us"] or 0) / row["us"],
                0.8 / len(own),
                color=COLORS[row["layout"]],
                hatch="///" if row["what"] == "fused" else None,
                edgecolor="white",
            )
    panel.axhline(1, color="#888888", linewidth=0.8)
    panel.axhline(0.8, color="#888888", linewidth=0.8, linestyle=":")
    panel.set_xticks(range(len(windows)), windows, rotation=30, ha="right")
    panel.set_xlabel("query tokens over 128K keys; query tokens / cached prefix")
    panel.set_ylabel("limit / ours")
    marks = [Patch(color=color) for color in COLORS.values()]
    panel.legend(marks, list(COLORS), fontsize=8, loc="upper right", title="hatched: fused", title_fontsize=8)
    backend = ", ".join(sorted({row["backend"] for row in rows}))
    title = f"Prefill windows ({backend}), {document['card']}, torch {document['torch']}"
    figure.suptitle(title, fontsize=11)
    figure.savefig(to, dpi=110)
    print(f"wrote {to}")


def decode_score(document: dict[str, Any], to: Path) -> None:
    """Plain read / ours over the bytes of K: a panel a query length, a colour a layout."""
    rows = document["rows"]
    query_lens = sorted({row["query_len"] for row in rows})
    figure, panels = plt.subplots(
        1,
        len(query_lens),
        figsize=(3.6 * len(query_lens), 3.8),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for panel, query_len in zip(panels[0], query_lens, strict=True):
        for layout, color in COLORS.items():
            for ragged, marker in ((False, "o-"), (True, "x")):
                points = sorted(
                    (row["bytes"] / 1e6, row["plain_read_us"] / row["us"])
                    for row in rows
                    if row["layout"] == layout
                    and row["query_len"] == query_len
                    and isinstance(row["keys"], str) == ragged
                )
                label = None if ragged else layout
                panel.plot(*zip(*points, strict=True), marker, color=color, label=label, markersize=5)
        panel.axhline(1, color="#888888", linewidth=0.8)
        panel.set_xscale("log")
        panel.set_title(f"query length {query_len}", fontsize=10)
        panel.set_xlabel("MB of K a launch")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("plain read / ours")
    panels[0][0].set_ylim(bottom=0)
    panels[0][-1].legend(fontsize=8, loc="upper right", title="x: ragged batches", title_fontsize=8)
    backend = ", ".join(sorted({row["backend"] for row in rows}))
    figure.suptitle(f"Decode scorer ({backend}), {document['card']}, torch {document['torch']}", fontsize=11)
    figure.savefig(to, dpi=110)
    print(f"wrote {to}")


if __name__ == "__main__":
    main()
