"""Writes docs/report.png, the page of the quick start's plan from its verdict to its timeline, and
docs/side-by-side.png, the timelines and the graph of that plan and of one by HEFT.

`.venv/bin/python page/picture.py`; it plans for five seconds and needs Chromium.
"""

import io
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

import placewise as pw
from placewise.driver import Budget
from placewise.plans import Plan
from placewise.report.page import to_page

WIDE = 1120
DOCS = Path(__file__).parent.parent / "docs"


def draw(view: Page, plans: list[Plan], first: str | None, last: str, name: str) -> None:
    """The page of plans, from one section (or its top) to another."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(to_page(plans), encoding="utf-8")
        view.goto(file.as_uri())
        view.wait_for_selector("html[data-ready]")
        top = view.locator(first).evaluate("(one) => one.getBoundingClientRect().top + scrollY") - 24 if first else 0
        bottom = view.locator(last).evaluate("(one) => one.getBoundingClientRect().bottom + scrollY") + 24
        drawn = view.screenshot(full_page=True, clip={"x": 0, "y": top, "width": WIDE, "height": bottom - top})
        shot = Image.open(io.BytesIO(drawn))
        shot.convert("P", palette=Image.Palette.ADAPTIVE, colors=200).save(DOCS / name, optimize=True)


with sync_playwright() as playwright:
    problem = pw.load_problem("llama-3-8b", "two-gpus-one-host")
    plan, heft = pw.plan(problem, budget=Budget(seconds=5)), pw.plan(problem, "heft")
    browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    view = browser.new_page(viewport={"width": WIDE, "height": 900}, color_scheme="light")
    draw(view, [plan], None, "#timeline", "report.png")
    draw(view, [plan, heft], "#timeline", "#graph", "side-by-side.png")
