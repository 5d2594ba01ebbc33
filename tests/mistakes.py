"""What users get wrong, and what `groupwise train` has to say: the cases of test_errors.py and of docs/errors.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import workplace as w
from models import tiny_tokenizer
from workplace import Mistake, data, model, reward, setting, training

NUMBER = "input should be a valid number"
GIB = 2**30
ONE_DISTRIBUTION = "drawn from another distribution than the one that training scores"
FILES = "accepted: a .jsonl, .json, .csv, .parquet file, or a Hub id such as org/name"
ONE_NUMBER = "accepted: one number for f(rollout)"
A_LIST = "accepted: a list of 1 numbers, one per completion"
PROMPTS = 'accepted: text, or a list of messages {"role": "user", "content": "..."}'
FOLDER = "give a folder that save_pretrained wrote, or "
AGAIN = "copy or download the model again, or write it with model.save_pretrained"
A_PROMPT = {"prompt": "w3", "answer": "w4"}

SETTINGS: dict[str, Mistake] = {
    "a typo in a setting": setting(
        "optimizer.lerning_rate=1",
        "no such setting (did you mean learning_rate?)",
        "accepted: learning_rate, betas",
    ),
    "a typo inside the algorithm": setting(
        "algorithm.surrogate.clip_hihg=1", "no such setting (did you mean high?)", "accepted: type, low, high"
    ),
    "a setting in the wrong place": setting(
        "learning_rate=1", "no such setting", "accepted: model, data", "did you mean optimizer.learning_rate?"
    ),
    "a typo in the run file": Mistake(
        ["train", "typo.yaml"],
        "stepz",
        "no such setting",
        "accepted: model, data",
        "did you mean steps?",
        w.a_file("typo.yaml", "stepz: 3"),
    ),
    "another system's name for a setting": setting(
        "steps_per_generation=2", "2", "here it is updates_per_step", "`groupwise import trl`"
    ),
    "nothing at all": Mistake(["train"], "model", "missing", "a Hugging Face causal language model", "set rewards:"),
    "a run file that is not there": Mistake(
        ["train", "no.yaml"], "no.yaml", "no such run file", "write one", "--model DIR --data FILE key=value"
    ),
    "two run files": Mistake(["train", "run.yaml", "b.yaml"], "b.yaml", "a second run file", "pass one", "key=value"),
    "a run file that is a list": Mistake(
        ["train", "list.yaml"],
        "list.yaml",
        "holds list",
        "a run file is a mapping",
        "as in model: DIR",
        w.a_file("list.yaml", "- 1"),
    ),
    "a run file that is no YAML": Mistake(
        ["train", "broken.yaml"],
        "broken.yaml",
        "not valid YAML",
        "line 1",
        "mend that place",
        w.a_file("broken.yaml", "steps: ["),
    ),
    "a run file that is no text": Mistake(
        ["train", "latin.yaml"],
        "latin.yaml",
        "not valid YAML",
        "mend that place",
        "save it as UTF-8",
        lambda: Path("latin.yaml").write_bytes("model: é".encode("latin-1")),
    ),
    "a value that is no YAML": setting("steps=[", "'['", "not valid YAML", "put text with special signs in quotes"),
    "an override without a name": Mistake(
        [*training(), "=3"], "=3", "not a setting", "write dotted.key=value", "such as optimizer.learning_rate=1e-5"
    ),
    "an override inside a number": setting("steps.much=3", "steps is 2", "holds no settings", "write steps=VALUE"),
    "an override of a reward that is not there": setting(
        "rewards.5.weight=2", "5 is not a place in a list of 1", "use 0 to 0"
    ),
    "no steps": setting("steps=0", "0", "greater than or equal to 1", "the default is 100"),
    "half a step": setting("steps=2.5", "2.5", "a valid integer", "the default is 100"),
    "text where a number belongs": setting("optimizer.learning_rate=fast", "'fast'", NUMBER, "the default is 1.0e-06"),
    "a negative learning rate": setting(
        "optimizer.learning_rate=-1", "-1", "greater than or equal to 0", "the default is 1.0e-06"
    ),
    "an infinite learning rate": setting(
        "optimizer.learning_rate=.inf", "inf", "a finite number", "the default is 1.0e-06"
    ),
    "a learning rate that is nan": setting(
        "optimizer.learning_rate=.nan", "nan", "a finite number", "the default is 1.0e-06"
    ),
    "a learning rate of 0": setting(
        "optimizer.learning_rate=0", "0", "set it above 0", "measure the model with `groupwise eval`"
    ),
    "a decay rate above 1": Mistake(
        [*training(), "optimizer.betas=[1.5,0.9]"], "optimizer.betas[0]", "1.5", "less than 1", "less than 1"
    ),
    "a group of nothing": setting("group_size=0", "0", "greater than or equal to 1", "the default is 8"),
    "a group of one": setting("group_size=1", "1", "use 2 or more", "baseline: none, such as reinforce"),
    "more updates than groups": setting(
        "updates_per_step=9", "9", "set it to at most prompts_per_step: 4", "or raise that"
    ),
    "an unknown dtype": setting("engine.dtype=float16", "'float16'", "'bfloat16'", "the default is auto"),
    "a device that is not there": Mistake(
        [*training(), "engine.device=cuda:99"],
        "engine.device",
        "cuda:99",
        "torch sees 0 CUDA devices here",
        "use auto or cpu",
        machine={"torch.cuda.device_count": 0},
    ),
    "a device that does not exist": setting("engine.device=potato", "potato", "accepted: auto, cpu, cuda, cuda:0"),
    "an unknown learner": setting("engine.learner=deepspeed", "'deepspeed'", "accepted: local, fsdp", "no such choice"),
    "a learner split over nothing": setting(
        "engine.learner={type: fsdp, ranks: 0}", "0", "greater than or equal to 1", "the default is null"
    ),
    "a learner split over processes, and a device for all of them": Mistake(
        [*training(), "engine.learner=fsdp", "engine.device=cuda:1"],
        "engine.device",
        "cuda:1",
        "each rank takes its own",
        "use auto, cuda or cpu",
        machine={"torch.cuda.device_count": 0},
    ),
    "vLLM that is not where it is looked for": setting(
        "engine.sampler={type: vllm, python: no/python}",
        "no/python; cannot be run: No such file or directory",
        "accepted: the Python of an environment with vLLM",
        "docs/scaling.md says how to make one",
    ),
    "an environment without vLLM": Mistake(
        [*training(), "engine.sampler={type: vllm, python: ./plain}"],
        "engine.sampler.python",
        "./plain; it has no vLLM",
        "accepted: the Python of an environment with vLLM",
        "or GROUPWISE_VLLM_PYTHON where it is",
        lambda: (Path("plain").write_text("#!/bin/sh\nexit 1\n"), Path("plain").chmod(0o755)),
    ),
    "a server that is no URL": setting(
        "engine.sampler={type: vllm, url: localhost}", "'localhost'", "^https?://", "the default is null"
    ),
    "a group that is more than vLLM may write at a time": setting(
        "engine.sampler={type: vllm, max_sequences: 3}",
        "a group is one request",
        "set it to at least 4",
    ),
    "a selection by entropies that vLLM does not say": Mistake(
        [*training(), "engine.sampler=vllm", "algorithm.selection=top_entropy"],
        "algorithm.selection",
        "needs the entropies of what was sampled",
        "engine.sampler: vllm does not report",
        "sample in this process with engine.sampler: none",
    ),
    "sampling ahead in one process": setting(
        "ahead=2", "2", "sampler and learner share one model", "set engine.sampler: vllm or engine.placement: ray"
    ),
    "engines that do not work together": Mistake(
        [*training(), "engine.placement=ray", "engine.sampler=vllm"],
        "engine.sampler: vllm",
        "engine.placement: ray",
        "do not work together yet",
        "use one of them",
    ),
    "actors that learn, and not how many": Mistake(
        [*training(), "engine.placement=ray", "engine.learner=fsdp"],
        "engine.learner.ranks",
        "null",
        "with engine.placement: ray they are actors, on any machine",
        "say how many",
    ),
    "ranks that share a GPU": Mistake(
        [*training(), "engine.placement={type: ray, gpus: 0.5}", "engine.learner={type: fsdp, ranks: 2}"],
        "engine.placement.gpus",
        "0.5",
        "no two ranks may share a GPU",
        "use 1",
    ),
    "a driver of actors that is started twice": Mistake(
        [*training(), "engine.placement=ray"],
        "engine.placement",
        "started as 2 processes, each of which would train the same",
        "start it once",
        "engine.learner.ranks says how many actors learn",
        machine={"groupwise.meeting.started": 2},
    ),
    "actors, and a device for all of them": Mistake(
        [*training(), "engine.placement=ray", "engine.device=cuda:1"],
        "engine.device",
        "cuda:1",
        "each actor gets its own",
        "use auto, cuda or cpu",
    ),
    "a placement that does not exist": setting(
        "engine.placement=slurm", "no such choice", "accepted: local, ray", "or code as file.py:function"
    ),
    "Ray that is not installed": Mistake(
        [*training(), "engine.placement=ray"],
        "engine.placement",
        "ray; needs Ray",
        'pip install "groupwise[ray]"',
        "or set engine.placement: local",
        machine={"groupwise.engines.cluster.find_spec": None},
    ),
    "a Ray cluster that does not answer": Mistake(
        [*training(), "engine.placement={type: ray, address: '127.0.0.1:1'}"],
        "engine.placement.address",
        "127.0.0.1:1; no cluster answers there",
        "accepted: auto on a machine of one, HOST:PORT, or null",
        "start one with `ray start --head`",
    ),
    "an impossible fraction": setting("max_invalid_fraction=2", "2", "less than or equal to 1", "the default is 0.25"),
    "several problems at once": Mistake(
        [*training(data="nowhere.jsonl", reward="mine.py:raises", model="./nothing"), "engine.device=potato"],
        "data.path: nowhere.jsonl",
        "3 problems",
        "accepted: a .jsonl",
        "accepted: auto",
    ),
}
ALGORITHMS: dict[str, Mistake] = {
    "an unknown algorithm": Mistake(
        [*training(), "--algorithm", "dap"],
        "algorithm",
        "'dap'",
        "accepted: grpo, ",
        "did you mean dapo?",
    ),
    "an unknown surrogate": setting(
        "algorithm.surrogate=foo", "'foo'", "accepted: clip, reinforce", "code as file.py:function"
    ),
    "an unknown ratio": setting("algorithm.ratio=foo", "'foo'", "'token', 'sequence'", "the default is token"),
    "an unknown scale": setting("algorithm.scale=foo", "'foo'", "group_std, ", "code as file.py:function"),
    "a negative clip": setting("algorithm.surrogate.low=-1", "-1", "greater than or equal to 0", "the default is 0.2"),
    "a share of tokens above 1": setting(
        "algorithm.selection={type: top_entropy, fraction: 2}", "2", "less than or equal to 1", "the default is 0.2"
    ),
    "a KL that regularises nothing": Mistake(
        [*training(), "algorithm.kl={estimator: k1}"],
        "algorithm",
        "kl.estimator k1",
        "use k2, k3 or k3_is",
        "use k2, k3 or k3_is",
    ),
    "values without a critic": Mistake(
        [*training(), "algorithm.credit_over_time=gae"],
        "algorithm",
        "credit_over_time gae",
        "set both or neither",
        "set both or neither",
    ),
    "two combinations that cannot be right": Mistake(
        [*training(), "algorithm={kl: {estimator: k1}, credit_over_time: gae}"],
        "algorithm",
        "2 problems",
        "use k2, k3 or k3_is",
        "set both or neither",
    ),
}
SAMPLING: dict[str, Mistake] = {
    "a temperature of 0": setting(
        "sampling.temperature=0", "0", "use a value above 0", "all completions of a group would be the same"
    ),
    "a cut distribution": setting("sampling.top_p=0.9", "0.9", "use top_p: 1 and top_k: 0", "evaluation.top_p"),
    "min-p": setting("sampling.min_p=0.05", "0.05", ONE_DISTRIBUTION, "Leave it out"),
    "a repetition penalty": setting(
        "sampling.repetition_penalty=1.1", "1.1", ONE_DISTRIBUTION, "discourage repetition with a reward"
    ),
    "stop strings": setting(
        "sampling.stop=['</answer>']", "['</answer>']", "a token that the policy drew", "generation_config.json"
    ),
    "no limit of length": setting("sampling.max_tokens=null", "None", "a valid integer", "the default is 256"),
    "no room for a token": setting("sampling.max_tokens=0", "0", "greater than or equal to 1", "the default is 256"),
}
DATA: dict[str, Mistake] = {
    "a dataset that is not there": Mistake(
        training(data="row.jsonl"), "data.path", "row.jsonl", FILES, "did you mean rows.jsonl?"
    ),
    "a dataset that is a folder": Mistake(training(data="model"), "data.path", "model", FILES, FILES),
    "a dataset that is not on the hub": Mistake(
        training(data="org/nothing"), "data.path", "org/nothing", "accepted: a file", "org/name:configuration"
    ),
    "a file of another kind": data("rows.txt", "w3", "unknown suffix '.txt'", "accepted: .jsonl, .json, .csv"),
    "a dataset without rows": data("empty.jsonl", "\n", "it has no rows", "at least one row with a prompt"),
    "a dataset that is no text": Mistake(
        training(data="latin.jsonl"),
        "data.path",
        "latin.jsonl",
        "not UTF-8",
        "save it as UTF-8",
        lambda: Path("latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1")),
    ),
    "a line that is no JSON": data(
        "cut.jsonl", '{"prompt": "w3"}\n{"prompt": "w', "line 2, column", "accepted: one JSON object per line"
    ),
    "a line that is no object": data(
        "list.jsonl", '["w3"]\n', "is the list ['w3']", "accepted: an object with a prompt"
    ),
    "JSON that is no list": data("one.json", '{"prompt": "w3"}', "holds one dict", "accepted: a list of objects"),
    "JSON lines called JSON": data(
        "lines.json", '{"prompt": "w3"}\n{"prompt": "w3"}\n', "not JSON (Extra data)", "belongs in a .jsonl file"
    ),
    "Parquet that is none": data("rows.parquet", "w3", "not a Parquet file", "accepted: .jsonl, .json, .csv"),
    "another column": Mistake(
        training(data="other.parquet"),
        "data.prompt_column",
        "'prompt'",
        "columns: question",
        "rename one of them, or set data.prompt_column",
        w.a_parquet_without_prompts,
    ),
    "a prompt that is null": data("null.jsonl", [A_PROMPT, {"prompt": None}], "rows[1]", PROMPTS, "leave it out"),
    "a prompt that is empty": data("blank.jsonl", [A_PROMPT, {"prompt": " "}], "is empty", PROMPTS, "mend that row"),
    "a prompt that is a number": data("number.jsonl", [{"prompt": 3}], "is the int 3", PROMPTS, "mend that row"),
    "a message without content": data(
        "chat.jsonl", [{"prompt": [{"role": "user"}]}], "has no text as the 'content' of message 0", PROMPTS
    ),
    "a conversation of nothing": data("chat.jsonl", [{"prompt": []}], "is an empty list", PROMPTS, "mend that row"),
    "messages without a chat template": data(
        "chat.jsonl",
        [{"prompt": w.MESSAGES, "answer": "w5"}],
        "its tokenizer has no chat template",
        "accepted: prompts that are strings, or a tokenizer with a template",
        "add chat_template.jinja",
        place="model",
    ),
    "a role that the template refuses": Mistake(
        training(data="chat.jsonl", model="damaged"),
        "model",
        "the roles solver",
        "only users speak",
        "change the roles in the data, or the template",
        w.a_strict_template,
    ),
    "prompts longer than the context": data(
        "long.jsonl",
        [A_PROMPT, {"prompt": "w3 " * 70, "answer": "w5"}],
        "10 of 20 prompts are too long: rows[1] has 70 tokens",
        "the model's context of 64",
        "set data.long_prompts: drop or truncate-left",
        place="data.long_prompts",
    ),
    "no prompt that fits": Mistake(
        [*training(), "sampling.max_tokens=64", "data.long_prompts=drop"],
        "data.long_prompts",
        "32 of 32 prompts are too long",
        "the model's context of 64",
        "lower sampling.max_tokens",
    ),
    "fewer prompts than a step": Mistake(
        [*training(), "prompts_per_step=33"],
        "data",
        "32 rows",
        "set prompts_per_step to at most 32",
        "or add rows",
    ),
    "fewer prompts than a step once the long ones are dropped": Mistake(
        [*training(data="long.jsonl"), "data.long_prompts=drop", "prompts_per_step=15"],
        "data",
        "10 rows",
        "set prompts_per_step to at most 10",
        "or add rows",
        w.some_rows("long.jsonl", A_PROMPT, {"prompt": "w3 " * 70, "answer": "w5"}),
    ),
    "held-out prompts that are not there": Mistake(
        [*training(), "evaluation.data.path=held.jsonl"], "evaluation.data.path", "held.jsonl", FILES, FILES
    ),
    "held-out prompts without the answers": Mistake(
        [*training(reward="exact_match"), "evaluation.data.path=held.jsonl"],
        "evaluation.data: rewards.exact_match",
        "needs the column 'answer'",
        "columns: prompt",
        "rename the column",
        w.some_rows("held.jsonl", {"prompt": "w3"}),
    ),
    "several problems of one dataset": Mistake(
        [*training(data="other.jsonl", reward="math_answer"), "--reward", "mine.py:needs_solution"],
        "rewards.math_answer",
        "3 problems",
        "columns: prompts, reference",
        "set data.prompt_column",
        w.some_rows("other.jsonl", {"prompts": "w3", "reference": "w4"}),
    ),
}
REWARDS: dict[str, Mistake] = {
    "an unknown reward": Mistake(
        training(reward="math_answr"),
        "rewards[0].use",
        "'math_answr'",
        "accepted: math_answer, ",
        "did you mean math_answer?",
    ),
    "an unknown function": Mistake(
        training(reward="mine.py:lo"),
        "rewards[0].use",
        "'mine.py:lo'",
        "mine.py has no function lo",
        "did you mean low?",
    ),
    "what is no function": Mistake(
        training(reward="mine.py:CONSTANT"),
        "rewards[0].use",
        "has CONSTANT, but 1.0 is no function",
        "function",
        "write package.module:function",
    ),
    "a file that is not there": Mistake(
        training(reward="yours.py:low"),
        "rewards[0].use",
        "'yours.py:low'",
        "cannot be imported: no such file",
        "write package.module:function or folder/file.py:function",
    ),
    "a file that is not Python": Mistake(
        training(reward="broken.py:low"),
        "rewards[0].use",
        "'broken.py:low'",
        "(broken.py, line 1)",
        "write package.module:function or folder/file.py:function",
        w.a_file("broken.py", "def low(:\n"),
    ),
    "no reward": setting("rewards=[]", "[]", "there is none", "name at least one, such as math_answer"),
    "two rewards of one name": setting(
        "rewards=[math_answer, math_answer]", "two rewards are called math_answer", "give one of them another `name`"
    ),
    "a weight that is no number": Mistake(
        [*training(), "rewards.0={use: math_answer, weight: .nan}"],
        "rewards[0].weight",
        "nan",
        "a finite number",
        "the default is 1.0",
    ),
    "a weight of 0": Mistake(
        [*training(), "rewards=[{use: 'mine.py:low', weight: 0}]"],
        "rewards",
        "the weight of low is 0",
        "above or below 0",
        "set the `weight`",
    ),
    "another signature": Mistake(
        training(reward="mine.py:mistaken"),
        "rewards.mistaken",
        "(a, b)",
        "accepted: f(rollout) -> float",
        "f(prompts, completions, **columns) -> list[float]",
    ),
    "a column that is missing": Mistake(
        training(data="other.jsonl", reward="math_answer"),
        "rewards.math_answer",
        "needs the column 'answer'",
        "columns: prompt, answers",
        "did you mean answers?",
        w.some_rows("other.jsonl", {"prompt": "w3", "answers": "w4"}),
    ),
    "a column that is missing, with TRL's signature": Mistake(
        training(reward="mine.py:needs_solution"),
        "rewards.needs_solution",
        "needs the column 'solution'",
        "columns: prompt, answer",
        "rename the column",
    ),
    "an answer that is null": Mistake(
        training(data="gaps.jsonl", reward="exact_match"),
        "rewards.exact_match",
        "rows[1].answer is null",
        "needs a value",
        "fill it in, or leave that row out",
        w.some_rows("gaps.jsonl", A_PROMPT, {"prompt": "w5", "answer": None}),
    ),
    "too many numbers": reward("too_many", "returned 2 values for 1 completions", A_LIST, A_LIST),
    "a dict": reward("dictionary", "the dict {'score': 1.0}", ONE_NUMBER, "Mend the function"),
    "a dict, with TRL's signature": reward("by_name", "the dict {'format': 1.0}", A_LIST, "None: no opinion"),
    "nothing": reward("nothing", "returned None", ONE_NUMBER, "Mend the function"),
    "nothing, with TRL's signature": reward("nothing_for_all", "returned None", A_LIST, "None: no opinion"),
    "one number for all completions": reward("one_for_all", "the float 1.0", A_LIST, "None: no opinion"),
    "text": reward("words", "the str '1.0' at [0]", A_LIST, "None: no opinion"),
    "lists in a list": reward("nested", "the list [1.0] at [0]", A_LIST, "None: no opinion"),
    "a reward that raises": reward("raises", "raised ZeroDivisionError: division by zero (mine.py:"),
    "nan": reward("not_a_number", "returned nan"),
    "inf": reward("infinite", "returned inf"),
}
MODELS: dict[str, Mistake] = {
    "a folder that is not there": Mistake(
        training(model="./modle"), "./modle", "there is no such folder", FOLDER, "a hub id such as Qwen/Qwen3-0.6B"
    ),
    "neither a folder nor on the hub": Mistake(
        training(model="modle"), "modle", "no such folder; as a hub id", FOLDER, "that this machine can reach"
    ),
    "no config": model(w.without("config.json"), "no config.json", "write one with model.save_pretrained"),
    "a config that was cut short": model(w.cut_short("config.json"), "config.json is damaged", AGAIN),
    "no weights": model(w.without("model.safetensors"), "no weights", "model.safetensors or pytorch_model.bin"),
    "weights that were cut short": model(
        w.cut_short("model.safetensors"), "model.safetensors", "is damaged or cut short", AGAIN
    ),
    "a shard that is missing": model(
        w.a_model(w.a_lost_shard), "model-00002-of-00002.safetensors is not there", "names 2 files of weights", AGAIN
    ),
    "a shard that was cut short": model(
        w.a_model(w.a_shard_cut_short), "model-00001-of-00002.safetensors", "is damaged or cut short", AGAIN
    ),
    "an index that was cut short": model(
        w.a_model(w.an_index_cut_short), "model.safetensors.index.json is damaged", AGAIN
    ),
    "a tensor that is missing": model(
        w.a_model(w.a_lost_tensor), "the weights lack model.norm.weight", "save the model again with save_pretrained"
    ),
    "no tokenizer": model(
        w.without("tokenizer.json", "tokenizer_config.json"),
        "the tokenizer cannot be loaded",
        "save one beside the model with tokenizer.save_pretrained",
    ),
    "a tokenizer that was cut short": model(w.cut_short("tokenizer.json"), "tokenizer.json is damaged", AGAIN),
    "a tokenizer of another model": model(
        w.a_model(lambda folder: tiny_tokenizer(200).save_pretrained(folder)),
        "the tokenizer has 200 tokens but the model embeds only 97",
        "use the model's own tokenizer",
        "resize_token_embeddings",
    ),
    "no token that ends a completion": model(
        w.a_model(w.no_stop), "no end-of-sequence token", "set eos_token_id in one of them"
    ),
    "an encoder-decoder": model(
        w.a_translator, "T5ForConditionalGeneration", "only models that predict the next token", path="t5"
    ),
    "an adapter without its model": model(
        w.an_adapter, "it holds an adapter", "merge it into its model", path="adapter"
    ),
    "a config that contradicts itself": model(
        w.edited("config.json", num_hidden_layers=3), "it cannot be read", "give a folder that save_pretrained wrote"
    ),
    "a config of text where numbers belong": model(
        w.edited("config.json", hidden_size="large"), "it cannot be read", "give a folder that save_pretrained wrote"
    ),
    "an architecture that nobody knows": model(
        w.edited("config.json", model_type="qwen9", architectures=["Qwen9ForCausalLM"]), "qwen9", "give a folder"
    ),
    "weights and a tokenizer that are missing": Mistake(
        training(model="damaged"),
        "damaged",
        "2 problems",
        "write them with model.save_pretrained",
        "save one beside the model with tokenizer.save_pretrained",
        w.without("model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    ),
    "sizes that do not go together": model(
        w.edited("config.json", num_attention_heads=0), "config.json", "write it with model.save_pretrained"
    ),
}
MACHINE: dict[str, Mistake] = {
    "a run folder that is in use": Mistake(
        [*training(), "output=used"],
        "used",
        "holds a run already",
        "continue it with `groupwise train --resume used`",
        "choose another folder with output=DIR",
        w.a_used_folder,
    ),
    "a run folder that is a file": Mistake(
        [*training(), "output=rows.jsonl"], "output", "rows.jsonl is not a folder", "accepted: a folder", "output=DIR"
    ),
    "a run folder inside a file": Mistake(
        [*training(), "output=rows.jsonl/run"],
        "output",
        "rows.jsonl is not a folder",
        "accepted: a folder",
        "output=DIR",
    ),
    "a disk that is full": Mistake(
        [*training(), "checkpoint.every=1", "steps=50", "checkpoint.keep_last=40", "output=run"],
        "output: run",
        "is free there",
        "41 checkpoints at a time",
        "keep fewer checkpoints, make room, or choose another disk with output=DIR",
        machine={"groupwise.checks.free_disk": 10**6},
    ),
    "more than memory holds": Mistake(
        [*training(), "--algorithm", "ppo", "algorithm.kl.coef=0.1"],
        "engine",
        "is free on cpu",
        "what helps: ",
        "an algorithm without a critic",
        machine={"groupwise.checks.available_memory": 600_000},
    ),
    "far more than memory holds": Mistake(
        training(),
        "engine",
        "is free on cpu",
        "what helps: ",
        "a smaller model",
        machine={"groupwise.checks.available_memory": 10_000},
    ),
    "a run to continue that is not there": Mistake(
        ["train", "--resume", "run"], "run", "not a run folder", "config.yaml", "pass the folder that a run printed"
    ),
    "a run to continue with nothing but damaged checkpoints": Mistake(
        ["train", "--resume", "used"],
        "used",
        "checkpoints/step-00002/learner/optimizer.pt is missing",
        "put the files back from a copy",
        "delete used/checkpoints to start this run over",
        w.a_damaged_checkpoint,
    ),
    "a comparison on a step that is not there": Mistake(
        ["compare", "used", "--step", "5"],
        "--step",
        "5",
        "accepted: 1 to 3, 7",
        "used has no rollouts of it",
        w.stored_steps(1, 2, 3, 7),
    ),
    "a comparison on a run that has sampled nothing": Mistake(
        ["compare", "used"],
        "used/rollouts",
        "holds no rollouts",
        "a run writes them from its first step on",
        "from its first step on",
        w.a_used_folder,
    ),
    "a comparison on rollouts of another version": Mistake(
        ["compare", "used"],
        "used/rollouts/step-00001.parquet",
        "has no column group",
        "written by another version",
        "compare with that version, or run again",
        w.stored_steps(1),
    ),
    "a comparison with an algorithm that nobody knows": Mistake(
        ["compare", "used", "--algorithms", "grpo,dapoo"],
        "dapoo",
        "no such algorithm or run file",
        "accepted: grpo, ",
        "did you mean dapo?",
        w.a_used_folder,
    ),
    "other settings for a run to continue": Mistake(
        ["train", "--resume", "run", "steps=9"],
        "--resume",
        "continues with the settings of the run",
        "pass no others",
        "pass no others",
    ),
}
EVAL = ["eval", "model", "--data", "rows.jsonl", "--reward", "mine.py:low", "sampling.max_tokens=4"]
EVALUATION: dict[str, Mistake] = {
    "a number of samples that is none": Mistake(
        [*EVAL, "--k", "1,x"], "--k", "'x'", "accepted: numbers from 1 to 1024", "as in --k 1,4,16"
    ),
    "no samples": Mistake([*EVAL, "--k", "0"], "--k", "'0'", "accepted: numbers from 1 to 1024", "as in --k 1,4,16"),
    "samples that are all the same": Mistake(
        [*EVAL, "--k", "4", "evaluation.temperature=0"],
        "evaluation.temperature",
        "0",
        "use a value above 0",
        "leave --k away for the greedy answer alone",
    ),
    "the temperature of a greedy answer": Mistake(
        [*EVAL, "evaluation.temperature=0.5"],
        "evaluation.temperature",
        "has no effect without --k",
        "accepted: data, rewards",
        "add --k 1",
    ),
    "the temperature of training": Mistake(
        [*EVAL, "--k", "4", "sampling.temperature=0.5"],
        "sampling.temperature",
        "is that of training",
        "accepted: data, rewards",
        "use evaluation.temperature",
    ),
    "a category that is not there": Mistake(
        [*EVAL, "--by", "answr"], "--by", "answr", "accepted: prompt, answer", "did you mean answer?"
    ),
    "a model to compare with that is not there": Mistake(
        [*EVAL, "--against", "./modle"],
        "./modle",
        "there is no such folder",
        FOLDER,
        "a hub id such as Qwen/Qwen3-0.6B",
    ),
    "a longest held-out completion without room": Mistake(
        [*training(), "evaluation.data.path=rows.jsonl", "evaluation.max_tokens=64"],
        "evaluation.data.long_prompts",
        "32 of 32 prompts are too long",
        "with evaluation.max_tokens 64 passes the model's context of 64",
        "lower evaluation.max_tokens",
    ),
}
PLANS: dict[str, Mistake] = {
    "a GPU that nobody knows": Mistake(
        ["plan", "run.yaml", "--gpus", "8xH10"],
        "--gpus",
        "H10: no such GPU (did you mean H100?)",
        "accepted: H100-80G, H200-141G",
        "by its numbers in GB, TFLOP/s and GB/s: 8xMINE:memory=80",
    ),
    "no GPUs at all": Mistake(
        ["plan", "run.yaml", "--gpus", "0xH100"], "--gpus", "'0xH100'", "a count and a GPU", "such as 8xH100-80G"
    ),
    "a GPU by too few numbers": Mistake(
        ["plan", "run.yaml", "--gpus", "2xMINE:memory=48"],
        "--gpus: memory=48",
        "missing: bandwidth, tflops",
        "accepted: bandwidth, link, memory, network, tflops",
        "as in 8xMINE:memory=80",
    ),
    "a GPU by numbers that are none": Mistake(
        ["plan", "run.yaml", "--gpus", "2xMINE:memory=much"],
        "--gpus",
        "'memory=much'",
        "write NAME=NUMBER",
        "such as 8xMINE:memory=80",
    ),
    "a simulation of no GPU in particular": Mistake(
        ["plan", "run.yaml", "--simulate"], "--simulate", "which GPUs?", "name them", "as in --gpus 8xH100-80G"
    ),
    "completions longer than they may be": Mistake(
        ["plan", "run.yaml", "--completion-tokens", "500"],
        "--completion-tokens",
        "500",
        "completions have 1 to sampling.max_tokens",
        "give their mean, or raise that",
    ),
}
GROUPS: Mapping[str, Mapping[str, Mistake]] = {
    "Settings": SETTINGS,
    "The algorithm": ALGORITHMS,
    "Sampling": SAMPLING,
    "Prompts": DATA,
    "Rewards": REWARDS,
    "The model": MODELS,
    "The run folder and the machine": MACHINE,
    "Evaluation": EVALUATION,
    "Plans": PLANS,
}
MISTAKES = {f"{group}: {did}": mistake for group, mistakes in GROUPS.items() for did, mistake in mistakes.items()}
