"""The launcher with real processes: progress, messages, and nothing left behind however the run ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.tables import table

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

# a run that starts a grandchild in a session of its own, as Ray and vLLM do, and writes its process id
GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True)
open({pid_file!r}, "w").write(str(child.pid))
{then}
"""


def hear_signals() -> None:
    """A shell starts background jobs with SIGINT ignored, nohup a test run with SIGHUP, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def launch(run_dir: Path, code: str, preexec_fn=hear_signals) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "scripts/launch.py"), str(run_dir), "--", sys.executable, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, preexec_fn=preexec_fn, **pipes)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.05)


def read_pid(path: Path) -> int:
    wait_for(path)
    return int(path.read_text())


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("then", ["raise RuntimeError('no more')", "import os; os.kill(os.getpid(), 9)", "pass"])
def test_no_orphans_when_the_run_ends(tmp_path, then):
    launcher = launch(tmp_path, GRANDCHILD.format(pid_file=str(tmp_path / "pid"), then=then))
    pid = read_pid(tmp_path / "pid")
    _, errors = launcher.communicate(timeout=60)
    assert gone(pid)
    assert (launcher.returncode == 0) == (then == "pass")
    if then != "pass":
        assert ("no more" in errors) or ("SIGKILL" in errors)
        assert "train.log" in errors and "The same command begins anew" in errors


DIES_LOUDLY = """
import signal
def end(*_):
    print("error: the fork server (process 7 on here) died, often because memory ran out", flush=True)
    time.sleep(1)
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
time.sleep(120)
"""


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_launcher_that_is_told_to_end_says_so_and_leaves_no_orphans(tmp_path, how, times):
    """A second signal comes while the processes end; what they say then is no cause."""
    launcher = launch(tmp_path, GRANDCHILD.format(pid_file=str(tmp_path / "pid"), then=DIES_LOUDLY))
    pid = read_pid(tmp_path / "pid")
    for _ in range(times):
        os.kill(launcher.pid, how)
        time.sleep(0.3)
    out, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + how and gone(pid)
    assert f"The run was ended by {how.name}. The same command begins anew" in errors
    assert "died" not in out + errors and "Traceback" not in errors


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(tmp_path):
    """A program under nohup starts with SIGHUP ignored."""
    code = f"import time; open({str(tmp_path / 'pid')!r}, 'w').write('1'); time.sleep(2)"
    launcher = launch(tmp_path, code, lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_for(tmp_path / "pid")
    os.kill(launcher.pid, signal.SIGHUP)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 0


def test_the_first_cause_is_printed_and_not_what_follows_from_it(tmp_path):
    """The program prints what Ray prints after an exception in the TaskRunner."""
    code = """
