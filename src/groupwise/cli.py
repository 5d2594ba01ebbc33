"""The command line: quickstart, train, eval, sample, and what looks at data, rewards, settings and runs.

Exit codes: 0 done, or stopped where it can be resumed; 2 the input is wrong (one message on standard error); 130 asked
twice to stop; 1 anything else, a faulty reward included.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from groupwise.checkpoint import check_run, model_of
from groupwise.compare.cli import app as compare_app
from groupwise.config import Config, Engine, algorithm_of
from groupwise.diagnosis.cli import app as doctor_app
from groupwise.errors import ConfigError, EngineError, GroupwiseError
from groupwise.eval_cli import app as eval_app
from groupwise.foreign.cli import app as import_app
from groupwise.interrupt import seconds
from groupwise.launch import launch
from groupwise.presets import PRESETS
from groupwise.report.cli import app as report_app
from groupwise.schema import reference
from groupwise.trees import Tree, apply, read_yaml

HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, context_settings=HELP)
app.add_typer(import_app, name="import")
app.add_typer(eval_app)
app.add_typer(doctor_app)
app.add_typer(compare_app)
app.add_typer(report_app)

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN.yaml] [key=value]...", help="A run file, and settings that override it."),
]
Model = Annotated[str | None, typer.Option("--model", help="Folder or hub id of a causal language model.")]
DataFile = Annotated[str | None, typer.Option("--data", help="Dataset: .jsonl, .json, .csv, .parquet or a hub id.")]
AlgorithmName = Annotated[str | None, typer.Option("--algorithm", help=f"One of {', '.join(PRESETS)}.")]
RewardNames = Annotated[
    list[str] | None, typer.Option("--reward", help="A reward by name or file.py:function; repeat for several.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but the result.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on the last line.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")]


def read_config(settings: Sequence[str] | None, **flags: Any) -> Config:
    """A run file (the first argument without `=`), then the flags, then the `key=value` overrides.

    Raises:
        ConfigError: a setting is wrong, or there are two run files.
    """
    return Config.parse(read_tree(settings, **flags))


def read_tree(settings: Sequence[str] | None, **flags: Any) -> Tree:
    """The settings of `read_config` as plain values, before they are checked."""
    files = [text for text in settings or () if "=" not in text]
    if len(files) > 1:
        raise ConfigError(f"{files[1]}: a second run file; pass one, and settings as key=value")
    tree = read_yaml(Path(files[0])) if files else {}
    if flags.get("model"):
        tree["model"] = flags["model"]
    if flags.get("data"):
        tree["data"] = {**_mapping(tree.get("data")), "path": flags["data"]}
    if flags.get("algorithm"):
        tree["algorithm"] = flags["algorithm"]
    if flags.get("rewards"):
        tree["rewards"] = list(flags["rewards"])
    for text in settings or ():
        if "=" in text:
            apply(tree, text)
    return tree


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def _console(quiet: bool) -> Console:
    return Console(stderr=True, quiet=quiet)


@app.command()
def train(
    settings: Settings = None,
    model: Model = None,
    data: DataFile = None,
    algorithm: AlgorithmName = None,
    reward: RewardNames = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Continue this run folder.")] = None,
    max_time: Annotated[
        str | None, typer.Option("--max-time", help="Stop after this long, to be resumed: 3h30m, 90s, or seconds.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Train a model: groupwise train RUN.yaml, or --model DIR --data FILE --reward NAME key=value ..."""
    from groupwise.train import train as run_training

    max_seconds = None if max_time is None else seconds(max_time)
    if resume is not None:
        if any((settings, model, data, algorithm, reward)):
            raise ConfigError("--resume: continues with the settings of the run; pass no others")
        check_run(resume)
        config = Config.load(resume / "config.yaml")
    else:
        config = read_config(settings, model=model, data=data, algorithm=algorithm, rewards=reward)
    if (ranks := config.engine.to_start()) > 1:
        raise typer.Exit(launch(["-m", "groupwise", *sys.argv[1:]], ranks))
    run = run_training(config, resume=resume, max_seconds=max_seconds, console=_console(quiet))
    result = {
        "run": str(run.folder),
        "before": None if run.before is None else run.before.headline,
        "after": None if run.after is None else run.after.headline,
    }
    if run.stopped is not None:
        result["stopped"] = run.stopped
    resume_with = f"groupwise train --resume {run.folder}"
    plain = f"trained model: {run.folder / 'model'}" if run.stopped is None else resume_with
    print(json.dumps(result) if as_json else plain)


@app.command()
def sample(
    model: Annotated[str, typer.Argument(help="Model folder, hub id, or a run folder.")],
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    count: Annotated[int, typer.Option("-n", min=1, help="How many completions.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest completion.")] = 256,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    seed: int = 0,
    traceback: Traceback = False,
) -> None:
    """Ask a model: prints its completions to one prompt."""
    from groupwise.build import load_sampler
    from groupwise.engines import Request, Sampling
    from groupwise.seeding import key

    sampler, chat = load_sampler(model_of(model), Engine())
    plain = raw or chat.tokenizer.chat_template is None
    request = Request(
        prompt=chat.prompt(prompt if plain else [{"role": "user", "content": prompt}]),
        keys=tuple(key(seed, "sample", i) for i in range(count)),
    )
    if not len(request.prompt):
        raise ConfigError(f"PROMPT: {prompt!r} has no tokens to continue; write a prompt")
    completions = sampler.sample([request], Sampling(max_tokens=max_tokens, temperature=temperature))[0]
    for completion in completions:
        print(chat.text(completion.tokens))


