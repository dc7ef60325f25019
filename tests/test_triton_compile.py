"""The Triton kernels compile for every target, without a GPU, and never twice.

Where TRITON_INTERPRET=1 is set, Triton makes no compilable kernels, so what is tested here runs in
processes of its own: `python tests/test_triton_compile.py TARGET` compiles for one target.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

CUDA_TARGETS = (80, 89, 90, 100, 120)
HIP_TARGETS = ("gfx942", "gfx950")
TARGETS = [str(target) for target in CUDA_TARGETS + HIP_TARGETS]


def _start(*arguments: str) -> subprocess.Popen[str]:
    source = Path(__file__).parents[1] / "src"
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(source)]))
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        env=dict(os.environ, TRITON_INTERPRET="0", PYTHONPATH=path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def compilations(request: pytest.FixtureRequest) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All targets that are asked for at once: most of a compilation waits for another program."""
    asked = {item.callspec.params["target"] for item in request.session.items if _asks(item)}
    processes = {target: _start(target) for target in TARGETS if target in asked}
    yield processes
    for process in processes.values():
        process.kill()
        process.communicate()


def _asks(item: pytest.Item) -> bool:
    return "compilations" in getattr(item, "fixturenames", ())


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_for(target: str, compilations: dict[str, subprocess.Popen[str]]) -> None:
    output, _ = compilations[target].communicate(timeout=280)
    assert compilations[target].returncode == 0, output
    assert output.split()[-1] == "compiled"


def test_one_compilation_a_variant() -> None:
    process = _start("count")
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output


# ---------------------------------------------------------------- in the processes


def _worth_compiling(constants: dict[str, Any]) -> bool:
    """Of the scorers, the extremes: the other layouts and widths differ in numbers only."""
    if "QUERY_ROWS" in constants:
        return (constants["QUERY_ROWS"], constants["ROWS"]) in ((128, 32), (64, 128))
    if "GROUPS" not in constants:
        return True
    narrow = constants["GROUPS"] == 1 and constants["ROWS"] == 32
    wide = constants["GROUPS"] * constants["GROUP"] == 32 and constants["ROWS"] == 128
    return narrow or wide


def _check_matrix_product(ptx: str, query_rows: int) -> None:
    """On 9.0 a prefill scorer multiplies 64 keys in registers by all query rows, fp16 into FP32."""
    products = [line.split(None, 1) for line in ptx.splitlines() if "wgmma.mma_async" in line]
    assert len(products) == 8  # of 16 dims each
    for operation, operands in products:
        assert operation == f"wgmma.mma_async.sync.aligned.m64n{query_rows}k16.f32.f16.f16"
        assert operands.split("}")[1].count("%r") == 4, operands
    assert "mma.sync" not in ptx
    assert ptx.count("ldmatrix.sync.aligned.m8n8.x4") == 4, "keys do not reach their registers as words"


ACCESS = re.compile(r"(?:ld|st|atom|red)\.\S*global\S*|bar\.sync|griddepcontrol\.\w+")


def _accesses(ptx: str) -> str:
    """A letter for each global access, barrier and launch control of a kernel, in the order of the text.

    `b`: barrier, `w`: wait for the predecessor, `r`: release of dependents, `A`, `R`: acquire or release at
    system scope, `a`: other atomic, `v`: volatile load, `l`: other load, `s`, `d`: store of 32 or 64 bits.
    """
    kinds = {
        "b": r"bar\.",
        "w": r"griddepcontrol\.wait",
        "r": r"griddepcontrol\.",
        "A": r"(?=.*\.sys\b)(?=.*\.acquire\b)(?:ld|atom)",
        "R": r"(?=.*\.sys\b)(?=.*\.release\b)(?:st|atom|red)",
        "v": r"ld\.volatile",
        "a": r"atom|red|(?:ld|st)(?=.*\.(?:gpu|sys|cta)\b)",
        "l": r"ld",
        "d": r"st\.global\.b64$",
        "s": r"st\.global\.b32$",
    }
    accesses = ACCESS.findall(ptx)
    return "".join(next((k for k, kind in kinds.items() if re.match(kind, a)), "?") for a in accesses)


