"""Estimates the GPU and host memory of a run from its config and its model's shape, before anything starts.

It counts what upstream's FSDP2 engine (verl 0.9.1, flash-attn, Adam) and vLLM hold at the moments at which memory can
run out: the update, the pass for old log-probs (in which upstream also computes entropies), the rollout, and loading.
A GB is 10^9 bytes; a GPU of 80 GB has about 5 GB more. The sizes of states, logits and the KV cache follow from the
code; `CONTEXTS`, `SERVER_WORKSPACE` and the bytes of a layer are estimates. A critic, LoRA and other engines are not
counted.
"""

import math
from dataclasses import dataclass

import torch
from omegaconf import DictConfig, OmegaConf
from verl.utils.torch_dtypes import PrecisionType

from verl.trainer.checks.model_shape import ModelShape, load_hf_config, model_shape

GB = 1e9
GPU = 80.0
# GB: CUDA contexts, NCCL's buffers and captured graphs of the trainer's and the server's process
CONTEXTS = 4.0
# GB: activations and sampling of vLLM, within its share of the GPU
SERVER_WORKSPACE = 3.0
# keys of actor_rollout_ref
ADVICE = {
    "update": "lower actor.ppo_max_token_len_per_gpu, or take more GPUs",
    "old log-probs": "set actor.entropy_from_logits_with_chunking, or lower rollout.log_prob_max_token_len_per_gpu",
    "rollout": "set actor.fsdp_config.optimizer_offload (or param_offload), or lower rollout.gpu_memory_utilization",
    "KV cache": "lower rollout.max_model_len, or raise rollout.tensor_model_parallel_size or gpu_memory_utilization",
}


@dataclass(frozen=True)
class TrainerMemory:
    """GB on a GPU of the trainer."""

    # the GPU's shard of each; during the update all three are on it, offloaded or not
    parameters: float
    gradients: float
    optimizer: float
    # the part of these that is not offloaded
    kept_parameters: float
    kept_optimizer: float
    # bf16 parameters of the vocabulary's matrix and of two layers, the current one and the next
    gathered: float
    # the gradient of the largest unit, in bf16, and in fp32 for the sum over the GPUs
    unreduced: float
    # the inputs of all layers, which gradient checkpointing keeps
    hidden_states: float
    # a layer that is computed again for its gradients
    layer: float
    # of the update
    logits: float
    # logits of the old log-probs, and what the computation of their entropies needs
    entropy_logits: float
    # what vLLM holds during the trainer's work
    server: float

    @property
    def update(self) -> float:
        """The peak of the update: the logits are freed before the last layer is computed again."""
        states = self.parameters + self.gradients + self.optimizer + self.hidden_states
        return states + self.gathered + self.unreduced + max(self.layer, self.logits) + CONTEXTS + self.server

    @property
    def log_prob(self) -> float:
        """The peak of the pass for old log-probs, which loads offloaded parameters but not an offloaded optimizer."""
        states = self.parameters + self.kept_optimizer
        return states + self.gathered + max(self.layer, self.entropy_logits) + CONTEXTS + self.server


@dataclass(frozen=True)
class ServerMemory:
    """What vLLM holds on a GPU in GB, and how many tokens fit."""

    share: float  # of the GPU that vLLM takes, by `gpu_memory_utilization`
    weights: float  # of the model, within the share
    kv_bytes_per_token: int
    tokens: int  # that the KV cache can hold
    sequences: int  # of full length that the KV cache can hold
    context: int  # tokens of the longest sequence, for which vLLM needs space to start
    responses: int  # of a step for each server
    waves: float  # how often these fill the KV cache if all have full length


@dataclass(frozen=True)
class MemoryPlan:
    """All estimates, in GB."""

    gpu: float
    shards: int  # number of GPUs over which parameters are sharded
    shape: ModelShape
    trainer: TrainerMemory
    server: ServerMemory
    rollout: float  # on a GPU during the rollout
    host: float  # on a node for offloaded states, before PyTorch rounds pinned tensors up to powers of two
    host_loading: float  # on a node while the model loads

    def problems(self) -> list[str]:
        """A line for each part that does not fit, with advice."""
        sizes = {
            "update": (self.trainer.update, self.gpu, "GB"),
            "old log-probs": (self.trainer.log_prob, self.gpu, "GB"),
            "rollout": (self.rollout, self.gpu, "GB"),
            "KV cache": (self.server.context, self.server.tokens, "tokens"),
        }
        return [
            f"{name}: does not fit, {needed:,.0f} {unit} where {available:,.0f} are; {ADVICE[name]}"
            for name, (needed, available, unit) in sizes.items()
            if needed > available
        ]


