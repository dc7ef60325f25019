"""Draw the plots of docs/performance.md from the JSON files in `benchmarks/results/`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import to_rgba
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from msa_icp.bench.decode_chain import WAYS, Row, quickest

RESULTS = Path(__file__).parent / "results"
BATCH_COLORS = ("#88ccee", "#4477aa", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#222222")
COLORS = {"P128W2": "#4477aa", "P128W4": "#ee6677", "P256W2": "#228833", "P256W4": "#ccbb44"}
SHADES = (1.0, 0.5, 0.25)
"""Of backends in their order."""
CONTEXTS = (8, 32, 128, 512, 1024)
"""Ticks, in thousands of keys."""
RATIOS = (0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8)
RATIOS_NEAR_ONE = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.3, 1.5)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="JSON files to draw, each beside itself; by default all those in benchmarks/results",
    )
    files: list[Path] = parser.parse_args(arguments).files
    for path in files or sorted(RESULTS.glob("*.json")):
        picture = next((draw for kind, draw in PICTURES.items() if path.name.startswith(f"{kind}_")), None)
        if picture is not None:
            picture(json.loads(path.read_text()), path.with_suffix(".png"))
        elif files:
            parser.error(f"{path}: a file that is drawn begins with {', '.join(PICTURES)}")


def _log_axis(axis: Any, ticks: Sequence[float]) -> None:
    """A logarithmic axis with these ticks, in decimals, as far as they are in its range."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_locator(NullLocator())


def prefill(document: dict[str, Any], to: Path) -> None:
    """Limit / ours of every window, a colour a layout, a shade a backend; hatched: the fused form."""
    rows = [row for row in document["rows"] if row["what"] != "select"]
    backends = sorted({row["backend"] for row in rows})
    shades = dict(zip(backends, SHADES, strict=False))
    windows = list(dict.fromkeys(row["window"] for row in rows))
    figure, panel = plt.subplots(figsize=(12, 4), layout="constrained")
    for place, window in enumerate(windows):
        own = [row for row in rows if row["window"] == window]
        for number, row in enumerate(own):
            panel.bar(
                place + (number + 0.5) / len(own) * 0.8 - 0.4,
                max(row["operations_us"], row["plain_read_us"] or 0) / row["us"],
                0.8 / len(own),
                color=to_rgba(COLORS[row["layout"]], shades[row["backend"]]),
                hatch="///" if row["what"] == "fused" else None,
                edgecolor="white",
            )
    panel.axhline(1, color="#888888", linewidth=0.8)
    panel.axhline(0.8, color="#888888", linewidth=0.8, linestyle=":")
    panel.set_xticks(range(len(windows)), windows, rotation=30, ha="right")
    panel.set_xlabel("query tokens over 128K keys; query tokens / cached prefix")
    panel.set_ylabel("limit / ours")
    marks = {layout: Patch(color=color) for layout, color in COLORS.items()}
    for backend, shade in shades.items():
        for what in sorted({row["what"] for row in rows if row["backend"] == backend}, reverse=True):
            hatch = "///" if what == "fused" else None
            label = f"{backend}, {what}"
            marks[label] = Patch(facecolor=to_rgba("#444444", shade), hatch=hatch, edgecolor="white")
    figure.legend(marks.values(), marks, fontsize=8, loc="outside right upper")
    title = f"Prefill windows, {document['card']}, torch {document['torch']}"
    figure.suptitle(title, fontsize=11)
    figure.savefig(to, dpi=110)
    print(f"wrote {to}")


