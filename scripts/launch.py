"""Starts a run as a child process, shows its progress, and ends all of its processes when it ends.

    python scripts/launch.py RUN_DIR -- python -m verl.trainer.main_ppo ...

The run's output goes to RUN_DIR/train.log, its metrics to RUN_DIR/metrics.jsonl (verl's file logger), its curves to
RUN_DIR/curves.png. One run at a time uses RUN_DIR. However the run ends, even by a SIGKILL of one of its processes, the
launcher ends every process that the run started, and removes its shared memory. VERBOSE=1 shows the whole output. The
exit code is the run's own.
"""

import contextlib
import ctypes
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "fork_server"))
import fork_server  # noqa: E402

hold_folder = runpy.run_path(str(HERE.parent / "verl/utils/folder_lock.py"))["hold_folder"]

PR_SET_CHILD_SUBREAPER = 36
LAST_LINES = 15
# Beginning of Hydra's line about a run that failed after its config was composed; it only repeats the arguments.
JOB_FAILED = "Error executing job with overrides"
# Exit code of a run whose config or files its own checks refuse (verl/trainer/checks/callback.py).
REFUSED = 2
LOOK_SECONDS = 0.5
# A warning of the run, also as Ray prints that of another process.
WARNED = re.compile(r"^(?:\(\w+ pid=[^)]*\) )?(warning: .*)", re.MULTILINE)
# The last line of a traceback in another process, as Ray prints it; vLLM puts its own head before each line.
RAISED = re.compile(
    r"\((\w+) pid=(\d+)[^)]*\) (?:ERROR \S+ \S+ \[\S+\] )?([\w.]*(?:Error|Exception|Exit|Interrupt)\b.*)"
)
# Exceptions that only follow from another process's exception or death, and the text about such a death.
FOLLOWS = re.compile(r"EngineDead|EngineGenerate|RayTask|RayActor|ActorDied|ActorUnavailable|WorkerCrashed|Cancelled")
DIED = "died, often because memory ran out"
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHARED_MEMORY = Path("/dev/shm")
# Beginnings of names in it: weights on their way to vLLM (a whole bucket), and multiprocessing's semaphores and memory.
SHARED_NAMES = ("verl_weights_", "sem.mp-", "psm_")
# Inodes of the host's own namespaces. With the first, but not the second, as with `docker run --ipc=host`, other
# containers' processes may use /dev/shm.
HOST_IPC, HOST_PID = 0xEFFFFFFF, 0xEFFFFFFC


class Interrupted(BaseException):
    """Raised when a user or a scheduler ends the launcher by a signal; the exception's argument is the signal."""


def ignore_endings() -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP from now on, so that none interrupts the clean-up and the final messages."""
    for ending in ENDINGS:
        signal.signal(ending, signal.SIG_IGN)


def interrupt(number: int, frame) -> None:
    """Raise `Interrupted` at the first signal; later signals are ignored."""
    ignore_endings()
    raise Interrupted(signal.Signals(number))


def shared_memory() -> set[str]:
    """Return the names of all files in /dev/shm."""
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def remove_unused_memory(keep: set[str]) -> None:
    """Remove this user's files in /dev/shm, of `SHARED_NAMES`, that no process has mapped, except `keep`: killed
    processes leave them, and they stay until the machine restarts."""
    unused = {name for name in shared_memory() - keep if name.startswith(SHARED_NAMES)}
    ipc, pid = (os.stat(f"/proc/self/ns/{kind}").st_ino if unused else 0 for kind in ("ipc", "pid"))
    if not unused or ipc == HOST_IPC and pid != HOST_PID:
        return
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            unused -= {line.rpartition("/")[2] for line in maps.read_text(errors="replace").splitlines()}
    for name in unused:
        with contextlib.suppress(OSError):  # removed meanwhile
            if (SHARED_MEMORY / name).stat().st_uid == os.getuid():
                (SHARED_MEMORY / name).unlink()


def keep_earlier_metrics(run_dir: Path) -> None:
    """Rename an earlier attempt's metrics.jsonl to metrics.001.jsonl and so on; verl's file logger would empty it."""
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        last = max((path.suffixes[0] for path in run_dir.glob("metrics.[0-9]*.jsonl")), default=".0")
        os.replace(metrics, run_dir / f"metrics.{int(last[1:]) + 1:03d}.jsonl")


def steps_announced(log: Path) -> int | None:
    """Return the run's total number of steps, which the trainer prints at the start; None if it is not in the log."""
    announced = re.findall(r"[Tt]otal training steps: (\d+)", log.read_text(errors="replace")) if log.exists() else []
    return int(announced[-1]) if announced else None


