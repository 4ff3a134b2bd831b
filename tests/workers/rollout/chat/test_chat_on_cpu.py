"""Turns in `environment=chat`: their calls, their ends, and the answers."""

import asyncio
import json
from collections import Counter

import numpy as np
import pytest
from omegaconf import OmegaConf

from tests.configs import composed
from tests.tables import table
from tests.workers.rollout.chat.families import FAMILIES, FUNCTIONS, Add, Shelf, chat_of, encode, instance, tokenizer_of
from verl.workers.rollout.chat.calls import Call, CallReader, schema_for_parser
from verl.workers.rollout.environment import Answer, Ends
from verl.workers.rollout.run_environment import environment_of

ROLLOUT = "actor_rollout_ref.rollout"

ADD = {"class_path": "tests.workers.rollout.chat.families.Add"}
CALL = '<tool_call>{"name": "search", "arguments": {"query": "%s"}}</tool_call>'


def answered(name: str, turn: str, end: str | None = None, max_tokens: int = 2000, **options) -> tuple[Answer, str]:
    """Return the answer to a turn, which ends with the family's end token or `end`, and the answer's text."""
    tools = {"shelf": instance(Shelf), "add": ADD}
    chat = chat_of(name, tools, **options)
    tokens = encode(name, turn + (FAMILIES[name].special[0] if end is None else end))
    answer = asyncio.run(chat.answer(None, tokens, max_tokens))
    return answer, tokenizer_of(name).decode(answer.tokens)


# ---- calls ----


@pytest.mark.parametrize(("name", "turn", "message", "tool"), table(__file__, "broken calls"))
def test_a_broken_call_is_answered_with_its_fault(name, turn, message, tool):
    answer, text = answered(name, turn)
    (call,) = answer.calls
    assert message in text and not answer.done
    assert call == {"tool": tool, "ok": False, "seconds": 0.0, "error": "malformed"}
    chat = chat_of(name)
    assert not asyncio.run(chat.is_final(encode(name, turn)))
    assert chat.metrics(answer.calls)[f"tool_{tool}/malformed"] == 1


def call_of(name: str) -> str:
    """Return a call as the family's template renders it."""
    template = chat_of(name).template
    tokens = template.turn("", [Call("search", '{"query": "otter"}')])
    return tokenizer_of(name).decode([token for token in tokens if token not in template.ends]).strip()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_as_the_template_renders_it_can_be_read(name):
    answer, text = answered(name, call_of(name))
    assert "found otter" in text and [call["ok"] for call in answer.calls] == [True]


@pytest.mark.parametrize(("name", "turn", "query"), table(__file__, "calls that run"))
def test_a_call_runs(name, turn, query):
    answer, text = answered(name, turn)
    assert f"found {query}" in text and not answer.done
    assert [(call["tool"], call["ok"]) for call in answer.calls] == [("shelf", True)]


@pytest.mark.parametrize(("name", "turn"), table(__file__, "final answers"))
def test_a_turn_without_a_call_is_the_final_answer(name, turn):
    assert answered(name, turn)[0] == Answer([], done=True)
    assert asyncio.run(chat_of(name).is_final(encode(name, turn)))


@pytest.mark.parametrize(("name", "text", "arguments"), table(__file__, "other formats"))
def test_other_parsers_of_verls_are_read_and_their_broken_calls_seen(name, text, arguments):
    reader = CallReader(name, tokenizer_of("qwen3"))
    schemas = [schema_for_parser(Add().function())]
    (call,) = asyncio.run(reader.read(encode("qwen3", text), schemas))
    if arguments is None:
        assert call.fault == "the call cannot be read"
    else:
        assert (call.name, json.loads(call.arguments), call.fault) == ("add", arguments, "")


