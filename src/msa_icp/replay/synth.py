"""Index keys and queries made up from a trace: deterministic, structured, and exact in FP32.

A key depends on the seed, the layer, its position and the prompt up to there (a hash over the chain of
hash ids), and on nothing else: no generator has a state, so every process can make any range of any
request at any time. Requests with the same prefix have the same bytes there; decoded tokens are
private to their request.

Structure, so that selecting is retrieving: the context is divided into *sections* of `SECTION` tokens,
each with a topic (a vector of 128 signs), and into *passages* of `PASSAGE` tokens, which flip a few
signs of the topic. A key is the passage's signs times magnitudes of its own. A query is a weighted
sum of the topics of `FOCI` earlier, finished sections of its own request, a few signs flipped; each
head has its own foci, and each focus stays on a section for a few dozens of tokens before it moves to
another one.

Exactness: key elements are multiples of 1/4 up to 2, query elements multiples of 1/4 up to 2. A
product is a multiple of 1/16 up to 4, so every partial sum of 128 of them in any order is a multiple
of 1/16 up to 512: 14 bits, far inside FP32. Every backend must give the same scores, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ..geometry import HEAD_DIM, NUM_HEADS
from .trace import HASH_TOKENS, Request

SECTION = HASH_TOKENS
PASSAGE = 64
FOCUS_WEIGHTS = (3, 2, 2, 1)
"""Weight of each focus of a query, in quarters; together at most 8, so that elements stay within 2."""
FOCI = len(FOCUS_WEIGHTS)

_TABLE = 1024
"""Rows of each table of vectors, a power of two."""
_WORDS = HEAD_DIM // 8
"""int64 words of a key: rows are gathered and combined eight bytes at a time."""
_CHUNK = 8192
"""Keys made at once; the working set stays in the caches."""


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


_STEP = _signed(0x9E3779B97F4A7C15)
_LAYER_STEP = 0x9E3779B97F4B  # small enough that its multiples are int64 numbers
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def mix(x: Tensor) -> Tensor:
    """A permutation of the int64 numbers that looks random (the finalizer of splitmix64)."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX_2
    return x ^ ((x >> 31) & (2**33 - 1))


def prefix_chain(hash_ids: Sequence[int]) -> list[int]:
    """For each section of a prompt a number that stands for the prompt up to and including it."""
    chain, state = [], b""
    for hash_id in hash_ids:
        state = hashlib.blake2b(state + hash_id.to_bytes(9, "little", signed=True), digest_size=8).digest()
        chain.append(int.from_bytes(state, "little", signed=True))
    return chain