class Progress:
    """A progress bar with reward and accuracy. It follows the growing metrics file."""

    def __init__(self, metrics: Path, total: int | None = None):
        self.metrics, self.total, self.offset = metrics, total, 0
        self.bar: tqdm | None = None  # created at the first entry, so that its rate leaves out the start-up
        self.shown: dict[str, str] = {}

    def update(self) -> None:
        if not self.metrics.exists():
            return
        with open(self.metrics) as file:
            file.seek(self.offset)
            for line in file:
                if line.endswith("\n"):
                    self.offset += len(line.encode())
                    with contextlib.suppress(json.JSONDecodeError):  # cut by a full disk
                        self._show(json.loads(line))

    def _show(self, entry: dict) -> None:
        data = entry["data"]
        reward = data.get("critic/score/mean", data.get("train/loss"))
        if reward is not None:
            self.shown["reward" if "critic/score/mean" in data else "loss"] = f"{reward:.3f}"
        for key, value in data.items():
            if re.fullmatch(r"val-core/.*/acc/mean@\d+", key) and value is not None:  # the file has null for NaN
                self.shown["val acc"] = f"{value:.3f}"
        if self.bar is None:
            self.total = self.total or steps_announced(self.metrics.with_name("train.log"))
            options = {"desc": "training", "unit": "step", "dynamic_ncols": True, "smoothing": 0.1}
            self.bar = tqdm(total=self.total, initial=entry["step"], **options)
        self.bar.set_postfix(self.shown, refresh=False)
        self.bar.update(entry["step"] - self.bar.n)
        self.bar.refresh()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def end_descendants(grace_seconds: float = 5.0) -> int:
    """Send SIGTERM to all descendants of this process, and SIGKILL after the grace time. Return their number."""
    descendants = psutil.Process().children(recursive=True)
    for process in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(descendants, timeout=grace_seconds)
    while alive := [p for p in {*alive, *psutil.Process().children(recursive=True)} if p.is_running()]:
        # Resource trackers free shared memory after the processes that use it have ended, so they are ended last.
        users = [process for process in alive if not _is_resource_tracker(process)]
        for process in users or alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _, alive = psutil.wait_procs(alive, timeout=1)
    return len(descendants)


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:  # the process has just ended
        return False


def wait(run: subprocess.Popen, progress: Progress) -> int:
    """Wait for the end of the run, and show its progress. Return its exit code."""
    while run.poll() is None:
        progress.update()
        time.sleep(LOOK_SECONDS)
    progress.update()
    progress.close()
    return run.returncode


def log_text(run_dir: Path, start: int) -> str:
    """Return the log from a byte on, without colors."""
    return re.sub(r"\x1b\[[0-9;]*m", "", (run_dir / "train.log").read_bytes()[start:].decode(errors="replace"))


def report_failure(run_dir: Path, start: int, pid: int, code: int) -> None:
    """Print why the run ended: its `error:` lines and `RunError`s, else its last exceptions, else the log's last lines;
    and above these the exception of another process that caused them (see `first_cause`). `start` is the length of the
    log, in bytes, before this run began, and `pid` the process id of the run's driver."""
    plain = log_text(run_dir, start).splitlines()
    causes = [line for line in plain if re.search(r"^(error:|.*(Error|Exception|Died|died)\b.*:)", line)]
    causes = [line for line in causes if not line.startswith(JOB_FAILED)]
    if code < 0:
        how = f"'s driver (process {pid} on {os.uname().nodename}) was ended by signal {signal.Signals(-code).name}"
    else:
        how = f" failed with exit code {code}"
    print(f"\nThe run{how}.", file=sys.stderr)
    errors = [line for line in causes if line.startswith("error:")]
    for match in filter(None, (re.search(r"\bRunError: (.*)", line) for line in plain)):
        if not any(match[1] in error for error in errors):  # the driver's watch may also have printed it
            errors.append(f"error: {match[1]}")
    lines = first_cause(errors, plain) + (errors or causes[-3:])
    for line in lines or plain[-LAST_LINES:]:
        print(f"  {line[:800]}", file=sys.stderr)
    print(f"Whole log: {run_dir / 'train.log'}", file=sys.stderr)
    text = "\n".join(plain)
    if "Failed to connect to Ray cluster" in text:
        print(
            f"RAY_ADDRESS={os.environ.get('RAY_ADDRESS')} names the cluster; unset it for one of the run's own.",
            file=sys.stderr,
        )
    composed = JOB_FAILED in text or "HYDRA_FULL_ERROR=1 for a complete stack trace" not in text
    if code == REFUSED or not composed:
        print("Nothing was started: correct the command or the file.", file=sys.stderr)
    elif not any(re.search("would fail again|nothing is left", line) for line in errors):
        print(next_start(run_dir), file=sys.stderr)


