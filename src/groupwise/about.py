"""What is published about each named algorithm: the prose of `docs/algorithms.md` and of `groupwise explain`."""

from __future__ import annotations

from typing import NamedTuple


class About(NamedTuple):
    """What is published about an algorithm; the rows of `docs/algorithms.md`."""

    title: str
    paper: str
    """arXiv ids, the first one the method's own; empty when there is none."""
    idea: str
    """What it changes, as a phrase."""
    fixes: str
    """The bias or the problem that it is an answer to."""
    when: str
    """What to take it for."""
    published: str = ""
    """The numbers that the paper, or the code named in the title, gives."""


ABOUT = {
    "grpo": About(
        "GRPO (DeepSeekMath)", "2402.03300", "rewards normalised within the group replace the critic",
        "PPO's critic costs memory and is hard to train when only the last token is rewarded.",
        "The reference point. Its 1/|o| favours short right answers and is lenient on long wrong ones; its 1/std gives "
        "nearly solved and nearly unsolved prompts more weight.",
        "beta 0.04, G 64, lr 1e-6, 1,024 tokens, batch 1,024, one update per rollout; clip width not stated",
    ),
    "grpo_process": About(
        "GRPO, process supervision", "2402.03300",
        "each reasoning step has a reward; a token gets the steps still to end",
        "One reward for a long completion does not say which step earned it.",
        "With rewards of steps: `process_reward_model`, or a function that returns `StepRewards`. A completion with "
        "more steps has larger advantages.",
    ),
    "grpo_r1": About(
        "GRPO of DeepSeek-R1", "2501.12948", "GRPO with almost no clipping and a weak KL",
        "", "To compare with R1's settings. The paper writes whole-sequence ratios; like every port, this is the token "
        "form.", "eps 10, beta 0.001, G 16, 32 prompts, 32,768 tokens, temperature 1, 16 mini-batches",
    ),
    "grpo_v32": About(
        "GRPO of DeepSeek-V3.2", "2512.02556", "no std, an unbiased KL, and no stale negative completions",
        "k3 in the loss has the gradient of another KL; negative completions that the policy has left are destructive.",
        "Several updates per rollout, or stale rollouts, with a KL that should be the reverse one. delta and beta are "
        "not published: 0.5 is TRL's suggestion, 0.001 is R1's.",
    ),
    "grpo_trl_default": About(
        "TRL's GRPOTrainer, default settings", "", "token mean, no KL, completions far off-policy masked",
        "", "To move a run from TRL (read in July 2026) here.", "eps 0.2, beta 0, G 8, lr 1e-6, cap 3, std eps 1e-4",
    ),
    "grpo_roll": About(
        "GRPO recipe of ROLL's documentation", "", "GRPO, then whitened over tokens, clipped at 2, dual clip 1.4",
        "", "To move a run from ROLL here. It is not GRPO: whitening moves completions with advantage 0 off 0, and at "
        "G 8 the clip at 2 binds for one right or one wrong answer of eight.",
        "eps 0.2, dual clip 1.4, beta 0.001, G 8, advantage clip 2",
    ),
    "dr_grpo": About(
        "Dr. GRPO", "2503.20783", "neither 1/|o| nor 1/std: a constant length in the denominator",
        "GRPO's length bias (1/|o|) and its difficulty bias (1/std).",
        "When wrong answers grow longer and longer. Equal to RLOO's advantage times (G - 1)/G.",
        "eps 0.2, beta 0, G 8, lr 1e-6, 3,000 tokens, 128 prompts, temperature 1",
    ),
    "dapo": About(
        "DAPO", "2503.14476", "clip-higher, dynamic sampling, token mean, soft overlong punishment",
        "Entropy collapse (clip-higher), groups that teach nothing (dynamic sampling), long completions whose tokens "
        "count less (token mean), noise from cut-off answers (soft punishment).",
        "Long reasoning with right-or-wrong rewards. The denominator is that of the authors' code, one mean over all "
        "tokens of the update; `drop_truncated: true` is its fifth piece, an alternative to the punishment.",
        "clip 0.2 / 0.28, beta 0, G 16, lr 1e-6, 20,480 tokens (4,096 of them falling), 512 prompts, 16 updates a step",
    ),
    "dapo_as_written": About(
        "DAPO, denominator as in the paper's formula", "2503.14476", "DAPO with one token mean per prompt",
        "", "To see the difference between the formula and the code: here every prompt counts the same.",
    ),
    "lite_ppo": About(
        "LitePPO", "2508.08221", "group mean, std of the whole batch, token mean",
        "The std of one group blows up groups whose rewards hardly differ.",
        "Rewards with more than two values. Its authors find the token mean better for base models, sequence means for "
        "aligned ones.", "eps 0.2, beta 0, G 8, 8,192 tokens, batch 1,024",
    ),
    "bnpo": About(
        "BNPO (Beta normalization)", "2506.02864", "divides by a Beta density fitted to the success rates",
        "Dividing by the std is one fixed choice of how much groups of another success rate weigh.",
        "Rewards in [0, 1]. Its limits are no scale at all and GRPO's std.",
        "clip 0.2 / 0.28, dual clip 10, G 16, lr 1e-6, 3,072 tokens, 32 prompts",
    ),
    "bnpo_trl": About(
        "TRL's loss_type bnpo", "", "token mean over each micro-batch",
        "", "To compare with TRL only: the result depends on how the batch is split, and it is not the paper's BNPO.",
        "eps 0.2",
    ),
    "gdpo": About(
        "GDPO", "2601.05242", "each reward function is normalised on its own, then they are added",
        "Summing rewards first gives different combinations of them the same advantage.",
        "Several reward functions. A weight of 0.5 then means half the influence, whatever the range of the reward.",
        "std eps 1e-4",
    ),
    "degrpo": About(
        "DeGRPO (Thinkless)", "2505.13379", "the first token, which chooses the mode, has a weight of its own",
        "A control token such as <think> or <short> gets 1/|o| of the gradient, and the choice of the mode collapses.",
        "Models that first choose how long to think.", "alpha 1/1000, beta 0.001, G 8, lr 1e-6, 24,576 tokens",
    ),
    "eighty_twenty": About(
        "80/20", "2506.01939", "DAPO on the fifth of the tokens with the largest entropy",
        "",
        "Long reasoning, as a variant of DAPO.", "fraction 0.2, clip 0.2 / 0.28",
    ),
    "gspo": About(
        "GSPO", "2507.18071", "one ratio for the completion, the geometric mean, clipped as a whole",
        "A token's ratio is a one-sample importance weight: its noise grows with length, and clipping amplifies it.",
        "Mixture-of-experts models, and several updates per rollout on long completions. Its clip widths are about a "
        "thousandth of a token's.", "clip 3e-4 / 4e-4, beta 0, 4 mini-batches",
    ),
    "gspo_token": About(
        "GSPO-token", "2507.18071", "GSPO's ratio in value, the token's in gradient",
        "A ratio of the whole completion cannot carry advantages that differ between its tokens.",
        "GSPO with process rewards or a KL per token. With one advantage per completion it equals GSPO.",
        "clip 3e-4 / 4e-4",
    ),
    "luspo": About(
        "LUSPO", "2602.05261", "GSPO's loss of a completion times its length",
        "GSPO, like GRPO, is biased towards short completions.", "GSPO when completions shrink.", "clip 2e-3 / 2.5e-3",
    ),
    "gmpo": About(
        "GMPO", "2507.20673", "the geometric mean of the ratios, each clipped in log space before it",
        "The arithmetic mean of ratio times advantage is dominated by outlier ratios.",
        "Several updates per rollout when single ratios explode.",
        "log clip 0.4, beta 0, G 8, lr 1e-6, 3,000 tokens, batch 128",
    ),
    "cispo": About(
        "CISPO (MiniMax-M1)", "2506.13585", "clips the weight of a token and keeps its gradient",
        "PPO's clip drops the tokens with a large ratio: often the rare ones that start a reflection.",
        "Many updates per rollout. The cap is an absolute ratio; the paper does not publish it, ScaleRL found 4 to 8 "
        "equivalent.", "no lower bound, no KL, DAPO's dynamic sampling and length penalty",
    ),
    "scalerl": About(
        "ScaleRL", "2510.13786", "CISPO with the batch's std, prompt means and without dull groups",
        "", "Large asynchronous runs. Its authors report that most such choices change efficiency, few the asymptote.",
        "cap 5, G 16",
    ),
    "sapo": About(
        "SAPO", "2511.20347", "a smooth gate in place of the clip, steeper for negative advantages",
        "A hard clip is all or nothing, and has no bound for A < 0.",
        "Several updates per rollout; near ratio 1 it behaves like GSPO.", "tau 1.0 (A > 0) and 1.05 (A < 0)",
    ),
    "dppo": About(
        "DPPO", "2602.04879", "bounds how far a probability moves, not its ratio",
        "A ratio of 1.5 is harmless for a token of probability 1e-4 and large for one of 0.6.",
        "When sampler and learner differ: everything is measured from the policy that sampled.",
        "delta 0.2 (total variation) or 0.05 (KL)",
    ),
    "prime_rl_default": About(
        "prime-rl's default loss", "2602.04879 2602.02276",
        "DPPO without std, with a k2 penalty towards the sampler's policy",
        "", "To move a run from prime-rl here.", "delta 0.2, k2 coefficient 0.002",
    ),
    "topr": About(
        "TOPR", "2503.14286", "positives like supervised learning, negatives with a ratio clipped to [0, 1]",
        "The importance weight of a negative completion has no bound.", "Rollouts of an older policy.", "clip [0, 1]",
    ),
    "vespo": About(
        "VESPO", "2602.10693", "a smooth weight of the completion's ratio that falls on both sides",
        "The variance of the product of a completion's ratios is exponential in its length.",
        "Rollouts of an older policy, or of a sampler that differs.",
        "(k, lambda) = (2, 3) for A >= 0, (3, 2) for A < 0",
    ),
    "intellect2": About(
        "INTELLECT-2", "2505.07291", "a second clip bounds the ratio of negative completions",
        "PPO's clip has no bound for A < 0.", "When single updates blow up.", "eps 0.2, delta 4, beta 1e-3",
    ),
    "reinforce": About(
        "REINFORCE (Williams 1992)", "", "reward times log-probability, nothing else",
        "", "The baseline of all baselines; it also works with `group_size: 1`.",
    ),
    "remax": About(
        "ReMax", "2310.10505", "the reward of the greedy completion is the baseline",
        "PPO needs a critic for its baseline.",
        "Few completions per prompt: one more, the greedy one, is sampled for each.",
    ),
    "rloo": About(
        "RLOO", "2402.14740", "the baseline is the mean of the others; the completion is one action",
        "PPO's machinery (critic, clip, credit per token) for a problem with one reward at the end; a baseline that "
        "contains the sample itself is biased.", "One update per rollout; small groups.", "G 2 or 4",
    ),
    "rloo_trl": About(
        "TRL's RLOOTrainer", "2402.14740", "RLOO with the completion's product of ratios, clipped",
        "", "To move a run from TRL here.", "eps 0.2, beta 0.05, G 2",
    ),
    "reinforce_pp": About(
        "REINFORCE++", "2501.03262", "no group: normalised over the tokens of the whole batch, KL in the reward",
        "Normalising within a group overfits easy prompts, and its mean and std share the sample.",
        "Many different prompts with few completions each.", "eps 0.2, gamma 1",
    ),
    "reinforce_pp_baseline": About(
        "REINFORCE++-baseline", "2501.03262", "group mean, then the whole batch's normalisation, k2 in the loss",
        "The std of a single group.", "As reinforce_pp, with several completions per prompt.", "eps 0.2",
    ),
    "ppo": About(
        "PPO with a critic", "1707.06347 1506.02438", "a second network estimates what is still to be earned (GAE)",
        "", "To compare with. It trains a second model as large as the policy.",
        "TRL's: eps 0.2, value clip 0.2, gamma 1, lambda 0.95, beta 0.05",
    ),
    "maxrl": About(
        "MaxRL", "2602.02710", "divides by the group's mean reward",
        "The plain policy gradient raises the success rate; with this scale it raises its logarithm, so rare successes "
        "count more.", "Hard prompts; rewards must not be negative.",
    ),
    "opo": About(
        "OPO", "2505.23585", "the baseline is the mean weighted by length",
        "The plain mean is not the baseline of least variance when the gradient of a completion grows with its length.",
        "Exactly on-policy runs: one update per rollout.", "beta 0",
    ),
    "gpg": About(
        "GPG", "2504.02546", "REINFORCE with the group mean; groups without signal leave the mean",
        "Groups whose rewards are all equal dilute the gradient.", "A small objective: no ratio, no clip, no KL.",
        "the factor B / (B - M), M completions in such groups",
    ),
    "kimi_k15": About(
        "Kimi k1.5", "2501.12599", "group mean, a length reward, a squared sequence log-ratio to the old policy",
        "", "Shorter right answers. tau is not published: kl.coef 0.1 is our choice.",
    ),
    "tis": About(
        "Truncated importance sampling (Yao et al. 2025)", "", "each token weighed by learner over sampler, at most 2",
        "A sampler with other kernels or precision makes every run slightly off-policy.",
        "When `sampler_mismatch` is not small.", "cap 2",
    ),
    "icepop": About(
        "IcePop", "2510.18855", "tokens on which learner and sampler disagree too much are left out",
        "Truncation still trains on tokens on which learner and sampler disagree.",
        "As tis, with a sampler that differs a lot on a few tokens.", "0.5 to 5",
    ),
    "decoupled_ppo": About(
        "Decoupled PPO (AReaL)", "2110.00641 2505.24298", "the clip's policy and the one that sampled are two",
        "With stale rollouts the clip would hold the policy near an old one.", "Asynchronous runs.", "eps 0.2",
    ),
}  # fmt: skip
"""What to know about each preset, for people; `tests/test_docs.py` keeps the two tables together."""
