"""Layer graphs: prepared steps as CUDA graphs, one a layer, replayed while nothing but the query changes.

A serving engine that keeps its buffers launches the same layers step after step. Their first runs are eager,
then each is captured, then replayed. A key is every argument of every launch but the query, which a replay
copies into a buffer of its own first; so a batch of another size, a buffer that moved, or another plan is
another key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import checks
from ..launches import Launch, identity, launch
from .steps import MSAIcpDecodeStep, MSAIcpPrefillStep

if TYPE_CHECKING:
    from .plan import MSAIcpIndexerPlan


@dataclass
class LayerGraphStats:
    """How the layers ran since the cache was made or cleared."""

    eager_layers: int = 0
    captured_layers: int = 0
    """Runs that captured a graph and launched it."""
    replayed_layers: int = 0
    evicted_keys: int = 0


@dataclass
class _Layer:
    """A layer of one key."""

    runs: int = 0
    graph: Any = None


class MSAIcpLayerGraphs:
    """Layer graphs of one rank; made by `MSAIcpIndexerPlan.layer_graphs`. For one stream at a time.

    Ranks need not agree: a rank that replays and one that runs eagerly launch the same kernels. A device
    without CUDA graphs runs every layer eagerly, and so does one on which the caller captures a graph of its
    own.

    Attributes:
        device: the indexer's.
        stats: `eager_layers`, `captured_layers`, `replayed_layers`, `evicted_keys`; a run counts once.
    """

    def __init__(self, indexer: MSAIcpIndexerPlan, *, capture_after: int, max_keys: int) -> None:
        """See `MSAIcpIndexerPlan.layer_graphs`."""
        self.device = indexer.device
        self._capture_after = checks.integer("capture_after", capture_after, 0)
        self._max_keys = checks.integer("max_keys", max_keys, 1)
        self._keys: OrderedDict[Hashable, dict[Hashable, _Layer]] = OrderedDict()
        self._staging: dict[Hashable, Tensor] = {}
        self.stats = LayerGraphStats()

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
            prefill, decode: prepared steps, at least one.
            exchange: the all-to-all of the prefill, called between its two halves; exactly with `prefill`.
                It is captured with the layer: on a GPU it must queue its work on the current stream, as
                `exchange_prefill` does over NCCL or within a process.
            exchange_key: tells exchanges apart that launch different work.
            decode_tokens: rows at the begin of `index_q` that are the decode step's; 0 exactly without one.

        Raises:
            ValueError: the arguments do not fit each other.
        """
        if prefill is None and decode is None:
            checks.refuse("prefill, decode", "given, at least one of them", None)
        if (exchange is None) != (prefill is None):
            checks.refuse("exchange", "given exactly with prefill", "given" if exchange else None)
        tokens = 0 if decode is None else decode.tokens
        if checks.integer("decode_tokens", decode_tokens, 0) != tokens:
            checks.refuse("decode_tokens", f"the {tokens} rows of the decode step", decode_tokens)
        return MSAIcpGraphStep(self, prefill, decode, exchange, exchange_key, tokens)

    def clear(self) -> None:
        """Forget all keys, graphs and staging buffers, and start `stats` anew."""
        self._keys.clear()
        self._staging.clear()
        self.stats = LayerGraphStats()

    # ------------------------------------------------------------ for the steps

    def layer(self, key: Hashable, layer: Hashable) -> _Layer:
        """A layer of a key, which becomes the one used last."""
        layers = self._keys.setdefault(key, {})
        self._keys.move_to_end(key)
        if len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)
            self.stats.evicted_keys += 1
        return layers.setdefault(layer, _Layer())

    def may_use_graphs(self, layer: _Layer) -> bool:
        """Whether the next run of a layer is that of a graph, which may have to be captured first."""
        return layer.runs >= self._capture_after and can_capture(self.device)

    def staging(self, index_q: Tensor) -> Tensor:
        """The buffer that graphs read a query of this shape from."""
        key = (index_q.shape, index_q.dtype)
        if key not in self._staging:
            self._staging[key] = torch.empty(index_q.shape, dtype=index_q.dtype, device=index_q.device)
        return self._staging[key]


class MSAIcpGraphStep:
    """A step of layer graphs; made by `MSAIcpLayerGraphs.begin_step`."""

    def __init__(
        self,
        cache: MSAIcpLayerGraphs,
        prefill: MSAIcpPrefillStep | None,
        decode: MSAIcpDecodeStep | None,
        exchange: Callable[[], None] | None,
        exchange_key: Hashable,
        decode_tokens: int,
    ) -> None:
        """See `MSAIcpLayerGraphs.begin_step`."""
        self._cache = cache
        self._prefill = prefill
        self._decode = decode
        self._exchange = exchange
        self._exchange_key = exchange_key
        self._decode_tokens = decode_tokens
        self._step_key: Hashable = None

    def run(self, layer: int, index_q: Tensor, index_k: Tensor, *, slot: int = 0) -> None:
        """A layer: the decode rows, then the prefill rows.

        Args:
            layer: which one; two layers never share a graph.
            index_q: `float8_e4m3fn [T, 4, 128]`: the decode step's rows, then the prefill step's.
            index_k: the layer's K shard.
            slot: the decode step's slot set.

        Raises:
            ValueError: as the prepared steps do; nothing has been launched.
        """
        cache = self._cache
        if self._step_key is None:
            self._step_key = self._key(index_q, index_k)
        query = index_q.shape, index_q.stride(), index_q.dtype, index_q.device
        state = cache.layer(self._step_key, (layer, slot, query, identity(index_k)))
        if not cache.may_use_graphs(state):
            self._launch(index_q, index_k, slot)
            cache.stats.eager_layers += 1
        else:
            if state.graph is None:
                self._bind(index_q, index_k, slot)  # checks what the graph does not read, as it is copied
            staged = cache.staging(index_q)
            if state.graph is None:
                state.graph = capture(lambda: self._launch(staged, index_k, slot), cache.device)
                cache.stats.captured_layers += 1
            else:
                cache.stats.replayed_layers += 1
            staged.copy_(index_q)
            state.graph.replay()
        state.runs += 1

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
        launches = (one.key() for part in parts for one in part)
        return self._exchange_key, self._decode_tokens, *launches


# ---------------------------------------------------------------- graphs of the device


def can_capture(device: torch.device) -> bool:
    """Whether the device has CUDA graphs, and none is being captured, to which the launches then belong."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def capture(body: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """What `body` launches on `device`, as a graph; nothing runs.

    Not `torch.cuda.graph`: that synchronizes the device and collects garbage, which a serving loop must not.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream(device)):  # the default one cannot be captured
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            body()
        finally:
            graph.capture_end()
    return graph