@app.command("check-reward")
def check_reward(
    settings: Settings = None,
    model: Model = None,
    data: DataFile = None,
    reward: RewardNames = None,
    sample: Annotated[int, typer.Option("--sample", min=0, help="Prompts to answer with the model, too.")] = 0,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows to ask the rewards about.")] = 32,
    answer: Annotated[
        str | None,
        typer.Option("--answer", help=r"How a right answer is written, such as 'So it is {{solution}}.'"),
    ] = None,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Try the rewards on right, wrong and hostile answers: exits with 1 when they can be fooled, or fail."""
    from groupwise.check_reward import check_run, tables

    tree = {"model": "", **read_tree(settings, model=model, data=data, rewards=reward)}
    report = check_run(Config.parse(tree), rows, sample, answer)
    problems = report.problems()
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        console = Console()
        for table in tables(report):
            console.print(table)
        for title in report.unchecked():
            note = f"{title}: no row has an answer known to be right; say how one is written with --answer"
            console.print(note, highlight=False, markup=False, soft_wrap=True)
        for problem in problems or ["no fault found"]:
            console.print(problem, highlight=False, markup=False, soft_wrap=True)
    if problems:
        raise typer.Exit(1)


@app.command()
def plan(
    settings: Settings = None,
    model: Model = None,
    data: DataFile = None,
    algorithm: AlgorithmName = None,
    reward: RewardNames = None,
    gpus: Annotated[
        list[str] | None, typer.Option("--gpus", help="GPUs to plan for, such as 8xH100-80G; repeat to compare.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Time this machine at the model's sizes first.")
    ] = False,
    simulate: Annotated[bool, typer.Option("--simulate", help="With --gpus: 8 to 4,096 of them.")] = False,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", min=1, help="Length of a prompt; else it is measured in the data.")
    ] = None,
    completion_tokens: Annotated[
        int | None, typer.Option("--completion-tokens", min=1, help="Mean length; else all have sampling.max_tokens.")
    ] = None,
    tail: Annotated[float, typer.Option(min=0.0, help="Spread of the logarithm of the lengths simulated.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Of the lengths simulated.")] = 0,
    quiet: Quiet = False,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Say before a run what it takes: memory, time, how to divide GPUs, and what to change where it does not fit."""
    from groupwise.plan.machine import read_gpus
    from groupwise.plan.outlook import subject_of
    from groupwise.plan.report import as_json as values
    from groupwise.plan.report import lines
    from groupwise.plan.report import plan as make_plan

    clusters = [read_gpus(text) for text in gpus or ()]
    if simulate and not clusters:
        raise ConfigError("--simulate: which GPUs? name them, as in --gpus 8xH100-80G")
    config = read_config(settings, model=model, data=data, algorithm=algorithm, rewards=reward)
    subject, progress = subject_of(config, prompt_tokens, completion_tokens), _console(quiet or as_json)
    found = make_plan(subject, clusters, measure=calibrate, simulate=simulate, seed=seed, tail=tail, say=progress.print)
    if as_json:
        print(json.dumps(values(found)))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    for part in lines(found):
        console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))


@app.command()
def config(
    settings: Settings = None,
    model: Model = None,
    data: DataFile = None,
    algorithm: AlgorithmName = None,
    reward: RewardNames = None,
    show_reference: Annotated[bool, typer.Option("--reference", help="Document every setting instead.")] = False,
    traceback: Traceback = False,
) -> None:
    """Print the resolved settings of a run file, or the documentation of each setting."""
    if not show_reference:
        tree = read_config(settings, model=model, data=data, algorithm=algorithm, rewards=reward)
        print(tree.resolve().to_yaml(), end="")
        return
    for path, default, text in reference(Config):
        print(f"{path}{f' (default: {default})' if default else ''}\n    {text}")


@app.command()
def explain(
    subject: Annotated[str, typer.Argument(metavar="PRESET|RUN.yaml", help="An algorithm by name, or a run file.")],
    against: Annotated[
        str | None, typer.Option("--against", metavar="PRESET|RUN.yaml", help="Compare it with this one.")
    ] = None,
    std: Annotated[
        Literal["population", "sample"] | None,
        typer.Option("--std", help="Which standard deviation rewards are scaled by."),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Show what an algorithm computes: its formula, its slots, its papers, and four completions worked through."""
    from groupwise import explain as page

    named = [(name, algorithm_of(name)) for name in (subject, against) if name is not None]
    if std is not None:
        named = [(name, page.with_std(algorithm, std)) for name, algorithm in named]
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    for number, part in enumerate(page.explain(*named[0], *named[1:])):
        console.print(*([""] if number else []), part, sep="\n", highlight=False)


@app.command()
def quickstart(
    seed: Annotated[int, typer.Option(help="Changes everything random.")] = 0,
    algorithm: AlgorithmName = None,
    settings: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Settings to change.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Make a small model and watch it learn to think: a few minutes on a laptop, no GPU, no download."""
    from groupwise.quickstart import quickstart as run_quickstart

    result = run_quickstart(seed=seed, algorithm=algorithm, overrides=settings or [], console=_console(quiet))
    if as_json:
        print(json.dumps(result))


@app.command()
def diff(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="A run folder.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another one.")],
    traceback: Traceback = False,
) -> None:
    """Show the first step and quantity at which two runs part; exits with 0 when they are the same, else with 1."""
    from groupwise.diff import first_apart, settings_apart

    settings, parted = list(settings_apart(run_a, run_b)), first_apart(run_a, run_b)
    for line in settings:
        print(f"setting {line}")
    print("the runs are the same" if parted is None else parted)
    if settings or parted is not None:
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the version."""
    print(metadata.version("groupwise"))


def main() -> None:
    """The `groupwise` command."""
    try:
        app()
    except GroupwiseError as error:
        if "--traceback" in sys.argv:
            traceback.print_exc()
        print(f"groupwise: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, EngineError) else 2)


if __name__ == "__main__":
    main()
