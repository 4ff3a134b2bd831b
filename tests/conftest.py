"""Settings, hooks and fixtures of every test process."""

import asyncio
import gc
import inspect
import logging
import os

import pytest
import yaml

pytest.register_assert_rewrite("tests.conformance")

# imports make a million objects that stay: collections would look through them in vain
gc.disable()

# Hydra composes some hundred configs: libyaml reads their files ten times as fast as the parser in Python
yaml.SafeLoader = yaml.CSafeLoader

# scripts/environment.sh sets this for runs without GPUs
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

# these wait for minutes in all: begun last, they would wait when nothing else is left to do
FIRST = ("test_python_tool_on_cpu.py", "test_watches_on_cpu.py")


@pytest.fixture(autouse=True)
def loggers_of_a_new_process():
    """Undo what code under an earlier test did to loggers, as an entry point sets up those of its whole process."""
    logging.getLogger().setLevel(logging.WARNING)
    verl = logging.getLogger("verl")
    verl.handlers, verl.level, verl.propagate = [], logging.NOTSET, True
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.disabled = False


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine function in an event loop of its own."""
    test = pyfuncitem.obj
    if inspect.iscoroutinefunction(test):
        asyncio.run(test(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}))
        return True


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in FIRST)


def pytest_collection_finish():
    gc.freeze()
    # configs are thousands of small objects: with Python's own thresholds collections take a twentieth of the time
    gc.set_threshold(200_000, 20, 50)
    gc.enable()


def pytest_terminal_summary(terminalreporter):
    """Append why tests were skipped, a line for each test, to the file that scripts/test.sh names by SKIPPED_TESTS."""
    file = os.environ.get("SKIPPED_TESTS")
    is_process_of_xdist = hasattr(terminalreporter.config, "workerinput")
    if file and not is_process_of_xdist:
        # a skipped test's report holds file, line and "Skipped: reason"
        reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])]
        with open(file, "a", encoding="utf-8") as lines:
            lines.writelines(" ".join(reason.split()) + "\n" for reason in reasons)
