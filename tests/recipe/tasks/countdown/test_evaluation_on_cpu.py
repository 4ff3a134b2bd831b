"""Countdown's questions from this project's data, and their scores."""

import json

from recipe.tasks.countdown import reward as countdown
from recipe.tasks.countdown.data import CountdownConfig, write_countdown
from verl.evaluation.questions.loading import read_questions


def test_countdown_as_our_training_data(tmp_path):
    paths = write_countdown(tmp_path, CountdownConfig(train_size=0, demo_size=0, test_size=8))
    result = read_questions("countdown", [paths["test"]]).questions
    assert len(result) == 8
    numbers, target = json.loads(result[0].answers[0])["numbers"], json.loads(result[0].answers[0])["target"]
    assert result[0].text == f"{' '.join(map(str, numbers))} = {target}"
    assert countdown.compute_score("countdown", "<answer>1</answer>", result[0].answers[0])["acc"] == 0.0
