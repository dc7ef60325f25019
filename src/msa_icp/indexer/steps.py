"""Prepared steps: what the layers of a step share is checked and packed once (contract, section 8).

The first layer records the launches of the call that it stands for (`launches.py`); it and every later one
bind them to their query and K shard, and launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import checks
from ..geometry import TOP_K
from ..launches import Launch, launch
from ..prefill_plan import MSAIcpScorePlan
from . import chains

if TYPE_CHECKING:
    from .plan import MSAIcpIndexerPlan

_ALIGNED = 16
"""Bytes; of the addresses of the query and the K shard."""


class _Layers:
    """The query and K shard of the first layer, which those of the others must be like."""

    def __init__(self) -> None:
        self._first: tuple[Any, ...] | None = None

    def check(self, index_q: Tensor, index_k: Tensor) -> None:
        """ValueError where a layer differs from the first in anything but its memory."""
        found = _describe(index_q), _describe(index_k)
        if self._first is None or found == self._first:
            self._first = found
            return
        for name, want, got in zip(("index_q", "index_k"), self._first, found, strict=True):
            if want != got:
                checks.refuse(name, f"like the first layer's {_words(want)}", _words(got))

    def forget(self) -> None:
        """The first layer was refused."""
        self._first = None


def _describe(tensor: Tensor) -> Any:
    try:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % _ALIGNED
    except (AttributeError, RuntimeError):  # no dense tensor: of a first layer the call says what is wrong
        return type(tensor)


def _words(described: Any) -> str:
    if not isinstance(described, tuple):
        return str(described)
    shape, strides, dtype, device, over = described
    return (
        f"{dtype} {list(shape)} of strides {strides} on {device}, {over} bytes past a multiple of {_ALIGNED}"
    )


def _compare(prepared: Sequence[Launch], call: Sequence[Launch]) -> None:
    """RuntimeError where a prepared layer would not launch what the call launches."""
    for place, (ours, theirs) in enumerate(zip(prepared, call, strict=True)):
        if (ours.key(), ours.bound()) != (theirs.key(), theirs.bound()):
            raise RuntimeError(
                f"debug: launch {place} of the prepared step is {ours.name} with {ours.key()}, of the call "
                f"{theirs.name} with {theirs.key()}; a buffer of the step was changed after it was prepared"
            )


class MSAIcpDecodeStep:
    """A prepared decode step; made by `MSAIcpIndexerPlan.prepare_decode_step`. For one thread at a time."""

    def __init__(
        self,
        indexer: MSAIcpIndexerPlan,
        buffers: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],
        arguments: dict[str, Any],
        *,
        debug: bool,
    ) -> None:
        """`buffers` and `arguments` of `MSAIcpIndexerPlan.decode`, without what differs between layers."""
        self._indexer = indexer
        shape = ("T", indexer.heads_per_rank, TOP_K)
        checks.tensor("output", buffers[4], torch.int32, shape, device=indexer.device)
        self._buffers = buffers
        self._arguments = arguments
        self._debug = debug
        self._layers = _Layers()
        self._by_slot: dict[int, list[Launch]] = {}

    @property
    def tokens(self) -> int:
        """Query tokens of a layer."""
        return int(self.output.shape[0])

    @property
    def output(self) -> Tensor:
        """The block ids of the layer that was merged last."""
        return self._buffers[4]

    def run(self, index_q: Tensor, index_k: Tensor, *, slot: int) -> None:
        """A layer: what `decode` does with this query, K shard and slot set.

        The first layer of each slot set checks everything; later ones only that `index_q` and `index_k` are
        like the first one's in shape, strides, dtype, device and alignment.

        Raises:
            ValueError: an argument breaks a rule; nothing has been launched.
            RuntimeError: with `debug`, the launches differ from those of `decode`.
        """
        launch(self.record(index_q, index_k, slot=slot))

    def publish(self, index_q: Tensor, index_k: Tensor, *, slot: int) -> None:
        """The first half of `run`: what `decode_publish` does. For several ranks in one thread or stream.

        Raises: as `run`.
        """
        launch(self.record(index_q, index_k, slot=slot)[:-1])

    def merge(self, *, slot: int) -> None:
        """The second half: what `decode_merge` does, in the slot set of the `publish` before.

        Raises:
            ValueError: no layer has been published in this slot set.
        """
        if slot not in self._by_slot:
            checks.refuse("slot", f"one that was published, of {sorted(self._by_slot)}", slot)
        launch(self._by_slot[slot][-1:])

    def record(self, index_q: Tensor, index_k: Tensor, *, slot: int) -> list[Launch]:
        """The launches of a layer, bound to it and not launched. The next layer binds the same ones."""
        self._layers.check(index_q, index_k)
        launches = self._by_slot.get(slot)
        if launches is None:
            try:
                launches = self._call(index_q, index_k, slot)
            except BaseException:
                if not self._by_slot:
                    self._layers.forget()
                raise
            self._by_slot[slot] = launches
        for one in launches:
            one.bind(index_q, index_k)
        if self._debug:
            _compare(launches, self._call(index_q, index_k, slot))
        return launches

    def _call(self, index_q: Tensor, index_k: Tensor, slot: int) -> list[Launch]:
        return chains.decode(self._indexer, index_q, index_k, *self._buffers, slot=slot, **self._arguments)


class MSAIcpPrefillStep:
    """A prepared prefill step; made by `MSAIcpIndexerPlan.prepare_prefill_step`. For one thread at a time."""

    def __init__(
        self,
        indexer: MSAIcpIndexerPlan,
        windows: Sequence[tuple[int, int, Tensor, MSAIcpScorePlan]],
        score_scratch: Tensor | None,
        num_valid_pages: Tensor,
        send: Tensor,
        received: Tensor,
        output: Tensor,
        local_kwargs: dict[str, Any],
        *,
        debug: bool,
    ) -> None:
        """See `MSAIcpIndexerPlan.prepare_prefill_step`."""
        self._indexer = indexer
        valid = checks.tensor("num_valid_pages", num_valid_pages, torch.int32, ("T",), device=indexer.device)
        self._windows = _checked_windows(windows, valid.shape[0])
        self._scratch = score_scratch
        self._num_valid_pages = valid
        self._send = send
        self._received = received
        self._output = output
        self._local_kwargs = local_kwargs
        self._debug = debug
        self._layers = _Layers()
        self._local: list[Launch] | None = None
        self._merge: list[Launch] | None = None

    @property
    def tokens(self) -> int:
        """Query tokens of a layer."""
        return int(self._num_valid_pages.shape[0])

    @property
    def output(self) -> Tensor:
        """The block ids of the layer that was merged last."""
        return self._output

    def local(self, index_q: Tensor, index_k: Tensor) -> None:
        """A layer of all windows up to the exchange: what `prefill_local` does for each of them.

        Args:
            index_q: `float8_e4m3fn [T, 4, 128]`, the query rows of all windows.
            index_k: the layer's K shard.

        Raises:
            ValueError: an argument breaks a rule; nothing has been launched.
            RuntimeError: with `debug`, the launches differ from those of `prefill_local`.
        """
        launch(self.record_local(index_q, index_k))

    def merge(self) -> None:
        """The layer's end: what `prefill_merge` does."""
        launch(self.record_merge())

    def record(self, index_q: Tensor, index_k: Tensor) -> list[Launch]:
        """The launches of a layer, `local`'s and `merge`'s, bound to it and not launched."""
        return [*self.record_local(index_q, index_k), *self.record_merge()]

    def record_local(self, index_q: Tensor, index_k: Tensor) -> list[Launch]:
        """Those of `local`."""
        self._layers.check(index_q, index_k)
        if self._local is None:
            try:
                self._local = self._call_local(index_q, index_k)
            except BaseException:
                self._layers.forget()
                raise
        for one in self._local:
            one.bind(index_q, index_k)
        if self._debug:
            _compare(self._local, self._call_local(index_q, index_k))
        return self._local

    def record_merge(self) -> list[Launch]:
        """Those of `merge`."""
        if self._merge is None:
            self._merge = self._call_merge()
        if self._debug:
            _compare(self._merge, self._call_merge())
        return self._merge

    def _call_local(self, index_q: Tensor, index_k: Tensor) -> list[Launch]:
        checks.tensor("index_q", index_q, checks.FP8, (self.tokens, "H", "D"), device=self._indexer.device)
        launches = []
        for start, end, block_table, plan in self._windows:
            call = chains.recorded(
                chains.prefill_local,
                self._indexer,
                index_q[start:end],
                index_k,
                block_table,
                plan,
                self._scratch,
                self._num_valid_pages[start:end],
                self._send[:, start:end],
                **self._local_kwargs,
            )
            for one in call:
                one.window = (start, end)
            launches += call
        return launches

    def _call_merge(self) -> list[Launch]:
        return chains.recorded(
            chains.prefill_merge, self._indexer, self._received, self._num_valid_pages, self._output
        )


def _checked_windows(
    windows: Sequence[tuple[int, int, Tensor, MSAIcpScorePlan]], tokens: int
) -> list[tuple[int, int, Tensor, MSAIcpScorePlan]]:
    if not windows:
        checks.refuse("windows", "at least one (start, end, block_table, plan)", "empty")
    before = 0
    for place, (start, end, _, _) in enumerate(windows):
        checks.integer(f"windows[{place}] start", start, before, tokens - 1)
        before = checks.integer(f"windows[{place}] end", end, start + 1, tokens)
    return list(windows)
