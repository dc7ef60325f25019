"""The command line: exit codes, one sentence for what cannot be done, and a clean end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from replay_cases import CONVERSATION, write_trace

import msa_icp
from msa_icp import cli, dispatch, verify
from msa_icp.indexer import MSAIcpDecodeStep
from msa_icp.replay import plan as plan_module
from msa_icp.replay import terminal
from msa_icp.replay.errors import RankFailure
from msa_icp.replay.plan import make_plan
from msa_icp.replay.trace import load_trace

SMALL = ["--in-process", "--sparse-layers", "2", "--max-batch", "4", "--prefill-tokens", "64"]


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    captured = capsys.readouterr()
    assert captured.err.startswith("msa-icp: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err + captured.out
    return captured.err.strip()


def test_replay_ends_with_a_table_and_a_report(tmp_path, capsys):
    folder = tmp_path / "report"
    assert run("replay", write_trace(tmp_path), *SMALL, "--legacy", "--report", folder) == 0
    out = capsys.readouterr().out
    assert "Replay of trace.jsonl" in out
    assert "rows wrong" in out
    assert "prefill" in out
    assert "(--prefill-tokens 64)" in out
    assert sorted(path.name for path in folder.iterdir()) == ["bytes.png", "selection.png", "summary.json"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["requests"] == len(CONVERSATION)
    assert summary["row_form"] == "legacy"
    assert summary["rows_checked"] > summary["prefill_rows_checked"] > 0 == summary["rows_wrong"]
    assert summary["chunk_tokens"] == 512
    assert summary["prefill_tokens_limit"] == 64


def test_an_azure_trace_is_replayed_too(tmp_path, capsys):
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,700,5\n")
    assert run("replay", path, *SMALL, "--world-size", 2, "--page-size", 256, "--query-len", 2) == 0
    assert "1 of 1 admitted, 1 finished" in capsys.readouterr().out


def test_a_wrong_selection_is_exit_code_1(tmp_path, capsys, monkeypatch):
    merge = MSAIcpDecodeStep.merge

    def wrong(step, *, slot):
        merge(step, slot=slot)
        step.output[0, 0, 0] += 1

    monkeypatch.setattr(MSAIcpDecodeStep, "merge", wrong)
    assert run("replay", write_trace(tmp_path), *SMALL, "--decode-steps", 2) == 1
    assert "first: step 1, request 0, position 1100" in " ".join(
        capsys.readouterr().out.replace("│", "").split()
    )


def test_a_failed_rank_is_exit_code_1(tmp_path, capsys, monkeypatch):
    def fail(plan, progress):
        raise RankFailure("rank 3: killed by SIGKILL", "")

    monkeypatch.setattr(terminal, "replay", fail)
    assert run("replay", write_trace(tmp_path), *SMALL) == 1
    assert sentence(capsys) == "msa-icp: rank 3: killed by SIGKILL"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--world-size", "3"], "--world-size must be 2 or 4, was 3"),
        (["--world-size", "four"], "Invalid value for '--world-size'"),
        (["--page-size", "100"], "--page-size must be 128 or 256, was 100"),
        (["--query-len", "0"], "--query-len must be from 1 to 8, was 0"),
        (["--max-context", "2000000"], "--max-context must be from 1 to 1048576, was 2000000"),
        (["--backend", "magic"], "--backend must be one of cake, auto, torch"),
        (["--check-every", "-1"], "--check-every must be from 0"),
        (["--chunk-tokens", "9000"], "--chunk-tokens must be from 1 to 8192, was 9000"),
        (["--prefill-tokens", "0"], "--prefill-tokens must be from 1 to 1048576, was 0"),
        (["--frobnicate"], "No such option: --frobnicate"),
        (["--report", "/dev/null/x"], "--report /dev/null/x cannot be made a folder"),
    ],
)
def test_an_option_that_makes_no_sense_is_one_sentence(tmp_path, capsys, arguments, expected):
    assert run("replay", write_trace(tmp_path), *SMALL, *arguments) == 2
    assert expected in sentence(capsys)


def test_a_broken_trace_is_one_sentence(tmp_path, capsys):
    path = write_trace(tmp_path)
    path.write_text(path.read_text() + '{"timestamp": 5}\n')
    assert run("replay", path, *SMALL) == 2
    assert sentence(capsys) == f"msa-icp: {path}, line {len(CONVERSATION) + 1}: input_length is missing"
    assert run("replay", tmp_path / "none") == 2
    assert "cannot be read: No such file or directory" in sentence(capsys)


def test_commands_that_are_not_there(capsys):
    for arguments in ([], ["dance"], ["replay"]):
        assert run(*arguments) == 2
        assert "Try: msa-icp --help" in sentence(capsys)
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("replay", "demo", "doctor", "verify"))


def test_a_context_that_does_not_fit_in_memory_is_one_sentence(tmp_path, capsys, monkeypatch):
    million = [(0, 2**20 - 8, 8, list(range(2048)))]
    trace = write_trace(tmp_path, million)
    assert run("replay", trace, "--max-context", 2**20, "--sparse-layers", 1000) == 2
    assert "this machine has" in sentence(capsys)
    monkeypatch.setattr(plan_module, "available_bytes", lambda: 2**30)
    assert run("replay", trace, "--max-context", 2**20, "--in-process", "--sparse-layers", 1) == 2
    said = sentence(capsys)
    assert said.startswith("msa-icp: contexts up to 1048576 tokens with --max-batch 16")
    assert "this machine has 1.0 GiB available" in said


def test_the_demo_replays_the_shipped_trace_on_four_ranks(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(
        terminal,
        "replay_trace",
        lambda trace, options, folder: seen.append((make_plan(load_trace(trace), options), folder)) or 0,
    )
    assert run("demo", "--report", tmp_path) == 0
    ((plan, folder),) = seen
    assert folder == tmp_path
    assert plan.options.world_size == 4
    assert not plan.options.in_process
    assert plan.skipped == 0
    assert plan.options.check_every > 0


def test_doctor_lists_the_backends_with_reasons(capsys, monkeypatch):
    assert run("doctor") == 0
    out = capsys.readouterr().out
    assert f"msa-icp {msa_icp.__version__}" in out
    assert "torch" in out
    monkeypatch.setattr(dispatch, "backends", lambda device: {"torch": "it is Monday"})
    assert run("doctor") == 1
    assert "it is Monday" in capsys.readouterr().out


def test_verify_is_handed_on(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(verify, "run", lambda *given, **choice: seen.append((given, choice)) or 1)
    assert run("verify", "--backend", "torch") == 1
    assert seen == [(("torch", "cpu"), {"only": None, "quick": False, "traces": False})]
    assert run("verify", "--only", "prefill", "--quick", "--traceback") == 1
    assert seen[1:] == [((None, "cpu"), {"only": "prefill", "quick": True, "traces": True})]
    assert run("verify", "--only", "both") == 2
    assert sentence(capsys) == "msa-icp: --only must be decode or prefill, was both"
    assert run("verify", "--device", "abacus") == 2
    assert sentence(capsys) == "msa-icp: --device must be a device of torch, was abacus"


# ---------------------------------------------------------------- as a program


def start(*arguments: object) -> subprocess.Popen[bytes]:
    """The command in a process group of its own, as a terminal starts it; its progress shows on a pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "msa_icp", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "FORCE_COLOR": "1"},
        start_new_session=True,
    )


