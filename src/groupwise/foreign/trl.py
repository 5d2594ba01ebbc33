"""TRL's GRPOConfig, of version 1.16, as our settings: a YAML or JSON file, or `key=value` settings.

What a file does not say, TRL has a default for, and it is imported too where it shapes the run.  Batches: TRL counts
completions per device and micro-steps; here a step samples `prompts_per_step` groups and makes `updates_per_step`
updates of them.  `tests/test_trl.py` compares advantages, loss and gradient with TRL's own code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from groupwise.errors import ConfigError
from groupwise.foreign import BF16, ONE_PASS, SHARES_ROWS, Imported, Reader, Reasons, put
from groupwise.foreign.trl_algorithm import trl_algorithm
from groupwise.trees import Tree, apply, read_yaml

LOCAL = "one process does everything here; the engine settings say what it may use"
REASONS: Reasons = (
    ("vllm_importance_sampling_*", "TRL corrects for vLLM's log-probs only; here the sampler and the learner agree"),
    ("vllm_* use_vllm use_transformers_* transformers_* cache_implementation ds3_gather_for_generation", LOCAL),
    ("fsdp* deepspeed ddp_* parallelism_config accelerator_config local_rank torch_compile* use_cache", LOCAL),
    ("gradient_checkpointing_kwargs activation_checkpointing_kwargs torch_empty_cache_steps", LOCAL),
    ("tf32 bf16_full_eval fp16_full_eval cast_lm_head_to_fp32 pad_to_multiple_of auto_find_batch_size", LOCAL),
    ("use_liger_kernel liger_kernel_config", LOCAL),
    ("average_tokens_across_devices full_determinism skip_memory_metrics debug", LOCAL),
    ("logging_* log_* report_to run_name project trackio_* disable_tqdm include_num_input_tokens_seen "
     "num_completions_to_print", "a run folder holds metrics and every rollout"),
    ("push_to_hub hub_*", "nothing is uploaded; the trained model is the folder model/ of the run"),
    ("dataloader_* remove_unused_columns ignore_data_skip data_seed train_sampling_strategy length_column_name "
     "label_names shuffle_dataset", "rows are drawn by a hash of the seed, the step and the group"),
    ("save_* enable_jit_checkpoint load_best_model_at_end metric_for_best_model greater_is_better "
     "restore_callback_states_from_checkpoint", "checkpoint.every and checkpoint.keep_last are all there is"),
    ("eval_* per_device_eval_batch_size prediction_loss_only include_for_metrics batch_eval_metrics "
     "num_generations_eval dataset_test_split", "an evaluation needs data: set evaluation.data, .every and .samples"),
    ("do_train do_eval do_predict resume_from_checkpoint", "the command says it: groupwise train, --resume, eval"),
    ("disable_dropout", "there is never any dropout here"),
    ("ref_model_mixup_alpha ref_model_sync_steps", "it is read for sync_ref_model: true only"),
    ("entropy_coef_* entropy_target use_adaptive_entropy", "it is read for use_adaptive_entropy: true only"),
    ("sapo_temperature_*", "it is read for loss_type: sapo only"),
    ("vespo_*", "it is read for loss_type: vespo only"),
    ("epsilon epsilon_high delta", "the loss_type does not read it"),
    ("generation_batch_size steps_per_generation off_policy_mask_threshold", "it is not set"),
    ("use_bias_correction_kl", "it is read for a beta above 0 only"),
    ("use_peft lora_* use_rslora use_dora load_in_* bnb_* use_bnb_nested_quant", "all weights are trained"),
    ("router_aux_loss_coef", "no loss of the router is added"),
    ("trust_remote_code model_revision attn_implementation model_init_kwargs* dtype torch_dtype", "the model is loaded "
     "from its folder with the settings of engine"),
    ("dataset_config dataset_streaming datasets*", "data.path and data.split are all there is; save other data as a "
     "file"),
    ("max_tool_calling_iterations", "a conversation ends with the first answer"),
    ("optim_args optim_target_modules label_smoothing_factor neftune_noise_alpha lr_scheduler_kwargs*",
     "the optimizer is AdamW with a constant, linear or cosine schedule"),
    ("chat_template_kwargs* generation_kwargs* repetition_penalty min_p", "training scores the distribution of the "
     "model at a temperature, so nothing else may shape what is sampled"),
    ("reward_model_name_or_path", "a reward that is a model is a function of yours: rewards: [file.py:function]"),
    ("output_dir", "a run makes itself a folder under runs/"),
    ("env* config use_cpu wandb_*", "it belongs to the machine"),
)  # fmt: skip
REWARDS: dict[str, Any] = {
    "accuracy_reward": {"use": {"type": "math_answer", "column": "solution"}},
    "think_format_reward": {"use": {"type": "format"}},
}


def import_trl(arguments: Sequence[str]) -> Imported:
    """Our settings for a YAML or JSON file of GRPOConfig fields, with `key=value` settings on top.

    Raises:
        ConfigError: the file is no mapping, or TRL or we refuse what it asks for.
    """
    files = [text for text in arguments if "=" not in text]
    if len(files) > 1:
        raise ConfigError(f"{files[1]}: a second file; pass one, and settings as key=value")
    settings = read_yaml(Path(files[0])) if files else {}
    for text in arguments:
        if "=" in text:
            apply(settings, text.lstrip("-"))
    return from_trl(settings)


def from_trl(settings: Mapping[str, Any]) -> Imported:
    """Our settings for the fields of a GRPOConfig, and names of model, dataset and rewards beside them.

    Raises:
        ConfigError: TRL or we refuse what it asks for.
    """
    r = Reader({k: None if v == "None" else v for k, v in settings.items()}, "TRL")
    tree: Tree = {}
    _model_and_data(r, tree)
    _rewards(r, tree)
    updates = _amounts(r, tree)
    tree["algorithm"] = r.algorithm(**trl_algorithm(r, updates))
    _sampling(r, tree)
    _optimizer(r, tree)
    _engine(r, tree)
    _checkpoints(r, tree, updates)
    return Imported(tree, r.finish((), REASONS, lambda key: "GRPOConfig of TRL 1.16 has no such field"))


def _model_and_data(r: Reader, tree: Tree) -> None:
    for keys, ours in (
        (("model_name_or_path", "model"), "model"),
        (("dataset_name", "train_dataset", "dataset"), "data.path"),
        (("dataset_train_split",), "data.split"),
    ):
        value = next((r.take(key) for key in keys if r.take(key) is not None), None)
        if value is not None:
            put(tree, ours, value)
        elif ours != "data.split":
            r.ask(ours, f"an argument of the trainer in TRL; the key of its command line is {keys[0]}")
        for key in keys:
            r.became(key, f"{ours}: {value}")


def _rewards(r: Reader, tree: Tree) -> None:
    names: Any = r.take("reward_funcs")
    named: list[Any] = list(cast(list[Any], names)) if isinstance(names, list) else [names] if names else []
    weights: list[Any] = r.take("reward_weights") or []
    if not named:
        r.ask("rewards", "math_answer stands in for the reward functions; they are code in TRL, and the same code runs "
              "here: rewards: [file.py:function]")  # fmt: skip
        r.became("reward_weights", "the weight of each of the rewards", "the functions are not named; set them")
        tree["rewards"] = ["math_answer"]
        return
    tree["rewards"] = []
    for i, name in enumerate(named):
        module, _, function = str(name).rpartition(".")
        reward = dict(REWARDS.get(str(name), {"use": f"{module}:{function}" if module else f"rewards.py:{name}"}))
        if i < len(weights):
            reward["weight"] = float(weights[i])
        tree["rewards"].append(reward)
    about = "ours reads the answer in its own way" if any(str(name) in REWARDS for name in named) else ""
    r.became("reward_funcs", f"rewards: {tree['rewards']}", about)
    r.became("reward_weights", "rewards: their weights")


def _amounts(r: Reader, tree: Tree) -> int:
    """Prompts, completions and updates of a step; how many of TRL's optimizer steps one of ours stands for."""
    group, micro = r.number("num_generations", 8), r.number("per_device_train_batch_size", 8)
    accumulation, processes = r.number("gradient_accumulation_steps", 1), r.number("num_processes", 1)
    rows, per_generation = r.number("generation_batch_size"), r.number("steps_per_generation")
    if rows and per_generation:
        raise ConfigError("generation_batch_size and steps_per_generation: TRL takes one of them, not both")
    per_generation = per_generation or (rows // (micro * processes) if rows else accumulation)
    window = max(per_generation, accumulation)  # micro-steps between two rounds of sampling with other weights
    rows = micro * processes * window
    prompts = max(rows // group, 1)
    updates = min(max(window // accumulation, 1), prompts)
    whole = rows % group == 0 and window % accumulation == 0 and updates == window // accumulation
    odd = "" if whole else f"TRL's {rows} completions are no whole number of groups of {group}, or of updates"
    tree |= {"prompts_per_step": prompts, "group_size": group, "updates_per_step": updates}
    if "num_processes" not in r:
        r.ask("prompts_per_step", f"{prompts} is for one process; num_processes=N says how many TRL runs on")
    r.became("num_generations", f"group_size: {group}")
    for key in ("per_device_train_batch_size", "generation_batch_size", "num_processes"):
        r.became(key, f"prompts_per_step: {prompts}", odd)
    for key in ("gradient_accumulation_steps", "steps_per_generation"):
        r.became(key, f"updates_per_step: {updates}", odd or (SHARES_ROWS if updates > 1 else ""))
    passes = r.number("num_iterations", 1)
    r.became("num_iterations", "one pass over the rollouts", ONE_PASS if passes > 1 else "")
    total = r.number("max_steps", -1)
    if total > 0:
        tree["steps"] = math.ceil(total / (updates * passes))
        r.became("max_steps", f"steps: {tree['steps']} of {updates} updates")
        r.no_counterpart("num_train_epochs", "max_steps decides, as in TRL")
    else:
        r.no_counterpart("max_steps", "it leaves the length of the run to num_train_epochs")
        r.no_counterpart("num_train_epochs", "the length of a run is counted in steps")
        r.ask("steps", f"TRL goes {r.number('num_train_epochs', 3.0)} times over the rows: rows * that / {prompts}")
    tree["seed"] = r.number("seed", 42)
    r.became("seed", f"seed: {tree['seed']}")
    return updates * passes


def _sampling(r: Reader, tree: Tree) -> None:
    length, temperature = r.number("max_completion_length", 512), float(r.number("temperature", 1.0))
    if length:
        put(tree, "sampling.max_tokens", length)
        r.became("max_completion_length", f"sampling.max_tokens: {length}")
    else:
        r.ask("sampling.max_tokens", "TRL leaves the length open; here it has to be a number")
        r.no_counterpart("max_completion_length", "sampling.max_tokens has to be a number")
    put(tree, "sampling.temperature", temperature)
    r.became("temperature", f"sampling.temperature: {temperature}")
    for name, whole in (("top_p", 1.0), ("top_k", 0)):
        cut = "training scores the whole distribution, so what is sampled must not be cut"
        r.became(name, "the whole distribution", cut if r.number(name, whole) not in (whole, -1, None) else "")


def _optimizer(r: Reader, tree: Tree) -> None:
    for key, ours, default in (
        ("learning_rate", "learning_rate", 1e-6),
        ("weight_decay", "weight_decay", 0.0),
        ("adam_epsilon", "eps", 1e-8),
    ):
        value = float(r.number(key, default))
        put(tree, f"optimizer.{ours}", value)
        decays = "ours decays every weight, TRL's neither biases nor norms" if ours == "weight_decay" and value else ""
        r.became(key, f"optimizer.{ours}: {value}", decays)
    put(tree, "optimizer.betas", [float(r.number("adam_beta1", 0.9)), float(r.number("adam_beta2", 0.999))])
    for key in ("adam_beta1", "adam_beta2"):
        r.became(key, "optimizer.betas")
    norm = r.number("max_grad_norm", 1.0)
    put(tree, "optimizer.max_grad_norm", float(norm or 1e9))
    r.became("max_grad_norm", f"optimizer.max_grad_norm: {float(norm or 1e9)}")
    kind = r.take("lr_scheduler_type", "linear")
    ours = str(kind).removesuffix("_with_warmup")
    known = ours in ("linear", "cosine", "constant")
    put(tree, "optimizer.schedule", ours if known else "linear")
    r.became("lr_scheduler_type", f"optimizer.schedule: {ours if known else 'linear'}", "" if known else f"no {kind}")
    warmup, share = r.number("warmup_steps", 0), r.number("warmup_ratio", 0.0)
    share = warmup if 0 < warmup < 1 else share
    updates = tree.get("steps", 0) * tree["updates_per_step"]
    count = int(warmup) if warmup >= 1 or not share else math.ceil(share * updates)
    put(tree, "optimizer.warmup_updates", count)
    unknown = "the length of the run is not known; set it" if share and warmup < 1 and not updates else ""
    r.became("warmup_steps", f"optimizer.warmup_updates: {count}", unknown if 0 < warmup < 1 else "")
    if "warmup_ratio" in r:
        r.became("warmup_ratio", f"optimizer.warmup_updates: {count}", unknown)
    name = str(r.take("optim", "adamw_torch_fused"))
    r.became("optim", "AdamW", "" if name.startswith("adamw_torch") else "there is no other optimizer")


def _engine(r: Reader, tree: Tree) -> None:
    half = "bf16" if r.take("bf16", not r.take("fp16", False)) else "fp16" if r.take("fp16") else None
    put(tree, "engine.dtype", "float32")
    for key in ("bf16", "fp16"):
        r.became(key, *(BF16 if half == key else BF16[:1]))
    newer, older = r.take("activation_checkpointing"), r.take("gradient_checkpointing", True)
    checkpointing = bool(older if newer is None else newer)  # transformers 5 renamed it, and the new name decides
    put(tree, "engine.gradient_checkpointing", checkpointing)
    for key in ("activation_checkpointing", "gradient_checkpointing"):
        r.became(key, f"engine.gradient_checkpointing: {str(checkpointing).lower()}")
    if r.take("use_cpu", False):
        put(tree, "engine.device", "cpu")
        r.became("use_cpu", "engine.device: cpu")
    if r.take("output_dir"):
        tree["output"] = str(r.take("output_dir"))
        r.became("output_dir", f"output: {tree['output']}")


def _checkpoints(r: Reader, tree: Tree, updates: int) -> None:
    kind, every = r.take("save_strategy", "steps"), r.number("save_steps", 500)
    if kind == "steps" and every >= 1:
        put(tree, "checkpoint.every", math.ceil(every / updates))
        r.became("save_strategy", "checkpoint.every")
        r.became("save_steps", f"checkpoint.every: {math.ceil(every / updates)}")
    if keep := r.number("save_total_limit"):
        put(tree, "checkpoint.keep_last", keep)
        r.became("save_total_limit", f"checkpoint.keep_last: {keep}")
