"""The pictures of a report."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
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
    """The blocks that each head selected for one request, over its tokens, in the first layer."""
    followed = outcome.plan.walk.followed
    request = outcome.plan.requests[followed]
    chosen = _followed(outcome)
    decoded = sum(position >= request.prompt_tokens for position in chosen)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(11, 7.5), layout="constrained")
        figure.suptitle(
            f"Blocks of 128 keys that each index head selects (request {request.index}: "
            f"{request.prompt_tokens:,} prompt tokens, {decoded} decoded ones; first sparse layer)"
        )
        axes = figure.subplots(2, 2, sharex=True, sharey=True)
        for head, axis in enumerate(axes.flat):
            _draw_head(axis, head, chosen)
            if chosen:
                _draw_foci(axis, head, outcome, sorted(chosen))
                axis.axvline(request.prompt_tokens - 0.5, color="black", linewidth=0.8)
        for axis in axes[:, 0]:
            axis.set_ylabel("block")
        for axis in axes[-1]:
            axis.set_xlabel("position of the token")
        handles: list[Artist] = [
            Patch(color="#dddddd", label="sections that the queries were made to look for"),
            Line2D([], [], color="black", linewidth=0.8, label="prefill to the left, decode to the right"),
        ]
        figure.legend(handles=handles, loc="outside lower center", frameon=False, ncols=2)
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
    """Contexts in the batch, and the bytes that decoding and prefill make a rank read, over the steps."""
    options, walk = outcome.plan.options, outcome.plan.walk
    contexts = walk.contexts[: outcome.steps]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(11, 10), layout="constrained")
        upper, *lower = figure.subplots(3, 1, sharex=True)
        by_row = [[row / 1024 for row in of_row] for of_row in zip(*contexts, strict=True)]
        shade = matplotlib.colormaps["viridis"].resampled(options.max_batch)
        if contexts:
            upper.stackplot(
                range(len(contexts)), *by_row, colors=[shade(row) for row in range(options.max_batch)],
                edgecolor="white", linewidth=0.4, step="post", alpha=0.85,
            )  # fmt: skip
        upper.set_title("Contexts of the requests that decode, a band for each batch row", loc="left")
        upper.set_ylabel("Ki tokens")
        _draw_read(lower[0], outcome, "decoding", k_bytes(outcome.plan, contexts))
        _draw_read(lower[1], outcome, "prefill", k_bytes(outcome.plan, walk.windows[: outcome.steps]))
        lower[1].set_xlabel("step")
        for axis in (upper, *lower):
            axis.set_ylim(bottom=0)
            axis.margins(x=0)
        figure.savefig(path, dpi=130)


def _draw_read(axis: Axes, outcome: Outcome, part: str, of_step: list[int]) -> None:
    """What each rank reads in a step, in front of what it would read of replicated keys."""
    options = outcome.plan.options
    steps = range(len(of_step))
    sharded = [count / 1e6 for count in of_step]
    replicated = [count * options.world_size for count in sharded]
    axis.fill_between(
        steps, replicated, step="post", color="#d9d9d9", linewidth=0,
        label=f"replicated indexer: {sum(replicated) / 1e3:,.2f} GB in all",
    )  # fmt: skip
    axis.fill_between(
        steps, sharded, step="post", color=_HEAD_COLOURS[0], linewidth=0,
        label=f"index context parallelism, {options.world_size} ranks: {sum(sharded) / 1e3:,.2f} GB in all",
    )  # fmt: skip
    axis.set_title(
        f"Index-key bytes that each rank reads in a step for {part} ({options.sparse_layers} sparse layers)",
        loc="left",
    )
    axis.set_ylabel("MB")
    axis.legend(loc="upper left", frameon=False)
    axis.set_ylim(top=1.3 * max([*replicated, 1e-3]))  # room for the legend
