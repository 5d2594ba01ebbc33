"""Take the screenshots of docs/seeing.md from a run, with the Chromium of this machine: tools/screenshots.py RUN."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from groupwise.report import write_report

DOCS = Path(__file__).parents[1] / "docs"
STEP = 10
# The result, its curve, and the completions below them: the rest of the page is left out of the picture.
STYLE = """.top { position: static !important }
#spread, #resources, .cards figure:not(.broad), .cards + p { display: none }
.groups { max-height: 24rem }"""


def shoot(browser: Browser, address: str, name: str, scheme: Any, width: int, below: int) -> None:
    """The page from its top to `below` pixels under the top of its completions."""
    size: Any = {"width": width, "height": 800}
    page = browser.new_page(viewport=size, color_scheme=scheme, reduced_motion="reduce")
    page.goto(address)
    page.add_style_tag(content=STYLE)
    step = page.get_by_label("Step", exact=True)
    step.fill(str(STEP - 1))
    page.get_by_text(f"step {STEP} of").wait_for()
    step.blur()
    page.evaluate("scrollTo(0, 0)")
    box = page.locator("#completions").bounding_box()
    assert box is not None, "a report has completions"
    page.wait_for_timeout(300)  # milliseconds, for charts to take their place
    clip: Any = {"x": 0, "y": 0, "width": width, "height": box["y"] + below}
    page.screenshot(path=DOCS / name, full_page=True, clip=clip)
    page.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        address = write_report([Path(sys.argv[1])], Path(folder) / "report.html").as_uri()
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        shoot(browser, address, "report.png", "light", 1280, 760)
        shoot(browser, address, "report-dark.png", "dark", 1280, 760)
        shoot(browser, address, "report-phone.png", "light", 375, 1100)
        browser.close()


if __name__ == "__main__":
    main()
