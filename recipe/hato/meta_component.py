"""`hato.meta_learning`: training steps form episodes of one domain each; Reptile or MAML moves weights at their ends.

`MetaActorWorker` holds the weights; this module orders the data and calls the workers.
"""

import random
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import ray
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.utils.dataset.rl_dataset import collate_fn
from verl.workers.engine_workers import ActorRolloutRefWorker

from recipe.hato.keys import MetaLearningConfig, hato_keys
from recipe.hato.meta_learning import episode_calls, episode_length
from recipe.hato.meta_workers import MetaActorWorker
from verl.trainer.ppo.v1.component import Component
from verl.utils.parts import register_component
from verl.workers.config.schedule import ASYNCHRONOUS, filters_groups, schedule_of

META_STRATEGIES = ("fsdp", "fsdp2", "veomni")


class DomainSampler(Sampler[int]):
    """Yields row numbers in blocks, each of a single domain, so that the steps of an episode see rows of one domain;
    blocks and rows are shuffled anew in every epoch.

    Each domain fills as many whole blocks as it can; its remaining rows are left out of the epoch. A domain with fewer
    rows than a block (the prompts of a step times the steps of an episode) fills a block by repeating its rows.

        >>> sampler = DomainSampler(["a", "b", "a", "b", "a"], block=2, seed=0)
        >>> len(sampler), len(list(sampler))
        (4, 4)
    """

    def __init__(self, domains: Sequence[Hashable], block: int, seed: int):
        self.rows_of: dict[Hashable, list[int]] = defaultdict(list)
        for row, domain in enumerate(domains):
            self.rows_of[domain].append(row)
        self.block, self.seed = block, seed
        self.epoch, self.yielded = -1, 0
        self.resumes_at: int | None = None

    def __len__(self) -> int:
        return sum(max(1, len(rows) // self.block) for rows in self.rows_of.values()) * self.block

    def __iter__(self) -> Iterator[int]:
        if self.resumes_at is None:
            self.epoch, self.yielded = self.epoch + 1, 0
        else:
            self.yielded, self.resumes_at = self.resumes_at, None
        for row in self._order()[self.yielded :]:
            self.yielded += 1
            yield row

    def _order(self) -> list[int]:
        rng, blocks = random.Random(f"{self.seed} {self.epoch}"), []
        for rows in self.rows_of.values():
            rows = rng.sample(rows, len(rows))
            rows = rows * -(-self.block // len(rows)) if len(rows) < self.block else rows
            blocks += [rows[at : at + self.block] for at in range(0, len(rows) - self.block + 1, self.block)]
        rng.shuffle(blocks)
        return [row for block in blocks for row in block]

    def state_dict(self) -> dict[str, int]:
        """Return the position in the epoch, for torchdata's StatefulDataLoader."""
        return {"epoch": self.epoch, "yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.resumes_at = state["epoch"], state["yielded"]


@register_component
class MetaLearning(Component):
    """Runs whenever the config has `hato.meta_learning`, also with `enable=false`: a checkpoint from the middle of a
    meta-learning episode lacks the weights at its beginning, and is not resumed."""

    state_file = "meta_learning.json"

    def __init__(self, config: DictConfig):
        super().__init__(config)
        self.settings: MetaLearningConfig = hato_keys(config).meta_learning
        self.steps_done = 0

    @classmethod
    def is_needed(cls, config: DictConfig) -> bool:
        return "meta_learning" in (config.get("hato") or {})

    @classmethod
    def check(cls, config: DictConfig) -> None:
        meta = hato_keys(config).meta_learning
        if not meta.enable:
            return
        length, save_freq = episode_length(meta.method, meta.n_inner_steps), config.trainer.save_freq
        if save_freq > 0 and save_freq % length:
            raise ValueError(
                f"trainer.save_freq={save_freq} with hato.meta_learning.enable=true: a run resumes only where an "
                f"episode ends, every {length} steps: expected a multiple of {length}, or -1"
            )
        if (schedule := schedule_of(config)) in ASYNCHRONOUS:
            raise ValueError(
                f"hato.meta_learning.enable=true with schedule={schedule}: an episode's batches are of one domain "
                "each, and prompts ahead would mix them: choose schedule=sync"
            )
        if filters_groups(config):
            raise ValueError(
                "hato.meta_learning.enable with algorithm.filter_groups.enable: prompts that replace dropped ones "
                "would come from other domains than the episode's: set one of the two to false"
            )
        if band := OmegaConf.select(config, "data.sampler.band"):
            raise ValueError(
                f"hato.meta_learning.enable with data.sampler.band={band}: an episode's prompts are of one domain: set "
                "one of the two to its default"
            )
        if (warmup := config.trainer.critic_warmup) > 1:
            raise ValueError(
                f"hato.meta_learning.enable with trainer.critic_warmup={warmup}: the actor is not updated in the first "
                "steps, where an episode begins: set trainer.critic_warmup=0"
            )
        strategy = config.actor_rollout_ref.actor.strategy
        if strategy not in META_STRATEGIES:
            raise ValueError(f"hato.meta_learning needs actor.strategy of {', '.join(META_STRATEGIES)}, not {strategy}")
        if OmegaConf.select(config, "trainer.v1.sampler.sync_refill_failed_groups", default=False):
            raise ValueError("hato.meta_learning with trainer.v1.sampler.sync_refill_failed_groups would mix domains")

    def choose_workers(self, worker_of_role: dict) -> None:
        for role, worker in worker_of_role.items() if self.settings.enable else ():
            if worker.__ray_metadata__.modified_class.__ray_actor_class__ is ActorRolloutRefWorker:
                worker_of_role[role] = ray.remote(MetaActorWorker)

    def train_dataloader(self, trainer) -> StatefulDataLoader | None:
        """Return a loader of whole episodes on one domain each; None if switched off."""
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
        """Restore the state; raise ValueError if the step lies within an episode of the checkpoint's or the run's
        settings."""
        saved, now, self.steps_done = state["settings"], asdict(self.settings), state["steps_done"]
        if any(_is_open(meta, self.steps_done) for meta in (saved, now)):
            raise ValueError(
                f"hato.meta_learning was {saved} in the checkpoint and is {now}: step {self.steps_done} lies within "
                "an episode; resume from a checkpoint where an episode ends both ways (trainer.resume_from_path)"
            )


def _is_open(meta: dict, steps_done: int) -> bool:
    return meta["enable"] and steps_done % episode_length(meta["method"], meta["n_inner_steps"]) > 0
