"""Prepared steps: what the layers of a step share is checked and packed once (contract, section 8).

The first layer records the launches of the call that it stands for (`launches.py`); it and every later one
bind them to their query and K shard, and launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import checks
from ..geometry import LEGACY_WORDS, NUM_HEADS, SLOT_SETS
from ..launches import Launch, launch, refuse_tracing
from ..prefill_plan import MSAIcpScorePlan
from . import chains
from .comm import CheckedComm

if TYPE_CHECKING:
    from .plan import MSAIcpIndexerPlan

ALIGNED = 16
"""Bytes; of the addresses of the query and the K shard."""


class _Layers:
    """The query and K shard of the first layer, which those of the others must be like."""

    def __init__(self) -> None:
        self._first: tuple[Any, ...] | None = None

    def check(self, index_q: Tensor, index_k: Tensor) -> None:
        """ValueError where a layer differs from the first in anything but its memory."""
        found = _describe(index_q), _describe(index_k)
        if found == self._first:
            return
        if self._first is None:
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
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % ALIGNED
    except (AttributeError, RuntimeError):  # no dense tensor: of a first layer the call says what is wrong
        return type(tensor)


def _words(described: Any) -> str:
    if not isinstance(described, tuple):
        return str(described)
    shape, strides, dtype, device, over = described
    return (
        f"{dtype} {list(shape)} of strides {strides} on {device}, {over} bytes past a multiple of {ALIGNED}"
    )


def _compare(prepared: Sequence[Launch], call: Sequence[Launch]) -> None:
    """RuntimeError where a prepared layer would not launch what the call launches."""
    if len(prepared) != len(call):
        raise RuntimeError(f"debug: the prepared step has {len(prepared)} launches, the call {len(call)}")
    for place, (ours, theirs) in enumerate(zip(prepared, call, strict=True)):
        if (ours.key(), ours.bound()) != (theirs.key(), theirs.bound()):
            raise RuntimeError(
                f"debug: launch {place} of the prepared step is {_shown(ours)}, the call's {_shown(theirs)}: "
                "a buffer of the step was changed after it was prepared, or it is bound to another layer"
            )


def _shown(one: Launch) -> str:
    return f"{one.name} with {one.key()} for {one.bound()}"


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
        self.indexer = indexer
        chains.check_output(indexer, buffers[4])
        checks.flag("debug", debug)
        self._buffers = buffers
        self._arguments = arguments
        self._debug = debug
        self._layers = _Layers()
        self._by_slot: dict[int, list[Launch]] = {}
        self._storage: CheckedComm | None = None  # keeps the memory that launches have addresses of

    @property
    def debug(self) -> bool:
        """Whether every layer is compared with the call that it stands for."""
        return self._debug

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
        launch(self._bound(index_q, index_k, slot))

    def publish(self, index_q: Tensor, index_k: Tensor, *, slot: int) -> None:
        """The first half of `run`: what `decode_publish` does. For several ranks in one thread or stream.

        Raises: as `run`.
        """
        launch(self._bound(index_q, index_k, slot)[:-1])

    def merge(self, *, slot: int) -> None:
        """The second half: what `decode_merge` does, in the slot set of the `publish` before.

        Raises:
            ValueError: no layer has been published in this slot set.
        """
        refuse_tracing("prepared step")
        if checks.integer("slot", slot, 0, SLOT_SETS - 1) not in self._by_slot:
            checks.refuse("slot", f"one that was published, of {sorted(self._by_slot)}", slot)
        self.check_storage()
        launch(self._by_slot[slot][-1:])

    def check_storage(self) -> None:
        """ValueError where the receive storage is closed, or another than that of the first layer."""
        if self._storage is not None and not self._storage.is_at(self._arguments["comm"]):
            was = "closed, or replaced: prepare a new step"
            checks.refuse("comm", "the receive storage that the step was prepared with", was)

    def record(self, index_q: Tensor, index_k: Tensor, *, slot: int) -> list[Launch]:
        """The launches of a layer, bound to it and not launched.

        The list is the caller's; the launches are those of every layer of this slot set, so the next one that
        is recorded or run binds the same ones to its own query and K shard.

        Raises: as `run`.
        """
        return list(self._bound(index_q, index_k, slot))

    def _bound(self, index_q: Tensor, index_k: Tensor, slot: int) -> list[Launch]:
        refuse_tracing("prepared step")
        launches = self._by_slot.get(checks.integer("slot", slot, 0, SLOT_SETS - 1))
        self.check_storage()
        self._layers.check(index_q, index_k)
        if launches is None:
            try:
                launches = self._call(index_q, index_k, slot)
            except BaseException:
                if not self._by_slot:
                    self._layers.forget()
                raise
            self._by_slot[slot] = launches
            self._storage = self.indexer.checked(self._arguments["comm"])
        for one in launches:
            if one.takes_query:
                one.bind(index_q, index_k)
        if self._debug:
            _compare(launches, self._call(index_q, index_k, slot))
        return launches

    def _call(self, index_q: Tensor, index_k: Tensor, slot: int) -> list[Launch]:
        return self.indexer.record_decode(index_q, index_k, *self._buffers, slot=slot, **self._arguments)


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
        self.indexer = indexer
        checks.flag("debug", debug)
        if unknown := set(local_kwargs) - {"pool"}:
            checks.refuse(min(unknown), "no argument of prepare_prefill_step; there is pool", "given")
        valid = checks.tensor("num_valid_pages", num_valid_pages, torch.int32, ("T",), device=indexer.device)
        self._windows = tuple(_checked_windows(windows, valid.shape[0]))
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
    def debug(self) -> bool:
        """Whether every layer is compared with the call that it stands for."""
        return self._debug

    @property
    def tokens(self) -> int:
        """Query tokens of a layer."""
        return int(self._num_valid_pages.shape[0])

    @property
    def windows(self) -> tuple[tuple[int, int, Tensor, MSAIcpScorePlan], ...]:
        """`(start, end, block_table, plan)` of each."""
        return self._windows

    @property
    def score_scratch(self) -> Tensor | None:
        """The score rows of whichever window was scored last; None with a pool."""
        return self._scratch

    @property
    def num_valid_pages(self) -> Tensor:
        """B128 blocks of each token."""
        return self._num_valid_pages

    @property
    def send(self) -> Tensor:
        """The carrier that `local` writes."""
        return self._send

    @property
    def received(self) -> Tensor:
        """What `merge` reads."""
        return self._received

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
        launch(self._bound_local(index_q, index_k))

    def merge(self) -> None:
        """The layer's end: what `prefill_merge` does."""
        launch(self._bound_merge())

    def record(self, index_q: Tensor, index_k: Tensor) -> list[Launch]:
        """The launches of a layer, `local`'s and `merge`'s, bound to it and not launched.

        The list is the caller's; the launches are those of every layer, so the next one that is recorded or
        run binds the same ones to its own query and K shard.

        Raises: as `local`.
        """
        return [*self._bound_local(index_q, index_k), *self._bound_merge()]

    def record_local(self, index_q: Tensor, index_k: Tensor) -> list[Launch]:
        """Those of `local`."""
        return list(self._bound_local(index_q, index_k))

    def record_merge(self) -> list[Launch]:
        """Those of `merge`."""
        return list(self._bound_merge())

    def _bound_local(self, index_q: Tensor, index_k: Tensor) -> list[Launch]:
        refuse_tracing("prepared step")
        self._layers.check(index_q, index_k)
        if self._local is None:
            try:
                local = self._call_local(index_q, index_k)
                self._bound_merge()  # what is wrong there is found before anything is launched
            except BaseException:
                self._layers.forget()
                raise
            self._local = local
        for one in self._local:
            one.bind(index_q, index_k)
        if self._debug:
            _compare(self._local, self._call_local(index_q, index_k))
        return self._local

    def _bound_merge(self) -> list[Launch]:
        refuse_tracing("prepared step")
        if self._merge is None:
            self._merge = self._call_merge()
        if self._debug:
            _compare(self._merge, self._call_merge())
        return self._merge

    def _call_local(self, index_q: Tensor, index_k: Tensor) -> list[Launch]:
        device = self.indexer.device
        checks.tensor("index_q", index_q, checks.FP8, (self.tokens, "H", "D"), device=device)
        checks.tensor("send", self._send, torch.int32, (NUM_HEADS, self.tokens, LEGACY_WORDS), device=device)
        launches = []
        for place, (start, end, block_table, plan) in enumerate(self._windows):
            names = {
                **chains.PREFILL_NAMES,
                "q": "index_q",
                "carrier": "send",
                "plan": f"windows[{place}] plan",
                "block_table": f"windows[{place}] block_table",
            }
            call = chains.recorded(
                chains.prefill_local,
                names,
                self.indexer,
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
            chains.prefill_merge,
            chains.PREFILL_NAMES,
            self.indexer,
            self._received,
            self._num_valid_pages,
            self._output,
        )


