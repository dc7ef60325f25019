"""Faults of the CUDA kernels that publish and merge: order of memory, and what is read before the wait."""

from __future__ import annotations

from .fault import Mutant

SYSTEM = "cuda_backend/device/ptx/system.cuh"
PUBLISH = "cuda_backend/topk_select_publish.cu"
MERGE = "cuda_backend/merge_candidates.cu"
ORDER_TESTS = ("test_cuda_order.py", "-k", "legacy_row or tagged_row")
LATE_PUBLISH_TESTS = ("test_cuda_late.py", "-k", "test_publish and 24-2")
LATE_MERGE_TESTS = ("test_cuda_late.py", "-k", "test_merge and 2-")
WAIT = "  wait_for_predecessor();\n  release_dependents();\n"

MUTANTS = (
    Mutant(
        "a kernel's ready word may overtake its row",
        ((SYSTEM, "st.release.sys", "st.relaxed.sys"),),
        ORDER_TESTS,
    ),
    Mutant(
        "a kernel's acquire is among the threads of its own card",
        ((SYSTEM, "ld.acquire.sys", "ld.acquire.gpu"),),
        ORDER_TESTS,
    ),
    Mutant(
        "a kernel's lanes may store before the row is free",
        (
            (
                PUBLISH,
                "meet_warp();  // what lane 0 acquired is for all of them: the owner",
                "// what lane 0 acquired is for all of them: the owner",
            ),
        ),
        ORDER_TESTS,
    ),
    Mutant(
        "a kernel signals before its lanes have stored",
        ((PUBLISH, "      meet_warp();\n      if (lane == 0) signal", "      if (lane == 0) signal"),),
        ORDER_TESTS,
    ),
    Mutant(
        "a kernel's lanes may read before the row has come",
        ((MERGE, "      meet_warp();  // what lane 0 acquired is for all of them\n", ""),),
        ORDER_TESTS,
    ),
    Mutant(
        "a kernel reads scores and counts before its predecessor has ended",
        (
            (
                PUBLISH,
                WAIT + "\n  // All of these are on their way at once.\n",
                "",
            ),
            (
                PUBLISH,
                "  const int seq_len = FUSED ?",
                WAIT + "  const int seq_len = FUSED ?",
            ),
        ),
        LATE_PUBLISH_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel takes the counter of a publish before its predecessor has ended",
        (
            (PUBLISH, WAIT, "  const int now = TAGGED ? load(counter) : 0;\n" + WAIT),
            (PUBLISH, "static_cast<unsigned>(load(counter)) + 1u", "static_cast<unsigned>(now) + 1u"),
        ),
        LATE_PUBLISH_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel merges rows that its predecessor has not replaced yet",
        (
            (MERGE, WAIT, ""),
            (
                MERGE,
                "  if (lane == 0) shared.states[rank] =",
                WAIT + "  if (lane == 0) shared.states[rank] =",
            ),
        ),
        LATE_MERGE_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel forgets the best of earlier rounds where it lists a whole round",
        ((PUBLISH, "    listed += kTop;\n", ""),),
        ("test_decode_score_publish.py", "-k", "cuda-cpu and rounds_of_equal"),
        emulated=True,
    ),
    Mutant(
        "a kernel polls four times as often as its limit says",
        (
            (
                "cuda_backend/device/waiting.cuh",
                "static_cast<int>(spin_limit)",
                "4 * static_cast<int>(spin_limit)",
            ),
        ),
        ("test_polls.py", "-k", "cuda-cpu and publish"),
        emulated=True,
    ),
)
