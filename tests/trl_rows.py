"""Section "bad input" of our study of TRL 1.16.0: what its `GRPOTrainer` does with each, and what happens here.

`ours` names cases of `mistakes.py`, whose messages are quoted on the page; where the input is none of the user's
mistakes, or cannot be known before sampling, `text` says what happens and `test` is the test in test_errors.py of it.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One input."""

    given: str
    trl: str
    ours: tuple[str, ...] = ()
    text: str = ""
    test: str = ""


ROWS = (
    Row(
        "a machine without a GPU",
        "`ValueError: Your setup doesn't support bf16/gpu`",
        ("Settings: a device that is not there",),
        "`engine.device: auto` takes the CPU.",
        "test_without_a_gpu_the_cpu_is_taken",
    ),
    Row(
        "a reward that raises",
        "the run dies with that exception, the rollouts are lost",
        ("Rewards: a reward that raises",),
        "On some samples only: these are left out, with the exception and its line as their `problem`; the run stops "
        "when they are more than `max_invalid_fraction`.",
        "test_a_sample_that_cannot_be_scored_is_left_out_and_too_many_stop_the_run",
    ),
    Row(
        "a reward that returns None or one number for all",
        "`TypeError: 'NoneType' object is not iterable`, the function is not named",
        ("Rewards: nothing, with TRL's signature", "Rewards: one number for all completions"),
    ),
    Row(
        "a list of None",
        "one warning; trains with zero gradient",
        text="The samples count as invalid, so the run stops: `rewards: none has an opinion on this sample`.",
        test="test_rewards_without_an_opinion_stop_the_run",
    ),
    Row("a list of the wrong length", "a clear message", ("Rewards: too many numbers",)),
    Row('text, even "1.0"', "`ValueError: too many dimensions 'str'`", ("Rewards: text",)),
    Row(
        "a list of lists",
        "`RuntimeError: expand(torch.FloatTensor{[4, 1]}, size=[4])...`",
        ("Rewards: lists in a list",),
    ),
    Row("a dict", "accepted; the keys become the rewards", ("Rewards: a dict, with TRL's signature",)),
    Row(
        "numpy, torch, bool",
        "accepted",
        text="Accepted.",
        test="test_numbers_of_any_library_are_rewards",
    ),
    Row(
        "one nan",
        "excluded, with a warning",
        ("Rewards: nan",),
        "On some samples only: as for a reward that raises.",
        "test_a_sample_that_cannot_be_scored_is_left_out_and_too_many_stop_the_run",
    ),
    Row(
        "one inf, rewards not scaled",
        "the weights are nan after one step; loss 0.0 is logged",
        ("Rewards: inf",),
        "On some samples only: as for a reward that raises; the weights stay finite.",
        "test_one_infinite_reward_leaves_the_weights_finite",
    ),
    Row(
        "one inf, rewards scaled",
        "the whole group silently gets advantage 0",
        ("Rewards: inf",),
        "On some samples only: that sample is left out, the rest of its group is compared without it.",
        "test_one_infinite_reward_leaves_the_weights_finite",
    ),
    Row(
        "a constant reward",
        "loss 0, no warning",
        text="A warning: `left nothing to learn from, so nothing was updated: all rewards were equal in 100%`.",
        test="test_a_constant_reward_is_said_to_teach_nothing",
    ),
    Row(
        "an absurd learning rate",
        "`RuntimeError: probability tensor contains either inf, nan or element < 0` at the next rollout",
        ("Settings: an infinite learning rate",),
        "A finite one that overflows stops the run before the optimizer takes the step.",
        "test_a_learning_rate_that_overflows_stops_the_run_with_its_name",
    ),
    Row(
        "a reward without `**kwargs`",
        "`TypeError: f() got an unexpected keyword argument 'prompts'`",
        text="It is called with what it takes.",
        test="test_a_reward_is_called_with_what_it_takes",
    ),
    Row(
        "a reward that needs a missing column",
        "`TypeError`, after the first generation was paid for",
        ("Rewards: a column that is missing, with TRL's signature", "Rewards: a column that is missing"),
    ),
    Row("no column `prompt`", "`KeyError: 'prompt'` at the first step", ("Prompts: another column",)),
    Row("a prompt that is None", "accepted and trained on", ("Prompts: a prompt that is null",)),
    Row("an empty prompt", "`IndexError: index -1 is out of bounds...`", ("Prompts: a prompt that is empty",)),
    Row(
        "no prompts, or fewer than a step",
        "a successful run of 0 steps",
        ("Prompts: a dataset without rows", "Prompts: fewer prompts than a step"),
    ),
    Row(
        "prompts that do not fill a last step",
        "dropped in every epoch, silently",
        text="A step may straddle two epochs: no prompt is left out.",
        test="test_prompts_that_do_not_fill_a_last_step_are_not_left_out",
    ),
    Row(
        "a prompt longer than the context",
        "silently trained, or a hang with vLLM's server",
        ("Prompts: prompts longer than the context", "Prompts: no prompt that fits"),
    ),
    Row(
        "a batch that is no multiple of the group",
        "`generation_batch_size (3) must be divisible by num_generations (4).`",
        text="Steps are made of whole groups, and micro-batches change no result: no number has to divide another.",
        test="test_no_number_has_to_divide_another",
    ),
    Row("a group of one", "a clear message", ("Settings: a group of one",)),
    Row(
        "two settings for the batch of a generation",
        "`... can not be both configured at the same time`",
        ("Settings: another system's name for a setting",),
        "There is one: `prompts_per_step`.",
    ),
    Row(
        "an unknown loss, ratio level or scale",
        "found after the first generation and its rewards",
        (
            "The algorithm: an unknown surrogate",
            "The algorithm: an unknown ratio",
            "The algorithm: an unknown scale",
        ),
    ),
    Row(
        "epsilon -1, top entropy quantile 2",
        "accepted silently",
        ("The algorithm: a negative clip", "The algorithm: a share of tokens above 1"),
    ),
    Row(
        "no limit of length, with Dr. GRPO",
        "`TypeError: unsupported operand type(s) for *: 'int' and 'NoneType'`",
        ("Sampling: no limit of length",),
    ),
    Row("a temperature of 0", "a clear message, at generation", ("Sampling: a temperature of 0",)),
    Row(
        "a KL to the reference, offline or with a model made in memory",
        "the reference is downloaded again, or is silently another model",
        text="The reference is the folder that is trained.",
        test="test_the_reference_is_the_folder_that_is_trained",
    ),
    Row(
        "a model that never stops, truncated completions masked",
        "loss 0 forever, no message",
        ("The model: no token that ends a completion",),
        "A warning: `nothing was updated: ... 100% of its completions were truncated`.",
        "test_completions_that_are_all_left_out_are_said_to_teach_nothing",
    ),
    Row("stop strings", "such completions count as truncated", ("Sampling: stop strings",)),
    Row(
        "a completion without a token",
        "`IndexError`",
        text="It is scored like any other and trains nothing.",
        test="test_an_empty_completion_is_scored_and_trains_nothing",
    ),
    Row(
        "prompts of several lengths, absolute positions",
        "log-probs of a GPT-2 are off by 6.8 nats, silently",
        text="Sampler and learner agree, and each step measures it (`sampler_mismatch`).",
        test="test_prompts_of_several_lengths_score_alike_with_absolute_positions",
    ),
    Row(
        "several GPUs without a launcher",
        "a clear message",
        text="`engine.device: auto` takes the first.",
        test="test_of_several_gpus_the_first_is_taken",
    ),
)
