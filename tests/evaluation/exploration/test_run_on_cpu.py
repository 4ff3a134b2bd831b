"""The trees, measurements and errors of scripts/explore.sh on `transformers`; tests/scripts has them on vLLM."""

import asyncio
import importlib.util
import json
from contextlib import aclosing
from pathlib import Path

import pandas as pd
import pytest
import torch
from datasets import load_dataset

from recipe.common.reporting.exploration_report import table, write
from tests.evaluation.exploration.random_model import model_and_tokenizer
from tests.refusals import refused, says
from verl.evaluation.exploration.plan import ExplorationPlan, exploration_plan
from verl.evaluation.exploration.run import Diagnosis, diagnose
from verl.utils.data_files import write_mixed
from verl.utils.parts import parts
from verl.workers.rollout.engines.interface import RolloutEngine
from verl.workers.rollout.engines.local_transformers import TransformersEngine

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = ["1 2 3 = 6", "4 5 6 = 15", "7 8 9 = 24"]
# right: an even number of characters; the answer is the last one
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    right = float(len(solution_str) % 2 == ground_truth["remainder"] + 0)
    return {"score": right, "acc": right, "pred": solution_str[-1:]}
"""
TOOLS = [
    "environment=tools",
    "actor_rollout_ref.rollout.tools.call_limit=2",
    "~actor_rollout_ref.rollout.tools.tool_instances.python",
    "+actor_rollout_ref.rollout.tools.tool_instances.search.class_path=tests.composition.WordCount",
]
POLICIES = {name for name, tree in parts("tree").items() if not (tree.alias or tree.forks_at_results)}
POLICIES = POLICIES - {"plain"} | {"plain T=1.0"}
SHORT = ["n=4", "prompts=3", "temperatures=[1.0]", "data.max_response_length=20", "data.max_prompt_length=24"]
SHORT += ["actor_rollout_ref.rollout.kt.rollout_filter_steps=[3]", "actor_rollout_ref.rollout.entropy_tokens=4"]
SHORT += ["actor_rollout_ref.rollout.initial_rollouts=2", "hato.tree.max_step_tokens=5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of random weights that calls tools, data for it, and a reward."""
    folder = tmp_path_factory.mktemp("explore")
    model, tokenizer = model_and_tokenizer()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    messages = [[{"role": "user", "content": text}] for text in PROMPTS]
    truths = [{"ground_truth": {"remainder": 0}}] * len(PROMPTS)
    data = {"prompt": messages, "data_source": "parity", "reward_model": truths}
    pd.DataFrame(data).to_parquet(folder / "data.parquet")
    return folder


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("explore", ROOT / "scripts/explore.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def planned(folder, script):
    def planned(*overrides: str, data: str = "data.parquet") -> ExplorationPlan:
        reward = f"reward.custom_reward_function.path={folder}/reward.py"
        config = script.config_of(f"{folder}/model", f"{folder}/{data}", [*SHORT, reward, *overrides])
        return exploration_plan(config)

    return planned


class Counting(RolloutEngine):
    def __init__(self):
        self.engine, self.tokens = TransformersEngine(*model_and_tokenizer()), 0

    async def generate(self, request):
        generation = await self.engine.generate(request)
        self.tokens += len(generation.token_ids)
        return generation


def groups_of(plan: ExplorationPlan, name: str):
    async def grown():
        engine = Counting()
        async with aclosing(Diagnosis(plan, engine)) as diagnosis:
            groups, _ = await diagnosis.groups_of(name, plan.policies[name])
        return groups, engine.tokens

    return asyncio.run(grown())


@pytest.mark.parametrize("policy", ["plain T=1.0", "latr", "eptree", "tree_grpo", "hato", "arpo", "aepo"])
def test_groups_are_scored_and_every_step_is_the_models(planned, policy):
    plan = planned(*TOOLS)
    groups, tokens = groups_of(plan, policy)
    model, tokenizer = model_and_tokenizer()
    assert all(group.metrics["tool_calls"] > 0 for group in groups)
    assert sum(group.generated for group in groups) == tokens
    by_tools = 0
    for group, text in zip(groups, PROMPTS, strict=True):
        assert text in tokenizer.decode(group.prompt_ids)
        assert 1 <= len(group.trajectories) <= 4
        for row in group.trajectories:
            response = tokenizer.decode(row.tokens, skip_special_tokens=True)
            assert row.right == (len(response) % 2 == 0) and row.answer == response[-1:]
            ids = torch.tensor([[*group.prompt_ids, *row.tokens]])
            with torch.no_grad():
                probs = model(ids).logits[0, len(group.prompt_ids) - 1 : -1].softmax(-1)
            assert len(row.steps) == len(probs)
            for step, expected in zip(row.steps, probs, strict=True):
                by_tools += step is None
                if step is not None:
                    assert (step.first, step.second) == pytest.approx(expected.topk(2).values.tolist(), abs=1e-4)
                    exact = float(-(expected * expected.clamp(min=1e-30).log()).sum())
                    assert step.entropy == pytest.approx(exact, abs=0.15)  # from the 20 most likely tokens
    assert by_tools > 0


def test_all_rows_proposals_and_files(planned, tmp_path):
    plan = planned(*TOOLS)
    result = asyncio.run(diagnose(plan, TransformersEngine(*model_and_tokenizer())))
    names = [row["policy"] for row in result["rows"]]
    assert set(plan.policies) == {*POLICIES, "arpo", "aepo"}
    assert names == [*plan.policies]
    arpo, latr = result["proposals"]
    # a run takes the proposed overrides
    again = planned(*TOOLS, *latr["overrides"].split(), *arpo["overrides"].split())
    rollout = again.policies["latr"].actor_rollout_ref.rollout
    assert f"kt.prob_filter_abs_thres={rollout.kt.prob_filter_abs_thres} " in latr["overrides"]
    assert again.config.actor_rollout_ref.rollout.branch_policy == "threshold"
    files = write(result, plan.describe(), 4, tmp_path / "new/explore_parity")
    assert [file.suffix for file in files] == [".md", ".json"] and all(file.stat().st_size for file in files)
    plain = result["rows"][0]
    rates = [rate for _, rate in result["solve_rates"]]
    assert [row for row, _ in result["solve_rates"]] == [0, 1, 2] and sum(rates) / 3 == pytest.approx(plain["accuracy"])
    assert sum(0 < rate < 1 for rate in rates) / 3 == pytest.approx(plain["mixed"])
    assert json.loads(files[1].read_text())["rows"] == json.loads(json.dumps(result["rows"]))
    lines = table(result["rows"], 4).splitlines()
    assert len(lines) == 2 + len(names) and len({line.count("|") for line in lines}) == 1
    assert all(line in files[0].read_text() for line in [*lines, latr["overrides"], arpo["overrides"]])


@pytest.mark.parametrize(
    "infos", [None, [{"index": i, "solve_rate": 0.9} for i in range(3)], [{"index": 1}, None, None]]
)
def test_mixed_rows_are_written_as_they_are_with_their_rate(folder, tmp_path, infos):
    table = pd.read_parquet(folder / "data.parquet")
    table = table if infos is None else table.assign(extra_info=infos)
    source, target = tmp_path / "all.parquet", tmp_path / "new/mixed.parquet"
    table.to_parquet(source)
    assert "0 of 2 prompts tried" in write_mixed(source, target, {0: 0.0, 1: 1.0}) and not target.exists()
    message = write_mixed(source, target, {0: 0.25, 1: 1.0, 2: 0.75})
    assert message.startswith(f"2 of 3 prompts tried are mixed ({source} has 3 rows)") and message.endswith(
        f"written: {target}"
    )
    written, kept = (load_dataset("parquet", data_files=str(file), split="train") for file in (target, source))
    for row, number, rate in zip(written, (0, 2), (0.25, 0.75), strict=True):
        own = dict(kept[number])
        assert row == own | {
            "extra_info": (own.get("extra_info") or dict.fromkeys(infos[0]) if infos else {}) | {"solve_rate": rate}
        }


def test_the_plan(planned):
    assert [prompt.number for prompt in planned("prompts=99").prompts] == [0, 1, 2]
    plan = planned("prompts=2", "seed=3")
    assert [prompt.number for prompt in plan.prompts] == sorted(prompt.number for prompt in plan.prompts)
    assert next(iter(plan.policies)) == "plain T=1.0" and set(plan.policies) == POLICIES
    # one tree of n = 4 has four leaves
    assert plan.config.actor_rollout_ref.rollout.custom.eptree.M == 1
    eight = planned("actor_rollout_ref.rollout.n=8").config
    assert (eight.n, eight.actor_rollout_ref.rollout.custom.tree_grpo.M) == (8, 2)
    assert "2 prompts" in plan.describe()[1] and "reward.py" in plan.describe()[2]
    more = planned("~policies.hato", "+policies.loose={tree: latr, kt: {prob_filter_abs_thres: 0.05}}")
    assert "hato" not in more.policies
    thresholds = [more.policies[name].actor_rollout_ref.rollout.kt.prob_filter_abs_thres for name in ("latr", "loose")]
    assert thresholds == [0.25, 0.05]


@pytest.mark.parametrize(("overrides", "message"), refused(str(Path(__file__).parent), "explore"))
def test_wrong_settings_are_named(planned, overrides, message):
    with pytest.raises(ValueError) as error:
        planned(*overrides.split())
    assert says(error.value, message)


def test_a_row_that_the_reward_does_not_fit_is_named(planned, folder):
    table = pd.read_parquet(folder / "data.parquet")
    table["data_source"] = ["parity", "odd", "odd"]
    table["reward_model"] = [{"ground_truth": truth} for truth in ({"remainder": 0}, {"rest": 1}, {"rest": 1})]
    table.to_parquet(folder / "bad.parquet")
    with pytest.raises(ValueError, match="row 1: reward.custom_reward_function fails with it: TypeError"):
        planned(data="bad.parquet")


def test_the_task_is_that_of_the_data(script, folder):
    table = pd.read_parquet(folder / "data.parquet")
    table["data_source"] = "walk"
    table.to_parquet(folder / "walk.parquet")
    config = script.config_of("model", f"{folder}/walk.parquet", [])
    assert config.reward.custom_reward_function.path == "pkg://recipe.tasks.walk.reward"
    config = script.config_of("model", f"{folder}/walk.parquet", ["task=countdown"])
    assert config.reward.custom_reward_function.path == "pkg://recipe.tasks.countdown.reward"
    config = script.config_of("model", f"{folder}/data.parquet", [])
    assert config.reward.custom_reward_function.path is None
