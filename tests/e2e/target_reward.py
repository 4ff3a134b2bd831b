"""A reward that an untrained model earns too: it depends on the problem, not on the answer."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": ground_truth["target"] / 30, "acc": 0.0}
