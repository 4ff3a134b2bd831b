"""An actor worker with three more methods, which a trainer calls around its updates: see `meta_learning.py`."""

import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_torch_device
from verl.workers.engine_workers import ActorRolloutRefWorker

from recipe.hato.meta_learning import MetaEpisode


class MetaActorWorker(ActorRolloutRefWorker):
    """Upstream's worker with meta-learning episodes; it behaves as upstream's until `meta_begin` is called."""

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

    def _meta_open(self) -> MetaEpisode:
        if self.episode is None:
            raise RuntimeError("meta-learning: no episode is open: call meta_begin first")
        return self.episode
