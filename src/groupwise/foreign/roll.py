"""A ROLL RLVR config (YAML) as our settings, with ROLL's documented meaning and its order of operations.

ROLL: group statistics -> `(r - mean) / (std + 1e-6)` -> `reward_clip` -> KL in the reward, clipped again -> reverse
sums -> whitening over all tokens of the step -> `advantage_clip` -> clipped surrogate.  Ours is the same order; numbers
in `tests/test_roll.py`.  ROLL reads its file without checking names: what it does not know it ignores.  Such keys are
imported with their documented meaning where they have one, and named dead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from groupwise.errors import ConfigError
from groupwise.foreign import BF16, ONE_PASS, SHARES_ROWS, Imported, Reader, Reasons, put
from groupwise.foreign.roll_algorithm import roll_algorithm
from groupwise.trees import Tree, read_yaml

NOT_A_FIELD = "no field of its config has this name, and it drops unknown names in silence"
NO_READER = "declared in its config, but nothing reads it"
DEAD: Reasons = (
    ("token_level_loss positive_loss_coef use_additional_prompts pg_variant", NOT_A_FIELD),
    ("*tis_lower_bound *tis_upper_bound", f"{NOT_A_FIELD}; the weight is always clipped to [0, 1]"),
    ("*cispo_epsilon_low *cispo_epsilon_high *cispo_use_unified_mask", f"{NOT_A_FIELD}; always 0.9 to 1.1, no mask"),
    ("*kimi15_tau", f"{NOT_A_FIELD}; always 0.1"),
    ("postive_loss_coef use_topr_neg_loss_coef use_policy_loss_type use_topr_loss val_greedy val_n_sample", NO_READER),
    ("mask_type balance_length minibatch_data_iter_num dataset_filter* l2 add_len_reward", NO_READER),
    ("use_reward_scaling use_reward_norm *response_filter_config*", NO_READER),
)
CLUSTER = "one process does everything here; the engine settings say what it may use"
REASONS: Reasons = (
    ("hydra.* defaults*", "a run file is read as it stands; settings of other files have to be copied into it"),
    ("*device_mapping *num_gpus_per_node num_nodes *world_size *strategy_args* *infer_batch_size", CLUSTER),
    ("*worker_cls *backend *use_remove_padding *use_dynamic_batching* *sequence_packing* system_envs*", CLUSTER),
    ("*max_running_requests is_num_return_sequences_expand generate_opt_level router_args*", CLUSTER),
    ("is_use_additional_prompts max_additional_running_prompts user_defined_rollout_loop_cls", CLUSTER),
    ("exp_name logging_dir logging_steps track_with tracker_kwargs* save_logging_board_dir", "a run folder holds logs"),
    ("output_dir checkpoint_config*", "a run keeps everything in its own folder under runs/; set `output` to name it"),
    ("resume_from_checkpoint", "`groupwise train --resume FOLDER` continues a run"),
    ("*template global_template tag_to_template* *attn_implementation", "the tokenizer's chat template is used"),
    ("reference.*", "the reference is the model that training starts from"),
    ("*domain_interleave_probs* *interleave_probs", "data.path is one file, read in one order"),
    ("*preprocessing_num_workers *dataset_dir", "data.path is read as it is written, relative to where you start"),
    ("async_generation_ratio", "sampling and training take turns here"),
    ("norm_mean_type norm_std_type", "adv_estimator decides: grpo always takes the group's mean and std"),
    ("lambd value_clip critic*", "it is read for adv_estimator: gae only"),
    ("target_kl kl_horizon", "kl.coef stays constant"),
    ("init_kl_coef kl_penalty", "it is read for add_token_level_kl only"),
    ("difficulty_l* difficulty_h* error_max_len_threshold", "the mask that reads it is off"),
    ("error_max_len_clip", "no slot drops wrong completions by their length; shape the reward instead"),
    ("difficulty_loss_weight length_loss_weight", "completions have no weight of their own; in ROLL neither has an "
     "effect at per_device_train_batch_size: 1"),
    ("whiten_rewards", "advantages can be whitened (whiten), rewards of tokens cannot"),
    ("critic_warmup", "policy and critic learn from the first step"),
    ("is_pure_opd use_opd teacher* student_*", "there is no distillation here"),
    ("force_disable_old_logprobs_recompute enable_old_logprobs_recompute enable_reference", "log-probs are computed "
     "when a slot of the algorithm needs them, and only then"),
    ("reward_pretrain reward_model*", "a reward that is a model is a function of yours: rewards: [file.py:function]"),
    ("rewards.*", "a reward here is a function of the completion and its row"),
    ("validation.*", "an evaluation has data, temperature and samples"),
    ("*model_type *num_beams *max_steps *num_train_epochs *lora* *freeze* *gradient_accumulation_steps", "it has no "
     "part in how ROLL trains here"),
    ("actor_train.* actor_infer.*", "it is no setting of sampling, optimizer or engine"),
)  # fmt: skip


def import_roll(path: Path) -> Imported:
    """Our settings for a ROLL config file.

    Raises:
        ConfigError: the file is no YAML mapping, or asks for something that we refuse.
    """
    return from_roll(read_yaml(path))


def from_roll(settings: Mapping[str, Any]) -> Imported:
    """Our settings for the tree of a ROLL config; interpolations such as `${pretrain}` are resolved.

    Raises:
        ConfigError: it asks for something that we refuse.
    """
    r = Reader(resolve_references(settings), "ROLL")
    tree: Tree = {}
    _model_and_data(r, tree)
    _rewards(r, tree)
    tree["algorithm"] = r.algorithm(**roll_algorithm(r))
    _amounts(r, tree)
    _sampling(r, tree)
    _optimizer(r, tree)
    for key, value in r.given.items():
        if isinstance(value, str) and "${" in value:
            r.ask(key, f"{value} stands for something that this file does not say")
    unknown = "the importer does not know it (ROLL drops in silence what is no field of its config)"
    return Imported(tree, r.finish(DEAD, REASONS, lambda key: unknown))


# Interpolations ------------------------------------------------------------------------------------------------------

_REFERENCE = re.compile(r"\$\{([^${}]+)\}")


def resolve_references(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`${key}`, `${a.b}` and `${oc.env:NAME,default}` replaced by what they stand for; others are left as they are."""

    def lookup(name: str, seen: tuple[str, ...]) -> Any:
        if name.startswith("oc.env:"):
            variable, _, default = name.removeprefix("oc.env:").partition(",")
            return os.environ.get(variable, default or None)
        place: Any = settings
        for part in name.split("."):
            if not isinstance(place, Mapping) or part not in place:
                return None
            place = place[part]
        if name in seen:
            raise ConfigError(f"${{{name}}}: refers to itself, by way of {' -> '.join(seen)}")
        return resolved(place, (*seen, name))

    def resolved(value: Any, seen: tuple[str, ...] = ()) -> Any:
        if isinstance(value, Mapping):
            return {str(k): resolved(v, seen) for k, v in cast(Mapping[str, Any], value).items()}
        if isinstance(value, list):
            return [resolved(item, seen) for item in cast(list[Any], value)]
        if not isinstance(value, str):
            return value
        whole = _REFERENCE.fullmatch(value)
        if whole and (found := lookup(whole[1], seen)) is not None:
            return found
        if whole:
            return value
        parts = _REFERENCE.split(value)  # text, name, text, name, ..., text
        texts = [lookup(part, seen) if i % 2 else part for i, part in enumerate(parts)]
        return "".join(f"${{{part}}}" if text is None else str(text) for part, text in zip(parts, texts, strict=True))

    return resolved(settings)


