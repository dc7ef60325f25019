"""The pictures of a report."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..geometry import BLOCK
from .plan import k_bytes
from .run import Outcome
from .synth import FOCI, SECTION, Synth

_HEAD_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#AA4499")
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "figure.facecolor": "white",
}


def draw_selection(outcome: Outcome, path: Path) -> None:
    """The blocks that each head selected for one request, over its decoded tokens, in the first layer."""
    followed = outcome.plan.walk.followed
    request = outcome.plan.requests[followed]
    chosen = _followed(outcome)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(11, 7.5), layout="constrained")
        figure.suptitle(
            f"Blocks of 128 keys that each index head selects (request {request.index}: "
            f"{request.prompt_tokens:,} prompt tokens, {len(chosen)} decoded ones; first sparse layer)"
        )
        axes = figure.subplots(2, 2, sharex=True, sharey=True)
        for head, axis in enumerate(axes.flat):
            _draw_head(axis, head, chosen)
            if chosen:
                _draw_foci(axis, head, outcome, list(chosen))
        for axis in axes[:, 0]:
            axis.set_ylabel("block")
        for axis in axes[-1]:
            axis.set_xlabel("position of the decoded token")
        handles = [Patch(color="#dddddd", label="sections that the queries were made to look for")]
        figure.legend(handles=handles, loc="outside lower center", frameon=False)
        figure.savefig(path, dpi=130)


def _followed(outcome: Outcome) -> dict[int, list[list[int]]]:
    """For each position of the followed request the selected ids of each head."""
    chosen: dict[int, list[list[int]]] = {}
    for rank in outcome.ranks:  # in order of rank, so of heads
        for position, ids in rank.followed:
            chosen.setdefault(position, []).extend(ids)
    return chosen


def _draw_head(axis: Axes, head: int, chosen: dict[int, list[list[int]]]) -> None:
    points = [(position, block) for position, ids in chosen.items() for block in ids[head] if block >= 0]
    axis.set_title(f"head {head}", loc="left", color=_HEAD_COLOURS[head])
    if points:
        x, y = zip(*points, strict=True)
        axis.scatter(x, y, s=5, marker="s", linewidths=0, color=_HEAD_COLOURS[head], rasterized=True)
    else:
        axis.text(0.5, 0.5, "the request was not reached", ha="center", transform=axis.transAxes)


def _draw_foci(axis: Axes, head: int, outcome: Outcome, positions: list[int]) -> None:
    synth = Synth(outcome.plan.requests, outcome.plan.options.seed)
    where = torch.tensor(positions)
    sections = synth.focus_sections(torch.full_like(where, outcome.plan.walk.followed), where, 0)[:, head]
    blocks = SECTION // BLOCK
    for focus in range(FOCI):
        lower = sections[:, focus] * blocks
        axis.fill_between(
            positions,
            lower - 0.5,
            lower + blocks - 0.5,
            step="post",
            color="#dddddd",
            linewidth=0,
            zorder=0.5,
        )


def draw_bytes(outcome: Outcome, path: Path) -> None:
    """Contexts in the batch, and the bytes that they make a rank read, over the decode steps."""
    options = outcome.plan.options
    contexts = outcome.plan.walk.contexts[: outcome.steps]
    steps = range(len(contexts))
    sharded = [count / 1e6 for count in k_bytes(outcome.plan, outcome.steps)]
    replicated = [count * options.world_size for count in sharded]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(11, 7.5), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True)
        by_row = [[row / 1024 for row in of_row] for of_row in zip(*contexts, strict=True)]
        shade = matplotlib.colormaps["viridis"].resampled(options.max_batch)
        if contexts:
            upper.stackplot(
                steps, *by_row, colors=[shade(row) for row in range(options.max_batch)],
                edgecolor="white", linewidth=0.4, step="post", alpha=0.85,
            )  # fmt: skip
        upper.set_title("Contexts in the batch, a band for each batch row", loc="left")
        upper.set_ylabel("Ki tokens")
        lower.fill_between(
            steps, replicated, step="post", color="#d9d9d9", linewidth=0,
            label=f"replicated indexer: {outcome.replicated_k_bytes / 1e9:,.2f} GB in all",
        )  # fmt: skip
        lower.fill_between(
            steps, sharded, step="post", color=_HEAD_COLOURS[0], linewidth=0,
            label=f"index context parallelism, {options.world_size} ranks: "
            f"{outcome.k_bytes_per_rank / 1e9:,.2f} GB in all",
        )  # fmt: skip
        lower.set_title(
            f"Index-key bytes that each rank reads in a step ({options.sparse_layers} sparse layers)",
            loc="left",
        )
        lower.set_ylabel("MB")
        lower.set_xlabel("decode step")
        lower.legend(loc="upper left", frameon=False)
        lower.set_ylim(top=1.3 * max(replicated, default=1.0))  # room for the legend
        for axis in (upper, lower):
            axis.set_ylim(bottom=0)
            axis.margins(x=0)
        figure.savefig(path, dpi=130)
