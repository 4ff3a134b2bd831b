"""Parameters that tools refuse, with the key named and without a secret: refused.txt."""

import json
import re
from pathlib import Path

import pytest

from tests.workers.rollout.tools.search.animals import ANIMALS, write_jsonl
from verl.workers.config.keys import read_keys
from verl.workers.rollout.tools.tool_box import ToolsConfig, tool_class

LINES = Path(__file__).with_name("refused.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(("tool", "params", "message"), [line.split(" | ") for line in LINES if line[0] != "#"])
def test_wrong_parameters_name_their_key_before_anything_starts(tmp_path, monkeypatch, tool, params, message):
    for name in ("BRIGHTDATA_API_KEY", "BRIGHTDATA_ZONE"):
        monkeypatch.delenv(name, raising=False)
    corpus = write_jsonl(tmp_path / "c.jsonl", ANIMALS)
    path, _, made = tool.partition(" ")
    entry = {"class_path": f"verl.workers.rollout.tools.{path}"}
    entry["params"] = json.loads(params.replace("CORPUS", str(corpus)))
    config = {"tool_instances": {"t": entry}}
    if made:
        read_keys(ToolsConfig, config, "actor_rollout_ref.rollout.tools")
    with pytest.raises(ValueError) as error:
        if made:
            tool_class("t", entry)[0](**entry["params"])
        read_keys(ToolsConfig, config, "actor_rollout_ref.rollout.tools")
    told = f"{error.value!r} {error.value.__context__!r}" if made else str(error.value)
    assert re.search(".*".join(map(re.escape, message.split("…"))), str(error.value)) and "s3cr3t" not in told
