"""Public sets of mathematics, in the layouts of their files."""

import pytest

from tests.evaluation.questions.layouts import read, verl_row
from verl.evaluation.questions.prompts import BOXED_INSTRUCTION


def test_the_instruction_of_training_data_is_not_the_question(tmp_path):
    (question,) = read(tmp_path, "math", [verl_row("1", f"p?\n\n{BOXED_INSTRUCTION}")]).questions
    assert question.text == "p?" and question.prompt[-1]["content"] == f"p?\n\n{BOXED_INSTRUCTION}"


@pytest.mark.parametrize("answer", ["40*27=1080", "#### ", "", None])
def test_gsm8k_without_its_number(tmp_path, answer):
    rows = [{"question": "How many?", "answer": answer}, {"question": "q?", "answer": "x y"}]
    with pytest.raises(ValueError, match="no number after ####"):
        read(tmp_path, "gsm8k", rows)
