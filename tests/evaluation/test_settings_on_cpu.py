"""An evaluation asks with the chat template's options of the checkpoint's run, and reports all its settings."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from recipe.common.tiny_model import write_tiny_model
from tests.configs import composed, evaluation_config
from tests.evaluation.toy_server import ToyModel, toy_server
from tests.tables import table
from verl.evaluation.main import EvaluationError, evaluate, plan_of
from verl.evaluation.scores.results import parse_result_lines
from verl.trainer.checkpoint_marker import CONFIG_FILE, MARKER

TEMPLATE = (
    """{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}{{ '<quick>' if quick else '<slow>' }}"""
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run with two checkpoints, of which the second is of an older version and holds no config."""
    run = tmp_path_factory.mktemp("work") / "outputs/run"
    config = composed("grpo_trainer", "+data.apply_chat_template_kwargs={quick: true}")
    for step in (1, 2):
        model = write_tiny_model(run / f"global_step_{step}/actor/huggingface")
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(model)
        (run / f"global_step_{step}" / MARKER).write_text(f"{step}\n")
    OmegaConf.save(config, run / "global_step_1" / CONFIG_FILE, resolve=False)
    (run / "gsm8k.jsonl").write_text('{"question": "What is 1 + 2?", "answer": "#### 3"}\n')
    return run


def config_of(run: Path, output: Path, *overrides: str):
    settings = ["experiment=run", "benchmark=gsm8k", f"files={run}/gsm8k.jsonl", f"output_dir={output}", "n=2"]
    return evaluation_config(*settings, "max_tokens=50", *overrides)


@pytest.mark.parametrize(("overrides", "template"), table(__file__, "templates"))
def test_the_options_are_those_of_the_checkpoints_run_unless_the_key_says_others(
    run, tmp_path, monkeypatch, overrides, template
):
    monkeypatch.chdir(run.parents[1])
    plan = plan_of(config_of(run, tmp_path, *overrides))
    assert plan.template == template
    assert any(f"apply_chat_template_kwargs={template}" in line for line in plan.describe())


@pytest.mark.parametrize(("step", "end"), [(1, "<quick>"), (2, "<slow>")])
def test_the_model_sees_the_prompt_of_its_training(run, tmp_path, step, end):
    model = ToyModel()
    with toy_server(model) as url:
        folder = run / f"global_step_{step}/actor/huggingface"
        evaluate(
            config_of(run, tmp_path, f"server.url={url}", f"model={folder}", "stop=[END]", "repetition_penalty=1.1")
        )
    assert len(model.asked) == 2
    for asked in model.asked:
        assert model.tokenizer.decode(asked["prompt"]).endswith(end)
        assert asked["stop"] == ["END"] and asked["repetition_penalty"] == 1.1


def test_the_log_names_every_setting(run, tmp_path):
    with toy_server(ToyModel()) as url:
        folder = run / "global_step_1/actor/huggingface"
        evaluate(
            config_of(run, tmp_path, f"server.url={url}", f"model={folder}", "seed=3", "top_k=5", "system=Be brief.")
        )
    lines = (tmp_path / "run/gsm8k.log").read_text().splitlines()
    sampling = "n=2, temperature=0.6, top_p=0.95, top_k=5, max_tokens=50, repetition_penalty=1.0, stop=[], seed=3"
    assert f"sampling: {sampling}" in lines
    (result,) = parse_result_lines(lines)
    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": 5, "max_tokens": 50, "repetition_penalty": 1.0, "stop": []}
    expected |= {"seed": 3, "prompt": "boxed, system: Be brief.", "apply_chat_template_kwargs": {"quick": True}}
    assert result.settings == expected | {"tools": [], "scoring": "math", "judge": "none"}


def test_prompts_of_the_file_are_told_from_a_style(run, tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text(
        '{"prompt": [{"role": "user", "content": "Add 1 + 2, please."}], "reward_model": {"ground_truth": "3"}}\n'
    )
    about = [f"files={file}", "server.url=http://127.0.0.1:9"]
    assert plan_of(config_of(run, tmp_path, *about)).prompt == "the file's own"
    assert plan_of(config_of(run, tmp_path, *about, "style=plain")).prompt == "plain", "the same words"


def test_a_chat_server_gets_the_options_only_if_it_knows_them(run, tmp_path):
    chat = ["server.api=chat", "apply_chat_template_kwargs={quick: true}", "stop=[END]"]
    with toy_server(model := ToyModel(owned_by="vllm")) as url:
        evaluate(config_of(run, tmp_path, f"server.url={url}", *chat, "repetition_penalty=1.1"))
    for asked in model.asked:
        assert asked["chat_template_kwargs"] == {"quick": True} and asked["stop"] == ["END"]
        assert asked["repetition_penalty"] == 1.1
    with toy_server(model := ToyModel()) as url:
        for chosen in (chat, ["server.api=chat", "repetition_penalty=1.1"]):
            with pytest.raises(EvaluationError, match=f"apply_chat_template_kwargs=.*{url} is no vLLM server"):
                evaluate(config_of(run, tmp_path / "other", f"server.url={url}", *chosen))
    assert not model.asked
