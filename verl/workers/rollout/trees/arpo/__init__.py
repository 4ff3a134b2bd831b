"""Trajectories that fork where the model is uncertain (ARPO, AEPO), `tree=arpo`."""
