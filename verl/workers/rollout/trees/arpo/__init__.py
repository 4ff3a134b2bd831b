"""Trajectories that fork where the model is unsure (ARPO, AEPO), `tree=arpo`."""