def next_start(run_dir: Path) -> str:
    """Return a sentence on where the same command would begin."""
    complete = [int(marker.parent.name.rpartition("_")[2]) for marker in run_dir.glob("global_step_*/COMPLETE")]
    if complete:
        return f"The same command resumes after step {max(complete)}, of which it has the last complete checkpoint."
    if (run_dir / "latest_checkpointed_iteration.txt").exists():  # supervised training writes no markers
        return "The same command resumes from the last checkpoint."
    return "The same command begins anew: there is no complete checkpoint yet."


def first_cause(errors: list[str], log: list[str]) -> list[str]:
    """Return a line with the exception that caused the errors, raised in a process that Ray or vLLM started; an empty
    list if no error says that a process died or that a call to one failed, or if the log has no exception of that
    process. `errors` are the run's own `error:` lines; without any, the first exception of any process is the cause."""
    text = " ".join(errors)
    if errors and DIED not in text and not FOLLOWS.search(text):
        return []
    raised = [match.groups() for line in log if (match := RAISED.search(line)) and not FOLLOWS.search(match[3])]
    if "Engine" in text:
        raised = [error for error in raised if error[0].startswith("EngineCore")]
    elif errors:
        raised = [error for error in raised if f"process {error[1]} on" in text]
    return [f"error: {name} (process {pid}) raised {error}" for name, pid, error in raised[:1]]


def draw_curves(run_dir: Path, python: str, environment: dict[str, str]) -> str:
    """Draw RUN_DIR/curves.png and return its name; "" if it cannot be drawn, which does not make the run fail. Where
    `python` is a fork server's client, a fork has made the imports."""
    command = [python, str(HERE / "plot_run.py"), str(run_dir)]
    drawn = subprocess.run(command, env=environment, capture_output=True, text=True)
    if drawn.returncode == 0:
        return "curves.png"
    *_, message = drawn.stderr.splitlines() or [f"exit code {drawn.returncode}"]
    print(f"no curves: {message[:800]}", file=sys.stderr)
    return ""


def main(arguments: list[str]) -> int:
    if len(arguments) < 3 or arguments[1] != "--":
        print(__doc__, file=sys.stderr)
        return 2
    run_dir, command = Path(arguments[0]), arguments[2:]
    try:
        lock = hold_folder(run_dir)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    before = shared_memory()
    keep_earlier_metrics(run_dir)
    # This process becomes the parent of every descendant whose own parent dies.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for ending in ENDINGS:
        if signal.getsignal(ending) != signal.SIG_IGN:  # nohup and background jobs ignore the signal
            signal.signal(ending, interrupt)
    verbose = os.environ.get("VERBOSE", "0") not in ("", "0")
    # If the option is repeated, the last one counts, as in Hydra.
    totals = [int(a.split("=")[1]) for a in command if re.fullmatch(r"trainer.total_training_steps=\d+", a)]
    steps = totals[-1] if totals else None
    print(f"starting; output in {run_dir / 'train.log'}", file=sys.stderr)
    with open(run_dir / "train.log", "ab") as log:
        start = log.tell()
        output = None if verbose else log
        try:
            environment, python = os.environ | {"VERL_LOCKED_DIR": os.path.realpath(run_dir)}, sys.executable
            if environment.get("VERL_PLATFORM") == "cpu" and command[0] == "python":
                environment |= fork_server.start(log)[0]
                python = command[0] = str(fork_server.CLIENT)
            with_launcher = partial(fork_server.end_with_parent, signal.SIGTERM)
            progress = Progress(run_dir / "metrics.jsonl", steps)
            options = {"stdout": output, "stderr": output, "env": environment, "pass_fds": [lock]}
            run = subprocess.Popen(command, preexec_fn=with_launcher, **options)
            code = wait(run, progress)
            ignore_endings()
            curves = "" if code else draw_curves(run_dir, python, environment)
        except Interrupted as interrupted:
            (number,) = interrupted.args
            end_descendants()
            print(f"\nThe run was ended by {number.name}. {next_start(run_dir)}", file=sys.stderr)
            return 128 + number
        finally:
            ignore_endings()
            end_descendants()
            remove_unused_memory(keep=before)
    if code:
        report_failure(run_dir, start, run.pid, code)
        return code if code > 0 else 128 - code
    for warning in dict.fromkeys(WARNED.findall(log_text(run_dir, start))):
        print(warning[:800], file=sys.stderr)
    print(", ".join(filter(None, (f"Results in {run_dir}: metrics.jsonl", "train.log", curves))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