# What is trained on what ---------------------------------------------------------------------------------------------


def _model_and_data(r: Reader, tree: Tree) -> None:
    model = r.take("pretrain") or r.take("actor_train.model_args.model_name_or_path")
    if model:
        tree["model"] = model
        r.became("pretrain", "model")
        r.became("actor_train.model_args.model_name_or_path", "model")
    else:
        r.ask("model", "folder or hub id of the model to train; ROLL's key is pretrain")
    for place, ours in (("actor_train", "data"), ("validation", "evaluation.data")):
        names = r.take(f"{place}.data_args.file_name")
        files: list[Any] = list(cast(list[Any], names)) if isinstance(names, list) else [names] if names else []
        if files:
            put(tree, f"{ours}.path", files[0])
            many = f"one file; join {len(files)} files into one, or start a run for each" if len(files) > 1 else ""
            r.became(f"{place}.data_args.file_name", f"{ours}.path: {files[0]}", many)
        elif ours == "data":
            r.ask("data.path", "the rows to train on; ROLL's key is actor_train.data_args.file_name")
        column = r.take(f"{place}.data_args.messages") or r.take(f"{place}.data_args.prompt")
        if column and files:
            put(tree, f"{ours}.prompt_column", column)
            for key in ("messages", "prompt"):
                r.became(f"{place}.data_args.{key}", f"{ours}.prompt_column: {column}")
    if "prompt_length" in r:
        put(tree, "data.long_prompts", "drop")
    r.became("prompt_length", "data.long_prompts: drop", "ROLL drops prompts of more tokens than this, we those that "
             "leave no room for sampling.max_tokens in the model's context")  # fmt: skip
    for key, ours in (("temperature", "temperature"), ("num_return_sequences", "samples")):
        value = r.number(f"validation.generating_args.{key}")
        if value is not None and "evaluation" in tree:
            tree["evaluation"][ours] = float(value) if ours == "temperature" else value
            r.became(f"validation.generating_args.{key}", f"evaluation.{ours}: {value}")


