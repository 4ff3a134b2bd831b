"""ARPO (arXiv 2507.19849) and AEPO (arXiv 2510.14545): tool-use rollouts that fork where the model is uncertain."""
