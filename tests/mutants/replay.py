"""Faults of the replay."""

from __future__ import annotations

from .fault import Mutant

ENGINE = "replay/engine.py"
REPLAY_PREFILL = "replay/prefill.py"
ENGINE_TESTS = ("test_replay_engine.py",)
CARD_TESTS = ("test_replay_processes.py", "-k", "way_to_cards and one_of_four")
"""Processes on a card, over a stand-in."""
REPLAY_TESTS = ("test_replay_run.py", "-k", "how_prompts_enter and options0")
FORM_TESTS = ("test_replay_run.py", "-k", "form_that")

MUTANTS = (
    Mutant(
        "a prompt is cached before it has entered",
        ((ENGINE, "self._whole_sections(place, start))", "self._whole_sections(place, prompt))"),),
        ENGINE_TESTS,
    ),
    Mutant(
        "a page that is given up keeps its keys",
        (
            (
                ENGINE,
                "            if fresh:\n                self._written[page] = 0\n",
                "            self._written.setdefault(page, 0)\n",
            ),
        ),
        ("test_replay_engine.py", "-k", "tight_cache"),
    ),
    Mutant(
        "entered keys are not known to be there",
        ((ENGINE, "            self._write(request.pages, segment.stop)\n", ""),),
        ENGINE_TESTS,
    ),
    Mutant(
        "a chunk of each prompt, whatever the limit",
        ((ENGINE, "                left -= segments[-1].tokens\n", ""),),
        ENGINE_TESTS,
    ),
    Mutant(
        "a replay's prompts always take the fused form",
        ((REPLAY_PREFILL, "if indexer.fused_prefill:", "if True:"),),
        FORM_TESTS,
    ),
    Mutant(
        "a segment goes on in the next window where it began",
        ((REPLAY_PREFILL, "segment, start=start, stop=stop)", "segment, stop=stop)"),),
        FORM_TESTS,
    ),
    Mutant(
        "a replay's windows begin at position 0",
        ((REPLAY_PREFILL, "numbers([segment.start for", "numbers([0 for"),),
        REPLAY_TESTS,
    ),
    Mutant(
        "a replay's prompts are exchanged in the layer after",
        (
            (
                "replay/loop.py",
                "        exchange(ranks)\n        for rank in ranks:\n            rank.prefill.merge(layer)",
                "        for rank in ranks:\n            rank.prefill.merge(layer)\n        exchange(ranks)",
            ),
        ),
        REPLAY_TESTS,
    ),
    Mutant(
        "a replay keeps what a layer merges for the first one",
        (("replay/rank.py", "self._merged[layer, :", "self._merged[0, :"),),
        REPLAY_TESTS,
    ),
    Mutant(
        "a prepared step's first half merges too",
        (("indexer/steps.py", "index_k, slot)[:-1])", "index_k, slot))"),),
        ("test_replay_run.py", "-k", "does_not_publish"),
    ),
    Mutant(
        "rows of prompts on a card are given to gloo",
        (("replay/processes.py", "if through_host is None:", "if True:"),),
        CARD_TESTS,
    ),
    Mutant(
        "what came to the host does not come to the card",
        (("replay/through_host.py", "        got.copy_(received)\n", ""),),
        CARD_TESTS,
    ),
    Mutant(
        "the current card is not the rank's",
        (("replay/processes.py", "        torch.cuda.set_device(device)\n", ""),),
        CARD_TESTS,
    ),
    Mutant(
        "scorers of ranks that share a card begin early",
        (("replay/rank.py", "enable_pdl=not self._plan.share_a_card", "enable_pdl=True"),),
        CARD_TESTS,
    ),
    Mutant(
        "a card for each rank, whether they are there or not",
        (("replay/plan.py", "rank if cards >= world_size else 0", "rank"),),
        ("test_replay_engine.py", "-k", "a_card_each"),
    ),
    Mutant(
        "the replay checks the first segment's rows for all",
        (("replay/checker.py", "outputs[layer][first:]", "outputs[layer]"),),
        REPLAY_TESTS,
    ),
)
