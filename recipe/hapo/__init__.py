"""HAPO (arXiv 2509.16591): its parts are in `verl.trainer.ppo.hapo_algos` and `verl.trainer.ppo.v1.components`."""