def _check_exchange(name: str, constants: dict[str, Any], ptx: str) -> None:
    """The exchange's order of memory (docs/exchange.md, lemmas 4 and 8), as the compiler left it."""
    accesses = _accesses(ptx)
    if name in ("publish_kernel", "select_round_kernel"):
        if constants["TAGS"]:  # tag and payload in one store of 64 bits; nothing to wait for
            assert accesses.endswith("dd"), accesses
            assert not re.search("[AR]", accesses), accesses
        else:  # the row behind the poll that found it free, and the ready word behind the row
            assert re.search("A[^AR]*ssb+R$", accesses), accesses
    elif name == "merge_kernel" and constants["PREFILL"]:
        assert not re.search("[ARa]", accesses), accesses
    elif name == "merge_kernel":  # the row behind the polls that found it, and cleared behind its loads
        assert re.search("Ab+v+[^vAR]*b+R[^vAR]*$", accesses), accesses
    elif (
        name == "_merge_tagged"
    ):  # one word a thread, and no second copy: else threads could see different rows
        assert accesses.count("v") == 1
        assert "ld.volatile.global.b64" in ptx
        assert not re.search("[AR]", accesses), accesses


def _check_dependent(name: str, constants: dict[str, Any], ptx: str) -> None:
    """A variant with dependent launch waits; but for the scorer, before it touches anything.

    All release their dependents but the fused form's first launch, whose dependents wait for its ends.
    """
    accesses = _accesses(ptx)
    dependent = bool(constants.get("DEPENDENT"))
    assert ("w" in accesses) == dependent, (name, constants)
    assert ("r" in accesses) == (dependent and name != "select_pieces_kernel"), (name, constants)
    if "w" in accesses and name != "_score":
        assert not re.search("[^br]", accesses[: accesses.index("w")]), (name, accesses)


def _stack_bytes(cubin: bytes) -> int:
    """Bytes of stack a thread: what does not fit its registers."""
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", usage.stdout).group(1))


