"""`install()`: whose function a call reaches, what is replaced and put back (docs/integration.md).

Over a package that stands in for FlashInfer: its functions note their calls, and it serves "cuda:0" alone.
Tensors without memory bring CUDA devices to a machine that has none. What computes are our functions, on the
CPU; under the names of the real FlashInfer too, where it is installed.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
import threading
import timeit
from pathlib import Path
from types import ModuleType, SimpleNamespace

import flashinfer_chain
import pytest
import torch

import msa_icp
from msa_icp import upstream

NAMES = tuple(name for name in msa_icp.__all__ if name.startswith(("msa_icp_", "prepare_msa_icp")))
PARAMETERS = {name: inspect.signature(getattr(msa_icp, name)).parameters for name in NAMES}
BY_DEVICE = tuple(name for name in NAMES if "device" in PARAMETERS[name])
SIZES = (
    "msa_icp_comm_layout",
    "msa_icp_decode_pool_bytes",
    "msa_icp_decode_score_columns",
    "msa_icp_index_score_columns",
)
BY_TENSOR = tuple(name for name in NAMES if name not in BY_DEVICE + SIZES)
REAL = importlib.util.find_spec("flashinfer") is not None
NO_LIBRARY = "raise OSError('libcudart.so.13: cannot open shared object file')"
"""A module that finds no library of CUDA while it is imported."""


class Package(ModuleType):
    """A module of the stand-in."""

    __path__: list[str] = []  # noqa: RUF012


class StandIn:
    """A package `flashinfer` that serves "cuda:0"; `calls` holds (whose, name, args, kwargs)."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.calls: list[tuple] = []
        self.asked: list[torch.device] = []
        self.package, self.msa_ops, self.definitions, self.experimental, self.kernels = (
            Package(f"flashinfer{part}")
            for part in (
                "",
                ".msa_ops",
                ".msa_ops.cake_icp_indexer",
                ".experimental",
                ".experimental.cake_msa_icp_indexer",
            )
        )
        self.package.__version__ = "0.7.4"
        self.package.msa_ops = self.msa_ops
        for name in names:
            function = self.function("theirs", name)
            setattr(self.definitions, name, function)
            setattr(self.msa_ops, name, function)
        self.msa_ops.msa_topk_select = self.function("theirs", "msa_topk_select")
        self.kernels.is_supported = self.is_supported

    def function(self, whose, name):
        def call(*args, **kwargs):
            self.calls.append((whose, name, args, kwargs))
            return f"{whose} {name}"

        call.__name__ = call.__qualname__ = name
        call.__doc__ = f"{whose} {name}"
        call.__module__ = self.definitions.__name__
        return call

    def is_supported(self, device):
        self.asked.append(device)
        return torch.device(device).index in (0, None)

    def modules(self) -> dict[str, ModuleType]:
        parts = (self.package, self.msa_ops, self.definitions, self.experimental, self.kernels)
        return {module.__name__: module for module in parts}

    def functions(self) -> list[list]:
        return [[getattr(module, name) for name in NAMES] for module in (self.msa_ops, self.definitions)]


@pytest.fixture
def flashinfer(monkeypatch):
    """The stand-in in place of FlashInfer; uninstalled afterwards."""
    stand_in = StandIn(NAMES)
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield stand_in
    msa_icp.uninstall()


@pytest.fixture
def installed(flashinfer, monkeypatch):
    """The stand-in after `install()`, with functions of ours that only note their calls."""
    for name in NAMES:
        noting = flashinfer.function("ours", name)
        noting.__signature__ = inspect.signature(getattr(msa_icp, name))
        monkeypatch.setattr(msa_icp, name, noting)
    msa_icp.install()
    return flashinfer


@pytest.fixture
def current_device(monkeypatch):
    """CUDA is there, and "cuda:0" is the current device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return monkeypatch


class OnDevice(torch.Tensor):
    """A tensor without memory: all that it knows is its device, which need not exist."""

    @staticmethod
    def __new__(cls, device):
        return torch.Tensor._make_wrapper_subclass(cls, (2,), device=device)

    @classmethod
    def __torch_dispatch__(cls, operation, *_):
        raise AssertionError(f"{operation} on a tensor without memory")


def tensor_on(device):
    return OnDevice(torch.device(device))


def whose(stand_in, name, *args, **kwargs):
    """'ours' or 'theirs', with both modules' functions; the arguments must arrive as they are."""
    answers = set()
    for module in (stand_in.msa_ops, stand_in.definitions):
        answer = getattr(module, name)(*args, **kwargs)
        who, called, got_args, got_kwargs = stand_in.calls.pop()
        assert (called, answer) == (name, f"{who} {name}")
        assert all(got is sent for got, sent in zip(got_args, args, strict=True))
        assert got_kwargs.keys() == kwargs.keys()
        assert all(got_kwargs[key] is value for key, value in kwargs.items())
        answers.add(who)
    assert not stand_in.calls
    return answers.pop() if len(answers) == 1 else answers


