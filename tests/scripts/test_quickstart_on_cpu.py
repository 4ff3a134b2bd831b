"""scripts/quickstart.sh refuses what it does not know before it sets anything up; a run of it takes minutes."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_an_unknown_recipe_is_named():
    env = {**os.environ, "RECIPE": "grpo"}
    output = subprocess.run(
        ["bash", "scripts/quickstart.sh"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )
    assert output.returncode == 2 and output.stdout == ""
    assert output.stderr == "error: RECIPE=grpo: choose hato, latr, hapo or arpo\n"