def compile_for(target: str) -> None:
    """Compile every kernel for a compute capability (times ten) or an AMD architecture."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import _normalize_ty

    from msa_icp import triton_backend
    from msa_icp.bench import producer_kernel
    from msa_icp.triton_backend.launch import Target

    if target.startswith("gfx"):
        gpu, ours = GPUTarget("hip", target, 64), Target.of_capability("hip", 0, 100)
    else:
        gpu, ours = GPUTarget("cuda", int(target), 32), Target.of_capability("cuda", int(target), 100)
    kernels = set()
    for kernel, values in chain(triton_backend.variants(ours), producer_kernel.variants(ours)):
        constants = dict(zip(kernel.constants, values, strict=True))
        if not _worth_compiling(constants):
            continue
        names = kernel.function.arg_names
        signature = dict.fromkeys(names, "constexpr")
        signature |= {name: _normalize_ty(kind) for name, kind in kernel.types.items()}
        aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in kernel.aligned}
        source = ASTSource(kernel.function, signature, constants, aligned)
        compiled = triton.compile(source, target=gpu, options=kernel.options(gpu.backend, constants))
        if gpu.backend == "cuda":
            _check_exchange(kernel.function.__name__, constants, compiled.asm["ptx"])
            _check_dependent(kernel.function.__name__, constants, compiled.asm["ptx"])
        if target == "90" and "QUERY_ROWS" in constants:
            _check_matrix_product(compiled.asm["ptx"], constants["QUERY_ROWS"])
            assert _stack_bytes(compiled.asm["cubin"]) == 0, (kernel.function.__name__, "spills")
        if gpu.backend == "cuda" and kernel.function.__name__ == "select_pieces_kernel":
            # Threads beyond the rows hold copies of them: all have read the kept keys before one writes.
            accesses = re.findall(r"ld\.global\.b64|st\.global\.b64|bar\.sync", compiled.asm["ptx"])
            order = "".join(access[0] for access in accesses)
            assert re.search("l{16}b+s{16}", order), order
        if kernel.function.__name__ == "plan_kernel":
            # Costs are written, added up and looked through by other threads: barriers of our own between,
            # whatever the compiler puts into its sums.
            assert len(re.findall(r"\b(?:gpu|ttg)\.barrier\b", compiled.asm["ttir"])) == 2
        kernels.add(kernel)
    assert len(kernels) == 15
    print("compiled")


def prefill_calls(backend: Any, layout: Any, lens: tuple[int, ...], offset: int, pitch: int) -> None:
    """Every prefill op once, for segments of `lens` tokens; `offset` and `pitch` move and stretch tensors."""
    import torch

    import msa_icp

    def fp8(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)

    queries = torch.tensor((0,) * offset + lens, dtype=torch.int32)[offset:]
    plan = msa_icp.msa_icp_index_score_sharded_plan(
        queries, queries, 4, qo_offset=queries * 0, device="cpu", backend="torch"
    )
    bounds = {"total_q": plan.total_q, "max_query_len": 16, "max_seq_len": 128 * plan.columns}
    metadata = (queries, queries, plan.qo_segment_offsets, plan.kv_segment_offsets, queries)
    storage = {name: getattr(plan, name) for name in ("packed_work_range", "packed_work_info", "workspace")}
    backend.index_score_sharded_plan_device(*metadata, **bounds, **storage)
    keys = fp8(4 * pitch).as_strided((3, 64, 128), (pitch, 128, 1))
    table = torch.zeros((len(lens), 3 + offset), dtype=torch.int32)[:, offset:]
    scores = torch.empty((plan.total_q, 4, 12 + offset))[:, :, offset : offset + 12]
    inputs = (fp8(plan.total_q, 4, 128), keys, table, plan)
    launch = {"layout": layout, "enable_pdl": True}
    backend.index_score_sharded(*inputs, max_score=scores, initialize=True, compact=False, **launch)
    valid = torch.ones(plan.total_q + offset, dtype=torch.int32)[offset:]
    carrier = torch.empty((4, plan.total_q + offset, 33 + offset), dtype=torch.int32)[:, offset:, offset:]
    force = {"force_begin_blocks": offset, "force_end_blocks": 1}
    backend.topk_select_prefill(scores, valid, carrier, index_scale=1, index_offset=0, **force)
    size = msa_icp.msa_icp_prefill_pool_bytes(total_q=plan.total_q, batch=plan.batch, device="cpu")
    pool = torch.empty(size, dtype=torch.uint8)
    backend.prefill_score_select(*inputs, valid, pool, carrier, **force, **launch)


def count_exchange(backend: Any, layout: Any, compiled: list[Any], launches: list[Any]) -> None:
    """Merge in all its forms, and score and publish in one, of batches and slices of any size."""
    import torch
    from calls import fused_call, merge_call

    before, launched = len(compiled), len(launches)
    for tagged, prefill in ((False, False), (True, False), (False, True)):
        call = merge_call("cpu", "torch", tagged, prefill)
        arguments = {name: value for name, value in call.arguments.items() if name != "backend"}
        for tokens in (1, 2, 6):
            arguments["recv_slot"] = call.arguments["recv_slot"][:, :, 6 - tokens :]
            arguments["num_valid_pages"] = torch.full((6,), 20, dtype=torch.int32)[6 - tokens :]
            arguments["output"] = torch.empty((tokens, 2 + tokens, 16), dtype=torch.int32)[:, tokens:]
            arguments |= {"spin_limit": 2**31 - tokens, "init_blocks": tokens, "enable_pdl": not prefill}
            backend.merge_candidates(**arguments, slot=tokens)
    assert len(launches) == launched + 9
    assert len(compiled) == before + 3

    call = fused_call("cpu", "torch")
    names = ("backend", "rank", "world_size", "page_size")
    arguments = {name: value for name, value in call.arguments.items() if name not in names}
    table = call.arguments["block_table"]
    # The last table is wider than the pool's rows: two rounds.
    for batch, columns in ((3, table.shape[1]), (1, 1), (2, 4100)):
        for name in ("index_q", "num_valid_pages"):
            arguments[name] = call.arguments[name][6 - 2 * batch :]
        arguments["seq_lens"] = call.arguments["seq_lens"][3 - batch :]
        arguments["block_table"] = torch.zeros((batch, columns + batch), dtype=torch.int32)[:, batch:]
        arguments |= {"spin_limit": 2**31 - batch, "force_begin_blocks": batch}
        backend.decode_score_publish(**arguments, layout=layout)
    assert len(launches) == launched + 9 + 8
    assert len(compiled) == before + 5  # the scorer of few tiles was there; the one of many is a loop


def count_compilations() -> None:
    """Calls that differ in addresses, strides, batch and values, over stand-ins for compiled kernels."""
    import torch
    import triton
    from calls import publish_call
    from helpers import random_scores

    from msa_icp import triton_backend
    from msa_icp.geometry import ShardLayout
    from msa_icp.triton_backend.launch import Kernel

    compiled: list[tuple[Any, ...]] = []
    launches: list[tuple[int, ...]] = []
    hooked: list[tuple[int, ...]] = []

    class Compiled:
        """A stand-in for what Triton compiles and loads."""

        function, packed_metadata = "function", "metadata"

        def run(self, *words: Any) -> None:
            assert words[3:9] == ("stream of None", "function", "metadata", None, None, None)
            launches.append(words[:3])

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *words: hooked.append(grid)

    class Driver:
        @staticmethod
        def get_current_stream(device_index: int | None) -> str:
            return f"stream of {device_index}"

    triton.runtime.driver.set_active(Driver())

    def compile_variant(self: Kernel, constants: tuple[Any, ...]) -> Compiled:
        compiled.append((self.function.__name__, constants))
        return Compiled()

    Kernel.compile = compile_variant  # type: ignore[method-assign]
    torch.cuda.is_current_stream_capturing = lambda: False

    def fp8(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)

    layout = ShardLayout(world_size=2, rank=1, page_size=128)
    for batch, offset, pitch in ((1, 0, 8192), (2, 1, 8208), (16, 2, 1 << 20), (257, 3, 8192)):
        numbers = torch.zeros(batch + offset, dtype=torch.int32)[offset:]
        table = torch.zeros((batch, 9 + offset), dtype=torch.int32)[:, offset:]
        keys = fp8(4 * pitch).as_strided((3, 64, 128), (pitch, 128, 1))
        scores = torch.empty((batch * 2, 4, 12 + 4 * offset))[:, :, offset : offset + 12]
        triton_backend.decode_index_score_sharded(
            fp8(batch * 2, 4, 128),
            keys,
            table,
            numbers,
            scores,
            layout=layout,
            decode_query_len=2,
            enable_pdl=True,
        )
        triton_backend.write_index_keys(fp8(batch, 128), numbers, numbers, table, keys, layout=layout)
    assert len(launches) == 8
    assert len(compiled) == 2

    call = publish_call("cpu", "torch")
    arguments = {name: value for name, value in call.arguments.items() if name != "backend"}
    for tokens in (1, 2, 6):
        arguments["scores"] = random_scores(6, 20, seed=0)[6 - tokens :]
        arguments["num_valid_pages"] = torch.full((6,), 20, dtype=torch.int32)[6 - tokens :]
        arguments["spin_limit"] = 2**31 - tokens
        triton_backend.topk_select_publish(**arguments)
    assert len(launches) == 11
    assert len(compiled) == 3

    count_exchange(triton_backend, layout, compiled, launches)

    # A profiler that hooks launches gets what Triton prepares for it.
    hooks = triton.knobs.runtime
    for number, hook in enumerate((hooks.launch_enter_hook, hooks.launch_exit_hook), 1):
        hook.add(print)
        triton_backend.topk_select_publish(**arguments)
        hook.remove(print)
        assert hooked == [(6, 4, 1)] * number
    launched = len(launches)
    triton_backend.topk_select_publish(**arguments)
    assert launches[-1] == (6, 4, 1)
    assert len(launches) == launched + 1

    before, launched = len(compiled), len(launches)
    for lens, offset, pitch in (((1,), 0, 8192), ((9, 0, 3), 1, 8208), ((16,) * 65, 3, 1 << 20)):
        prefill_calls(triton_backend, layout, lens, offset, pitch)
    assert len(launches) == launched + 3 * 5
    assert len(compiled) == before + 6  # the plan's two shapes, and one of each other kernel

    torch.cuda.is_current_stream_capturing = lambda: True
    triton_backend.topk_select_publish(**arguments)  # it is loaded
    arguments["generations"] = None  # the legacy rows' kernel is not
    with pytest.raises(RuntimeError, match="warmup"):
        triton_backend.topk_select_publish(**arguments)
    assert len(compiled) == before + 6


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    if sys.argv[1] == "count":
        count_compilations()
    else:
        compile_for(sys.argv[1])