# ---------------------------------------------------------------- whose function a call reaches


def test_every_function_is_of_one_kind():
    assert len(BY_TENSOR) + len(BY_DEVICE) + len(SIZES) == len(NAMES) == 16
    for name in BY_TENSOR:
        assert next(iter(PARAMETERS[name].values())).annotation == "Tensor", name


@pytest.mark.parametrize(("device", "who"), [("cuda:0", "theirs"), ("cuda:1", "ours"), ("cpu", "ours")])
def test_the_first_tensor_decides(installed, device, who):
    tensor, other = tensor_on(device), torch.zeros(1)
    for name in BY_TENSOR:
        assert whose(installed, name, tensor, other, rank=1) == who, name
        first = next(iter(PARAMETERS[name]))
        assert whose(installed, name, rank=1, **{first: tensor}) == who, name


@pytest.mark.parametrize(
    ("device", "who"),
    [("cuda:0", "theirs"), ("cuda:1", "ours"), ("cuda", "theirs"), (None, "theirs"), ("cpu", "ours")],
)
def test_an_argument_device_decides_whatever_the_tensors(installed, current_device, device, who):
    on_cpu = torch.zeros(1)
    for name in BY_DEVICE:
        for form in (device, torch.device(device) if device else None):
            assert whose(installed, name, on_cpu, device=form) == who, name
        assert whose(installed, name, on_cpu) == "theirs"


def test_the_current_device_is_asked_for_every_time(installed, current_device):
    for index, who in enumerate(("theirs", "ours")):
        current_device.setattr(torch.cuda, "current_device", lambda index=index: index)
        for device in ("cuda", None):
            assert whose(installed, BY_DEVICE[0], device=device) == who


