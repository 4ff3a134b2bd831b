"""Tree policies decide which trajectories are generated for a prompt. Each module here is a choice of `tree=<name>`.

plain            n independent trajectories
latr             lookahead trees: branches by the most likely tokens, pruned where they are too alike
arpo             forks where the model is unsure after a tool's result (ARPO, AEPO)
hato             a search for reasoning steps
over_generation  more than n trajectories, of which the n most different ones are kept
"""