def _rewards(r: Reader, tree: Tree) -> None:
    found: list[Tree] = []
    others: list[str] = []
    for key, worker in r.given.items():
        domain = re.fullmatch(r"rewards\.(\w+)\.worker_cls", key)
        if domain and str(worker).endswith("MathRuleRewardWorker"):
            reward = {"use": {"type": "math_answer", "column": "ground_truth"}, "name": domain[1]}
            found.append(reward)
            r.became(key, f"rewards: {reward}", "ROLL's gives 0 to an answer without </think> or a blank line before "
                     "it; check the name of the column")  # fmt: skip
        elif domain:
            others.append(domain[1])
            r.no_counterpart(key, "this reward has to be a function of yours: rewards: [file.py:function]")
    if not found:
        r.ask("rewards", "math_answer stands in for ROLL's reward workers; name what grades your data")
    if len(found) + len(others) > 1:
        r.ask("rewards", "ROLL grades each row by the reward of its domain; here every reward sees every row")
    tree["rewards"] = found or ["math_answer"]


# Amounts, sampling, optimizer ----------------------------------------------------------------------------------------


def _amounts(r: Reader, tree: Tree) -> None:
    prompts, group = r.number("rollout_batch_size", 128), r.number("num_return_sequences_in_group", 1)
    steps = r.number("max_steps")
    for key, ours, value in (
        ("rollout_batch_size", "prompts_per_step", prompts),
        ("num_return_sequences_in_group", "group_size", group),
        ("max_steps", "steps", steps),
        ("seed", "seed", r.number("seed")),
        ("save_steps", "checkpoint.every", r.number("save_steps")),
    ):
        if value is not None:
            put(tree, ours, value)
            r.became(key, f"{ours}: {value}")
    if steps is None:
        r.ask("steps", "how many rounds of sampling and updating; ROLL's key is max_steps")
    if (every := r.number("eval_steps")) and "evaluation" in tree:
        tree["evaluation"]["every"] = every
        r.became("eval_steps", f"evaluation.every: {every}")
    r.no_counterpart("eval_steps", "no validation data is named")
    r.became("ppo_epochs", "one pass over the rollouts", ONE_PASS if r.number("ppo_epochs", 1) > 1 else "")
    tree["updates_per_step"] = _updates(r, prompts, group)


