"""Tries an agent before a run: whether it starts and asks, and whether a second run asks the same."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.fault_reports import cause_of
from verl.workers.rollout.agent.environment import AgentInstance, AgentKeys, Agents, Said, row_of_agent
from verl.workers.rollout.agent.gateway import Reply
from verl.workers.rollout.engines.interface import result_in_thread
from verl.workers.rollout.stateful import Step, result_in_time


def try_agent(keys: AgentKeys, row: Mapping[str, Any], replies: Sequence[Reply] = (), max_steps: int = 0) -> list[Step]:
    """Start the program twice with a row, and return its requests and its outcome.

    Args:
        replies: replies to its requests in turn, the last one again and again; without any, the first request is all.
        max_steps: number of replies after which a run is ended.

    Raises:
        ValueError: it cannot be started, sends no request, or sends others in the second run; names the key.
    """
    key = (
        f"environment.command={keys.command}"
        if keys.class_path is None
        else f"environment.class_path={keys.class_path}"
    )

    async def run(agents: Agents) -> list[Step]:
        instance = AgentInstance(agents, row_of_agent(row, 0), Counter())
        try:
            steps = [Step(await result_in_time(instance.reset(), keys.timeout))]
            while replies and len(steps) <= max_steps and not steps[-1].done:
                reply = replies[min(len(steps), len(replies)) - 1]
                steps.append(await result_in_time(instance.step(Said(reply)), keys.timeout))
            return steps
        finally:
            await instance.close()

    async def runs() -> list[Step]:
        agents = Agents(keys)
        try:
            await agents.start()
            first = await run(agents)
            for number, (one, other) in enumerate(zip(first, await run(agents), strict=False), 1):
                if (one.observation, one.done) != (other.observation, other.done):
                    but = "; tree=plain can train it" if number > 1 else ""
                    raise ValueError(
                        f"{key}: two runs with the same answers differ, so that trees cannot branch it{but}. "
                        f"environment.ignored leaves out what may differ. Request {number}:\n"
                        + "\nand in the second run:\n".join(around_difference(_text(one), _text(other)))
                    )
            return first
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"{key}: {cause_of(error)}") from error
        finally:
            await agents.stop()

    return result_in_thread(runs())


def around_difference(one: str, other: str, n_before: int = 200, n_after: int = 300) -> tuple[str, str]:
    """Return parts of two texts, where they first differ: some characters before and after."""
    at = max(len(os.path.commonprefix([one, other])) - n_before, 0)
    return one[at : at + n_before + n_after], other[at : at + n_before + n_after]


def _text(step: Step) -> str:
    return str(step.observation) if step.done else "\n".join(step.observation.texts)
