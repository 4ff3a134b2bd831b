"""Word problems from this project's data, and their scores."""

from recipe.tasks.word_problems.data import WordProblemsConfig, write_word_problems
from verl.evaluation.questions.loading import read_questions
from verl.evaluation.scores.scoring import find_scoring


def test_word_problems_as_our_training_data(tmp_path):
    paths = write_word_problems(tmp_path, WordProblemsConfig(train_size=0, valid_size=0, test_size=8))
    questions = read_questions("wordproblems", [paths["test"]]).questions
    assert len(questions) == 8 and set(paths) == {"test"}
    truth = int(questions[0].answers[0])
    score = find_scoring("number").score
    assert score(questions[0], f"So it is 2 + 2 = {truth}.") == (1.0, str(truth), {})
    assert score(questions[0], f"{truth} or {truth + 1}").score == 0.0
