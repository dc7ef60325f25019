"""The CUDA kernels of the exchange keep the order of memory that docs/exchange.md argues with.

The emulator has headers of its own in the place of device/ptx. What is looked at here is what NVRTC makes of
the real ones: order and scope of every access of ready words, tagged words and errors, and the barriers.
"""

from __future__ import annotations

import functools

import pytest
from ptx_paths import ENTRY, Paths

from msa_icp import cuda_backend
from msa_icp.cuda_backend import loader
from msa_icp.cuda_backend.merge_candidates import LEGACY, PREFILL, TAGGED
from msa_icp.cuda_backend.merge_candidates import kernel_for as merge_kernel
from msa_icp.cuda_backend.topk_select_publish import kernel_for as publish_kernel

if cuda_backend.not_installed() is not None:
    pytest.skip(cuda_backend.not_installed(), allow_module_level=True)

publishes = pytest.mark.parametrize("fused", [False, True], ids=["publish", "fused"])
worlds = pytest.mark.parametrize("world_size", [2, 4])

ACQUIRE, RELEASE = r"ld\.acquire\.sys\.global\.b32", r"st\.release\.sys\.global\.b32"
TAGGED_LOAD = r"ld\.relaxed\.sys\.global\.b64"
ERRORS = {"ld.relaxed.gpu.global.b32", "atom.relaxed.gpu.global.add.s32"}
"""How the error words are read and counted: CTAs of one card do."""
WARP, CTA = r"bar\.warp\.sync", r"bar(rier)?(\.cta)?\.sync\S*"
ORDERED = r"\S*\.(acquire|release|acq_rel|relaxed|volatile|mmio|sys|gpu|cluster)\b\S*|fence\S*|membar\S*"
COMPILED = (
    *(publish_kernel(tagged=tagged, fused=fused) for tagged in (False, True) for fused in (False, True)),
    *(merge_kernel(form, world) for form in (LEGACY, TAGGED, PREFILL) for world in (2, 4)),
)


@functools.cache
def paths_of(kernel: loader.Kernel) -> Paths:
    """Of the PTX that the assembler is given."""
    from cuda.bindings import nvrtc

    variant = kernel.variant
    options = variant._options(loader.ARCHITECTURE)
    program = loader._cuda_core().Program(variant.text(), "c++", options)
    program.compile("cubin")
    _, size = nvrtc.nvrtcGetPTXSize(program.handle)
    ptx = b" " * size
    nvrtc.nvrtcGetPTX(program.handle, ptx)
    return Paths.of(ptx.decode().rstrip("\0"))


def ordered(paths: Paths) -> set[str]:
    """The operations on memory of others that are more than plain loads and stores."""
    found = (paths.where(ORDERED) & paths.accesses) | paths.where(r"fence\S*|membar\S*")
    return {paths.operations[number].lstrip("@") for number in found}


def stored_words(paths: Paths) -> set[int]:
    """Plain stores of words, without those that describe a failure, which are behind its counting."""
    counted = paths.where(r"atom\S+add\S+")
    return paths.where(r"st\.global\.b32") & paths.behind({ENTRY}, without=counted)


@publishes
def test_a_legacy_row_is_stored_between_acquire_and_release(fused):
    """Section 4: P1, then P2, then P3, then P4, then P5, whatever way a warp takes."""
    paths = paths_of(publish_kernel(tagged=False, fused=fused))
    assert ordered(paths) == {"ld.acquire.sys.global.b32", "st.release.sys.global.b32", *ERRORS}
    polls, row, ready = paths.where(ACQUIRE), stored_words(paths), paths.where(RELEASE)
    warp = paths.where(WARP)
    assert polls
    assert row
    assert ready
    assert row <= paths.behind(polls)
    assert not row & paths.behind(polls, without=warp), "P2: the lanes do not meet behind the acquiring poll"
    assert not ready & paths.behind({ENTRY}, without=row), "a ready word without a row"
    assert not ready & paths.behind(row, without=warp), "P4: the lanes do not meet behind their stores"
    assert not (polls | row) & paths.behind(ready), "something comes behind the ready word"


