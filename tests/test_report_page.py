"""The page in a real browser: what is drawn, what mouse and keyboard do, and what it must never do.

Chromium is driven headless, offline; every request that leaves the page's own address fails the test.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from runs import GROUP, PROMPTS, STEPS, TRAP, WRONG, grow, long_run, made_log, made_run, made_scores

from groupwise.compare import compare, save
from groupwise.presets import DR_GRPO, PPO
from groupwise.report import page, write_report
from groupwise.report.data import RunFolder, overview
from groupwise.report.watch import Server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: tools/system_packages.sh installs it")

DESKTOP, PHONE = 1280, 375
AXE = resources.files("axe_playwright_python").joinpath("axe.min.js")
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def view(chromium: Browser) -> Iterator[Open]:
    """Opens an address; afterwards nothing may have been said on the console, and nothing asked of anyone else."""
    complaints: list[str] = []
    pages: list[Page] = []

    def look(address: str, width: int = DESKTOP, scheme: Any = "light") -> Page:
        shown = chromium.new_page(
            viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
        )
        home = address.split("?")[0]
        shown.set_default_timeout(10_000)  # milliseconds
        pages.append(shown)
        shown.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        shown.on("pageerror", lambda error: complaints.append(str(error)))
        shown.on(
            "request", lambda asked: complaints.append(asked.url) if not asked.url.startswith((home, "data:")) else 0
        )
        shown.goto(address)
        expect(shown.locator(".answer, .empty").first).to_be_attached()
        return shown

    yield look
    for shown in pages:
        shown.close()
    assert complaints == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = made_run(tmp_path_factory.mktemp("runs") / "first")
    save(folder, compare(folder, {"dr_grpo": DR_GRPO, "ppo": PPO}, gradients=False))
    return folder


@pytest.fixture(scope="module")
def report(run: Path) -> str:
    return write_report([run], run / "report.html").as_uri()


@contextmanager
def served(run: Path) -> Iterator[str]:
    """The address of a live page."""
    with Server([run]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.address
        server.shutdown()


def answers(page: Page) -> list[str]:
    return page.locator(".answer .said").all_inner_texts()


def text_of(page: Page, selector: str) -> str:
    return " ".join(page.locator(selector).first.inner_text().split())


def in_view(page: Page, selector: str) -> None:
    page.locator(selector).first.evaluate("element => element.scrollIntoView({block: 'center'})")


def test_the_page_begins_with_the_held_out_result_before_and_after(view: Open, report: str) -> None:
    page = view(report)
    assert text_of(page, ".big") == "50.0% → 75.0%"
    assert "After 12 steps and 192 completions: 25.0 points up, but the 95% intervals overlap." in text_of(
        page, ".lead"
    )
    assert text_of(page, "dl.facts").startswith(
        "Model model Data rows.jsonl Algorithm Groupwise's default Steps 12 of 12"
    )


def test_every_metric_that_moves_has_a_curve_with_a_point_for_each_step(view: Open, report: str) -> None:
    page = view(report)
    titles = page.locator("#curves figure h3").all_inner_texts()
    assert titles == ["math_answer", "Length", "Gradient norm", "Loss"]
    paths = [curve.get_attribute("d") for curve in page.locator("#curves .curve").all()]
    assert [len(re.findall("[ML]", path or "")) for path in paths] == [STEPS] * 4
    assert page.locator("#curves .dot").count() == 2  # the held-out evaluations
    assert "Entropy 0.7" in text_of(page, "#curves > .note")  # what never changed is said in words


def test_evaluations_of_several_samples_have_curves_of_pass_and_majority(view: Open, tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", steps=3)
    log = made_log(folder, 3)
    for step, mean in ((1, 0.25), (2, 0.5)):
        figures = {name: np.full(4, mean) for name in ("mean@4", "pass@2", "pass@4", "maj@4")}
        log.evaluation(step, dataclasses.replace(made_scores(log.chat, [True] * 4), per_prompt=figures))
    page = view(write_report([folder], folder / "report.html").as_uri())
    charts = page.locator("#curves figure", has_text=re.compile("Held-out .*@"))
    assert charts.locator("h3").all_inner_texts() == ["Held-out pass@4", "Held-out maj@4"]
    paths = [curve.get_attribute("d") or "" for curve in charts.locator(".curve").all()]
    assert [len(re.findall("[ML]", path)) for path in paths] == [2, 2]


def test_the_pointer_on_a_curve_says_its_values(view: Open, report: str) -> None:
    page = view(report)
    chart = page.locator("#curves figure", has_text="Loss").locator("svg")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 11, box["y"] + 60)
    assert text_of(page, "#tip") == "step 12 first: 0.0833"
    gradient = page.locator("#curves figure", has=page.get_by_role("heading", name="Gradient norm"))
    assert gradient.locator(".value").inner_text() == "0.42"  # every chart follows
    page.mouse.move(5, 5)
    assert page.locator("#tip").is_hidden()


def test_the_arrow_keys_on_a_curve_say_its_values_and_enter_opens_the_step(view: Open, report: str) -> None:
    page = view(report)
    page.locator("#curves figure", has_text="Loss").locator("svg").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert " ".join(page.locator("#said").inner_text().split()) == "step 2 first: 0.5"
    page.keyboard.press("Enter")
    expect(page.locator("output")).to_have_text("step 2 of 12")


def test_smoothing_moves_the_curve_and_keeps_what_was_measured_behind_it(view: Open, report: str) -> None:
    page = view(report)
    before = page.locator("#curves .curve").nth(1).get_attribute("d")
    slider = page.get_by_label("Smoothing")
    slider.fill("0")
    measured = page.locator("#curves .curve").nth(1).get_attribute("d")
    slider.fill("0.9")
    strong = page.locator("#curves .curve").nth(1).get_attribute("d")
    assert len({before, measured, strong}) == 3
    behind = page.locator("#curves figure").nth(1).locator("path:not(.curve)").get_attribute("d")
    assert behind == measured


def test_a_group_is_chosen_with_the_mouse(view: Open, report: str) -> None:
    page = view(report)
    assert page.locator(".groups li").count() == PROMPTS
    page.locator(".groups li", has_text="What is 12 + 1?").click()
    assert text_of(page, ".asked summary") == "What is 12 + 1?"
    ends = [f"It is 13, as sample {sample} says<|im_end|>" for sample in (0, 1)]
    assert answers(page) == [*ends, f"{WRONG}<|im_end|>", f"{WRONG}<|im_end|>"]
    heads = page.locator(".answer header").all_inner_texts()
    assert [" ".join(head.split()) for head in heads][1:3] == [
        "right reward 1.1 advantage +0.87 27 tokens",
        "wrong reward 0.1 advantage −0.87 16 tokens",
    ]


def test_groups_and_steps_are_chosen_with_the_keyboard(view: Open, report: str) -> None:
    page = view(report)
    groups = page.get_by_role("listbox", name="Prompts of this step")
    groups.focus()
    page.keyboard.press("Home")
    assert text_of(page, ".asked summary") == "What is 12 + 0?"
    page.keyboard.press("ArrowDown")
    assert text_of(page, ".groups [aria-selected=true] .ask") == "What is 12 + 1?"
    assert groups.get_attribute("aria-activedescendant") == "group-1"
    page.keyboard.press("ArrowLeft")
    expect(page.locator("output")).to_have_text("step 11 of 12")
    assert text_of(page, ".asked summary") == "What is 11 + 1?"
    page.keyboard.press("ArrowRight")
    expect(page.locator("output")).to_have_text("step 12 of 12")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")  # stays at the first
    assert text_of(page, ".asked summary") == "What is 12 + 0?"


def test_a_step_is_chosen_with_the_slider_and_the_buttons(view: Open, report: str) -> None:
    page = view(report)
    page.get_by_label("Step", exact=True).fill("0")
    expect(page.locator("output")).to_have_text("step 1 of 12")
    assert page.get_by_label("Previous step").is_disabled()
    page.get_by_label("Next step").click()
    expect(page.locator("output")).to_have_text("step 2 of 12")


def test_completions_are_filtered_and_counted(view: Open, report: str) -> None:
    page = view(report)
    chips = page.get_by_role("group", name="Filter completions").get_by_role("button")
    # The truncated one is right; the one without a reward is neither right nor wrong.
    assert chips.all_inner_texts() == ["All 16", "Right 8", "Wrong 7", "Truncated 1", "Invalid 1"]
    chips.nth(4).click()
    assert text_of(page, ".answer header").startswith("invalid")
    assert "no verdict" in text_of(page, ".answer .bad >> nth=-1")
    assert page.locator(".groups li").count() == 1
    chips.nth(3).click()
    assert "truncated" in text_of(page, ".answer header")
    chips.nth(1).click()
    assert {text.startswith("It is") for text in answers(page)} == {True}


def test_a_search_filters_and_marks_and_enter_goes_to_the_next_step_that_has_it(view: Open, report: str) -> None:
    page = view(report)
    search = page.get_by_role("searchbox")
    search.fill("SAMPLE 3")
    assert answers(page) == []
    assert "Try another filter" in text_of(page, ".answers .empty")
    search.fill("What is 3 +")
    assert page.locator(".groups li").count() == 0
    search.press("Enter")
    expect(page.locator("output")).to_have_text("step 3 of 12")
    assert page.locator(".groups li").count() == PROMPTS
    search.fill("k")
    assert page.locator(".answer mark").count() > 0


def test_tokens_are_coloured_by_what_is_asked_and_say_their_numbers(view: Open, report: str) -> None:
    page = view(report)
    page.locator(".groups li").nth(1).click()
    assert page.get_by_label("Colour").locator("option").all_inner_texts() == ["Advantage", "Log-prob", "Entropy"]
    colors = [
        page.locator(".answer").nth(i).locator(".token").first.evaluate("e => getComputedStyle(e).backgroundColor")
        for i in (0, 2)
    ]
    assert colors == ["rgba(31, 87, 195, 0.4)", "rgba(201, 84, 18, 0.4)"]
    in_view(page, ".answer .token")
    page.locator(".answer .token").first.hover()
    assert text_of(page, "#tip") == '"I" probability 60.7%, log-prob −0.500 advantage +0.87 entropy 0.70 nats'
    page.get_by_label("Colour").select_option("logprob")
    assert {e.evaluate("e => getComputedStyle(e).backgroundColor") for e in page.locator(".answer .token").all()} == {
        "rgba(201, 84, 18, 0.05)"
    }


def test_a_completion_that_looks_like_html_is_only_text(view: Open, report: str) -> None:
    page = view(report)
    page.locator(".groups li").last.click()
    assert answers(page)[-1] == f"{TRAP}<|im_end|>"
    assert page.locator("img").count() == 0


def test_prompts_are_listed_by_what_became_of_them(view: Open, report: str) -> None:
    page = view(report)
    chips = page.get_by_role("group", name="Which prompts").get_by_role("button")
    assert chips.all_inner_texts() == ["Newly solved 2", "Lost 1", f"Hardest in training {STEPS * PROMPTS}"]
    assert page.locator("#prompts h3.question").all_inner_texts() == ["Held-out 1?", "Held-out 2?"]
    assert page.locator("#prompts .prompt .said").all_inner_texts()[:2] == [WRONG, "surely 1"]
    chips.nth(2).click()
    page.get_by_role("button", name="step 11").first.click()
    expect(page.locator("output")).to_have_text("step 11 of 12")
    assert text_of(page, ".asked summary") == "What is 11 + 0?"


def test_two_runs_lie_over_each_other_and_can_be_hidden(view: Open, run: Path, tmp_path: Path) -> None:
    other = made_run(tmp_path / "second", steps=5, algorithm="gspo")
    page = view(write_report([run, other], tmp_path / "two.html").as_uri())
    assert text_of(page, "h1") == "2 runs compared"
    assert "Algorithm Groupwise's default · gspo Steps 12 of 12 · 5 of 5 " in text_of(page, "dl.facts")
    assert page.locator("#result svg text.strong").count() == 2  # each with its own before and after
    loss = page.locator("#curves figure", has_text="Loss")
    assert loss.locator(".curve").count() == 2
    assert page.locator("#formula h3").all_inner_texts() == ["Groupwise's default · first", "gspo · second"]
    page.get_by_role("group", name="Runs shown").get_by_role("button", name="second").click()
    assert page.locator("#curves figure", has_text="Loss").locator(".curve").count() == 1
    page.get_by_label("Run", exact=True).select_option("second")
    expect(page.locator("output")).to_have_text("step 5 of 5")


def test_findings_and_tables_are_shown_where_a_run_has_them(view: Open, run: Path, tmp_path: Path) -> None:
    shown = overview(RunFolder(run))
    shown["findings"] = [
        {"severity": "error", "title": "No group teaches", "why": "All right.", "try": "harder", "evidence": "1.0"}
    ]
    shown["tables"] = [{"title": "Gradients", "note": "", "columns": ["algorithm", "norm"], "rows": [["dapo", 0.25]]}]
    data = {"live": False, "runs": [shown], "groups": [{"pieces": [], "steps": {}}]}
    (tmp_path / "page.html").write_text(page(data))
    seen = view((tmp_path / "page.html").as_uri())
    assert text_of(seen, ".finding") == "error No group teaches All right. Try: harder 1.0"
    assert text_of(seen, "#tables tbody") == "dapo 0.25"
    assert seen.locator("nav a").all_inner_texts()[:2] == ["Result", "Diagnosis"]


def test_a_comparison_that_was_made_is_on_the_page(view: Open, report: str) -> None:
    page = view(report)
    titles = page.locator("#tables h3").all_inner_texts()
    assert titles == [
        f"Step {STEPS}: {what}" for what in ("the update", "whom it favours", "cosines of the pushes", "left out")
    ]
    rows = page.get_by_role("region", name="the update").locator("tbody th").all_inner_texts()
    assert rows == ["run", "dr_grpo"]
    cosine = page.get_by_role("region", name="cosines").locator("td.number").first
    assert cosine.inner_text() == "+1.000"
    expect(cosine).to_have_css("background-color", "rgba(31, 87, 195, 0.3)")
    assert "critic" in text_of(page, "#tables figure:last-child tbody")


def test_a_run_that_has_done_nothing_yet_says_so(view: Open, tmp_path: Path) -> None:
    run = made_run(tmp_path / "young", steps=0, of=9)
    for file in [*run.rglob("*.parquet"), run / "metrics.jsonl"]:
        file.unlink()
    page = view(write_report([run], tmp_path / "young.html").as_uri())
    assert "Nothing has been scored yet" in text_of(page, ".lead")
    assert text_of(page, "#completions .empty") == "No completion has been written yet."


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_the_page_fits_its_window_and_passes_axe(view: Open, report: str, width: int, scheme: str) -> None:
    page = view(report, width, scheme)
    page.locator(".groups li").last.click()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    small = "e => parseFloat(getComputedStyle(e).fontSize) < 11 && e.textContent.trim() && !e.children.length"
    assert page.evaluate(f"[...document.querySelectorAll('main *')].filter({small}).length") == 0
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run().then(result => result.violations.map(v => [v.id, v.nodes.map(n => n.html)]))")
    assert found == []
    assert page.evaluate("axe.run({runOnly: ['color-contrast']}).then(result => result.passes.length)") == 1


def test_the_theme_follows_the_system_until_the_button_says_otherwise(view: Open, report: str) -> None:
    page = view(report, scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(19, 21, 25)"
    page.emulate_media(color_scheme="light")
    expect(page.locator("body")).to_have_css("background-color", "rgb(252, 251, 249)")
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(background) == "rgb(19, 21, 25)"


def test_a_live_page_follows_the_run_and_asks_for_steps_as_they_are_wanted(view: Open, tmp_path: Path) -> None:
    run = made_run(tmp_path / "live", steps=2, of=9)
    with served(run) as address:
        page = view(address)
        assert page.locator("#live").inner_text() == "step 2 of 9"
        page.get_by_label("Previous step").click()
        expect(page.locator("output")).to_have_text("step 1 of 2")
        assert len(answers(page)) == GROUP
        page.get_by_label("Next step").click()
        expect(page.locator("output")).to_have_text("step 2 of 2")
        grow(made_log(run, 9), 3)
        expect(page.locator("#live")).to_have_text("step 3 of 9")
        expect(page.locator("output")).to_have_text("step 3 of 3")  # it was at the end
        assert "What is 3 +" in text_of(page, ".asked summary")
        page.close()  # before the server is gone, of which the browser would complain


@pytest.mark.slow
def test_a_report_of_500_steps_of_512_completions_is_small_and_opens_at_once(view: Open, tmp_path: Path) -> None:
    run = long_run(tmp_path / "long", steps=500, prompts=32, group_size=16, tokens=200)
    file = write_report([run], tmp_path / "long.html")
    assert file.stat().st_size < 15e6
    began = time.perf_counter()
    page = view(file.as_uri())
    expect(page.locator("#curves .curve").first).to_be_attached()
    assert time.perf_counter() - began < 2
    assert "256,000 completions" in text_of(page, ".lead")
    assert len(answers(page)) == 16