def describe_memory(config: DictConfig, hf_config=None) -> str:
    """The plan in a few lines, with a warning for each part that does not fit; a note if memory cannot be estimated.

    `hf_config` is the model's `PretrainedConfig`, by default that of `actor_rollout_ref.model`, if on this machine.
    """
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    not_counted = f"{'memory:':<10}not counted: "
    if actor.strategy not in ("fsdp", "fsdp2") or model.lora_rank > 0:
        return f"{not_counted}actor.strategy={actor.strategy}, model.lora_rank={model.lora_rank}"
    try:
        gpu = torch.cuda.get_device_properties(0).total_memory / GB if torch.cuda.is_available() else GPU
        plan = plan_memory(config, hf_config or load_hf_config(model), gpu)
        return "\n".join(_lines(plan, actor.fsdp_config))
    except FileNotFoundError:
        return f"{not_counted}whether the run fits is unknown, as the config of {model.path} is not on this machine"
    except Exception as error:  # a model whose memory cannot be estimated may still train
        return f"{not_counted}{error!r}"


def _lines(plan: MemoryPlan, fsdp: DictConfig) -> list[str]:
    trainer, server = plan.trainer, plan.server
    entropy = "compiled" if fsdp.use_torch_compile else "all tokens at once"
    if fsdp.entropy_from_logits_with_chunking:
        entropy = f"{fsdp.entropy_from_logits_chunk_size} tokens at once"
    lines = {
        "memory": f"{plan.shape.parameters:,} parameters over {plan.shards} GPUs of {plan.gpu:.0f} GB; estimates:",
        "update": f"{trainer.update:.1f} GB: parameters {trainer.parameters:.1f}, gradients {trainer.gradients:.1f}, "
        f"Adam {trainer.optimizer:.1f}, whole layers {trainer.gathered + trainer.unreduced:.1f}, hidden states "
        f"{trainer.hidden_states:.1f}, a layer's work {trainer.layer:.1f} or logits {trainer.logits:.1f}",
        "log-prob": f"{trainer.log_prob:.1f} GB: logits and entropy ({entropy}) {trainer.entropy_logits:.1f}",
        "rollout": f"{plan.rollout:.1f} GB: vLLM {server.share:.1f}, of which weights {server.weights:.1f}; trainer "
        f"{trainer.kept_parameters + trainer.kept_optimizer:.1f}",
        "KV cache": f"{server.tokens:,} tokens of {server.kv_bytes_per_token:,} bytes, {server.sequences} of the "
        f"longest sequences; {server.responses} responses a server and step, {server.waves:g} wave(s)",
        "host": f"{plan.host:.0f} GB a node for what is offloaded, {plan.host_loading:.0f} GB while the model loads",
    }
    warnings = [("warning", problem) for problem in plan.problems()]
    return [f"{name + ':':<10}{value}" for name, value in [*lines.items(), *warnings]]


def plan_memory(config: DictConfig, hf_config, gpu: float = GPU) -> MemoryPlan:
    """Estimate the memory of a run with a composed config, a model's `PretrainedConfig`, and GPUs of `gpu` GB."""
    shape, part = model_shape(hf_config), config.actor_rollout_ref
    fsdp, node = part.actor.fsdp_config, config.trainer.n_gpus_per_node
    world = config.trainer.nnodes * node
    shards = fsdp.fsdp_size if 0 < fsdp.fsdp_size < world else world
    server = server_memory(config, shape, gpu)
    trainer = trainer_memory(config, shape, shards, server.share)
    # parameters 1, gradients 1, Adam 2
    offloaded = 4 if fsdp.offload_policy else fsdp.param_offload + 2 * fsdp.optimizer_offload
    host = offloaded * itemsize(fsdp)
    if part.actor.use_kl_loss or config.algorithm.use_kl_in_reward:
        host += itemsize(part.ref.fsdp_config)  # upstream always offloads a reference policy
    return MemoryPlan(
        gpu=gpu,
        shards=shards,
        shape=shape,
        trainer=trainer,
        server=server,
        rollout=server.share + CONTEXTS + part.hybrid_engine * (trainer.kept_parameters + trainer.kept_optimizer),
        host=host * shape.parameters / shards * node / GB,
        # every process reads a tied model; only the first process reads an untied model
        host_loading=itemsize(fsdp) * shape.parameters * (node if shape.tied else 1) / GB,
    )


def itemsize(fsdp: DictConfig) -> int:
    """Bytes of a trained parameter, and also of its gradient and of each of Adam's two states; fp32 is the default."""
    return PrecisionType.to_dtype(fsdp.model_dtype or "fp32").itemsize


