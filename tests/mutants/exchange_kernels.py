"""Faults of the CUDA kernels that publish and merge: order of memory, and what is read before the wait."""

from __future__ import annotations

from .fault import Mutant

SYSTEM = "cuda_backend/device/ptx/system.cuh"
PUBLISH = "cuda_backend/topk_select_publish.cu"
MERGE = "cuda_backend/merge_candidates.cu"
ORDER_TESTS = ("test_cuda_order.py", "-k", "legacy_row or tagged_row")

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
)
