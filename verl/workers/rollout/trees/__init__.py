"""Tree policies: which tokens of a prompt's trajectories are generated. A module here is a choice of `tree=<name>`.

plain            n independent trajectories
latr             lookahead trees: branches by the most likely tokens, pruned where they are too alike
arpo             forks where the model is unsure after a tool's result (ARPO, AEPO)
hato             a search for reasoning steps
over_generation  more trajectories than n, of which the most different are kept
"""
