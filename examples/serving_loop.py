"""A decode loop over 57 sparse layers into which a prompt enters: what a serving engine does with msa_icp.

    python examples/serving_loop.py [--device cuda] [--steps 6] [--layers 57]

`serve` is the loop, `Rank` what it needs before. All ranks live in this process, so that it runs anywhere.
In an engine each is a process: its storage comes from `ReceiveStorage.create(group)`, `publish` and `merge`
are one call, `decode.run`, and `exchange_prefill` takes one rank's carriers. docs/integration.md has the
reasons.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch
from torch import Tensor

import msa_icp
from msa_icp import reference

WORLD, PAGE, COLUMNS, HEADS, DIM, TOP_K = 4, 128, 20, 4, 128, 16
INIT, LOCAL = 1, 1  # blocks that are selected in any case
CONTEXTS = (2300, 2517, 2100)  # keys of the requests that decode from the first step on
CACHED, PROMPT, CHUNK = (
    2304,
    2390,
    32,
)  # of the prompt: keys that are there, its end, tokens that enter a step
BATCH, ROW = 4, 3  # rows of the batch; the prompt's


def serve(ranks: list[Rank], keys: Tensor, steps: int) -> int:
    """Run the steps; `keys[layer, request, position]` is the model. Returns how many rows were compared."""
    compared = 0
    for contexts, prompt in schedule(steps):
        for rank in ranks:
            rank.begin(contexts, prompt)
        decoded = [(row, context - 1) for row, context in enumerate(contexts) if context]
        new = torch.tensor([*decoded, *((ROW, i) for i in prompt)], dtype=torch.int32, device=keys.device)
        request, position = new.T.contiguous()
        for layer in range(len(keys)):
            new_keys = fp8(keys[layer, request, position])
            index_q = fp8(numbers(BATCH + len(prompt), HEADS, DIM, device=keys.device))
            decoding, entering = index_q[:BATCH], index_q[BATCH:]
            with ranks[0].comm.slot_set() as slot:  # 0, 1, 2, 0, ... from layer to layer, from step to step
                for rank in ranks:
                    rank.write(layer, new_keys, request, position)  # the kernel before the scorer
                    rank.decode.publish(decoding, rank.index_k[layer], slot=slot)
                for rank in ranks:
                    rank.decode.merge(slot=slot)
            if prompt:
                for rank in ranks:
                    rank.prefill.local(entering, rank.index_k[layer])
                msa_icp.exchange_prefill([rank.send for rank in ranks], [rank.received for rank in ranks])
                for rank in ranks:
                    rank.prefill.merge()
            # Here the layer's attention reads the blocks in decode.output and prefill.output.
        for rank in ranks:
            rank.comm.check()  # raises where a peer did not come: nothing of this step is good then
        row, last = decoded[-1]
        compared += compare([rank.decode.output[row] for rank in ranks], decoding[row], keys[-1, row], last)
        if prompt:
            merged = [rank.prefill.output[-1] for rank in ranks]
            compared += compare(merged, entering[-1], keys[-1, ROW], prompt[-1])
    return compared


def schedule(steps: int) -> Iterator[tuple[list[int], range]]:
    """The engine's own part, the same on every rank: each row's keys, 0 for none, and the prompt tokens."""
    contexts, start = [*CONTEXTS, 0], CACHED
    for _ in range(steps):
        if start == PROMPT and not contexts[ROW]:
            contexts[ROW] = PROMPT  # the prompt has entered: its request decodes from now on
        contexts = [context + 1 if context else 0 for context in contexts]
        prompt = range(start, min(start + CHUNK, PROMPT))
        yield contexts, prompt
        start = prompt.stop


class Rank:
    """What one rank makes once: its indexer, its share of the keys, and buffers that stay where they are."""

    def __init__(self, comm: msa_icp.ReceiveStorage, table: Tensor, layers: int) -> None:
        self.comm, self.table, self.device = comm, table, table.device
        self.indexer = msa_icp.prepare_msa_icp_indexer(
            world_size=WORLD,
            rank=comm.rank,
            num_index_heads=HEADS,
            page_size=PAGE,
            init_blocks=INIT,
            local_blocks=LOCAL,
            max_decode_tokens=BATCH,
            max_decode_query_len=1,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=BATCH,
            max_model_len=COLUMNS * PAGE,
            num_sparse_layers=layers,
            device=self.device,
        )
        self.indexer.warmup()  # a kernel that is first loaded while a peer waits for it stalls both
        shards = self.empty(layers, table.numel(), PAGE // WORLD, DIM, dtype=torch.uint8)
        self.index_k = shards.view(torch.float8_e4m3fn)
        self.seq_lens, self.num_valid_pages = self.empty(BATCH), self.empty(BATCH)
        self.decode = self.indexer.prepare_decode_step(
            table,
            self.seq_lens,
            self.num_valid_pages,
            self.empty(*self.indexer.decode_scores_shape(), dtype=torch.float32),
            self.empty(BATCH, HEADS // WORLD, TOP_K),
            comm=comm,
            tagged=True,
            decode_query_len=1,
        )
        self.pool = self.scratch = None  # of prefill in one launch, or in two, whichever takes less time here
        if self.indexer.fused_prefill:
            self.pool = self.empty(*self.indexer.prefill_pool_shape(), dtype=torch.uint8)
        else:
            self.scratch = self.empty(*self.indexer.prefill_scratch_shape(), dtype=torch.float32)
        self.carriers = self.empty(*self.indexer.prefill_carrier_shape())
        self.blocks = self.empty(CHUNK, HEADS // WORLD, TOP_K)

    def begin(self, contexts: list[int], prompt: range) -> None:
        """What the layers of a step share. The decode step reads its buffers anew, so it stays prepared."""
        self.seq_lens.copy_(torch.tensor(contexts))
        msa_icp.num_valid_pages(self.seq_lens, 1, out=self.num_valid_pages)
        if not prompt:
            return
        count = len(prompt)
        lens, key_lens, sums, key_sums, starts = (
            torch.tensor(values, dtype=torch.int32, device=self.device)
            for values in ([count], [prompt.stop], [0, count], [0, prompt.stop], [prompt.start])
        )
        sizes = {"total_q": count, "max_query_len": count, "max_seq_len": prompt.stop}
        window = self.indexer.prefill_window_plan(0, lens, key_lens, sums, key_sums, starts, **sizes)
        valid = torch.arange(prompt.start, prompt.stop, dtype=torch.int32, device=self.device) // 128 + 1
        self.send = self.carriers[0, :, :count]
        self.received = self.carriers[1].view(WORLD, HEADS // WORLD, CHUNK, -1)[:, :, :count]
        self.prefill = self.indexer.prepare_prefill_step(
            [(0, count, self.table[ROW:], window)],
            self.scratch,
            valid,
            self.send,
            self.received,
            self.blocks[:count],
            pool=self.pool,
        )

    def write(self, layer: int, keys: Tensor, request: Tensor, position: Tensor) -> None:
        """Keep this rank's share of the keys of new tokens."""
        index_k, rank = self.index_k[layer], self.comm.rank
        msa_icp.write_index_keys(
            keys, position, request, self.table, index_k, rank=rank, world_size=WORLD, page_size=PAGE
        )

    def empty(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


def compare(merged: list[Tensor], query: Tensor, keys: Tensor, position: int) -> int:
    """A token's blocks, by rank, against the selection of one rank that has all the keys."""
    context = fp8(keys[: position + 1]).cpu()
    expected = reference.select_unsharded(query[None].cpu(), context, [position], INIT, LOCAL)[0]
    found = torch.cat(merged).tolist()
    if found != expected:
        raise AssertionError(f"position {position}: expected {expected}, got {found}")
    return len(found)


def numbers(*shape: int, device: torch.device | str) -> Tensor:
    """Random quarters from -2 to 2, whose scores every backend has exactly."""
    return torch.randint(-8, 9, shape, dtype=torch.int8, device=device)


def fp8(quarters: Tensor) -> Tensor:
    return (quarters / 4).to(torch.float8_e4m3fn)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=57)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # on a CPU: the products are so small that a second thread only waits
    torch.manual_seed(0)
    keys = numbers(args.layers, BATCH, COLUMNS * PAGE, DIM, device=args.device)
    table = torch.randperm(BATCH * COLUMNS).to(args.device, torch.int32).view(BATCH, COLUMNS)
    with msa_icp.ReceiveStorage.in_process(WORLD, capacity=BATCH, device=args.device) as storages:
        ranks = [Rank(comm, table, args.layers) for comm in storages]
        cached = [(row, i) for row, stop in enumerate((*CONTEXTS, CACHED)) for i in range(stop)]
        request, position = torch.tensor(cached, dtype=torch.int32).T.contiguous().to(args.device)
        for layer in range(args.layers):
            for rank in ranks:
                rank.write(layer, fp8(keys[layer, request, position]), request, position)
        began = time.perf_counter()
        compared = serve(ranks, keys, args.steps)
        seconds = time.perf_counter() - began
    print(f"{WORLD} ranks on {args.device}: {args.steps} steps of {args.layers} layers in {seconds:.1f} s")
    print(f"{compared} rows compared with the reference, none differs")


if __name__ == "__main__":
    main()
