"""Writes docs/report.png: the page of the quick start's plan, from its verdict to its timeline.

`.venv/bin/python page/picture.py`; it plans for five seconds and needs Chromium.
"""

import io
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import placewise as pw
from placewise.driver import Budget
from placewise.report.page import to_page

with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
    plan = pw.plan(pw.load_problem("llama-3-8b", "two-gpus-one-host"), budget=Budget(seconds=5))
    file = Path(folder) / "page.html"
    file.write_text(to_page([plan]), encoding="utf-8")
    browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    view = browser.new_page(viewport={"width": 1120, "height": 900}, color_scheme="light")
    view.goto(file.as_uri())
    view.wait_for_selector("html[data-ready]")
    bottom = view.locator("#timeline").evaluate("(one) => one.getBoundingClientRect().bottom + scrollY")
    whole = view.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": 1120, "height": bottom + 24})
    shot = Image.open(io.BytesIO(whole)).convert("P", palette=Image.Palette.ADAPTIVE, colors=200)
    shot.save(Path(__file__).parent.parent / "docs/report.png", optimize=True)
