"""LATR (arXiv 2510.24302): lookahead-tree rollouts, rollout name `kt`."""
