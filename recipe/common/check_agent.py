"""Runs an agent (docs/agents.md) twice on one row with the same answers, and says whether trees can branch it.

python -m recipe.common.check_agent --class-path recipe.sums.my_agent.run --answer "I am done."
python -m recipe.common.check_agent --row '{"prompt": [{"role": "user", "content": "2 + 2?"}]}' -- python my_agent.py

The answers are given in turn, the last one again and again; an answer that is a JSON list of [name, arguments] is a
call of tools. It shows each request's last message. Where the second run sends another request, it shows both.
"""

import argparse
import json
import sys

from verl.workers.rollout.agent.environment import AgentKeys
from verl.workers.rollout.agent.gateway import Reply
from verl.workers.rollout.run_environment import try_agent

ROW = {"prompt": [{"role": "user", "content": "What is 2 + 2?"}]}


def reply_of(answer: str) -> Reply:
    """Return an answer as a reply: a text, or calls as a JSON list of [name, arguments]."""
    try:
        calls = [(name, json.dumps(arguments)) for name, arguments in json.loads(answer)]
        return Reply("", tuple(calls), "tool_calls")
    except (ValueError, TypeError):
        return Reply(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="*", help="environment.command, after --")
    parser.add_argument("--class-path", help="environment.class_path, instead")
    parser.add_argument("--row", type=json.loads, default=ROW, help="a row of the data, as JSON")
    parser.add_argument("--answer", action="append", help="what the model says; may be given several times")
    parser.add_argument("--ignored", action="append", default=[], help="environment.ignored")
    parser.add_argument("--max-steps", type=int, default=20, help="answers after which a run is ended")
    options = parser.parse_args()
    replies = [reply_of(answer) for answer in options.answer or ["I do not know."]]
    try:
        keys = AgentKeys(command=options.command or None, class_path=options.class_path, ignored=options.ignored)
        steps = try_agent(keys, options.row, replies, options.max_steps)
    except ValueError as error:
        sys.exit(f"error: {error}")
    for number, step in enumerate(steps, 1):
        if step.done:
            print(f"result: {step.observation.result or step.observation.failed}")
        else:
            print(f"request {number}: {step.observation.messages[-1]['content']}")
    print("Two runs with the same answers send the same requests: trees can branch it (environment.replay=true).")


if __name__ == "__main__":
    main()
