"""Hands the entropy statistics that travel with a prompt to vLLM as that prompt's adaptive temperature.

Chosen by actor_rollout_ref.rollout.agent.agent_loop_manager_class. A prompt without statistics (validation, the first
step) samples the ordinary way.
"""

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

ADAPTIVE_TEMPERATURE = "adaptive_temperature"

# upstream decorates its worker; this is the class before that
_AgentLoopWorker = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__


@ray.remote
class HAPOAgentLoopWorker(_AgentLoopWorker):
    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        settings = prompt.pop(ADAPTIVE_TEMPERATURE, None)
        if settings is not None and not trajectory["validate"]:
            extra_args = {**(sampling_params.get("extra_args") or {}), ADAPTIVE_TEMPERATURE: settings}
            sampling_params = {**sampling_params, "extra_args": extra_args}
        await super()._run_prompt(prompt, sampling_params, trajectory, trace)


class HAPOAgentLoopManager(AgentLoopManagerTQ):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = HAPOAgentLoopWorker
