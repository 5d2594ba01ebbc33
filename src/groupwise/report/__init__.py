"""`groupwise report`: runs as one HTML page that needs nothing but itself; `groupwise watch` serves the same page live.

completions   the completions of a run: a digest of each step, whole groups where they fit
data          a run folder as plain data
watch         the server of a running job's page
page.html.jinja, style.css, *.js   what the page looks like; the scripts build it from the data
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from groupwise.errors import CheckpointError
from groupwise.report.completions import whole_groups
from groupwise.report.data import RunFolder, groups_to_show, overview

TOKEN_BUDGET = 500_000
"""Tokens shown in full, of all runs together: about 8 MB of the page."""
SCRIPTS = ("charts.js", "sections.js", "groups.js", "page.js")


def write_report(runs: Sequence[Path], output: Path) -> Path:
    """Write the page of one run or of several to a file.

    Raises:
        CheckpointError: a folder is no run, or the file cannot be written.
        ConfigError: the config.yaml of a run cannot be read.
    """
    folders = [RunFolder(run) for run in runs]
    chosen = groups_to_show(folders, TOKEN_BUDGET)
    groups = [whole_groups(run.files(), steps) for run, steps in zip(folders, chosen, strict=True)]
    text = page({"live": False, "runs": [overview(run) for run in folders], "groups": groups})
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{output}: cannot be written: {error.strerror}; choose another with --output") from error
    return output


def page(data: dict[str, Any]) -> str:
    """The whole page, with its data, style and scripts in it."""
    here = resources.files(__name__)
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        here.joinpath("page.html.jinja").read_text(encoding="utf-8")
    )
    # Completions are anyone's words: `<` is spelled so that none of them can end the script that holds the data.
    embedded = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return template.render(
        title=" and ".join(run["name"] for run in data["runs"]),
        style=Markup(here.joinpath("style.css").read_text(encoding="utf-8")),
        scripts=[Markup(here.joinpath(name).read_text(encoding="utf-8")) for name in SCRIPTS],
        data=Markup(embedded),
    )