def _updates(r: Reader, prompts: int, group: int) -> int:
    """Optimizer steps of one pipeline step: its rows over those of one update on all data-parallel ranks."""
    args, config = "actor_train.training_args", "actor_train.strategy_args.strategy_config"
    keys = [f"{args}.per_device_train_batch_size", f"{args}.gradient_accumulation_steps"]
    per_device, accumulation = (r.number(key) for key in keys)
    if per_device is None or accumulation is None:
        r.ask("updates_per_step", f"1 is assumed; ROLL divides its rows by devices, {keys[0]} and {keys[1]}")
        return 1
    ranges = re.findall(r"range\(\s*(?:(\d+)\s*,\s*)?(\d+)\s*\)", str(r.take("actor_train.device_mapping")))
    devices = sum(int(end) - int(start or 0) for start, end in ranges)
    if not devices:
        r.ask("updates_per_step", "one device is assumed, because actor_train.device_mapping cannot be read")
        devices = 1
    for name in ("tensor", "pipeline", "context"):
        devices //= int(r.number(f"{config}.{name}_model_parallel_size", 1))
    rows = max(devices, 1) * per_device * accumulation
    exact = max(prompts * group / rows, 1)
    updates = min(round(exact), prompts)
    odd = f"ROLL's {prompts * group} rows make {exact:.3g} updates of {rows}" if updates != exact else ""
    for key in (*keys, "actor_train.device_mapping"):
        r.became(key, f"updates_per_step: {updates}", odd or (SHARES_ROWS if updates > 1 else ""))
    return updates


def _sampling(r: Reader, tree: Tree) -> None:
    prefix = "actor_infer.generating_args"
    length, whole, prompt = (r.number(k) for k in ("response_length", "sequence_length", "prompt_length"))
    length = length if length is not None else whole - (prompt or 1024) if whole else None
    if length is not None:
        put(tree, "sampling.max_tokens", length)
        r.became("response_length", f"sampling.max_tokens: {length}")
        r.became("sequence_length", f"sampling.max_tokens: {length}")
    else:
        r.ask("sampling.max_tokens", "the longest completion; ROLL's key is response_length")
    temperature = r.number(f"{prefix}.temperature")
    if temperature is not None:
        put(tree, "sampling.temperature", float(temperature))
        scored = "" if temperature == 1 else "ROLL trains on log-probs without the temperature, we with it"
        r.became(f"{prefix}.temperature", f"sampling.temperature: {temperature}", scored)
    for name in ("top_p", "top_k"):
        cut = "training scores the whole distribution, so what is sampled must not be cut"
        r.became(f"{prefix}.{name}", "the whole distribution", "" if r.take(f"{prefix}.{name}") in (0, 1) else cut)
    for name, ours in (("max_new_tokens", "sampling.max_tokens"), ("num_return_sequences", "group_size")):
        r.dead(f"{prefix}.{name}", f"overwritten by what became {ours}")


def _optimizer(r: Reader, tree: Tree) -> None:
    for role, ours in (("actor_train", "optimizer"), ("critic", "critic_optimizer")):
        if role == "critic" and tree["algorithm"]["critic"] is None:
            continue
        for name, key in (("learning_rate", "learning_rate"), ("weight_decay", "weight_decay")):
            value = r.number(f"{role}.training_args.{name}")
            if value is not None:
                put(tree, f"{ours}.{key}", float(value))
                r.became(f"{role}.training_args.{name}", f"{ours}.{key}: {value}")
        warmup = r.number(f"{role}.training_args.warmup_steps")
        if warmup is not None:
            put(tree, f"{ours}.warmup_updates", warmup)
            r.became(f"{role}.training_args.warmup_steps", f"{ours}.warmup_updates: {warmup}")
        kind = r.take(f"{role}.training_args.lr_scheduler_type")
        if kind in ("constant", "linear", "cosine", "constant_with_warmup"):
            put(tree, f"{ours}.schedule", kind.removesuffix("_with_warmup"))
            r.became(f"{role}.training_args.lr_scheduler_type", f"{ours}.schedule: {kind.removesuffix('_with_warmup')}")
    norm = r.number("max_grad_norm", 1.0) / abs(r.number("rl_loss_coef", 1.0))
    put(tree, "optimizer.max_grad_norm", float(norm))
    r.became("max_grad_norm", f"optimizer.max_grad_norm: {norm}")
    args = "actor_train.model_args"
    if r.take(f"{args}.dtype") is not None:
        put(tree, "engine.dtype", "float32")
        r.became(f"{args}.dtype", *(BF16 if r.take(f"{args}.dtype") in ("bf16", "bfloat16", "fp16") else BF16[:1]))
    if (off := r.take(f"{args}.disable_gradient_checkpointing")) is not None:
        put(tree, "engine.gradient_checkpointing", not off)
        r.became(f"{args}.disable_gradient_checkpointing", f"engine.gradient_checkpointing: {not off}")
