"""Trees of reasoning steps that are searched by value and uncertainty (HATO), `tree=hato`.

HATO has design notes and no paper; where the notes are silent, the docstrings state our decisions.

    keys.py           the keys under `hato`; checks.py checks them, notes_names.py knows the names of the notes
    tree.py           the search as a tree policy: requests to the engine, and use of its answers
    search.py         which steps are expanded next, with how many children
    frontier.py       which steps are open, have ended, or were dropped
    value_model.py    value V and uncertainty U of a step, from its features (step_features.py)
    local_reward.py   R_local of a step
    metrics.py        diversity and novelty of answers, calibration of V
    credit.py         each step against its siblings
    component.py      the search's part in the trainer; meta_*.py and domain_sampler.py: meta-learning
"""
