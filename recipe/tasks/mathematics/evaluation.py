"""Evaluates mathematics on public sets, in the layouts in which they are published."""

import math
import re
from functools import partial

from verl.evaluation.questions.benchmarks import (
    HUB,
    first_of,
    last_question,
    needs_image,
    register_benchmark,
    text_question,
)
from verl.evaluation.questions.prompts import BOXED_INSTRUCTION
from verl.utils.data_files import BadRow
from verl.utils.math_answers.comparison import last_boxed, without_dollars

# DAPO-Math-17k asks for a last line "Answer: ...", but the reward reads \boxed only.
_DAPO_INSTRUCTIONS = re.compile(
    r"\ASolve the following math problem step by step\.[^\n]*\n+|\n+Remember to put your answer on its own line[^\n]*\Z"
)


def math_question(row: dict, names: tuple[str, ...] = ()) -> str:
    """Return the bare question in `problem`, `question` or `prompt` (`names` is not used), after a text in `context`
    (OlympiadBench), without instructions on how to answer."""
    question = next((row[key] for key in ("problem", "question", "prompt") if row.get(key)), None)
    if isinstance(question, list):
        question = last_question(question)
    if not isinstance(question, str) or not question.strip():
        raise BadRow("no question in problem, question or prompt")
    if any(key.startswith("image") and value for key, value in row.items()):
        raise BadRow("the question needs an image")
    question = _DAPO_INSTRUCTIONS.sub("", question.strip()).removesuffix(BOXED_INSTRUCTION).strip()
    context = row.get("context")
    return f"{context.strip()}\n{question}" if isinstance(context, str) and context.strip() else question


def math_answer(row: dict) -> str:
    """Return the answer of a row of mathematics as LaTeX without dollar signs; commas join several answers.

    >>> math_answer({"final_answer": ["$1$", "$\\\\frac{1}{2}$"]}), math_answer({"answer": 142.0})
    ('1, \\\\frac{1}{2}', '142')
    >>> math_answer({"question": "How many?", "answer": "40 * 27 = 1080 #### 1,080"})
    '1080'
    """
    reward_model = row.get("reward_model")
    ground_truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    for answer in (ground_truth, row.get("final_answer"), row.get("answer")):
        parts = [_as_text(part) for part in (answer if isinstance(answer, list) else [answer])]
        if parts and all(parts):
            return ", ".join(parts)
    solution = row.get("solution")
    answer = last_boxed(solution) if isinstance(solution, str) else None
    if not answer or not answer.strip():
        raise BadRow("no answer in reward_model.ground_truth, final_answer, answer or a \\boxed of solution")
    return answer.strip()


def _as_text(answer) -> str:
    """Return an answer as text; empty if it is neither text nor a number."""
    if isinstance(answer, float) and math.isfinite(answer):
        answer = int(answer) if answer.is_integer() else answer
    elif not isinstance(answer, str | int) or isinstance(answer, bool):
        return ""
    text = str(answer).strip()
    return _gsm8k_number(text) if "####" in text else without_dollars(text)


def _gsm8k_number(solution: str) -> str:
    return solution.rpartition("####")[2].strip().replace(",", "")


def gsm8k_answers(row: dict, names: tuple[str, ...]) -> list[str]:
    """Return the number that follows #### at the end of a solution, as the only golden answer."""
    solution = first_of(row, names)
    answer = _gsm8k_number(str("" if solution is None else solution))
    if len(answer.split()) != 1:
        raise BadRow(f"no number after #### in {' or '.join(names)}")
    return [answer]


# sets whose answers the model boxes, as published solutions do
_register = partial(
    register_benchmark,
    question=("problem", "question"),
    answer=("answer", "solution"),
    scoring="math",
    style="boxed",
    read_question=math_question,
    read_answers=lambda row, names: [math_answer(row)],
    read_prompt=lambda text: math_question({"prompt": text}),
    read_truth=lambda truth: [math_answer({"reward_model": {"ground_truth": truth}})],
    left_out={"needs an image": needs_image},
)
_register("aime24", "AIME24", f"{HUB}/HuggingFaceH4/aime_2024 or {HUB}/math-ai/aime24")
_register("aime25", "AIME25", f"{HUB}/math-ai/aime25 or {HUB}/MathArena/aime_2025", id=("id", "problem_idx"))
_register("math500", "MATH500", f"{HUB}/HuggingFaceH4/MATH-500", id=("unique_id",))
_register(
    "gsm8k",
    "GSM8K",
    f"{HUB}/openai/gsm8k (main, test)",
    question=("question",),
    answer=("answer",),
    read_question=text_question,
    read_answers=gsm8k_answers,
    note="answer is the solution, then #### and the number",
)
_register("math", "MATH", f"{HUB}/EleutherAI/hendrycks_math (the test files of all seven subjects, together)")
_register("amc23", "AMC23", f"{HUB}/math-ai/amc23 or {HUB}/AI-MO/aimo-validation-amc")
_register(
    "olympiadbench",
    "OlympiadBench",
    f"{HUB}/Hothan/OlympiadBench (OE_TO_maths_en_COMP) or {HUB}/math-ai/olympiadbench",
    answer=("final_answer", "answer"),
    note="several final answers are one answer, in any order; context is asked with the question",
)
