"""Awaits code that users write: rewards, policies, tools.

asyncio lets SystemExit and KeyboardInterrupt of a task escape from the event loop, which then serves no other task
(`asyncio.tasks.Task.__step`). A reward that calls `sys.exit` would therefore stop its whole worker in silence.
"""

import asyncio
import math
import numbers
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


class UserCodeExit(RuntimeError):
    """User code raised an exception that is no `Exception`, such as SystemExit."""


async def guarded(call: Awaitable[T], name: str) -> T:
    """Await user code and return its result; an exception that is no `Exception` becomes UserCodeExit with `name`. This
    guards the caller's task; `guard_tasks` guards those that it makes."""
    try:
        return await call
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise UserCodeExit(f"{name} raised {error!r}") from error


def guard_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Guard every task that is made in an event loop from now on, including tasks that user code makes."""
    if loop.get_task_factory() is not _guarded_task:
        loop.set_task_factory(_guarded_task)


def _guarded_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(guarded(coroutine, "a task"), loop=loop, **options)


def finite_number(value: Any, name: str) -> float:
    """Return a real number, such as a reward or a scalar of numpy or torch, as a float; else raise ValueError."""
    number = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    if not isinstance(number, numbers.Real) or not math.isfinite(number):
        raise ValueError(f"{name} is {value!r}, expected a finite number")
    return float(number)
