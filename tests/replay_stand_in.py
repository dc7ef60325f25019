"""Ranks of a replay as they would run on cards, on a machine without any.

`symmetric_stand_in` is in the place of PyTorch's symmetric memory and of the cards; tensors are the CPU's.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from symmetric_stand_in import StandIn

import msa_icp
from msa_icp import symmetric_memory
from msa_icp.replay import plan as plan_module
from msa_icp.replay import processes
from msa_icp.replay import rank as rank_module
from msa_icp.replay.plan import Plan, rank_devices

_rank_main = processes._rank_main


def on_cards(plan: Plan, device: str, cards: int) -> Plan:
    """The plan of a machine with so many cards, for `rank_main`."""
    options = replace(plan.options, device=device)
    return replace(plan, options=options, devices=rank_devices(options, cards))


def rank_main(plan: Plan, rank: int, *arguments: object) -> None:
    """In the place of `processes._rank_main`: the same, in a process that thinks that it has cards."""
    stand_in = StandIn(rank, index=3 if plan.share_a_card else 0)  # which is right for at most one rank
    stand_in.install()

    def set_device(device: torch.device) -> None:
        stand_in.index = device.index

    torch.cuda.set_device = set_device
    plan_module.resolve_backend = lambda options: "torch"
    os.environ.pop(symmetric_memory.ONE_CARD, None)
    _look_on(plan)
    _rank_main(plan, rank, *arguments)


def _look_on(plan: Plan) -> None:
    """AssertionError where a call would not do on cards."""
    exchange, prepare = msa_icp.exchange_prefill, msa_icp.prepare_msa_icp_indexer
    prepare_step = msa_icp.MSAIcpIndexerPlan.prepare_decode_step
    shared = len(set(plan.devices)) == 1

    def exchange_of_the_host(carrier, received):
        assert carrier.is_contiguous()  # a slice of the prefill's own carrier, on the card, is not
        assert received.is_contiguous()
        exchange(carrier, received)

    def prepare_patiently(*, spin_limit, **limits):
        assert spin_limit == (rank_module.SHARED_CARD_SPIN_LIMIT if shared else rank_module.SPIN_LIMIT)
        assert (os.environ.get(symmetric_memory.ONE_CARD) == "1") == shared
        return prepare(spin_limit=spin_limit, **limits)

    def prepare_without_overlap(indexer, *buffers, enable_pdl, **step):
        assert enable_pdl is not shared
        return prepare_step(indexer, *buffers, enable_pdl=enable_pdl, **step)

    msa_icp.exchange_prefill = exchange_of_the_host
    msa_icp.prepare_msa_icp_indexer = prepare_patiently
    msa_icp.MSAIcpIndexerPlan.prepare_decode_step = prepare_without_overlap
