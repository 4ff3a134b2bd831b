"""Estimates what a run holds on each GPU from its config and its model's shape, before anything starts.

It counts parameters, gradients, Adam's states, activations and logits of upstream's FSDP2 engine (verl 0.9.1), and
vLLM's weights and KV cache. With LoRA only its factors have gradients and Adam's states. A critic and other engines are
not counted. A GB is 10^9 bytes; a GPU of 80 GB has about 5 GB more.
"""

import math
from dataclasses import dataclass

import torch
from omegaconf import DictConfig, OmegaConf
from verl.utils.torch_dtypes import PrecisionType

from verl.trainer.checks.model.settings import config_folder
from verl.utils.parts import parts
from verl.workers.config.explore import parts_of
from verl.workers.config.token_bytes import TokenBytes

GB = 1e9
GPU = 80.0  # GB
CONTEXTS = 4.0  # GB: an estimate of CUDA contexts, NCCL's buffers and captured graphs
SERVER_WORKSPACE = 3.0  # GB: an estimate of vLLM's activations, which lie within its share of the GPU


# Advice for each part that may not fit; the keys are below `actor_rollout_ref`.
ADVICE = {
    "training": "lower actor.ppo_max_token_len_per_gpu and rollout.log_prob_max_token_len_per_gpu, set "
    "actor.entropy_from_logits_with_chunking, or take more GPUs",
    "rollout": "set actor.fsdp_config.optimizer_offload, or lower rollout.gpu_memory_utilization",
    "KV cache": "lower rollout.max_model_len, or raise rollout.tensor_model_parallel_size or gpu_memory_utilization",
}


@dataclass(frozen=True)
class MemoryPlan:
    """Estimates for one GPU: its memory by use, in GB, and the size of vLLM's KV cache in tokens."""

    gpu: float
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    server: float  # vLLM's share of the GPU, which includes `weights` and `kv_cache`
    weights: float
    kv_cache: float
    kv_tokens: int  # number of tokens that the KV cache holds
    longest: int  # number of tokens of the longest sequence, which the KV cache must hold
    training: float  # sum of what the GPU holds at once during the update
    rollout: float  # sum of what the GPU holds at once during the rollout

    def problems(self) -> list[str]:
        """Return a line with advice for each of training, rollout and KV cache that does not fit."""
        spare = {
            "training": self.gpu - self.training,
            "rollout": self.gpu - self.rollout,
            "KV cache": self.kv_tokens - self.longest,
        }
        return [f"{name} does not fit: {ADVICE[name]}" for name, amount in spare.items() if amount < 0]


def describe_memory(config: DictConfig, hf_config=None) -> str:
    """Return the plan in a few lines, with a warning for each part that does not fit, or why there is no plan."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    not_counted = f"{'memory:':<10}not counted: "
    if actor.strategy not in ("fsdp", "fsdp2"):
        return f"{not_counted}actor.strategy={actor.strategy}"
    try:
        gpu = torch.cuda.get_device_properties(0).total_memory / GB if torch.cuda.is_available() else GPU
        plan = plan_memory(config, hf_config or load_hf_config(model), gpu)
    except FileNotFoundError:
        return f"{not_counted}whether the run fits is unknown, as the config of {model.path} is not on this machine"
    except Exception as error:  # a model whose memory cannot be estimated may still train
        return f"{not_counted}{error!r}"
    lines = {
        "memory": f"estimates for a GPU of {plan.gpu:.0f} GB",
        "update": f"{plan.training:.1f} GB: parameters {plan.parameters:.1f}, gradients {plan.gradients:.1f}, Adam "
        f"{plan.optimizer:.1f}, activations {plan.activations:.1f}, logits {plan.logits:.1f}",
        "rollout": f"{plan.rollout:.1f} GB: vLLM {plan.server:.1f}, of which weights {plan.weights:.1f}",
        "KV cache": f"{plan.kv_cache:.1f} GB: {plan.kv_tokens:,} tokens; the longest sequence has {plan.longest:,}",
    }
    if model.lora_rank > 0 and not model.lora.merge and config.actor_rollout_ref.rollout.free_cache_engine:
        copies = plan.weights * config.trainer.n_gpus_per_node
        lines["host"] = f"{copies:.0f} GB a node: sleeping servers keep the frozen weights in pinned memory"
    warnings = [("warning", problem) for problem in plan.problems()]
    return "\n".join(f"{name + ':':<10}{value}" for name, value in [*lines.items(), *warnings])


def plan_memory(config: DictConfig, hf_config, gpu: float = GPU) -> MemoryPlan:
    """Return the plan of a run of a model (`PretrainedConfig`) on GPUs of `gpu` GB."""
    shape, part = model_shape(hf_config), config.actor_rollout_ref
    factors = lora_parameters(hf_config, part.model)
    fsdp, rollout = part.actor.fsdp_config, part.rollout
    world = config.trainer.nnodes * config.trainer.n_gpus_per_node
    shards = fsdp.fsdp_size if 0 < fsdp.fsdp_size < world else world
    # Parameters, gradients and each of Adam's two states have the same type.
    itemsize = PrecisionType.to_dtype(fsdp.model_dtype or "fp32").itemsize
    gigabytes = 0.0 if fsdp.offload_policy else itemsize / shards / GB  # of one parameter, in the shard of one GPU
    parameters, trained = (shape.parameters + factors) * gigabytes, (factors or shape.parameters) * gigabytes
    logits = logits_bytes(config, shape.vocabulary) / GB
    # The logits are gone when the layers' backward begins. A prefix tree's budget keeps what it gathers within this.
    token = TokenBytes.of(hf_config, part.model.enable_gradient_checkpointing)
    kept = 0 if part.model.enable_activation_offload else token.kept
    tokens = micro_batch_tokens(config)
    activations = tokens * kept / GB + max(0.0, tokens * token.layer / GB - logits)
    parallel = (rollout.tensor_model_parallel_size, rollout.pipeline_model_parallel_size)
    server, weights = rollout.gpu_memory_utilization * gpu, 2 * shape.parameters / math.prod(parallel) / GB
    if not part.model.lora.get("merge"):
        weights += 2 * factors / GB  # as if the adapter were not shared among the GPUs of a server
    kv_cache = max(0.0, server - weights - SERVER_WORKSPACE)
    stays = part.hybrid_engine and not rollout.free_cache_engine  # vLLM does not sleep while these GPUs train
    resident = parameters * (not fsdp.param_offload) + 2 * trained * (not fsdp.optimizer_offload)
    return MemoryPlan(
        gpu=gpu,
        parameters=parameters,
        gradients=trained,
        optimizer=2 * trained,
        activations=activations,
        logits=logits,
        server=server,
        weights=weights,
        kv_cache=kv_cache,
        kv_tokens=int(kv_cache * GB / shape.kv_bytes_per_token(*parallel)),
        longest=rollout.max_model_len or config.data.max_prompt_length + config.data.max_response_length,
        training=parameters + 3 * trained + activations + logits + CONTEXTS + server * stays,
        rollout=server + CONTEXTS + resident * part.hybrid_engine,
    )


def micro_batch_tokens(config: DictConfig) -> int:
    """Return the largest number of tokens of a micro-batch on one GPU."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if actor.use_dynamic_bsz:
        return max(actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu)
    rows = max(actor.ppo_micro_batch_size_per_gpu, rollout.log_prob_micro_batch_size_per_gpu)
    longest = config.data.max_prompt_length + config.data.max_response_length
    return math.ceil(rows * longest / actor.ulysses_sequence_parallel_size)


