"""A rollout in which every third prompt's tree takes seconds longer than the others, as long responses do on GPUs."""

import asyncio

import ray

from verl.workers.rollout.engines.vllm_server import LLMClientEngine
from verl.workers.rollout.group_rollout import GroupAgentLoopManager, GroupAgentLoopWorker

SECONDS = 2.0  # before each of its requests

_Worker = GroupAgentLoopWorker.__ray_metadata__.modified_class.__ray_actor_class__


class SlowEngine(LLMClientEngine):
    def __init__(self, *args):
        super().__init__(*args)
        self.slow: dict[str, bool] = {}  # group -> whether it is slow; every third group to begin is

    async def generate(self, request):
        if self.slow.setdefault(request.request_id, len(self.slow) % 3 == 1):
            await asyncio.sleep(SECONDS)
        return await super().generate(request)


@ray.remote
class SlowWorker(_Worker):
    def _tree_rollout(self):
        self.engine = SlowEngine(self.llm_client, self.tokenizer.decode)
        return super()._tree_rollout()


class SlowManager(GroupAgentLoopManager):
    """actor_rollout_ref.rollout.agent.agent_loop_manager_class=slow_prompts.SlowManager"""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = SlowWorker
