"""The page at a thousand, a hundred thousand and a million ops: its size, how long it takes to open, and each frame.

Random graphs (about two edges per op), each op on the device of its stretch of fifty, so that there are transfers.
*Open* is from the start of the navigation to the first drawing of everything, *frame* the time from one frame to the
next while the timeline is zoomed in from the whole run and out again, *draw* what the page's own code takes of it, and
*most* where it took most; in headless Chromium, which draws without a graphics card.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from harness import main, progress, random_problem
from placewise.plans import Plan
from placewise.report.page import to_page
from placewise.simulator import simulate

FRAMES = 120
MOVE = """
async (frames) => {
  const canvas = document.querySelector("#timeline canvas");
  canvas.scrollIntoView();
  const { left, top, width } = canvas.getBoundingClientRect();
  const next = () => new Promise(requestAnimationFrame);
  const between = [], drawing = [];
  await next();
  for (let i = 0; i < frames; i++) {
    const zoom = i < frames / 2 ? -30 : 30;
    const before = await next();
    const began = performance.now();
    canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: zoom, ctrlKey: true, cancelable: true, bubbles: true,
                                                   clientX: left + width / 2, clientY: top + 40 }));
    const after = await next();
    between.push(after - before);
    drawing.push(performance.now() - Math.max(began, after));
  }
  return [between, drawing];
}
"""


def measure(options: Any) -> list[dict[str, Any]]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("there is no chromium; apt-get install chromium")
    rows = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for ops in options.ops:
            progress(f"{ops:,} ops")
            file = Path(folder) / f"{ops}.html"
            written = _write(ops, file)
            view = browser.new_page(viewport={"width": 1280, "height": 800})
            view.goto(file.as_uri())
            view.wait_for_selector("html[data-ready]", timeout=120_000)
            opened = float(view.evaluate("document.documentElement.dataset.ready"))
            between, drawing = view.evaluate(MOVE, FRAMES)
            rows.append(
                {
                    "ops": ops,
                    "MB": round(file.stat().st_size / 1e6, 2),
                    "write CPU s": round(written, 1),
                    "open s": round(opened / 1e3, 2),
                    "frame ms": round(float(np.median(between)), 1),
                    "frame ms, 95%": round(float(np.percentile(between, 95)), 1),
                    "draw ms": round(float(np.median(drawing)), 1),
                    "most": round(float(np.max(drawing)), 1),
                }
            )
            view.close()
        browser.close()
    return rows


def _write(ops: int, file: Path) -> float:
    """Seconds of CPU that the page takes to be made, once the plan is simulated."""
    problem = random_problem(ops, 8)
    placement = (np.arange(ops) // 50 % 8).astype(np.int32)
    timeline = simulate(problem, placement)
    plan = Plan(problem, placement, None, timeline.value, timeline.value / 2, "by-hand", "0")
    plan.__dict__["timeline"] = timeline
    began = time.process_time()
    file.write_text(to_page([plan]), encoding="utf-8")
    return time.process_time() - began


if __name__ == "__main__":
    settings = {"ops": {"type": int, "nargs": "*", "default": [1_000, 100_000, 1_000_000], "help": "sizes"}}
    main("The page: size, time to open, time of a frame", measure, **settings)
