"""The facade: one object per rank that a serving engine calls (contract, section 8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import api, checks, dispatch
from ..geometry import LEGACY_WORDS, NUM_HEADS
from ..launches import Launch, launch
from ..prefill_plan import MSAIcpScorePlan, default_device
from . import chains, rules
from .comm import CheckedComm, Comm, comm_fields
from .graphs import MSAIcpLayerGraphs
from .limits import Limits
from .steps import MSAIcpDecodeStep, MSAIcpPrefillStep


class MSAIcpIndexerPlan:
    """One rank's indexer. Made by `prepare_msa_icp_indexer`; section 8 of docs/contract.md.

    Everything is allocated here. No method allocates, synchronizes or reads a value of a device, so all of
    them can be captured in a CUDA graph once `warmup` has been called; `layer_graphs` allocates when it
    captures.
    Shapes: `B` requests, `T` tokens, `H = 4` index heads, `W` ranks, `hpr = H / W`, `P` keys a page.

    Attributes:
        world_size, rank, num_index_heads, page_size, init_blocks, local_blocks, max_decode_tokens,
            max_decode_query_len, max_num_batched_tokens, max_num_seqs, max_model_len, num_sparse_layers,
            backend, spin_limit: the arguments.
        device: the arguments' one, with its index.
        heads_per_rank: `hpr`; this rank owns the heads from `rank * hpr` on.
        index_scale, index_offset: a column `c` of this rank's scores is block `c * scale + offset`.
        comm_layout: `msa_icp_comm_layout` of `max_decode_tokens`: what `comm` holds.
        decode_score_columns: columns of the decode scores.
        prefill_score_columns: columns of the prefill scores of the longest context, rounded up to 16.
        max_prefill_windows: windows of a step that can be planned at once.
        fused_decode_min_batch: requests from which on `decode` without a pool uses its own; None: never.
        fused_prefill: whether the fused form is the better one for prefill windows.
        prefill_short_tokens: windows of up to so many tokens that take another path where there is a pool;
            0, as there is no such path.
        prefill_errors: int32 `[4]`, the error words of the prefill merge, which never waits.
        pool: of the fused form, where `fused_decode_min_batch` is set.
        work_ranges, work_info, plan_workspace: storage of the device plans, a row a window in the first two.
    """

    @torch.inference_mode(False)  # an inference tensor could not be written outside that mode
    def __init__(
        self,
        *,
        world_size: int,
        rank: int,
        num_index_heads: int,
        page_size: int,
        init_blocks: int,
        local_blocks: int,
        max_decode_tokens: int,
        max_decode_query_len: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        num_sparse_layers: int,
        device: torch.device | str | None,
        backend: str = "cake",
        spin_limit: int = 1 << 26,
    ) -> None:
        """See `prepare_msa_icp_indexer`."""
        limits = self.limits = Limits.checked(
            world_size=world_size,
            rank=rank,
            num_index_heads=num_index_heads,
            page_size=page_size,
            init_blocks=init_blocks,
            local_blocks=local_blocks,
            max_decode_tokens=max_decode_tokens,
            max_decode_query_len=max_decode_query_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_sparse_layers=num_sparse_layers,
        )
        where = self.device = checks.plan_device("device", default_device() if device is None else device)
        if dispatch.resolve(backend, where) is dispatch.package("torch") and where.type != "cpu":
            checks.refuse("backend", f"one that publishes and merges on {where}", repr(backend))
        self.backend = backend
        self.spin_limit = checks.integer("spin_limit", spin_limit, 1, 2**31 - 1)

        self.world_size, self.rank, self.page_size = limits.world_size, limits.rank, limits.page_size
        self.num_index_heads, self.heads_per_rank = limits.num_index_heads, limits.heads_per_rank
        self.init_blocks, self.local_blocks = limits.init_blocks, limits.local_blocks
        self.max_decode_tokens = limits.max_decode_tokens
        self.max_decode_query_len = limits.max_decode_query_len
        self.max_num_batched_tokens = limits.max_num_batched_tokens
        self.max_num_seqs = limits.max_num_seqs
        self.max_model_len = limits.max_model_len
        self.num_sparse_layers = limits.num_sparse_layers
        self.index_scale, self.index_offset = limits.layout.index_scale, limits.layout.index_offset
        self.comm_layout = limits.comm_layout
        self.decode_score_columns = api.msa_icp_decode_score_columns(self.max_model_len, self.page_size)
        self.prefill_score_columns = limits.scratch_pitch(self.max_model_len)
        self.max_prefill_windows = limits.max_prefill_windows
        self.fused_decode_min_batch = rules.fused_decode_min_batch(where, self.page_size, self.world_size)
        self.fused_prefill = rules.fused_prefill(where, self.page_size, self.world_size)
        self.prefill_short_tokens = 0

        sizes = limits.plan_storage(where)
        windows = self.max_prefill_windows
        self.work_ranges = torch.zeros(windows, sizes["work_range_numel"], dtype=torch.int64, device=where)
        self.work_info = torch.zeros(windows, sizes["work_info_numel"], dtype=torch.int64, device=where)
        self.plan_workspace = torch.empty(sizes["workspace_bytes"], dtype=torch.uint8, device=where)
        self.prefill_errors = torch.zeros(4, dtype=torch.int32, device=where)
        self.pool = None if self.fused_decode_min_batch is None else self._own_pool()
        self._comm: CheckedComm | None = None

    def _own_pool(self) -> Tensor:
        size = api.msa_icp_decode_pool_bytes(max_decode_tokens=self.max_decode_tokens)
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    # ------------------------------------------------------------ sizes and loading

    def decode_scores_shape(self) -> tuple[int, int, int]:
        """Of the float32 `scores` that serve every decode batch: `(max_decode_tokens, H, columns)`."""
        return self.max_decode_tokens, NUM_HEADS, self.decode_score_columns

    def prefill_scratch_shape(self, max_seq_len: int | None = None) -> tuple[int, int, int]:
        """Of the float32 `score_scratch` of windows over contexts of up to `max_seq_len` keys.

        None: `max_model_len`. The first number is the most tokens of such a window: the shorter the contexts,
        the longer the windows.
        """
        longest = self.max_model_len if max_seq_len is None else max_seq_len
        return self.limits.scratch_shape(checks.integer("max_seq_len", longest, 1, self.max_model_len))

    def prefill_window_tokens(self) -> int:
        """Most tokens of a window of the fused form."""
        return self.limits.window_tokens

    def prefill_pool_shape(self) -> tuple[int]:
        """Of the uint8 `pool` of the fused prefill form: it serves every window, chunk and layer."""
        return (
            api.msa_icp_prefill_pool_bytes(
                total_q=self.limits.window_tokens, batch=self.max_num_seqs, device=self.device
            ),
        )

    def prefill_carrier_shape(self) -> tuple[int, int, int, int]:
        """Of the int32 carriers, the one that is sent and the one that is received."""
        return 2, NUM_HEADS, self.max_num_batched_tokens, LEGACY_WORDS

    def warmup(self) -> None:
        """Compile and load every kernel: before the first exchange, and before a CUDA graph is captured.

        A kernel that is first loaded while a peer waits for it stalls both. Ranks may call it at once, from a
        cold cache too. It is `msa_icp.warmup` for this plan's backend, page size and world size.
        """
        dispatch.warmup(self.device, self.backend, page_size=self.page_size, world_size=self.world_size)

    # ------------------------------------------------------------ decode

    def check_comm(self, comm: Comm) -> None:
        """Check the receive storage; `decode` does so itself on first use, and when a field has changed.

        Args:
            comm: `ReceiveStorage`, or any object with `recv` (int32 `legacy_shape` of `comm_layout`),
                `tagged_recv` (int64 `tagged_shape`, `tagged_offset_bytes` after `recv` in one storage),
                `recv_bases`, `tagged_recv_bases` (int64 `[W]`), `publish_generations`,
                `expected_generations` (int32, of their shapes) and `errors` (int32 `[>= 1]`), all contiguous
                on the plan's device.

        Raises:
            ValueError: a field breaks a rule; the message names it.
        """
        self._comm = CheckedComm(comm, self.limits, self.device)

    def decode(
        self,
        index_q: Tensor,
        index_k: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        num_valid_pages: Tensor,
        scores: Tensor | None,
        output: Tensor,
        *,
        comm: Comm,
        slot: int,
        tagged: bool,
        decode_query_len: int,
        enable_pdl: bool = True,
        pool: Tensor | None = None,
    ) -> None:
        """One layer of a decode batch: score, publish, and merge what all ranks published.

        Every rank of the group calls it for the same batch and slot set, at about the same time: a merge
        waits for the peers, `spin_limit` polls at most. For several ranks in one thread or stream call
        `decode_publish` for all of them, then `decode_merge`.

        Args:
            index_q, index_k, block_table, seq_lens: as for `msa_icp_decode_index_score_sharded`;
                `T = B * decode_query_len <= max_decode_tokens`.
            num_valid_pages: `int32 [T]`, contiguous: B128 blocks of each token, 0 for padding
                (`msa_icp.num_valid_pages`).
            scores: `float32 [>= T, 4, columns]` score rows; `scores[:T]` is written and means nothing
                afterwards. Not looked at in the fused form, may be None there.
            output: `int32 [T, hpr, 16]`, unit last stride; written: the block ids of this rank's heads,
                ascending, with a tail of -1.
            comm: see `check_comm`.
            slot: slot set, 0, 1 or 2. Uses of one must be two layers apart for tagged rows, across steps too:
                go on rotating from step to step (`ReceiveStorage.slot_set`).
            tagged: tagged rows (no flag to clear) or legacy rows. They need two sparse layers at least.
            decode_query_len: query tokens of each request, at most `max_decode_query_len`.
            enable_pdl: programmatic dependent launch (section 11).
            pool: with it score and publish are one call that needs no scores, see
                `msa_icp_decode_score_publish`. None: from `fused_decode_min_batch` requests on the plan's
                own.

        Raises:
            ValueError: an argument breaks a rule; the message names it, and nothing has been launched. What a
                wait in vain leaves in `comm.errors` is section 6.
        """
        self._decode(
            index_q,
            index_k,
            block_table,
            seq_lens,
            num_valid_pages,
            scores,
            output,
            comm=comm,
            slot=slot,
            tagged=tagged,
            decode_query_len=decode_query_len,
            enable_pdl=enable_pdl,
            pool=pool,
        )

    def decode_publish(
        self,
        index_q: Tensor,
        index_k: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        num_valid_pages: Tensor,
        scores: Tensor | None,
        output: Tensor,
        *,
        comm: Comm,
        slot: int,
        tagged: bool,
        decode_query_len: int,
        enable_pdl: bool = True,
        pool: Tensor | None = None,
    ) -> None:
        """The first half of `decode`, with the same arguments: score and publish.

        For several ranks in one thread, or on one stream: every one of them publishes before the first
            merges.
        """
        self._decode(
            index_q,
            index_k,
            block_table,
            seq_lens,
            num_valid_pages,
            scores,
            output,
            comm=comm,
            slot=slot,
            tagged=tagged,
            decode_query_len=decode_query_len,
            enable_pdl=enable_pdl,
            pool=pool,
            without_merge=True,
        )

    def decode_merge(
        self,
        index_q: Tensor,
        index_k: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        num_valid_pages: Tensor,
        scores: Tensor | None,
        output: Tensor,
        *,
        comm: Comm,
        slot: int,
        tagged: bool,
        decode_query_len: int,
        enable_pdl: bool = True,
        pool: Tensor | None = None,
    ) -> None:
        """The second half of `decode`, with the same arguments: merge what all ranks published."""
        self._decode(
            index_q,
            index_k,
            block_table,
            seq_lens,
            num_valid_pages,
            scores,
            output,
            comm=comm,
            slot=slot,
            tagged=tagged,
            decode_query_len=decode_query_len,
            enable_pdl=enable_pdl,
            pool=pool,
            without_publish=True,
        )

    def _decode(self, *tensors: Any, **arguments: Any) -> None:
        if is_dynamo_compiling():
            # Nothing else ties the rows that a publish writes to this plan's capacity.
            comm_fields(arguments["comm"], self.limits, self.device)
            chains.decode(self, *tensors, **arguments)
        else:
            launch(self.record_decode(*tensors, **arguments))

    def record_decode(self, *tensors: Any, comm: Comm, **arguments: Any) -> list[Launch]:
        """What `decode`, or a half of it, launches: checked, and not launched yet."""
        self.checked(comm)
        self._check_query(tensors[0])
        return chains.recorded(chains.decode, chains.DECODE_NAMES, self, *tensors, comm=comm, **arguments)

    def _check_query(self, index_q: Any) -> None:
        """The functions would name what is not where it is, or the rows that this limit has made too few."""
        if not isinstance(index_q, Tensor):
            return
        if index_q.device != self.device:
            checks.refuse("index_q", f"on {self.device}, as the indexer is", f"on {index_q.device}")
        if index_q.dim() and index_q.shape[0] > self.max_decode_tokens:
            must_be = f"at most max_decode_tokens = {self.max_decode_tokens} tokens"
            checks.refuse("index_q.shape[0]", must_be, index_q.shape[0])

    def checked(self, comm: Comm) -> CheckedComm:
        """The receive storage, checked: anew where it is not the one of the last call, as it was then."""
        checked = self._comm
        if checked is None or not checked.still_describes(comm):
            checked = self._comm = CheckedComm(comm, self.limits, self.device)
        return checked

    # ------------------------------------------------------------ prefill

    def prefill_window_plan(
        self,
        window: int,
        qo_segment_lens: Tensor,
        kv_segment_lens: Tensor,
        qo_segment_offsets: Tensor,
        kv_segment_offsets: Tensor,
        qo_offset: Tensor,
        *,
        total_q: int,
        max_query_len: int,
        max_seq_len: int,
    ) -> MSAIcpScorePlan:
        """Plan a window on the device into the plan's own storage; one plan serves every layer of the step.

        Args:
            window: which of the step, `0 <= window < max_prefill_windows`; planning one anew overwrites it.
            qo_segment_lens, kv_segment_lens, qo_segment_offsets, kv_segment_offsets, qo_offset, total_q,
                max_query_len, max_seq_len: as for `msa_icp_index_score_sharded_plan_device`; at most
                `max_num_seqs` segments, `total_q` at most `prefill_window_tokens()` and `max_seq_len` at most
                `max_model_len`.

        Raises:
            ValueError: an argument breaks a rule; nothing has been written.
        """
        workers = self.limits.plan_storage(self.device)["work_range_numel"]
        if workers != self.work_ranges.shape[1]:
            checks.refuse(
                "torch.get_num_threads()", f"{self.work_ranges.shape[1]}, as at construction", workers
            )
        place = checks.integer("window", window, 0, self.max_prefill_windows - 1)
        lens = checks.tensor(
            "qo_segment_lens", qo_segment_lens, torch.int32, ("segments",), device=self.device
        )
        if lens.shape[0] > self.max_num_seqs:
            checks.refuse(
                "qo_segment_lens.shape[0]", f"at most max_num_seqs={self.max_num_seqs}", lens.shape[0]
            )
        checks.integer("total_q", total_q, 1, self.limits.window_tokens)
        checks.integer("max_seq_len", max_seq_len, 1, self.max_model_len)
        return api.msa_icp_index_score_sharded_plan_device(
            qo_segment_lens,
            kv_segment_lens,
            qo_segment_offsets,
            kv_segment_offsets,
            qo_offset,
            NUM_HEADS,
            total_q=total_q,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            packed_work_range=self.work_ranges[place],
            packed_work_info=self.work_info[place],
            workspace=self.plan_workspace,
            backend=self.backend,
        )

    def prefill_local(
        self,
        query: Tensor,
        index_k: Tensor,
        block_table: Tensor,
        window_plan: MSAIcpScorePlan,
        score_scratch: Tensor | None,
        num_valid_pages: Tensor,
        carrier_view: Tensor,
        *,
        pool: Tensor | None = None,
    ) -> None:
        """One layer of a window on this rank: score its shard and select its Top16 into the carrier.

        Then comes the exchange (`msa_icp.exchange_prefill`), and `prefill_merge`.

        Args:
            query: `float8_e4m3fn [T, 4, 128]`, contiguous, `T == window_plan.total_q`.
            index_k, block_table: as for `msa_icp_index_score_sharded`.
            window_plan: of `prefill_window_plan`.
            score_scratch: `float32 [>= T, 4, columns]` score rows, see `prefill_scratch_shape`; `[:T]` is
                written and means nothing afterwards. May be None with a pool.
            num_valid_pages: `int32 [T]`, contiguous: B128 blocks of each token, 0 for padding.
            carrier_view: `int32 [4, T, 33]`, unit last stride: a token slice of a head-major buffer; written.
            pool: `uint8` of `prefill_pool_shape()`: the fused form, without score rows.

        Raises:
            ValueError: an argument breaks a rule, or there is neither scratch nor pool; nothing has been
                launched.
        """
        self._prefill(
            chains.prefill_local,
            query,
            index_k,
            block_table,
            window_plan,
            score_scratch,
            num_valid_pages,
            carrier_view,
            pool=pool,
        )

    def prefill_merge(self, received: Tensor, num_valid_pages: Tensor, output: Tensor) -> None:
        """Merge what the exchange brought, for this rank's heads.

        Args:
            received: `int32 [W, hpr, T, 33]`, unit last stride: every rank's rows.
            num_valid_pages: `int32 [T]`, contiguous.
            output: `int32 [T, hpr, 16]`, unit last stride; written, `[0, -1, ...]` for padding.

        Raises:
            ValueError: an argument breaks a rule; nothing has been launched.
        """
        self._prefill(chains.prefill_merge, received, num_valid_pages, output)

    def _prefill(self, calls: Callable[..., None], *tensors: Any, **arguments: Any) -> None:
        if is_dynamo_compiling():
            calls(self, *tensors, **arguments)
        else:
            launch(chains.recorded(calls, chains.PREFILL_NAMES, self, *tensors, **arguments))

    # ------------------------------------------------------------ prepared steps and graphs

    def prepare_decode_step(
        self,
        block_table: Tensor,
        seq_lens: Tensor,
        num_valid_pages: Tensor,
        scores: Tensor | None,
        output: Tensor,
        *,
        comm: Comm,
        tagged: bool,
        decode_query_len: int,
        enable_pdl: bool = True,
        pool: Tensor | None = None,
        debug: bool = False,
    ) -> MSAIcpDecodeStep:
        """What all layers of a decode step share; its `run(index_q, index_k, slot=)` does a layer.

        `publish(index_q, index_k, slot=)` and `merge(slot=)` are its halves, for several ranks in one thread.

        Args: as for `decode`. The tensors are kept, and every layer reads what they hold then; `output` is
            the same for every layer, so take what it holds before the next one.
            debug: compare every layer's launches with those of a call of `decode`.

        Raises:
            ValueError: `output` is no such tensor, or `debug` no bool. The first layer raises whatever else
                `decode` would.
        """
        return MSAIcpDecodeStep(
            self,
            (block_table, seq_lens, num_valid_pages, scores, output),
            {
                "comm": comm,
                "tagged": tagged,
                "decode_query_len": decode_query_len,
                "enable_pdl": enable_pdl,
                "pool": pool,
            },
            debug=debug,
        )

    def prepare_prefill_step(
        self,
        windows: Sequence[tuple[int, int, Tensor, MSAIcpScorePlan]],
        score_scratch: Tensor | None,
        num_valid_pages: Tensor,
        send: Tensor,
        received: Tensor,
        output: Tensor,
        *,
        debug: bool = False,
        **local_kwargs: Any,
    ) -> MSAIcpPrefillStep:
        """What all layers of a prefill step share; its `local(index_q, index_k)` and `merge()` do a layer.

        Args:
            windows: `(start, end, block_table, plan)` of each window: token rows `[start, end)` of the query,
                of `num_valid_pages` and of the carrier. Ordered, disjoint, not empty; `plan.total_q` is
                `end - start`, and no plan lies where another has been planned.
            score_scratch: as for `prefill_local`, for the longest window.
            num_valid_pages: `int32 [T]` of all windows.
            send: `int32 [4, T, 33]`: the carrier, written by `local`.
            received: `int32 [W, hpr, T, 33]`, read by `merge`.
            output: `int32 [T, hpr, 16]`, written by `merge`.
            debug: compare every layer's launches with those of calls of `prefill_local` and `prefill_merge`.
            **local_kwargs: `pool`, as for `prefill_local`.

        Raises:
            ValueError: the windows break a rule.
        """
        return MSAIcpPrefillStep(
            self, windows, score_scratch, num_valid_pages, send, received, output, local_kwargs, debug=debug
        )

    def layer_graphs(self, *, capture_after: int = 1, max_keys: int = 4) -> MSAIcpLayerGraphs:
        """CUDA graphs of prepared steps, one a layer; see `MSAIcpLayerGraphs`.

        Args:
            capture_after: how often a layer runs eagerly with the same arguments before it is captured.
            max_keys: steps with other arguments than these keep graphs; the least recently used one goes.
        """
        return MSAIcpLayerGraphs(self, capture_after=capture_after, max_keys=max_keys)
