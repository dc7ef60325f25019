"""What every test file shares: the backends that are here, and the settings of hypothesis.

A test that takes `backend` and `device` runs once for every backend and device of this machine. With
the mark `exchange` it runs where publish and merge do, with the mark `prefill` where the backend has
the prefill ops, with the mark `large` it leaves out interpreted kernels. With EMULATE_CUDA=1 the CUDA
backend serves CPU tensors, emulated. With TRITON_INTERPRET=1 the Triton backend does, interpreted, with
exact matrix products.
"""

from __future__ import annotations

from datetime import timedelta

import cuda_emulation
import exact_interpreter
import hypothesis
import pytest
import torch

import msa_icp
from msa_icp import verify

EMULATED = None
if cuda_emulation.REQUESTED:
    cuda_emulation.install()
    EMULATED = ("cuda", "cpu")  # where the emulator is missing the tests are skipped, with the reason

if msa_icp.backends("cpu")["triton"] is None:  # it serves a CPU in its interpreter alone
    exact_interpreter.install()

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SLOW = [
    (name, device) for device in DEVICES for name in msa_icp.backends(device) if verify.is_slow(name, device)
]
RANKS_AT_ONCE = {
    f"test_{name}.py"
    for name in (
        "bench_multi_gpu",
        "cli",
        "exchange",
        "exchange_cuda",
        "exchange_prefill",
        "indexer",
        "indexer_graphs",
        "replay_processes",
        "storage",
        "storage_processes",
        "symmetric_memory",
    )
}
"""Test files with ranks in threads or in processes of their own, some of which look at what others leave."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "exchange: needs a backend that publishes and merges on the device")
    config.addinivalue_line("markers", "prefill(ops): needs a backend with these prefill ops, default all")
    config.addinivalue_line("markers", "ranks_at_once: of a file with ranks in threads or processes")
    config.addinivalue_line("markers", "large: too much for interpreted kernels")
    for slow, examples in ((False, 60), (True, 3)):
        hypothesis.settings.register_profile(
            "slow" if slow else "fast",
            max_examples=examples,
            deadline=timedelta(seconds=120) if slow else timedelta(seconds=20),
            derandomize=True,
            suppress_health_check=[hypothesis.HealthCheck.too_slow],
        )
    hypothesis.settings.load_profile("slow" if SLOW else "fast")


def pytest_report_header() -> list[str]:
    lines = []
    for device in DEVICES:
        for name, reason in msa_icp.backends(device).items():
            lines.append(f"msa-icp {name} on {device}: {'runs' if reason is None else f'left out, {reason}'}")
    return lines


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `backend` and `device` over what this machine has (the header says why one is left out).

    What a backend here cannot run is skipped, with the reason.
    """
    if "backend" not in metafunc.fixturenames:
        return
    exchange = metafunc.definition.get_closest_marker("exchange") is not None
    prefill = metafunc.definition.get_closest_marker("prefill")
    large = metafunc.definition.get_closest_marker("large") is not None
    combinations = []
    for device in DEVICES:
        for name, reason in msa_icp.backends(device).items():
            if reason is not None and (name, device) != EMULATED:
                continue
            if reason is None and exchange:
                reason = verify.no_exchange(name, device)
            if reason is None and prefill is not None:
                reason = verify.no_prefill(name, *prefill.args)
            if reason is None and large and verify.is_slow(name, device):
                reason = "too much for interpreted kernels"
            marks = [pytest.mark.skip(reason=f"{name} on {device}: {reason}")] if reason else []
            combinations.append(pytest.param(name, device, id=f"{name}-{device}", marks=marks))
    metafunc.parametrize(("backend", "device"), combinations)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what `make test` runs one after the other, so that no wait fails for want of a processor."""
    if item.path.name in RANKS_AT_ONCE:
        item.add_marker(pytest.mark.ranks_at_once)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Interpreted prefill kernels run in two of the four layouts: interleaved rows, and whole blocks."""
    leave_out = pytest.mark.skip(reason="too much for interpreted kernels")
    for item in items:
        values = getattr(item, "callspec", None) and item.callspec.params
        if item.get_closest_marker("prefill") and values and "world_size" in values and "backend" in values:
            slow = verify.is_slow(values["backend"], values["device"])
            if slow and values["world_size"] * values["page_size"] != 512:
                item.add_marker(leave_out)


@pytest.fixture(autouse=True)
def _keep_torch_as_it_was():
    """A test that changes a default of torch must not change the next test.

    One thread: the products are so small that a second one only waits, and for long on a busy machine.
    """
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(torch.float32)