def trainer_memory(config: DictConfig, shape: ModelShape, shards: int, server_share: float) -> TrainerMemory:
    """The trainer's memory; `server_share` is the GB that vLLM takes on the same GPU when it is awake."""
    part, fsdp = config.actor_rollout_ref, config.actor_rollout_ref.actor.fsdp_config
    shard = 0 if fsdp.offload_policy else shape.parameters * itemsize(fsdp) / shards
    tokens, log_prob_tokens = micro_batch_tokens(config)
    layer = shape.layer_bytes_per_token()
    gathered = shape.embedding_parameters + 2 * shape.layer_parameters
    largest = max(shape.embedding_parameters, shape.layer_parameters)
    # gradients are summed over the GPUs after the last micro-batch only; until then every GPU holds all of them
    to_be_summed = shape.parameters if fsdp.use_no_sync_for_gradient_accumulation else largest
    entropy_in_loss = part.actor.calculate_entropy or part.actor.entropy_coeff != 0
    sizes = {
        "parameters": shard,
        "gradients": shard,
        "optimizer": 2 * shard,
        "kept_parameters": shard * (not fsdp.param_offload),
        "kept_optimizer": 2 * shard * (not fsdp.optimizer_offload),
        "gathered": 2 * (gathered if fsdp.reshard_after_forward else shape.parameters),
        "unreduced": 2 * largest + 4 * to_be_summed,
        "hidden_states": tokens
        * shape.layers
        * (2 * shape.hidden if part.model.enable_gradient_checkpointing else layer),
        "layer": max(tokens, log_prob_tokens) * layer,
        "logits": logits_bytes(config, shape.vocabulary, tokens, entropy_in_loss, training=True),
        "entropy_logits": logits_bytes(config, shape.vocabulary, log_prob_tokens, entropy=True, training=False),
        "server": server_share * GB * (part.hybrid_engine and not part.rollout.free_cache_engine),
    }
    return TrainerMemory(**{name: size / GB for name, size in sizes.items()})


def micro_batch_tokens(config: DictConfig) -> tuple[int, int]:
    """Tokens of a micro-batch on a GPU, for the update and for the log-probs.

    Upstream multiplies its limits by the sequence-parallel size and cuts the sequences into as many parts.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if actor.use_dynamic_bsz:
        return actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu
    longest = config.data.max_prompt_length + config.data.max_response_length
    rows = (actor.ppo_micro_batch_size_per_gpu, rollout.log_prob_micro_batch_size_per_gpu)
    return tuple(math.ceil(row * longest / actor.ulysses_sequence_parallel_size) for row in rows)


def logits_bytes(config: DictConfig, vocabulary: int, tokens: int, entropy: bool, training: bool) -> int:
    """The most bytes that a micro-batch's logits, their gradient and their entropies take at the same time.

    Logits are bf16, and flash-attn's cross-entropy overwrites them with their gradient; a temperature other than 1
    copies them. Autocast computes entropies in fp32. In eager mode the probabilities, the logits and the logits minus
    their maximum exist together, which takes 12 bytes for each logit. With gradients it takes 24 bytes, of which 10
    stay until the backward pass, however small the chunks are. In compiled code there is at most a single copy. A chunk
    counts 12 bytes for each logit in compiled code as well, since upstream's loop is compiled again for every new
    number of tokens and runs in eager mode from the ninth on. On a prefix tree the gradient does not overwrite the
    logits.
    """
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    if config.actor_rollout_ref.model.use_fused_kernels:
        return 0
    decay = OmegaConf.select(config, "hato.exploration.temperature_decay", default=0)
    unscaled = config.actor_rollout_ref.rollout.temperature == 1 and decay == 0
    gradient = 2 if training and config.actor_rollout_ref.actor.get("use_prefix_tree") else 0
    logits = ((2 if unscaled else 4) + gradient) * tokens * vocabulary
    if not entropy:
        return logits
    if fsdp.entropy_from_logits_with_chunking:
        chunk = min(tokens, fsdp.entropy_from_logits_chunk_size)
        return logits + (12 * chunk + 10 * tokens * training) * vocabulary
    eager = 24 if training else 12
    return logits + (4 if fsdp.use_torch_compile else eager) * tokens * vocabulary


def server_memory(config: DictConfig, shape: ModelShape, gpu: float) -> ServerMemory:
    """vLLM's memory on a GPU of `gpu` GB."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    tensor, pipeline = rollout.tensor_model_parallel_size, rollout.pipeline_model_parallel_size
    own, trainers = rollout.nnodes * rollout.n_gpus_per_node, config.trainer.nnodes * config.trainer.n_gpus_per_node
    # with GPUs of the rollout's own, the servers on the trainer's sleep but for the validation
    gpus = own or trainers
    share, weights = rollout.gpu_memory_utilization * gpu, 2 * shape.parameters / (tensor * pipeline) / GB
    kv_bytes = shape.kv_bytes_per_token(tensor, pipeline)
    tokens = max(0, int((share - weights - SERVER_WORKSPACE) * GB / kv_bytes))
    longest = data.max_prompt_length + data.max_response_length
    sequences = tokens // longest
    responses = math.ceil(data.train_batch_size * rollout.n / (gpus // (tensor * pipeline)))
    at_once = min(sequences, rollout.max_num_seqs)
    return ServerMemory(
        share=share,
        weights=weights,
        kv_bytes_per_token=kv_bytes,
        tokens=tokens,
        sequences=sequences,
        context=rollout.max_model_len or longest,
        responses=responses,
        waves=math.ceil(responses / at_once) if at_once else math.inf,
    )
