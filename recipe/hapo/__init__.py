"""HAPO (arXiv 2509.16591). Its parts are in `verl.trainer.ppo.loss.hapo` and `verl.trainer.ppo.v1.components`."""
