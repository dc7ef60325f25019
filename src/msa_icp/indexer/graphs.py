"""Layer graphs: prepared steps as CUDA graphs, one a layer, replayed while nothing but the query changes.

A serving engine that keeps its buffers launches the same layers step after step. Their first runs are eager,
then each is captured, then replayed. A key is every argument of every launch but the query, so a batch of
another size, a buffer that moved, or another plan is another key. The graphs of a key are captured over a
staging buffer for the query. Before a replay the query is copied there, or the graph is told to read it where
it is (graph_query.py), which is the same to the kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import checks
from ..geometry import SLOT_SETS
from ..launches import Launch, identity, launch, refuse_tracing
from .graph_query import QueryWords, can_be_moved
from .steps import ALIGNED, MSAIcpDecodeStep, MSAIcpPrefillStep

if TYPE_CHECKING:
    from .plan import MSAIcpIndexerPlan

STATS = ("eager_layers", "captured_layers", "replayed_layers", "evicted_keys")
_MOST_SEEN = 64
"""Keys without a graph that are remembered: batch sizes that come once must not push out one that stays."""


@dataclass
class _Layer:
    """A layer of one key, with the K shard that it had last."""

    keys: Hashable
    runs: int = 0
    graph: _LayerGraph | None = None


@dataclass(eq=False)
class _Key:
    """What steps with the same arguments share."""

    key: Hashable
    layers: dict[Hashable, _Layer] = field(default_factory=dict)
    staging: Tensor | None = None
    """What the graphs read the query from."""
    used: int = 0
    evicted: bool = False


class _LayerGraph:
    """A graph of a layer, and how its kernels come to the query of a replay."""

    def __init__(self, graph: Any, staged: Tensor, words: QueryWords | None) -> None:
        """Captured over the query in `staged`; None: there the query must be."""
        self._graph = graph
        self._staged = staged
        self._words = words

    def replay(self, index_q: Tensor) -> None:
        """Replay it with another query, of the shape, strides and alignment that it was captured for."""
        if self._words is None:
            self._staged.copy_(index_q)
        else:
            self._words.read_from(index_q)
        self._graph.replay()


class MSAIcpLayerGraphs:
    """Layer graphs of one rank; made by `MSAIcpIndexerPlan.layer_graphs`. For one stream at a time.

    Ranks need not agree: a rank that replays and one that runs eagerly launch the same kernels. A device
    without CUDA graphs runs every layer eagerly, and so does one on which the caller captures a graph of its
    own.

    Attributes:
        device: the indexer's.
        stats: a Counter of `eager_layers`, `captured_layers`, `replayed_layers`, of which a run counts as
            one, and of `evicted_keys`.
    """

    def __init__(self, indexer: MSAIcpIndexerPlan, *, capture_after: int, max_keys: int) -> None:
        """See `MSAIcpIndexerPlan.layer_graphs`."""
        self.device = indexer.device
        self._indexer = indexer
        self._capture_after = checks.integer("capture_after", capture_after, 0)
        self._max_keys = checks.integer("max_keys", max_keys, 1)
        self._keys: dict[Hashable, _Key] = {}
        self._clock = 0
        self.stats = _no_stats()

    @property
    def indexer(self) -> MSAIcpIndexerPlan:
        """Whose steps they are of."""
        return self._indexer

    @property
    def capture_after(self) -> int:
        """Eager runs of a layer, in each slot set, before it is captured."""
        return self._capture_after

    @property
    def max_keys(self) -> int:
        """Keys that have graphs at once."""
        return self._max_keys

    def begin_step(
        self,
        *,
        prefill: MSAIcpPrefillStep | None = None,
        decode: MSAIcpDecodeStep | None = None,
        exchange: Callable[[], None] | None = None,
        exchange_key: Hashable = None,
        decode_tokens: int = 0,
    ) -> MSAIcpGraphStep:
        """A step of decode rows, prefill rows, or both.

        Args:
            prefill, decode: prepared steps of this indexer, at least one.
            exchange: the all-to-all of the prefill, called between its two halves; exactly with `prefill`.
                It is captured with the layer: on a GPU it must queue its work on the current stream, as
                `exchange_prefill` does over NCCL or within a process.
            exchange_key: hashable; tells exchanges apart that launch different work.
            decode_tokens: rows at the begin of `index_q` that are the decode step's; 0 exactly without one.

        Raises:
            ValueError: the arguments do not fit each other.
        """
        if prefill is None and decode is None:
            checks.refuse("prefill, decode", "given, at least one of them", None)
        self._check_step("prefill", prefill, MSAIcpPrefillStep)
        self._check_step("decode", decode, MSAIcpDecodeStep)
        if (exchange is None) != (prefill is None):
            checks.refuse("exchange", "given exactly with prefill", "given" if exchange else None)
        if exchange is not None and not callable(exchange):
            checks.refuse("exchange", "a function without arguments", type(exchange))
        if not isinstance(exchange_key, Hashable):
            checks.refuse("exchange_key", "hashable", type(exchange_key))
        tokens = 0 if decode is None else decode.tokens
        if checks.integer("decode_tokens", decode_tokens, 0) != tokens:
            checks.refuse("decode_tokens", f"the {tokens} rows of the decode step", decode_tokens)
        return MSAIcpGraphStep(self, prefill, decode, exchange, exchange_key)

    def clear(self) -> None:
        """Forget all keys, graphs and staging buffers, and start `stats` anew."""
        for entry in list(self._keys.values()):
            self._forget(entry)
        self.stats = _no_stats()

    def _check_step(
        self, name: str, step: Any, kind: type[MSAIcpPrefillStep] | type[MSAIcpDecodeStep]
    ) -> None:
        must_be = f"a prepared {name} step of the indexer that made these layer graphs"
        if step is not None and not isinstance(step, kind):
            checks.refuse(name, must_be, type(step))
        if step is not None and step.indexer is not self._indexer:
            checks.refuse(name, must_be, "one of another indexer")

    # ------------------------------------------------------------ for the steps

    def entry(self, key: Hashable) -> _Key:
        """What is kept for a key."""
        entry = self._keys.get(key)
        if entry is None:
            unused = [other for other in self._keys.values() if other.staging is None]
            if len(unused) >= _MOST_SEEN:
                self._forget(min(unused, key=lambda other: other.used))
            entry = self._keys[key] = _Key(key)
        return entry

    def use(self, entry: _Key) -> None:
        """From now on it is the one used last."""
        self._clock += 1
        entry.used = self._clock

    def uses_graphs(self, layer: _Layer) -> bool:
        """Whether the next run of a layer is that of a graph, which may have to be captured first."""
        return layer.runs >= self._capture_after and can_capture(self.device)

    @torch.inference_mode(False)  # an inference tensor could not be written outside that mode
    def staging(self, entry: _Key, index_q: Tensor) -> Tensor:
        """The buffer that a key's graphs read the query from; a key that gets one may push another out."""
        if entry.staging is None:
            captured = [other for other in self._keys.values() if other.staging is not None]
            if len(captured) >= self._max_keys:
                self._forget(min(captured, key=lambda other: other.used))
                self.stats["evicted_keys"] += 1
            entry.staging = torch.empty(index_q.shape, dtype=index_q.dtype, device=index_q.device)
        return entry.staging

    def _forget(self, entry: _Key) -> None:
        del self._keys[entry.key]
        entry.layers.clear()
        entry.staging = None
        entry.evicted = True