def logits_bytes(config: DictConfig, vocabulary: int) -> int:
    """Return the most bytes that a micro-batch's logits and their entropies take on a GPU at the same time.

    A logit takes 2 bytes (bf16), and 2 more for each copy: a temperature other than 1 makes one, and the gradient on a
    prefix tree makes another. Upstream computes entropies in fp32. If that is compiled, it takes 4 bytes for each
    logit. Otherwise, and with `entropy_from_logits_with_chunking`, it takes 12 bytes for each logit of one chunk
    (without chunks: of the micro-batch), and an entropy in the loss keeps up to 12 bytes more for every logit. With
    fused kernels there are no logits.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if config.actor_rollout_ref.model.use_fused_kernels:
        return 0
    tokens = micro_batch_tokens(config)
    tree = parts("tree").get(parts_of(rollout).tree or "")
    changes = tree is not None and tree.changes_temperature(config)
    copies = 1 + (rollout.temperature != 1 or changes) + bool(actor.get("use_prefix_tree"))
    fsdp, in_loss = actor.fsdp_config, actor.calculate_entropy or actor.entropy_coeff != 0
    if fsdp.use_torch_compile and not fsdp.entropy_from_logits_with_chunking:
        return (2 * copies + 4) * tokens * vocabulary
    chunk = fsdp.entropy_from_logits_chunk_size if fsdp.entropy_from_logits_with_chunking else tokens
    return ((2 * copies + 12 * in_loss) * tokens + 12 * min(tokens, chunk)) * vocabulary


# ---- the model ----


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes; tied parameters count once."""

    parameters: int
    vocabulary: int
    layers: int
    kv_heads: int
    head_dim: int

    def kv_bytes_per_token(self, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> int:
        """Return the bytes of a token's bf16 keys and values on a GPU; more GPUs than KV heads hold copies of heads."""
        return -(-self.layers // pipeline_parallel) * max(1, self.kv_heads // tensor_parallel) * self.head_dim * 2 * 2


def load_hf_config(model: DictConfig):
    """Return the `PretrainedConfig` of `actor_rollout_ref.model` with the run's overrides.

    Raises:
        FileNotFoundError: the config is neither in a folder nor in the hub's cache. Nothing is downloaded.
    """
    from transformers import AutoConfig
    from verl.utils.model import update_model_config

    name = model.hf_config_path or model.path
    if (folder := config_folder(name)) is None:
        raise FileNotFoundError(f"{name}: neither a folder nor in the hub's cache")
    hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    overrides = OmegaConf.to_container(model.override_config, resolve=True)
    update_model_config(hf_config, overrides.get("model_config", overrides))
    return hf_config


def model_shape(hf_config) -> ModelShape:
    """Return the sizes of a causal language model."""
    model = _on_meta(hf_config)
    text = hf_config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelShape(model.num_parameters(), text.vocab_size, text.num_hidden_layers, kv_heads, head_dim)


def lora_parameters(hf_config, model: DictConfig) -> int:
    """Return the number of parameters of the LoRA factors that `actor_rollout_ref.model` asks for; 0 without LoRA."""
    if model.lora_rank <= 0:
        return 0
    from peft import LoraConfig, get_peft_model

    keys = {"target_modules": model.target_modules, "exclude_modules": model.exclude_modules}
    keys = {key: OmegaConf.to_object(value) if OmegaConf.is_config(value) else value for key, value in keys.items()}
    adapted = get_peft_model(_on_meta(hf_config), LoraConfig(task_type="CAUSAL_LM", r=model.lora_rank, **keys))
    return adapted.get_nb_trainable_parameters()[0]


def _on_meta(hf_config):
    """Return the causal language model on torch's device `meta`, where it takes no memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager")
