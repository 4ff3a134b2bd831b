"""HAPO (arXiv 2509.16591). Its parts are in `recipe.hapo.loss` and `verl.trainer.ppo.v1.components`."""