def decode_score(document: dict[str, Any], to: Path) -> None:
    """Plain read / ours over the bytes of K: a line of panels a backend, a panel a query length."""
    rows = [row for row in document["rows"] if row["plain_read_us"] is not None]
    if not rows:
        return
    backends = sorted({row["backend"] for row in rows})
    query_lens = sorted({row["query_len"] for row in rows})
    figure, panels = plt.subplots(
        len(backends),
        len(query_lens),
        figsize=(3.6 * len(query_lens), 3.4 * len(backends)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for line, backend in zip(panels, backends, strict=True):
        for panel, query_len in zip(line, query_lens, strict=True):
            mine = [row for row in rows if (row["backend"], row["query_len"]) == (backend, query_len)]
            _of_plain_read(panel, mine)
            panel.set_title(f"{backend}, query length {query_len}", fontsize=10)
        line[0].set_ylabel("plain read / ours")
    for panel in panels[-1]:
        panel.set_xlabel("MB of K a launch")
    panels[0][0].set_ylim(bottom=0)
    panels[0][-1].legend(fontsize=8, loc="lower right", title="x: ragged batches", title_fontsize=8)
    figure.suptitle(f"Decode scorer, {document['card']}, torch {document['torch']}", fontsize=11)
    figure.savefig(to, dpi=110)
    print(f"wrote {to}")


def _of_plain_read(panel: Any, rows: list[dict[str, Any]]) -> None:
    """One panel, a colour a layout."""
    for layout, color in COLORS.items():
        for ragged, marker in ((False, "o-"), (True, "x")):
            points = sorted(
                (row["bytes"] / 1e6, row["plain_read_us"] / row["us"])
                for row in rows
                if row["layout"] == layout and isinstance(row["keys"], str) == ragged
            )
            if points:
                label = None if ragged else layout
                panel.plot(*zip(*points, strict=True), marker, color=color, label=label, markersize=5)
    panel.axhline(1, color="#888888", linewidth=0.8)
    panel.set_xscale("log")
    panel.grid(alpha=0.3)


def decode_chain(document: dict[str, Any], to: Path) -> None:
    """Another way / our chain over the context: above one, sharding pays. A row a W and page size."""
    rows = [Row(**row) for row in document["rows"] if row["what"] in WAYS]
    cells = quickest(rows)
    layouts = sorted({key[:2] for key in cells}, reverse=True)
    if not layouts:
        return
    others = {"replicated": RATIOS, "page_strided": RATIOS_NEAR_ONE}
    figure, panels = plt.subplots(
        len(layouts),
        2,
        figsize=(9, 3 * len(layouts)),
        sharex=True,
        sharey="col",
        squeeze=False,
        layout="constrained",
    )
    for line, (world_size, page_size) in enumerate(layouts):
        for (other, ticks), panel in zip(others.items(), panels[line], strict=True):
            for requests, color in zip(sorted({key[2] for key in cells}), BATCH_COLORS, strict=False):
                points = sorted(
                    (key[3] / 1024, times[other] / times["chain"])
                    for key, times in cells.items()
                    if key[:3] == (world_size, page_size, requests) and {"chain", other} <= times.keys()
                )
                if points:
                    panel.plot(*zip(*points, strict=True), "o-", color=color, label=requests, markersize=4)
            panel.axhline(1, color="#888888", linewidth=0.8)
            _log_axis(panel.xaxis, CONTEXTS)
            _log_axis(panel.yaxis, ticks)
            panel.set_title(
                f"{other.replace('_', '-')} / sharded, W = {world_size}, P = {page_size}", fontsize=10
            )
            panel.grid(alpha=0.3)
        panels[line][0].set_ylabel("times as long")
    for panel in panels[-1]:
        panel.set_xlabel("context, thousands of keys")
    panels[0][0].legend(fontsize=8, title="requests", title_fontsize=8)
    figure.suptitle(f"A layer of decode, {document['card']}, torch {document['torch']}", fontsize=11)
    figure.savefig(to, dpi=110)
    plt.close(figure)
    print(f"wrote {to}")


def multi_gpu(document: dict[str, Any], to: Path) -> None:
    """Ranks together: publish + merge, replicated / sharded over the context, the parts of prefill."""
    parts = {name: part["rows"] for name, part in document["parts"].items() if part["rows"]}
    pages = sorted({row["page_size"] for row in parts.get("chain", ())})
    draw = [(_latency, parts["latency"])] if "latency" in parts else []
    draw += [(_against_replicated, [r for r in parts["chain"] if r["page_size"] == page]) for page in pages]
    draw += [(_prefill_parts, parts["prefill"])] if "prefill" in parts else []
    if not draw:
        return
    figure, panels = plt.subplots(
        1, len(draw), figsize=(4.5 * len(draw), 4.2), squeeze=False, layout="constrained"
    )
    for panel, (picture, rows) in zip(panels[0], draw, strict=True):
        picture(panel, rows)
        panel.grid(alpha=0.3)
    title = f"{document['ranks']} ranks, {document['card']}, torch {document['torch']}"
    figure.suptitle(f"{title}\n{document['timings']}", fontsize=11)
    figure.savefig(to, dpi=110)
    plt.close(figure)
    print(f"wrote {to}")


def _latency(panel: Any, rows: list[dict[str, Any]]) -> None:
    """Bars of publish + merge; hatched: alone, the peers' rows already there."""
    for place, row in enumerate(rows):
        panel.bar(place - 0.2, row["us"], 0.4, color=BATCH_COLORS[1])
        panel.bar(place + 0.2, row["alone_us"], 0.4, color=BATCH_COLORS[0], hatch="///", edgecolor="white")
    goals = {row["goal_us"] for row in rows} - {None}
    for goal in goals:
        panel.axhline(goal, color="#888888", linewidth=0.8)
    names = [f"{r['backend']} {r['form']}\n{r['tokens']} x {r['columns']}" for r in rows]
    panel.set_xticks(range(len(rows)), names, rotation=60, ha="right", fontsize=7)
    panel.set_ylabel("microseconds a layer")
    panel.set_title("publish + merge; hatched: alone", fontsize=10)


def _against_replicated(panel: Any, rows: list[dict[str, Any]]) -> None:
    """Replicated / the quickest sharded form over the context, a colour a batch."""
    for requests, color in zip(sorted({row["requests"] for row in rows}), BATCH_COLORS, strict=False):
        points = []
        for context in sorted({row["context"] for row in rows}):
            cell = [row for row in rows if (row["requests"], row["context"]) == (requests, context)]
            times = [
                [r["us"] for r in cell if (r["what"] == "replicated") == which] for which in (True, False)
            ]
            if all(times):
                points.append((context / 1024, min(times[0]) / min(times[1])))
        if points:
            panel.plot(*zip(*points, strict=True), "o-", color=color, label=requests, markersize=4)
    panel.axhline(1, color="#888888", linewidth=0.8)
    _log_axis(panel.xaxis, CONTEXTS)
    _log_axis(panel.yaxis, RATIOS)
    panel.set_xlabel("context, thousands of keys")
    panel.set_ylabel("replicated / sharded")
    panel.set_title(f"a layer of decode, P = {rows[0]['page_size']}", fontsize=10)
    panel.legend(fontsize=8, title="requests", title_fontsize=8)


def _prefill_parts(panel: Any, rows: list[dict[str, Any]]) -> None:
    """The whole layer as a line over bars of its parts."""
    for place, row in enumerate(rows):
        for number, name in enumerate(("local", "exchange", "merge")):
            label = None if place else name
            color = BATCH_COLORS[number + 1]
            panel.bar(place + number * 0.27 - 0.27, row[f"{name}_us"], 0.27, color=color, label=label)
        panel.plot([place - 0.4, place + 0.4], [row["layer_us"]] * 2, color="#222222")
    names = [f"{row['backend']} {row['form']}\n{row['query_tokens']} tokens" for row in rows]
    panel.set_xticks(range(len(rows)), names, rotation=60, ha="right", fontsize=7)
    panel.set_yscale("log")
    panel.set_ylabel("microseconds a layer")
    panel.set_title("prefill; line: all three together", fontsize=10)
    panel.legend(fontsize=8)


PICTURES: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "decode_score": decode_score,
    "decode_chain": decode_chain,
    "prefill": prefill,
    "multi_gpu": multi_gpu,
}
"""What the names of the files begin with, and what draws them."""


if __name__ == "__main__":
    main()