print("(TaskRunner pid=3) ray.exceptions.RayTaskError(ValueError): ray::Server.rpc()")
print("verl.utils.fault_reports.RunError: step 3: all 16 prompt groups failed; the first: ValueError: no engine")
print("ray.exceptions.RayTaskError(RunError): ray::TaskRunner.run() (pid=3)")
print("verl.utils.fault_reports.RunError: step 3: all 16 prompt groups failed; the first: ValueError: no engine")
print("SomeLaterError: the connection was closed: by the end")
raise SystemExit(1)
"""
    _, errors = launch(tmp_path, code).communicate(timeout=60)
    assert errors.count("error: step 3: all 16 prompt groups failed; the first: ValueError: no engine") == 1
    assert "SomeLaterError" not in errors and "The same command begins anew" in errors


@pytest.mark.parametrize("log", sorted((Path(__file__).parent / "logs").glob("*.log")), ids=lambda log: log.stem)
def test_the_cause_comes_first_in_the_logs_of_real_runs(tmp_path, log):
    """A file begins with the beginning of the expected line, and continues with lines of a real train.log."""
    expected, _, excerpt = log.read_text().partition("\n")
    code = f"print({excerpt!r}, end=''); raise SystemExit(1)"
    _, errors = launch(tmp_path, code).communicate(timeout=60)
    first, _ = errors.split("The run failed with exit code 1.\n")[1].split("\n", 1)
    assert first.strip().startswith(expected)


def test_a_checkpoint_that_cannot_be_loaded_is_not_said_to_resume(tmp_path):
    message = (
        "RunError: global_step_9 cannot be resumed from (damaged: x), and the same command would fail again: remove"
    )
    _, errors = launch(tmp_path, f"print({message!r}); raise SystemExit(1)").communicate(timeout=60)
    assert "would fail again" in errors and "The same command" not in errors.replace("and the same", "")


@pytest.mark.parametrize(("code", "last"), table(__file__, "last lines"))
def test_the_last_line_says_what_the_same_command_would_do(tmp_path, code, last):
    for step in (4, 12, 20):
        (tmp_path / f"global_step_{step}").mkdir(parents=True)
    for step in (4, 12):
        (tmp_path / f"global_step_{step}/COMPLETE").touch()
    _, errors = launch(tmp_path, code).communicate(timeout=60)
    assert errors.splitlines()[-1] == last


def test_progress_shows_reward_and_accuracy_and_ends_with_the_place(tmp_path):
    metrics = [{"step": n, "data": {"critic/score/mean": 0.25 * n}} for n in (1, 2)]
    metrics.append({"step": 2, "data": {"val-core/countdown/acc/mean@8": 0.625, "val-core/x/acc/mean@8": None}})
    lines = "".join(json.dumps(entry) + "\n" for entry in metrics)
    code = f"import time; open({str(tmp_path / 'metrics.jsonl')!r}, 'w').write({lines!r}); time.sleep(1.5)"
    warning = "warning: step 1, validation: 2 of 8 prompt groups failed; the first: TimeoutError"
    code += f"\nfor _ in range(2): print('\\x1b[36m(TaskRunnerV1 pid=3)\\x1b[0m {warning}')"
    out, errors = launch(tmp_path, code).communicate(timeout=60)
    assert "reward=0.500" in errors and "val acc=0.625" in errors and errors.count(warning) == 1
    assert str(tmp_path) in out and (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_killed_driver_is_named_and_errors_of_an_earlier_attempt_are_not_repeated(tmp_path):
    (tmp_path / "train.log").write_text("error: the one before\n")
    launcher = launch(tmp_path, "import os; print(os.getpid(), flush=True); os.kill(os.getpid(), 9)")
    _, errors = launcher.communicate(timeout=60)
    pid = (tmp_path / "train.log").read_text().split()[-1]
    assert launcher.returncode == 137 and f"driver (process {pid} on " in errors and "SIGKILL" in errors
    assert "the one before" not in errors


def test_a_second_run_in_the_same_folder_is_refused_and_changes_nothing(tmp_path):
    """The lock lives as long as the run: the second launcher is refused while the first one's driver lives."""
    wait_code = f"import time; open({str(tmp_path / 'pid')!r}, 'w').write('1'); time.sleep(60)"
    first = launch(tmp_path, wait_code)
    wait_for(tmp_path / "pid")
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"data":{"critic/score/mean":0.5}}\n')
    (tmp_path / "metrics.002.jsonl").touch()  # 001 has been removed
    same_folder = tmp_path.with_name("link")
    same_folder.symlink_to(tmp_path)
    second = launch(same_folder, "print('started')")
    _, errors = second.communicate(timeout=60)
    assert second.returncode == 2
    assert f"another run uses {same_folder} (process {first.pid} on {os.uname().nodename})" in errors
    assert not (tmp_path / "metrics.003.jsonl").exists() and "started" not in (tmp_path / "train.log").read_text()
    first.kill()
    first.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while (third := launch(tmp_path, "pass")).wait(timeout=60) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert third.returncode == 0 and (tmp_path / "metrics.003.jsonl").exists()


def test_a_run_without_launcher_is_refused_in_a_folder_that_another_one_uses(tmp_path, monkeypatch):
    from omegaconf import OmegaConf

    from verl.trainer.checks.run_dir import lock_run_dir

    first = launch(tmp_path, f"import time; open({str(tmp_path / 'pid')!r}, 'w').write('1'); time.sleep(60)")
    wait_for(tmp_path / "pid")
    config = OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path)}})
    with pytest.raises(ValueError, match=f"another run uses .*process {first.pid} on"):
        lock_run_dir(config)
    monkeypatch.setenv("VERL_LOCKED_DIR", str(tmp_path))  # the launcher sets this for its driver
    lock_run_dir(config)
    first.terminate()
    first.communicate(timeout=60)


LEAVES = """
import os, signal, subprocess, sys, time
for name in {names}:
    open(f"/dev/shm/{{name}}", "w").write("x" * 4096)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_shared_memory_of_killed_processes_is_removed_and_that_of_others_stays(tmp_path):
    """A file that a living process has mapped stays, and what was there before the run."""
    from multiprocessing.shared_memory import SharedMemory

    used = SharedMemory("verl_weights_test_used", create=True, size=4096)
    own = [Path(f"/dev/shm/{name}") for name in ("verl_weights_test_own", "sem.mp-test_own", "psm_test_own")]
    other = Path("/dev/shm/psm_test_other")
    try:
        other.write_text("x")
        killed = launch(tmp_path, LEAVES.format(names=[file.name for file in own]))
        _, errors = killed.communicate(timeout=60)
        assert killed.returncode == 137, errors
        assert [file for file in own if file.exists()] == []
        assert other.exists() and Path("/dev/shm", used.name).exists()
    finally:
        used.close(), used.unlink()
        for file in (*own, other):
            file.unlink(missing_ok=True)
