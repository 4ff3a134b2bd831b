"""Trees of reasoning steps that are searched by value and uncertainty (HATO), `tree=hato`.

HATO has design notes and no paper; where the notes are silent the docstrings say what was decided.

    config.py         the keys under `hato`
    policy.py         the search as a tree policy: what is asked from the engine, and what becomes of it
    search.py         which steps are expanded next, with how many children
    frontier.py       which steps are open, have ended, or were dropped
    value_model.py    V and U of a step, from its features (step_features.py)
    local_reward.py   R_local of a step
    metrics.py        diversity and novelty of answers, calibration of V
"""