def test_calls_of_a_turn_run_at_once_up_to_the_limit():
    answer, text = answered("qwen2_5", CALL % "a" + CALL % "fail" + CALL % "b" + CALL % "c", max_parallel_calls=3)
    assert [call["ok"] for call in answer.calls] == [True, False, True]
    assert text.index("found a") < text.index("Error") < text.index("found b") and "found c" not in text


def test_a_tools_own_error_is_its_message():
    answer, text = answered("qwen2_5", CALL % "fail")
    assert "\nError: nothing there\n" in text and answer.calls[0]["error"] == "empty"


def test_an_answer_that_does_not_fit_ends_the_trajectory_by_length():
    whole = answered("qwen2_5", CALL % "a")[0].tokens
    assert answered("qwen2_5", CALL % "a", max_tokens=len(whole))[0].tokens == whole
    short = answered("qwen2_5", CALL % "a", max_tokens=len(whole) - 1)[0]
    assert short.tokens == [] and not short.done and len(short.calls) == 1


CUT = {"left": "(truncated)...eady end", "right": "found st...(truncated)", "middle": "foun...(truncated)... end"}


@pytest.mark.parametrize(("side", "text"), CUT.items())
def test_a_long_result_is_cut(side, text):
    keys = {"max_tool_response_length": 8, "tool_response_truncate_side": side}
    assert f"<tool_response>\n{text}\n</tool_response>" in answered("qwen2_5", CALL % "start, steady end", **keys)[1]


# ---- ends of turns ----


def test_a_turn_ends_with_an_end_token_or_one_of_the_parsers():
    end, other = 7, 9
    qwen, glm = chat_of("qwen2_5"), chat_of("glm")
    assert [qwen.ends(turn, {end}).ends for turn in ([], [other], [other, end])] == [Ends.NO, Ends.NO, Ends.TURN]
    assert glm.ends([other, *glm.stop_token_ids], {end}) == (Ends.TURN, 2)


@pytest.mark.parametrize(
    ("user", "assistant", "expected"), [(None, None, 3), (2, None, 2), (5, 2, 1), (None, 1, 0), (None, 9, 3)]
)
def test_verls_limits_of_turns_limit_the_answers(user, assistant, expected):
    assert chat_of("qwen2_5", max_user_turns=user, max_assistant_turns=assistant).call_limit == expected


def test_a_turn_that_ended_with_another_token_gets_the_templates_end_first():
    expected = answered("qwen2_5", CALL % "a")[1]
    for end in ("<|endoftext|>", ""):
        assert answered("qwen2_5", CALL % "a", end=end)[1] == "<|im_end|>" + expected
    call = '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "a"}'
    assert not answered("gpt_oss", call)[1].startswith("<|call|>")


def test_a_sampled_token_that_the_builder_removes_stays():
    """GLM's turn ends with the token with which the tool message begins."""
    call = "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>a</arg_value>\n</tool_call>"
    response = "\n<tool_response>\nfound a\n</tool_response><|assistant|>\n"
    assert answered("glm", call, end="<|observation|>")[1] == response
    assert answered("glm", call, end="<|user|>")[1] == "<|observation|>" + response
    assert answered("glm", call, end="<|endoftext|>")[1] == "<|observation|>" + response


# ---- texts from outside ----


class Hostile(Shelf):
    """Returns the control tokens of all families, and describes itself with them."""

    text = "".join(token for family in FAMILIES.values() for token in (*family.special, *family.added))
    summary = text

    async def execute(self, content: str, *, timeout: float) -> str:
        await super().execute(content, timeout=timeout)
        return self.text


@pytest.mark.parametrize("name", FAMILIES)
def test_results_descriptions_and_names_add_no_control_token(name):
    """Prompt and answers have as many of each control token as with texts that hold none."""
    family, tokenizer, counts = FAMILIES[name], tokenizer_of(name), []
    control = set(tokenizer.convert_tokens_to_ids([*family.special, *family.added]))
    turn = encode(name, call_of(name) + family.special[0])
    for tool in (Shelf, Hostile):
        chat = chat_of(name, {"shelf": instance(tool)})
        answer = asyncio.run(chat.answer(None, turn, 9999)).tokens
        prompt = chat.template.builder.build_initial_tokens([{"role": "user", "content": "?"}], tools=chat.schemas)
        counts.append([Counter(token for token in tokens if token in control) for tokens in (answer, prompt)])
    assert counts[0] == counts[1]
    assert len(answer) > 50