def test_without_cuda_all_is_ours(installed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in BY_DEVICE:
        for device in (None, "cuda", "cuda:0", "cpu"):
            assert whose(installed, name, device=device) == "ours"


@pytest.mark.parametrize("device", ["no such device", 3.5, [], "meta"])
def test_what_is_no_device_is_ours_to_refuse(installed, current_device, device):
    assert whose(installed, BY_DEVICE[0], device=device) == "ours"


def test_calls_without_a_tensor_are_ours(installed, current_device):
    for name in SIZES:
        assert whose(installed, name, 4, 1) == "ours"
        assert whose(installed, name, max_decode_tokens=3) == "ours"
    for wrong in (None, 7, [torch.zeros(1)]):
        assert whose(installed, BY_TENSOR[0], wrong) == "ours"
    assert whose(installed, BY_TENSOR[0]) == "ours"


def test_flashinfer_is_asked_once_a_device_and_never_about_a_cpu(installed):
    served, unserved = tensor_on("cuda:0"), tensor_on("cuda:1")
    for _ in range(3):
        for tensor in (served, unserved, torch.zeros(1)):
            whose(installed, BY_TENSOR[0], tensor)
    assert installed.asked == [torch.device("cuda:0"), torch.device("cuda:1")]


@pytest.mark.parametrize(
    ("capability", "who"),
    [
        ((10, 0), "theirs"),
        ((10, 3), "theirs"),
        ((10, 7), "theirs"),
        ((9, 0), "ours"),
        ((8, 9), "ours"),
        ((10, 1), "ours"),
        ((12, 0), "ours"),
    ],
)
@pytest.mark.parametrize("lost", ["the module", "a library", "the function"])
def test_without_is_supported_the_compute_capability_decides(
    installed, current_device, capability, who, lost, tmp_path
):
    if lost == "the module":
        current_device.setitem(sys.modules, "flashinfer.experimental.cake_msa_icp_indexer", None)
    elif lost == "a library":
        (tmp_path / "cake_msa_icp_indexer.py").write_text(NO_LIBRARY)
        installed.experimental.__path__ = [str(tmp_path)]
        current_device.delitem(sys.modules, "flashinfer.experimental.cake_msa_icp_indexer")
    else:
        del installed.kernels.is_supported
    current_device.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert whose(installed, BY_TENSOR[0], tensor_on("cuda:1")) == who


def test_errors_are_those_of_the_function_that_was_called(flashinfer):
    msa_icp.install()
    with pytest.raises(ValueError, match=r"scores: must be .*torch.Tensor, was NoneType"):
        flashinfer.msa_ops.msa_icp_topk_select_prefill(None, None, None)
    with pytest.raises(TypeError, match="nonsense"):
        flashinfer.msa_ops.msa_icp_comm_layout(4, 1, 8, nonsense=1)


def test_a_call_costs_few_microseconds(flashinfer, monkeypatch):
    name = BY_TENSOR[0]
    monkeypatch.setattr(msa_icp, name, lambda index_q, *, rank: None)
    plain = getattr(msa_icp, name)
    msa_icp.install()
    tensor, either = torch.zeros(1), getattr(flashinfer.msa_ops, name)
    took = [
        min(timeit.repeat(lambda f=f: f(tensor, rank=1), number=1000, repeat=30)) / 1000
        for f in (plain, either)
    ]
    assert took[1] - took[0] < 5e-6  # 0.4e-6 on an idle machine


# ---------------------------------------------------------------- what is replaced, and put back


def test_installed_functions_look_like_flashinfers(flashinfer):
    before = flashinfer.functions()
    msa_icp.install()
    after = flashinfer.functions()
    for was, now in zip(before[0] + before[1], after[0] + after[1], strict=True):
        assert now is not was
        assert (now.__name__, now.__doc__, now.__module__) == (was.__name__, was.__doc__, was.__module__)
        assert inspect.signature(now) == inspect.signature(was)
    for name in NAMES:
        assert getattr(flashinfer.msa_ops, name) is getattr(flashinfer.definitions, name)


def test_nothing_else_is_touched(flashinfer):
    before = {module: dict(vars(module)) for module in flashinfer.modules().values()}
    msa_icp.install()
    for module, content in before.items():
        changed = {name for name, value in vars(module).items() if value is not content.get(name)}
        expected = set(NAMES) if module in (flashinfer.msa_ops, flashinfer.definitions) else set()
        assert changed - {"__warningregistry__"} == expected, module


def test_uninstall_restores_exactly(flashinfer):
    before = flashinfer.functions()
    msa_icp.uninstall()
    assert flashinfer.functions() == before
    for times in (1, 3):
        for _ in range(times):
            msa_icp.install()
        for _ in range(times):
            msa_icp.uninstall()
            assert flashinfer.functions() == before


def test_modules_whose_functions_differ_get_their_own_back(flashinfer):
    flashinfer.msa_ops.msa_icp_comm_layout = flashinfer.function("theirs", "msa_icp_comm_layout")
    before = flashinfer.functions()
    msa_icp.install()
    assert flashinfer.msa_ops.msa_icp_comm_layout is not flashinfer.definitions.msa_icp_comm_layout
    msa_icp.uninstall()
    assert flashinfer.functions() == before


def test_a_second_install_changes_nothing(installed):
    once = installed.functions()
    msa_icp.install()
    assert installed.functions() == once
    assert whose(installed, BY_TENSOR[0], tensor_on("cuda:0")) == "theirs"


def test_a_second_install_replaces_what_was_put_back(installed):
    name = BY_TENSOR[0]
    fresh = installed.function("theirs", name)
    setattr(installed.definitions, name, fresh)  # as a reload of the module does
    msa_icp.install()
    assert whose(installed, name, tensor_on("cuda:1")) == "ours"
    msa_icp.uninstall()
    assert getattr(installed.definitions, name) is fresh


def test_uninstall_leaves_what_somebody_else_has_put_there(installed):
    name = BY_TENSOR[0]
    foreign = installed.function("foreign", name)
    setattr(installed.msa_ops, name, foreign)
    msa_icp.uninstall()
    assert getattr(installed.msa_ops, name) is foreign
    assert not hasattr(getattr(installed.definitions, name), "__wrapped__")


def test_a_name_imported_before_stays_flashinfers(flashinfer):
    from flashinfer.msa_ops import msa_icp_comm_layout as before

    msa_icp.install()
    from flashinfer.msa_ops import msa_icp_comm_layout as after

    assert before(2, 2, 8) == "theirs msa_icp_comm_layout"
    assert after(2, 2, 8) == msa_icp.msa_icp_comm_layout(2, 2, 8)


def test_what_flashinfer_said_is_forgotten_with_it(installed):
    name, tensor = BY_TENSOR[0], tensor_on("cuda:0")
    assert whose(installed, name, tensor) == "theirs"
    msa_icp.uninstall()
    installed.kernels.is_supported = lambda device: False
    msa_icp.install()
    assert whose(installed, name, tensor) == "ours"


def test_threads_install_and_uninstall_at_once(flashinfer):
    before, rounds, failures = flashinfer.functions(), 30, []
    barrier = threading.Barrier(4)

    def work():
        try:
            for _ in range(rounds):
                barrier.wait(30)
                msa_icp.install()
                installed = getattr(flashinfer.msa_ops, NAMES[0])
                assert not hasattr(installed.__wrapped__, "__wrapped__")  # no wrapper of a wrapper
                barrier.wait(30)
                msa_icp.uninstall()
                barrier.wait(30)
                assert flashinfer.functions() == before
        except BaseException as error:
            barrier.abort()
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_import_and_install_do_not_import_or_start_more_than_needed():
    """`import msa_icp` imports no FlashInfer; `install` without it leaves nothing half done."""
    program = """
import sys, torch, msa_icp
assert "flashinfer" not in sys.modules
sys.modules["flashinfer"] = None
try:
    msa_icp.install()
except ImportError as error:
    print(error)
msa_icp.uninstall()
assert not torch.cuda.is_initialized()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "pip install 'flashinfer-python>=0.7.4'" in ended.stdout, ended.stderr
    assert ended.returncode == 0, ended.stderr


def test_a_flashinfer_without_msa_ops_is_an_import_error(flashinfer, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer.msa_ops.cake_icp_indexer", None)
    with pytest.raises(ImportError, match=r"cake_icp_indexer.*or import the functions from msa_icp itself"):
        msa_icp.install()


def test_a_flashinfer_that_lacks_a_library_is_an_import_error(flashinfer, monkeypatch, tmp_path):
    """As where CUDA's runtime is missing: what loads it raises no ImportError."""
    (tmp_path / "msa_ops.py").write_text(NO_LIBRARY)
    flashinfer.package.__path__ = [str(tmp_path)]
    monkeypatch.delitem(sys.modules, "flashinfer.msa_ops")
    with pytest.raises(ImportError, match=r"here \(libcudart\.so\.13.*msa_icp itself") as raised:
        msa_icp.install()
    assert raised.value.name == "flashinfer"
    assert not upstream._originals


@pytest.mark.parametrize("module", ["msa_ops", "definitions"])
def test_a_flashinfer_without_one_of_the_functions_is_left_alone(flashinfer, module):
    delattr(getattr(flashinfer, module), "msa_icp_merge_candidates")
    before = {part: dict(vars(part)) for part in (flashinfer.msa_ops, flashinfer.definitions)}
    with pytest.raises(
        RuntimeError, match=r"msa_icp_merge_candidates: FlashInfer 0\.7\.4 .*flashinfer-python>="
    ):
        msa_icp.install()
    assert {part: dict(vars(part)) for part in before} == before
    assert not upstream._originals


# ---------------------------------------------------------------- a whole path


def test_an_unchanged_engine_selects_right_on_a_cpu(flashinfer):
    msa_icp.install()
    from flashinfer import msa_ops

    called = flashinfer_chain.check(msa_ops)
    assert set(NAMES) == called
    assert not flashinfer.calls


def test_without_install_the_engine_reaches_flashinfer(flashinfer):
    """The test above would notice: the stand-in answers with a text."""
    with pytest.raises((TypeError, AttributeError, AssertionError)):
        flashinfer_chain.check(SimpleNamespace(**vars(flashinfer.msa_ops)))
    assert flashinfer.calls


@pytest.mark.skipif(not REAL, reason="flashinfer is not installed")
def test_an_unchanged_engine_selects_right_over_the_real_package(tmp_path):
    """In a process of its own, for FlashInfer loads much and makes folders."""
    tests = Path(__file__).parent
    environment = {
        **os.environ,
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(Path(msa_icp.__file__).parents[1]), str(tests), *sys.path]),
    }
    ended = subprocess.run(
        [sys.executable, str(tests / "flashinfer_chain.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode == flashinfer_chain.NOT_HERE:
        pytest.skip(ended.stdout.strip())
    assert ended.returncode == 0, ended.stderr
    assert set(NAMES) == set(ended.stdout.split())
