"""`hato.meta_learning`: training steps form episodes of one domain each; Reptile or MAML moves weights at their ends.

`MetaActorWorker` holds the weights; this module orders the data and calls the workers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import ray
from omegaconf import DictConfig
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.utils.dataset.rl_dataset import collate_fn
from verl.workers.engine_workers import ActorRolloutRefWorker

from recipe.hato.checks import check_meta_learning
from recipe.hato.domain_sampler import DomainSampler
from recipe.hato.keys import MetaLearningConfig, hato_keys
from recipe.hato.meta_learning import episode_calls, episode_length
from recipe.hato.meta_workers import MetaActorWorker
from verl.trainer.ppo.v1.component import Component
from verl.utils.parts import register_component


@register_component
class MetaLearning(Component):
    """Runs whenever the config has `hato.meta_learning`, also with `enable=false`: a checkpoint from the middle of a
    meta-learning episode must not be resumed without it."""

    state_file = "meta_learning.json"

    def __init__(self, config: DictConfig):
        super().__init__(config)
        self.settings: MetaLearningConfig = hato_keys(config).meta_learning
        self.steps_done = 0

    @classmethod
    def wanted(cls, config: DictConfig) -> bool:
        return "meta_learning" in (config.get("hato") or {})

    @classmethod
    def check(cls, config: DictConfig) -> None:
        check_meta_learning(config)

    def choose_workers(self, worker_of_role: dict) -> None:
        for role, worker in worker_of_role.items() if self.settings.enable else ():
            if worker.__ray_metadata__.modified_class.__ray_actor_class__ is ActorRolloutRefWorker:
                worker_of_role[role] = ray.remote(MetaActorWorker)

    def train_dataloader(self, trainer) -> StatefulDataLoader | None:
        """Return a loader of whole episodes on one domain each; None if switched off.

        Raises:
            ValueError: the training steps are not whole episodes, or there is only one domain.
        """
        if not self.settings.enable:
            return None
        length = episode_length(self.settings.method, self.settings.n_inner_steps)
        if trainer.total_training_steps % length:
            whole = max(1, trainer.total_training_steps // length) * length
            raise ValueError(
                f"{trainer.total_training_steps} training steps are not whole episodes of hato.meta_learning, which "
                f"take {length} steps each: set trainer.total_training_steps={whole}"
            )
        domains = list(trainer.train_dataset.dataframe["data_source"])
        if len(set(domains)) == 1:
            raise ValueError(
                f"hato.meta_learning.enable: all {len(domains)} rows of data.train_files have the data_source "
                f"{domains[0]}; it learns over domains, give it at least two"
            )
        data = self.config.data
        return StatefulDataLoader(
            dataset=trainer.train_dataset,
            batch_size=trainer.train_dataloader.batch_size,
            num_workers=data.dataloader_num_workers,
            drop_last=True,
            collate_fn=collate_fn,
            sampler=DomainSampler(domains, block=data.train_batch_size * length, seed=data.get("seed") or 0),
        )

    @contextmanager
    def around_update(self, trainer, metrics: dict) -> Iterator[None]:
        meta, workers = self.settings, trainer.actor_rollout_wg
        before, after = (), ()
        if meta.enable:
            before, after = episode_calls(trainer.global_steps, meta.method, meta.n_inner_steps)
        for call in before:
            settings = {"method": meta.method, "meta_lr": meta.meta_lr, "inner_lr": meta.inner_lr}
            getattr(workers, call)(**(settings if call == "meta_begin" else {}))
        yield
        for call in after:
            metrics.update(getattr(workers, call)()[0])
        self.steps_done = trainer.global_steps

    def state_dict(self) -> dict:
        return {"settings": asdict(self.settings), "steps_done": self.steps_done}

    def load_state_dict(self, state: dict) -> None:
        """Restore the state; raise ValueError if the settings changed and the step lies within an episode of either."""
        saved, self.steps_done = state["settings"], state["steps_done"]
        now = asdict(self.settings)
        if saved != now and any(_is_open(meta, self.steps_done) for meta in (saved, now)):
            raise ValueError(
                f"hato.meta_learning was {saved} in the checkpoint and is {now}: step {self.steps_done} lies within "
                "an episode; leave it as it was, or resume from a checkpoint where an episode ends both ways"
            )


def _is_open(meta: dict, steps_done: int) -> bool:
    """Return whether `hato.meta_learning` with these values is within an episode."""
    return meta["enable"] and steps_done % episode_length(meta["method"], meta["n_inner_steps"]) > 0
