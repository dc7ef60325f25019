"""Faults of the CUDA kernels, whose tests run over the emulator."""

from __future__ import annotations

from .fault import Mutant

KERNEL_SCORE_TESTS = ("test_cuda_forms.py", "-k", "every_form and (1-4-128 or 1-2-256)")
MANY_ROUNDS_TESTS = ("test_cuda_forms.py", "-k", "many_rounds and 36-2 and 2-256")
KERNEL_TAIL_TESTS = ("test_decode_index_score_sharded.py", "-k", "cuda-cpu and not exact and not every_byte")
KERNEL_SELECT_TESTS = ("test_topk_select_publish.py", "-k", "cuda-cpu")
KERNEL_WINDOW_TESTS = ("test_index_score_sharded.py", "-k", "cuda-cpu and not alignment and not any_window")
KERNEL_LIMIT_TESTS = ("test_index_score_sharded.py", "-k", "cuda-cpu and end_of_what and 40-4-128")
KERNEL_PREFILL_SELECT_TESTS = ("test_topk_select_prefill.py", "-k", "cuda-cpu")
KERNEL_MERGE_TESTS = ("test_merge_candidates.py", "test_exchange.py", "-k", "cuda-cpu")

MUTANTS = (
    Mutant(
        "a prefill kernel takes a tile whose last key no token may see to be whole",
        (
            (
                "cuda_backend/index_score_sharded.cu",
                "(item.last_key(first) + 1) / kTileSpan",
                "(item.last_key(first) + 2) / kTileSpan",
            ),
        ),
        KERNEL_LIMIT_TESTS,
        emulated=True,
    ),
    Mutant(
        "a prefill kernel's floor is one lane too high",
        (("cuda_backend/topk_select_prefill.cu", "above < kTop ?", "above < kTop - 1 ?"),),
        KERNEL_PREFILL_SELECT_TESTS,
        emulated=True,
    ),
    Mutant(
        "a prefill kernel keeps too few of the columns that equal its floor",
        (("cuda_backend/topk_select_prefill.cu", "while (found < kTop &&", "while (found < 1 &&"),),
        KERNEL_PREFILL_SELECT_TESTS,
        emulated=True,
    ),
    Mutant(
        "a prefill kernel does not make way among the best of earlier columns",
        (
            (
                "cuda_backend/topk_select_prefill.cu",
                "lane + keys_above(shared.offered, count, key)",
                "lane",
            ),
        ),
        KERNEL_PREFILL_SELECT_TESTS,
        emulated=True,
    ),
    Mutant(
        "a prefill kernel forces the blocks of the first chunk in every one",
        (
            (
                "cuda_backend/topk_select_prefill.cu",
                "~bits_before(forced_end - first, lane)",
                "~bits_before(forced_end, lane)",
            ),
        ),
        KERNEL_PREFILL_SELECT_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel masks the second half of a fragment by the first",
        (
            (
                "cuda_backend/device/decode_score.cuh",
                "Layout::position(sight.column, row + 8, sight.rank)",
                "Layout::position(sight.column, row, sight.rank)",
            ),
        ),
        KERNEL_TAIL_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel takes one query token more to be history",
        (
            (
                "cuda_backend/device/decode_score.cuh",
                "<= seq_len - static_cast<int>(with.query_len);",
                "<= seq_len - static_cast<int>(with.query_len) + PAGE;",
            ),
        ),
        KERNEL_TAIL_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel writes columns that do not round up to four",
        (
            (
                "cuda_backend/device/decode_score.cuh",
                "/ kColumnStep * kColumnStep",
                "/ kColumnStep * kColumnStep + 1",
            ),
        ),
        KERNEL_SCORE_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel pairs the halves of a row the other way round in the queries",
        (
            (
                "cuda_backend/device/fragments.cuh",
                "step_share(halves, step, share[step][0], share[step][1])",
                "step_share(halves, step ^ 4, share[step][0], share[step][1])",
            ),
        ),
        KERNEL_SCORE_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel leaves a page's last warp out of its maximum",
        (("cuda_backend/decode_index_score_sharded.cu", "other < kPagePieces", "other < kPagePieces - 1"),),
        KERNEL_SCORE_TESTS,
        emulated=True,
    ),
    Mutant(
        "a CTA of several rounds leaves out its last",
        (
            (
                "cuda_backend/decode_index_score_sharded.cu",
                "lanes_where(mine && own_round < written)",
                "lanes_where(mine && own_round + step < written)",
            ),
        ),
        KERNEL_SCORE_TESTS,
        emulated=True,
    ),
    Mutant(
        "a CTA of more than 32 rounds leaves out the others",
        (("cuda_backend/decode_index_score_sharded.cu", "if (pieces < kWarpSize) break;", "break;"),),
        MANY_ROUNDS_TESTS,
        emulated=True,
    ),
    Mutant(
        "a CTA reads its 33rd round where its first was",
        (
            (
                "cuda_backend/decode_index_score_sharded.cu",
                "    source = piece_address(with, next_page, first_row);\n",
                "",
            ),
        ),
        MANY_ROUNDS_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel ranks the higher id first",
        (
            (
                "cuda_backend/device/ranking.cuh",
                "static_cast<unsigned>(kMostBlocks - 1 - id)",
                "static_cast<unsigned>(id)",
            ),
            (
                "cuda_backend/device/ranking.cuh",
                "return kMostBlocks - 1 - static_cast<int>(key",
                "return static_cast<int>(key",
            ),
        ),
        KERNEL_SELECT_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel ranks NaN as itself",
        (
            (
                "cuda_backend/device/ranking.cuh",
                "score == score ? score + 0.0f : minus_infinity()",
                "score + 0.0f",
            ),
        ),
        KERNEL_SELECT_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel narrows down to one class of columns too few",
        (
            (
                "cuda_backend/topk_select_publish.cu",
                "threadIdx.x / kTop * modulus : -1",
                "threadIdx.x / kTop * modulus % (modulus * 7) : -1",
            ),
        ),
        KERNEL_SELECT_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel's floor is one lane of a warp too high",
        (("cuda_backend/topk_select_publish.cu", "above < kTop ?", "above < kTop - 1 ?"),),
        KERNEL_SELECT_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel's floor is one lane of every warp too high",
        (("cuda_backend/topk_select_publish.cu", "above < kQuarter ?", "above < kQuarter - 1 ?"),),
        KERNEL_SELECT_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel leaves out a warp where it looks for the smallest of their fourths",
        (
            (
                "cuda_backend/topk_select_publish.cu",
                "quarters = shared.floors[1][i] < quarters ?",
                "quarters = i < kWarps - 1 && shared.floors[1][i] < quarters ?",
            ),
        ),
        KERNEL_SELECT_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel ranks a list that is not whole",
        (
            (
                "cuda_backend/topk_select_publish.cu",
                "if (__builtin_expect(listed <= kRoom, true)) return listed;",
                "return listed < kRoom ? listed : kRoom;",
            ),
        ),
        KERNEL_SELECT_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel looks only at the first batch of a thread that reaches the floor",
        (("cuda_backend/topk_select_publish.cu", "} while (++i < batches);", "} while (false);"),),
        KERNEL_SELECT_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel copies the first of a wide row's batches alone",
        (
            (
                "cuda_backend/topk_select_publish.cu",
                "column < row.columns; column += kThreads) copy_word",
                "column < kBatch; column += kThreads) copy_word",
            ),
        ),
        KERNEL_SELECT_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel publishes the score of its key where that is -inf",
        (
            (
                "cuda_backend/topk_select_publish.cu",
                "(bits == 0 || bits == bits_of(minus_infinity()))",
                "bits == 0",
            ),
        ),
        KERNEL_SELECT_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel forces no block at the end of a row",
        (("cuda_backend/topk_select_publish.cu", "| (column >= forced_end)", ""),),
        KERNEL_SELECT_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel publishes what was not free",
        (("cuda_backend/topk_select_publish.cu", "if (ready == 0) {", "{"),),
        KERNEL_MERGE_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel's window sees one key more",
        (
            (
                "cuda_backend/index_score_sharded.cu",
                "at % kTilePages, last_key, static",
                "at % kTilePages, last_key + 1, static",
            ),
        ),
        KERNEL_WINDOW_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel's lanes send the maxima that they keep",
        (
            (
                "cuda_backend/index_score_sharded.cu",
                "const float sent = lane & kBit ? best[place] : best[place | kBit];",
                "const float sent = lane & kBit ? best[place | kBit] : best[place];",
            ),
        ),
        KERNEL_WINDOW_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel's window takes a tile that not all see for whole",
        (("cuda_backend/index_score_sharded.cu", "(item.last_key(first) + 1)", "(item.last_key(last) + 1)"),),
        KERNEL_WINDOW_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel scores the page's other block as well",
        (("cuda_backend/index_score_sharded.cu", "i == own ? score : minus_infinity()", "score"),),
        KERNEL_WINDOW_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel keeps a block that two ranks sent twice",
        (("cuda_backend/merge_candidates.cu", "repeated |= from_lane_across(repeated, kTop);", ""),),
        KERNEL_MERGE_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel keeps none of a block that two ranks sent",
        (
            (
                "cuda_backend/merge_candidates.cu",
                "(others.better & others.same) != 0",
                "number_of_ones(others.same) > (share == rank * kTop / kShare)",
            ),
        ),
        KERNEL_MERGE_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel ranks a candidate among half of the others",
        (("cuda_backend/merge_candidates.cu", "larger += from_lane_across(larger, kTop);", ""),),
        KERNEL_MERGE_TESTS,
        emulated=True,
    ),
    Mutant(
        "a late merge of a kernel clears what was there",
        (("cuda_backend/merge_candidates.cu", "if (complete && lane == 0) signal", "if (lane == 0) signal"),),
        KERNEL_MERGE_TESTS,
        emulated=True,
    ),
    Mutant(
        "a kernel names the ranks that were there",
        (
            (
                "cuda_backend/merge_candidates.cu",
                "there ? kLate : kLate | 1 << rank;",
                "there ? kLate | 1 << rank : kLate;",
            ),
        ),
        KERNEL_MERGE_TESTS,
        emulated=True,
    ),
)