class Synth:
    """Keys and queries of `requests`; a request is named by its place in that sequence."""

    def __init__(self, requests: Sequence[Request], seed: int) -> None:
        chains = [prefix_chain(request.hash_ids) for request in requests]
        lengths = torch.tensor([len(chain) for chain in chains])
        self._seed = mix(torch.tensor(seed * 2 + 1))
        self._chain = torch.tensor([link for chain in chains for link in chain])
        self._first = lengths.cumsum(0) - lengths
        self._prompt = torch.tensor([request.prompt_tokens for request in requests])
        self._index = torch.tensor([request.index for request in requests])
        self._private = mix(self._chain[self._first + lengths - 1] + (self._index + 1) * _STEP)
        self._make_tables()

    def _make_tables(self) -> None:
        count = _TABLE * HEAD_DIM
        noise = mix(torch.arange(4 * count) * _STEP + self._seed).view(4, _TABLE, HEAD_DIM)
        # e4m3 bytes: magnitudes 1/4, 2/4 ... 8/4, and sign bits.
        quarters = torch.arange(-8, 9).div(4).to(torch.float8_e4m3fn).view(torch.uint8)
        self._quarters = quarters
        self._magnitudes = quarters[9 + (noise[0] & 7)].view(torch.int64)
        sign_bytes = ((noise[1:] & 1) << 7).to(torch.uint8)
        few = ((noise[3] & 14) == 0).to(torch.uint8)  # one in eight
        self._signs = (sign_bytes[0].view(torch.int64), sign_bytes[1].view(torch.int64))
        self._flips = (few << 7).view(torch.int64)

    def trace_index(self, request: int) -> int:
        """Place in the trace of a request."""
        return int(self._index[request])

    def keys(self, request: Tensor, position: Tensor, layer: int) -> Tensor:
        """Index keys `float8_e4m3fn [n, 128]` of the tokens `(request[i], position[i])`, int64 `[n]`."""
        out = torch.empty(position.shape[0], _WORDS, dtype=torch.int64)
        for rows, r, p in zip(out.split(_CHUNK), request.split(_CHUNK), position.split(_CHUNK), strict=True):
            section = p // SECTION
            topic = self._topic(
                torch.where(p < self._prompt[r], self._link(r, section), self._own(r, section)), layer
            )
            passage = mix(topic + (p // PASSAGE) * _STEP)
            torch.index_select(self._magnitudes, 0, (passage + p % PASSAGE * 13) & (_TABLE - 1), out=rows)
            rows ^= self._topic_signs(topic)
            rows ^= _lookup(self._flips, passage >> 20)
        return out.view(torch.float8_e4m3fn)

    def context(self, request: int, length: int, layer: int) -> Tensor:
        """The keys of the first `length` positions of a request."""
        return self.keys(torch.full((length,), request), torch.arange(length), layer)

    def queries(self, request: Tensor, position: Tensor, layer: int) -> Tensor:
        """Index queries `float8_e4m3fn [n, 4, 128]` of decoded tokens, arguments as for `keys`."""
        topics = self._topic(self._foci(request, position, layer), layer)
        signs = 1 - (self._topic_signs(topics).view(torch.uint8) >> 6).to(torch.int64)  # 1 or -1
        weights = torch.tensor(FOCUS_WEIGHTS)[:, None]
        q = self._quarters[8 + (signs * weights).sum(-2)]
        noise = mix(self._private[request] + position * _STEP + layer)[:, None] + torch.arange(NUM_HEADS)
        return (q ^ _lookup(self._flips, mix(noise)).view(torch.uint8)).view(torch.float8_e4m3fn)

    def focus_sections(self, request: Tensor, position: Tensor, layer: int) -> Tensor:
        """Which sections the queries of `(request[i], position[i])` look for: int64 `[n, 4, FOCI]`."""
        places = torch.arange(NUM_HEADS * FOCI).view(NUM_HEADS, FOCI)
        dwell = 24 + 7 * places  # tokens that a focus stays: 24 ... 129
        private = self._private[request][:, None, None]
        phase = mix(private + places) & 1023
        epoch = (position[:, None, None] + phase) // dwell
        finished = ((epoch * dwell - phase) // SECTION).clamp(min=1)
        choice = mix(private + mix(epoch * (NUM_HEADS * FOCI) + places + layer * _LAYER_STEP))
        return (choice & (2**62 - 1)) % finished

    def _foci(self, request: Tensor, position: Tensor, layer: int) -> Tensor:
        """The numbers that stand for the sections of `focus_sections`."""
        section = self.focus_sections(request, position, layer)
        r = request[:, None, None]
        return torch.where(section * SECTION < self._prompt[r], self._link(r, section), self._own(r, section))

    def _link(self, request: Tensor, section: Tensor) -> Tensor:
        """Number of a section of the prompt; any number past its end."""
        return self._chain[(self._first[request] + section).clamp(max=self._chain.shape[0] - 1)]

    def _own(self, request: Tensor, section: Tensor) -> Tensor:
        """Number of a section of decoded tokens."""
        return mix(self._private[request] + section)

    def _topic(self, number: Tensor, layer: int) -> Tensor:
        return mix(number + self._seed + layer * _LAYER_STEP)

    def _topic_signs(self, topic: Tensor) -> Tensor:
        """Sign bits of topics: int64 `[..., 16]`; two tables together make a million of them."""
        first, second = self._signs
        return _lookup(first, topic) ^ _lookup(second, topic >> 20)


def _lookup(table: Tensor, number: Tensor) -> Tensor:
    """Rows of a table by the low bits of `number` `[...]`: `[..., 16]`."""
    rows = torch.index_select(table, 0, (number & (_TABLE - 1)).flatten())
    return rows.view(*number.shape, _WORDS)
