"""Upstream's trainers with the components of methods, credit on trees, and reports on prompt groups and their trees.

One step; additions are marked with *:

    generate                    * components give settings to the rollouts (`step_settings`, `prompt_settings`)
    balance                     * rows in the data's order; padding rows of two tokens, evenly over mini-batches
    old log-probs, entropies    * diversity and metrics of groups
                                * components compute token fields from the entropies, which the rows carry to the loss
    advantages                  * estimators read the rollout's values for each token (`TokenField`)
                                * trees of groups; components read the batch (`after_advantage`)
    update the actor            * the loss reads the token fields; components act before and after (`around_update`)
    save a checkpoint           * the components' states are saved

`trainer.tree_freq` and `tree_prompts` say which trees are written. If a rollout made no tree, the tree of its
responses' common prefixes is used.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from omegaconf import DictConfig
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.trainer.distillation import is_distillation_enabled
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass

from verl.trainer.ppo.credit.nodes import SEGMENT_IDS, Nodes, batch_nodes, credit_metrics
from verl.trainer.ppo.v1.batch_rows import (
    ORDER,
    PROBLEM,
    BatchRows,
    Group,
    is_padding_row,
    place_of,
    rewards_column,
    zero_advantages,
)
from verl.trainer.ppo.v1.component import Component, components_of
from verl.trainer.ppo.v1.row_order import (
    check_updates,
    clear_contexts,
    distinct_tokens,
    place_groups,
    spread_padding_rows,
)
from verl.trainer.ppo.v1.trainer_state import load_state, save_state
from verl.trainer.ppo.v1.tree_buffer import FilteredPrompts
from verl.trainer.ppo.v1.tree_reports import (
    broken_tools,
    diversity_metrics,
    segment_advantages,
    tree_metrics,
    tree_of_group,
    tree_record,
    write_records,
)
from verl.trainer.ppo.v1.watched_run import WatchedRun
from verl.utils import tensordict_utils as tu
from verl.utils.fault_reports import RunError
from verl.utils.parts import GROUP_COMPARISONS, compares, computed_fields, credit_of, parts
from verl.utils.token_fields import FIELDS, TokenField
from verl.workers.config.prefix_tree import (
    SKIP_ZERO_ADVANTAGES,
    TRAINED_TOKEN_SHARE,
    UNIQUE_TOKEN_SHARE,
    skips_zero_advantages,
)
from verl.workers.rollout.contexts import CONTEXTS
from verl.workers.rollout.engines.vllm_server import serve_top_logprobs
from verl.workers.rollout.prompt_task import PROMPT_SETTINGS, STEP_SETTINGS, PromptSettings
from verl.workers.rollout.trajectory_tree import shown_prompts, writes_trees
from verl.workers.utils.field_losses import ppo_loss_with_fields
from verl_patches.short_padding_rows import shorten_padding_rows


class ExploreMixin(WatchedRun):
    """Mixin that makes these additions to an upstream trainer: `class ExploreTrainer(ExploreMixin, PPOTrainerSync)`.

    Information about a row is kept in a column of that row and not in the trainer, because in asynchronous schedules a
    batch may hold prompts of several steps.
    """

    def __init__(self, config: DictConfig):
        config = config.copy()
        self.components = components_of(config)
        self.computed_fields = computed_fields(config)
        self.n_prompts = 0  # number of prompts submitted so far
        self.trees_written: Counter[int] = Counter()  # number of trees by step
        self.submitted: Counter[str] = Counter()  # times each problem was submitted in step `submitted_in`
        self.submitted_in = 0
        shorten_padding_rows()
        serve_top_logprobs()
        super().__init__(config)

    # ---- begin and end ----

    def _init_resource_pool_mgr(self):
        super()._init_resource_pool_mgr()
        for component in self.components:
            component.choose_workers(self.role_worker_mapping)

    def _init_dataloader(self):
        super()._init_dataloader()
        for component in self.components:
            if (loader := component.train_dataloader(self)) is not None:
                self.train_dataloader = loader

    def _setup(self):
        super()._setup()
        actor = self.config.actor_rollout_ref.actor
        loss = parts("loss").get(actor.policy_loss.loss_mode)
        if fields := [field.name for field in (loss.fields(actor) if loss else ())]:
            actor_config = omega_conf_to_dataclass(actor)
            self.actor_rollout_wg.set_loss_fn(partial(ppo_loss_with_fields, config=actor_config, fields=fields))

    def fit(self, agent_loop_manager):
        super().fit(agent_loop_manager)
        if stop := getattr(self.agent_loop_manager, "stop", None):  # upstream's manager has no `stop`
            stop()  # the servers are about to end, with asynchronous schedules while prompts are unfinished

    # ---- rollout ----

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        problems = [hashlib.sha1(str(list(prompt)).encode()).hexdigest() for prompt in batch["raw_prompt"]]
        batch[ORDER] = _column(range(self.n_prompts, self.n_prompts + len(problems)))
        batch[PROBLEM] = _column(problems)
        self.n_prompts += len(problems)
        self._prepare_rollout(batch)
        return super()._submit_batch_to_rollout(batch)

    def _prepare_rollout(self, batch: TensorDict) -> None:
        problems = list(batch[PROBLEM])
        # A problem that occurs again in the same step gets other seeds.
        prompt_settings = [PromptSettings(occurrence=self._occurrence(problem)) for problem in problems]
        step_settings = PromptSettings()
        for component in self.components:
            step_settings = step_settings.merged(component.step_settings(self))
            if (more := component.prompt_settings(problems)) is not None:
                prompt_settings = [own.merged(other) for own, other in zip(prompt_settings, more, strict=True)]
        tu.assign_non_tensor_data(batch, STEP_SETTINGS, step_settings)
        batch[PROMPT_SETTINGS] = _column(prompt_settings)

    def set_temperature(self, temperature: float) -> None:
        """Set the temperature of the next steps' sampling and loss; upstream reads it from the trainer's config."""
        self.config.actor_rollout_ref.rollout.temperature = temperature

    def _occurrence(self, problem: str) -> int:
        if self.submitted_in != self.global_steps:
            self.submitted, self.submitted_in = Counter(), self.global_steps
        self.submitted[problem] += 1
        return self.submitted[problem] - 1

    # ---- a batch ----

    def _balance_batch(self, batch, *args, **kwargs):
        """Sort rows in the data's order, balance them over ranks, and spread padding rows evenly over mini-batches.

        With `use_prefix_tree` groups stay together instead. With `actor.shuffle` the worker draws its mini-batches at
        random after this.
        """
        batch.reorder(BatchRows(batch).in_data_order)
        batch = super()._balance_batch(batch, *args, **kwargs)
        clear_contexts(BatchRows(batch))
        config = self.config.actor_rollout_ref
        n_mini_batches, rest = divmod(len(batch), config.actor.ppo_mini_batch_size * config.rollout.n)
        if n_mini_batches and not rest:  # otherwise the actor is not updated in this step
            check_updates(len(BatchRows(batch).real), n_mini_batches)
            n_ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
            if config.actor.get("use_prefix_tree"):
                batch.reorder(self._groups_together(BatchRows(batch), n_ranks, n_mini_batches))
            else:
                batch.reorder(spread_padding_rows([is_padding_row(tag) for tag in batch.tags], n_ranks, n_mini_batches))
        return batch

    def _groups_together(self, rows: BatchRows, n_ranks: int, n_mini_batches: int) -> list[int]:
        groups = [group.rows for group in rows.groups]
        padding_rows = sorted(set(range(len(rows))) - set(rows.real))
        rows.fetch(SEGMENT_IDS.name, CONTEXTS)
        tokens = [distinct_tokens(rows, group) for group in groups]
        return place_groups(groups, tokens, padding_rows, n_ranks, n_mini_batches)

    def _report_rollouts(self, rows: BatchRows) -> dict[str, float]:
        """Add metrics of trees and the diversity of groups; raise RunError if every call of a tool failed by its own
        fault."""
        metrics = super()._report_rollouts(rows) | tree_metrics(rows)
        for tool, said in broken_tools(rows).items():
            raise RunError(f"step {self.global_steps}: every call of the tool {tool} failed, by its own fault: {said}")
        return metrics | diversity_metrics(rows, rows.groups[: shown_prompts(self.config)])

    def _compute_old_log_prob(self, batch, metrics: dict):
        super()._compute_old_log_prob(batch, metrics)
        if self.computed_fields:
            rows = self.rows
            entropy, mask = rows.tokens("entropy", 0.0), rows.response_mask.bool()
            if not_finite := int((~entropy.isfinite() & mask).sum()):
                metrics["training/not_finite_entropies"] = not_finite
            fields = compute_fields(self.computed_fields, self.components, entropy, mask, metrics)
            with rows.held():
                for name, values in fields.items():
                    rows.put(name, values)
        return self.rows.batch

    def _columns_of_rollouts(self) -> Sequence[str]:
        sent = (field.name for field in self._fields_of_rows() if field not in self.computed_fields)
        return (*super()._columns_of_rollouts(), "responses", "extra_fields", ORDER, PROBLEM, *sent)

    def _after_advantages(self, rows: BatchRows, metrics: dict) -> None:
        self._zero_single_rows(rows)
        self._report_step(rows, metrics)

    @contextmanager
    def _credit_context(self, rows: BatchRows):
        with ExitStack() as stack:
            for field in self._fields_of_rows():
                stack.enter_context(field.bound(rows.tokens(field.name, 0.0 if field.unsent is None else field.unsent)))
            credit = credit_of(self.config.algorithm.adv_estimator)
            for reward_field in credit.reward_fields if credit else ():
                stack.enter_context(reward_field.bound(rows.reward_field(reward_field.name)))
            for component in self.components:
                for context_value, value in component.context_values().items():
                    stack.enter_context(context_value.bound(value))
            yield

    def _fields_of_rows(self) -> list[TokenField]:
        """Return the fields that an estimator may read: the rollouts' fields, and those that the trainer computed."""
        credit = credit_of(self.config.algorithm.adv_estimator)
        needs = credit.needs if credit else ()
        sent = [field for field in FIELDS.values() if field.unsent is not None and not field.on_demand]
        return list(dict.fromkeys([*sent, *self.computed_fields, *(field for field in needs if field.on_demand)]))

    def _zero_single_rows(self, rows: BatchRows) -> None:
        """Write advantage 0 for a trajectory that is alone in its group; upstream would give it its score."""
        if compares(self.config.algorithm.adv_estimator) in GROUP_COMPARISONS:
            single = [g for g in rows.groups if len({place_of(rows.keys[row]).session for row in g.rows}) == 1]
            zero_advantages(rows, [row for group in single for row in group.rows])

    def _report_step(self, rows: BatchRows, metrics: dict) -> None:
        """Add metrics of credit, call `after_advantage` of the components, and write the file of trees."""
        if SEGMENT_IDS.get().max() >= 0:
            norm = self.config.algorithm.get("norm_adv_by_std_in_grpo", True)
            rewards = rows.tokens(rewards_column(self.config.algorithm), 0.0)
            metrics.update(credit_metrics(rewards, rows.response_mask, rows.index, norm))
        for component in self.components:
            component.after_advantage(rows, metrics)
        # Whether a rollout kept its tree depends on the step in which it began, which may be earlier than this step.
        before = self.trees_written[self.global_steps]  # number of trees from earlier updates of this step
        free = shown_prompts(self.config) - before
        kept = [group for group in rows.groups if writes_trees(self.config, group.order[0])][:free]
        if kept:
            nodes = batch_nodes(rows.index, rows.response_mask)
            advantages = segment_advantages(rows, nodes).tolist()
            records = [self._tree_record(rows, group, nodes, advantages) for group in kept]
            write_records(self.config.trainer.default_local_dir, self.global_steps, records, after=before > 0)
            self.trees_written[self.global_steps] += len(kept)

    def _tree_record(self, rows: BatchRows, group: Group, nodes: Nodes, advantages: list[float]) -> dict:
        tree, made_by_rollout = tree_of_group(rows, group)
        if made_by_rollout:
            numbers = nodes.segment_nodes(group.uid, range(len(tree.segments)))
            for segment, node in zip(tree.segments, numbers, strict=True):
                segment.info.notes |= {"advantage": advantages[node]} if node >= 0 else {}
            for component in self.components:
                component.annotate(tree, rows, group)
        scores = zip(group.rows, rows.column("rm_scores", group.rows), strict=True)
        rewards = [tokens.sum().item() if rows.has_answer[row] else None for row, tokens in scores]
        update = "tree" if self.config.actor_rollout_ref.actor.get("use_prefix_tree") else "rows"
        return tree_record(tree, self.global_steps, group.uid, rewards, update, self.tokenizer)

    def _update_actor(self, batch, metrics: dict):
        if skips_zero_advantages(self.config.actor_rollout_ref.actor) and not is_distillation_enabled(
            self.config.get("distillation")
        ):
            batch.extra_info[SKIP_ZERO_ADVANTAGES] = True
        with ExitStack() as stack:
            for component in self.components:
                stack.enter_context(component.around_update(self, metrics))
            batch = super()._update_actor(batch, metrics)
        for name in (TRAINED_TOKEN_SHARE, UNIQUE_TOKEN_SHARE):
            if (share := metrics.pop(f"actor/{name}", None)) is not None:
                metrics[name] = share
                metrics["perf/mfu/actor"] *= share  # upstream counts all rows' tokens
        return batch

    # ---- checkpoint ----

    def _save_checkpoint(self):
        for component in self.components:
            if component.state_file and (state := component.state_dict()) is not None:
                save_state(self, component.state_file, state)
        super()._save_checkpoint()

    def _load_checkpoint(self):
        super()._load_checkpoint()
        for component in self.components:
            if component.state_file and (state := load_state(self, component.state_file)):
                component.load_state_dict(state)
                component.on_resume(self)


def compute_fields(
    fields: Collection[TokenField],
    components: Sequence[Component],
    entropy: torch.Tensor,
    mask: torch.Tensor,
    metrics: dict,
) -> dict[str, torch.Tensor]:
    """Return by name the token fields (B, T) that the run's parts need, from the old policy's entropies in nats and the
    mask of the tokens that count; add the computation's metrics to `metrics`."""
    values: dict[str, torch.Tensor] = {}
    for component in components:
        if component.computes:
            values |= component.token_fields(entropy, mask, metrics)
    for field in fields:
        if field.compute is not None:
            values[field.name], field_metrics = field.compute(entropy, mask)
            metrics |= field_metrics
    return {field.name: values[field.name] for field in fields}


def _column(values: Sequence) -> NonTensorStack:
    return NonTensorStack(*map(NonTensorData, values))


@register_trainer("explore")
class ExploreTrainer(ExploreMixin, FilteredPrompts, PPOTrainerSync):
    """Trainer of `schedule=sync`; `verl_patches.plugin` imports this module to register it with upstream."""

    upstream_mode = "sync"