def wait_for(process: subprocess.Popen[bytes], word: bytes) -> bytes:
    """What the command printed until `word` came."""
    assert process.stdout is not None
    seen = b""
    while word not in seen:
        part = os.read(process.stdout.fileno(), 65536)
        assert part, f"ended without saying {word!r}: {seen!r}"
        seen += part
    return seen


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    return write_trace(tmp_path, [(0, 1500, 90_000, [0, 1, 2])])


def test_ctrl_c_in_a_terminal_leaves_a_report_and_nothing_else(endless, tmp_path):
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    with start(
        "replay", endless, "--sparse-layers", 1, "--check-every", 50, "--report", tmp_path / "r"
    ) as process:
        wait_for(process, b"decoding")
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 4
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert b"interrupted" in out
    assert b"Traceback" not in out
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert 0 < summary["decode_steps"] < summary["decode_steps_planned"]
    assert summary["rows_checked"] > 0 == summary["rows_wrong"]
    assert not psutil.wait_procs(children, timeout=10)[1]
    if before:
        assert set(os.listdir("/dev/shm")) <= before


def test_ranks_end_when_the_command_is_killed(endless):
    with start("replay", endless, "--sparse-layers", 1, "--world-size", 2, "--check-every", 0) as process:
        wait_for(process, b"decoding")
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        gone, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    assert len(gone) >= 2


def test_without_the_extra_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; import msa_icp.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'msa-icp[cli]'" in done.stderr
