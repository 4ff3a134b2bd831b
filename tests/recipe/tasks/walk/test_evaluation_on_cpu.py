"""The number walk's questions from this project's data, and their scores."""

import json
import random

from recipe.tasks.walk.data import Problem, WalkConfig, random_walk, write_walks
from verl.evaluation.questions.loading import read_questions
from verl.evaluation.scores.scoring import find_scoring


def test_number_walks_as_our_training_data(tmp_path):
    paths = write_walks(tmp_path, WalkConfig(train_size=0, valid_size=0, demo_size=0, test_size=8))
    questions = read_questions("walk", [paths["test"]]).questions
    assert len(questions) == 8 and not set(paths) & {"train", "sft"}
    truth = json.loads(questions[0].answers[0])
    assert questions[0].text == f"{truth['start']}>{truth['target']} {truth['steps']}: {' '.join(truth['operations'])}"
    right = random_walk(Problem(**truth), True, random.Random(0))
    score = find_scoring("walk").score
    assert score(questions[0], right).score == 1.0
    assert score(questions[0], right + "0") == (0.0, "", {})
