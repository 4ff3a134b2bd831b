"""An actor worker with three more methods, which a trainer calls around its updates: see `meta_learning.py`."""

import os
from pathlib import Path

import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_torch_device
from verl.workers.engine_workers import ActorRolloutRefWorker

from recipe.hato.meta_learning import MetaEpisode


class MetaActorWorker(ActorRolloutRefWorker):
    """Upstream's worker with meta-learning episodes; it behaves as upstream's until `meta_begin` is called. A
    checkpoint within an episode also holds the episode, one file per rank; resuming needs as many ranks."""

    episode: MetaEpisode | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meta_begin(self, method: str, meta_lr: float = 0.1, inner_lr: float = 0.01) -> None:
        """Store theta; the following updates are inner steps. `MetaEpisode` explains the arguments."""
        if self.episode is not None:
            raise RuntimeError("meta-learning: meta_begin within an episode: call meta_end first")
        get_torch_device().synchronize()
        optimizer = self.actor.engine.optimizer
        self.episode = MetaEpisode(optimizer, method=method, meta_lr=meta_lr, inner_lr=inner_lr)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meta_query(self) -> None:
        """Let the following updates contribute maml's gradient at theta_inner instead of steps."""
        self._meta_open().query()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meta_end(self) -> dict[str, float]:
        """Move theta, and return on every rank the metrics |theta_inner - theta| and, for maml, the gradient norm."""
        episode = self._meta_open()
        get_torch_device().synchronize()  # offloaded parameters may still be being copied to the host
        squared = torch.tensor(episode.distance_squared(), dtype=torch.float64)
        torch.distributed.all_reduce(squared)
        metrics = {"meta/inner_distance": squared.item() ** 0.5}
        self.episode = None
        if episode.method == "reptile":
            episode.end()
            return metrics
        with self.actor.engine.train_mode():  # loads offloaded parameters and optimizer states to the device
            episode.end()
            if episode.query_steps:
                metrics["meta/grad_norm"] = self.actor.engine.optimizer_step()
        return metrics

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
        super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)
        if self.episode is not None:
            torch.save(self.episode.state_dict(), self._meta_file(local_path))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False):
        state = None
        if local_path is not None:
            if os.path.exists(self._meta_file(local_path)):
                state = torch.load(self._meta_file(local_path), map_location="cpu", weights_only=True)
            elif others := sorted(Path(local_path).glob("meta_episode_world_size_*")):
                raise ValueError(
                    f"{others[0]}: saved within an episode of meta-learning by another number of ranks than the "
                    f"{self.world_size} of now; resume with as many, or from a checkpoint at an episode's end"
                )
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
        self.episode = MetaEpisode.resumed(self.actor.engine.optimizer, state) if state else None

    def _meta_file(self, local_path: str) -> str:
        return os.path.join(local_path, f"meta_episode_world_size_{self.world_size}_rank_{self.rank}.pt")

    def _meta_open(self) -> MetaEpisode:
        if self.episode is None:
            raise RuntimeError("meta-learning: no episode is open: call meta_begin first")
        return self.episode