@publishes
def test_a_tagged_row_is_stored_word_by_word_and_waits_for_nothing(fused):
    """Lemma 4: tag and payload in one store of 64 bits, at system scope."""
    paths = paths_of(publish_kernel(tagged=True, fused=fused))
    assert ordered(paths) == {"st.relaxed.sys.global.b64"}
    assert len(stored_words(paths)) == 1  # the counter


@worlds
def test_a_legacy_row_is_read_behind_acquire_and_handed_back_behind_release(world_size):
    """Section 4: M1, then M2, then M3, then M4, then M5, whatever way a warp takes."""
    paths = paths_of(merge_kernel(LEGACY, world_size))
    assert ordered(paths) == {"ld.acquire.sys.global.b32", "st.release.sys.global.b32", *ERRORS}
    polls, ready = paths.where(ACQUIRE), paths.where(RELEASE)
    warp, cta = paths.where(WARP), paths.where(CTA)
    row = paths.where(r"ld\.(global\.)?b32") & paths.behind(polls)
    assert polls
    assert row
    assert ready
    assert not row & paths.behind(polls, without=warp), "M2: the lanes do not meet behind the acquiring poll"
    assert not ready & paths.behind({ENTRY}, without=row), "a row is handed back unread"
    assert not ready & paths.behind(row, without=cta), "M4: the ranks' warps do not meet behind their loads"
    assert not (polls | row) & paths.behind(ready), "a row is read that has been handed back"


@worlds
def test_a_tagged_row_is_read_once(world_size):
    """Lemmas 3 to 5: 64 bits at system scope, a word a lane, and merged is what was polled."""
    paths = paths_of(merge_kernel(TAGGED, world_size))
    assert ordered(paths) == {"ld.relaxed.sys.global.b64", *ERRORS}
    polls = paths.where(TAGGED_LOAD)
    read_again = {n for n in paths.behind(polls) & paths.accesses if paths.operations[n].startswith("ld.")}
    assert read_again <= polls | paths.where(r"ld\.relaxed\.gpu\.global\.b32"), "there is a second copy"


@worlds
def test_a_prefill_merge_orders_nothing(world_size):
    assert ordered(paths_of(merge_kernel(PREFILL, world_size))) == set()


@pytest.mark.parametrize("kernel", COMPILED, ids=lambda kernel: kernel.variant.name.replace(" ", "-"))
def test_nothing_is_touched_before_the_wait_and_no_thread_ends_without_it(kernel):
    """Lemma 1: with dependent launch the wait is what follows the step's earlier kernels."""
    paths = paths_of(kernel)
    waits = paths.where(r"griddepcontrol\.wait")
    early = paths.behind({ENTRY}, without=waits)
    assert waits
    assert paths.accesses & paths.behind(waits)
    assert not (paths.accesses | paths.ends) & early, {paths.operations[n] for n in early & paths.accesses}
    assert paths.ends & paths.behind(waits)


def test_paths():
    """Of a few instructions: a loop, a branch around it, and a part that lies behind the end."""
    paths = Paths.of(
        """
.visible .entry kernel(
	.param .align 8 .b8 with[16]
)
{
	.reg .pred %p<3>;
	ld.param.u64 %rd1, [with];
	@%p1 bra 	$L_rare;
$L_loop:
	ld.global.b32 %r1, [%rd1]; // poll
	@!%p2 bra $L_loop;
$L_on: bar.sync 0;
	@%p1 st.global.b32 [%rd1], %r1;
	ret;
$L_rare:
	{
	membar.sys;
	}
	bra.uni $L_on;
}
"""
    )
    names = "entry ld.param.u64 @bra ld.global.b32 @bra bar.sync @st.global.b32 ret membar.sys bra.uni"
    assert paths.operations == tuple(names.split())
    assert paths.behind({3}) == {3, 4, 5, 6, 7}
    assert paths.behind({ENTRY}, without={3}) == {1, 2, 8, 9, 5, 6, 7}
    assert paths.behind({ENTRY}, without={5}) == {1, 2, 3, 4, 8, 9}
    assert paths.accesses == {3, 6}
    assert paths.ends == {7}