def _no_stats() -> Counter[str]:
    return Counter(dict.fromkeys(STATS, 0))


class MSAIcpGraphStep:
    """A step of layer graphs; made by `MSAIcpLayerGraphs.begin_step`."""

    def __init__(
        self,
        cache: MSAIcpLayerGraphs,
        prefill: MSAIcpPrefillStep | None,
        decode: MSAIcpDecodeStep | None,
        exchange: Callable[[], None] | None,
        exchange_key: Hashable,
    ) -> None:
        """See `MSAIcpLayerGraphs.begin_step`."""
        self._cache = cache
        self._prefill = prefill
        self._decode = decode
        self._exchange = exchange
        self._exchange_key = exchange_key
        self._decode_tokens = 0 if decode is None else decode.tokens
        self._tokens = self._decode_tokens + (0 if prefill is None else prefill.tokens)
        self._debug = any(step.debug for step in (prefill, decode) if step is not None)
        self._entry: _Key | None = None

    def run(self, layer: int, index_q: Tensor, index_k: Tensor, *, slot: int = 0) -> None:
        """A layer: the decode rows, then the prefill rows.

        Args:
            layer: which one; two layers never share a graph.
            index_q: `float8_e4m3fn [T, 4, 128]`: the decode step's rows, then the prefill step's.
            index_k: the layer's K shard. One that moves is captured anew.
            slot: the decode step's slot set; each has graphs of its own.

        Raises:
            ValueError: as the prepared steps do; nothing has been launched.
            RuntimeError: as the prepared steps do with `debug`, before a replay, too.
        """
        refuse_tracing("layer graph")
        cache = self._cache
        entry, state = self._state(layer, index_q, index_k, slot)
        cache.use(entry)
        if not cache.uses_graphs(state):
            self._launch(index_q, index_k, slot)
            cache.stats["eager_layers"] += 1
        elif state.graph is None:
            parts = self._bind(index_q, index_k, slot)  # checks what the graph does not read
            readers = sum(one.takes_query for part in parts for one in part)
            staged = cache.staging(entry, index_q)
            graph = capture(lambda: self._launch(staged, index_k, slot), cache.device)
            state.graph = _LayerGraph(graph, staged, query_words(graph, staged, index_q, readers))
            cache.stats["captured_layers"] += 1
            state.graph.replay(index_q)
        else:
            if self._debug:
                self._bind(index_q, index_k, slot)
            elif self._decode is not None:
                self._decode.check_storage()
            state.graph.replay(index_q)
            cache.stats["replayed_layers"] += 1
        state.runs += 1

    def _state(self, layer: int, index_q: Tensor, index_k: Tensor, slot: int) -> tuple[_Key, _Layer]:
        """The step's key, and what is known of the layer."""
        checks.integer("layer", layer)
        checks.integer("slot", slot, 0, SLOT_SETS - 1)
        if not isinstance(index_q, Tensor) or index_q.dim() == 0 or index_q.shape[0] != self._tokens:
            must_be = f"a tensor of the {self._tokens} rows of the steps"
            checks.refuse(
                "index_q", must_be, list(index_q.shape) if isinstance(index_q, Tensor) else type(index_q)
            )
        entry = self._entry
        if entry is None or entry.evicted:
            entry = self._entry = self._cache.entry(self._key(index_q, index_k))
        # Whatever the first layer's check looks at: what is refused eagerly has no graph either.
        over = index_q.data_ptr() % ALIGNED
        query = index_q.shape, index_q.stride(), index_q.dtype, index_q.device, over
        place = (layer, 0 if self._decode is None else slot, query)
        keys = identity(index_k)
        state = entry.layers.get(place)
        if state is None or state.keys != keys:
            state = _Layer(keys)
            self._bind(index_q, index_k, slot)
            entry.layers[place] = state
        return entry, state

    def _parts(self, index_q: Tensor) -> tuple[Tensor, Tensor]:
        return index_q[: self._decode_tokens], index_q[self._decode_tokens :]

    def _bind(self, index_q: Tensor, index_k: Tensor, slot: int) -> list[list[Launch]]:
        """Check the layer and bind the launches: those of decode, of the local half, and of the merge."""
        queries, prompts = self._parts(index_q)
        parts: list[list[Launch]] = [[], [], []]
        if self._decode is not None:
            parts[0] = self._decode.record(queries, index_k, slot=slot)
        if self._prefill is not None:
            parts[1] = self._prefill.record_local(prompts, index_k)
            parts[2] = self._prefill.record_merge()
        return parts

    def _launch(self, index_q: Tensor, index_k: Tensor, slot: int) -> None:
        decode, local, merge = self._bind(index_q, index_k, slot)
        launch(decode)
        launch(local)
        if self._exchange is not None:
            self._exchange()
        launch(merge)

    def _key(self, index_q: Tensor, index_k: Tensor) -> Hashable:
        """Of the step: every argument of every launch but the query and the K shard, which is the layer's.

        For one slot set, whichever comes first: what the others launch follows from its number.
        """
        parts = self._bind(index_q, index_k, 0)
        launches = tuple(tuple(one.key() for one in part) for part in parts)
        return self._exchange_key, launches


# ---------------------------------------------------------------- graphs of the device


def can_capture(device: torch.device) -> bool:
    """Whether the device has CUDA graphs, and none is being captured, to which the launches then belong."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def capture(body: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """What `body` launches on `device`, as a graph; nothing runs.

    Not `torch.cuda.graph`: that synchronizes the device and collects garbage, which a serving loop must not.
    """
    kept = can_be_moved()
    graph = torch.cuda.CUDAGraph(keep_graph=kept)
    with torch.cuda.stream(torch.cuda.Stream(device)):  # the default one cannot be captured
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            body()
        finally:
            graph.capture_end()
        if kept:
            graph.instantiate()
    return graph


def query_words(
    graph: torch.cuda.CUDAGraph, staged: Tensor, index_q: Tensor, readers: int
) -> QueryWords | None:
    """The words of a graph captured over `staged` by which it reads `index_q` where that is.

    None where it has to be copied: it lies otherwise than the staging buffer, or the graph does not show an
    address for each of the `readers`, the launches that take the query.
    """
    if index_q.stride() != staged.stride() or not can_be_moved():
        return None
    words = QueryWords(graph, staged)
    return words if words.count == readers else None
