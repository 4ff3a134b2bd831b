"""Plays an environment by hand, and checks that trees can grow in it.

python -m recipe.common.try_environment recipe.lights.lights.Lights '{"on": [false, true, false]}' 1 3 2

It shows what the class, or the OpenEnv server at a URL, returns for the task and the actions. Then it takes the actions
again in a second instance, and in copies if the class has them, and says where these return something else.
"""

import argparse
import json
import sys

from verl.workers.rollout.gym.environment import GymKeys
from verl.workers.rollout.run_environment import try_gym


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", help="environment.class_path, or environment.url")
    parser.add_argument("task", type=json.loads, help="extra_info.environment of a row, as JSON")
    parser.add_argument("actions", nargs="*")
    arguments = parser.parse_args()
    key = "url" if "://" in arguments.environment else "class_path"
    try:
        steps = try_gym(GymKeys(**{key: arguments.environment}), arguments.task, arguments.actions)
    except ValueError as error:
        sys.exit(f"error: {error}")
    for action, step in zip(["reset", *arguments.actions], steps, strict=False):
        print(f"{action}: {step.observation}", *[] if step.reward is None else [f"(reward {step.reward:g})"])
    print("done" if steps[-1].done else "not done")


if __name__ == "__main__":
    main()
