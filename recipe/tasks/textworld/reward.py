"""Scores a response that holds commands of a game, without the game: is the walkthrough in it?

In training the environment gives the rewards (`environment.reward=sum`). This score is for `environment.reward=task`.
"""

from verl.utils.reward_score.ground_truth import as_list, json_object


def walkthrough_of(ground_truth) -> list[str]:
    """Return the commands that win the game; raise ValueError if the ground truth holds none."""
    truth = json_object(ground_truth, "walkthrough, a list of commands")
    return [str(command) for command in as_list("walkthrough", truth.get("walkthrough"), "commands")]


def check_row(data_source, ground_truth, extra_info=None, **kwargs) -> None:
    """Raise ValueError if `compute_score`, with the same arguments, cannot score responses to a row."""
    walkthrough_of(ground_truth)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Score a response: 1 if the commands of the walkthrough occur in it in their order, else 0. The ground truth is
    `{"walkthrough": ["open box", "take key"]}`, or the same as JSON text."""
    text, place = str(solution_str), 0
    for command in walkthrough_of(ground_truth):
        at = text.find(command, place)
        if at < 0:
            return {"score": 0.0, "acc": 0.0, "pred": ""}
        place = at + len(command)
    return {"score": 1.0, "acc": 1.0, "pred": ""}