def _checked_windows(windows: Any, tokens: int) -> list[tuple[int, int, Tensor, MSAIcpScorePlan]]:
    if isinstance(windows, (str, Tensor)) or not isinstance(windows, Iterable):
        checks.refuse("windows", "a sequence of (start, end, block_table, plan)", type(windows))
    found = list(windows)
    if not found:
        checks.refuse("windows", "at least one (start, end, block_table, plan)", "empty")
    before = 0
    for place, window in enumerate(found):
        if not isinstance(window, tuple) or len(window) != 4:
            was = f"{len(window)} items" if isinstance(window, tuple) else type(window)
            checks.refuse(f"windows[{place}]", "a tuple of four: (start, end, block_table, plan)", was)
        start, end, _, _ = window
        checks.integer(f"windows[{place}] start", start, before, tokens - 1)
        before = checks.integer(f"windows[{place}] end", end, start + 1, tokens)
    for place, (start, end, _, plan) in enumerate(found):
        if not isinstance(plan, MSAIcpScorePlan) or plan.total_q != end - start:
            must_be = f"an MSAIcpScorePlan of total_q == end - start == {end - start}"
            was = f"of {plan.total_q}" if isinstance(plan, MSAIcpScorePlan) else type(plan)
            checks.refuse(f"windows[{place}] plan", must_be, was)
    _refuse_plans_of_one_number([plan for *_, plan in found])
    return found


def _refuse_plans_of_one_number(plans: list[MSAIcpScorePlan]) -> None:
    """The later of two plans in one storage has overwritten the other; one plan may serve twice."""
    planned: dict[int, int] = {}
    for place, plan in enumerate(plans):
        name = f"windows[{place}] plan"
        words = checks.tensor(f"{name}.packed_work_info", plan.packed_work_info, torch.int64, ("words",))
        first = planned.setdefault(words.data_ptr(), place)
        if plans[first] is not plan:
            must_be = "in storage of its own (prefill_window_plan: another number)"
            checks.refuse(name, must_be, f"planned over that of windows[{first}]")