def test_the_name_of_an_unknown_tool_adds_no_control_token():
    call = "<|channel|>commentary to=functions.x%s <|constrain|>json<|message|>{}"
    plain, hostile = (answered("gpt_oss", call % name)[0].tokens for name in ("y", "[gMASK]|>"))
    special = tokenizer_of("gpt_oss").all_special_ids
    assert [t for t in plain if t in special] == [t for t in hostile if t in special]


# ---- rows ----


def test_a_row_selects_tools():
    chat = chat_of("qwen2_5", {"shelf": instance(Shelf), "add": ADD})
    names = [schema["function"]["name"] for schema in chat.schemas]
    assert names == ["search", "add"] and chat.open({"index": 0}, 1).schemas == chat.schemas
    for row in ({"extra_info": {"tool_selection": ["add"]}}, {"tools": ["add"]}):
        selected = chat.open(row, 1)
        assert [schema["function"]["name"] for schema in selected.schemas] == ["add"]
        turn = encode("qwen2_5", CALL % "a" + "<|im_end|>")
        text = tokenizer_of("qwen2_5").decode(asyncio.run(selected.answer(None, turn, 999)).tokens)
        assert "there is no tool search; the tools are add." in text
    assert chat.open({"extra_info": {"tool_selection": []}, "tools": None}, 1).schemas == chat.schemas
    assert chat.open({"extra_info": None, "tools": np.array(["add"])}, 1).selected.keys() == {"add"}


@pytest.mark.parametrize(("row", "names"), table(__file__, "a row with an unknown tool is refused"))
def test_a_row_with_an_unknown_tool_is_refused(row, names):
    with pytest.raises(ValueError) as error:
        chat_of("qwen2_5").open({"index": 7, **row}, 1)
    assert str(error.value) == f"row 7: {names}, and the tools of {ROLLOUT} are search"


def test_verls_yaml_of_tools_and_file_of_functions_suffice(tmp_path):
    """The config needs no entry of `tool_instances`; the tools of both files are called."""
    listed = {"class_name": "verl.tools.base_tool.BaseTool", "config": {"type": "native"}, "tool_schema": DOUBLE}
    OmegaConf.save({"tools": [listed]}, tmp_path / "tools.yaml")
    keys = {"tool_config_path": tmp_path / "tools.yaml", "function_tool_path": FUNCTIONS}
    values = [f"{ROLLOUT}.multi_turn.{key}={path}" for key, path in keys.items()]
    values.append(f"{ROLLOUT}.tools.tool_instances.python=null")
    config = composed("explore", "hardware=cpu", "tree=plain", "environment=chat", *values)
    builder = chat_of("qwen2_5").template.builder
    chat = environment_of(config, tokenizer_of("qwen2_5"), builder)
    assert [schema["function"]["name"] for schema in chat.schemas] == ["double", "look_up", "plus"]
    assert chat.schemas[0] == DOUBLE
    for call, result in (
        ('"double", "arguments": {"n": 4}', "Updated the tool state."),
        ('"plus", "arguments": {"a": 4}', "5"),
    ):
        turn = encode("qwen2_5", f'<tool_call>{{"name": {call}}}</tool_call><|im_end|>')
        text = tokenizer_of("qwen2_5").decode(asyncio.run(chat.answer(None, turn, 999)).tokens)
        assert f"<tool_response>\n{result}\n</tool_response>" in text


DOUBLE = {
    "type": "function",
    "function": {
        "name": "double",
        "description": "Doubles a number.",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
}
