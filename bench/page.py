"""The page at a thousand, a hundred thousand and a million ops: its size, how long it takes to open, and each frame.

Random graphs (about two edges per op), each op on the device of its stretch of fifty, so that there are transfers.
*Open* is from the start of the navigation to the first drawing of everything. The frames are the times from one frame
to the next, the median and that of 95 in 100, while the page is *scrolled* from its top to its end, the timeline is
*zoomed* in from the whole run and out again, and *panned* along a tenth of the run; *draw* is what the page's own code
takes of a frame while it is zoomed, and *most* where it took most. *Unfold* is from a click on a box of the graph to
what is in it, the longest of three. All in headless Chromium, which draws without a graphics card.
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
MOVES = """
async (frames) => {
  const canvas = document.querySelector("#timeline canvas");
  const next = () => new Promise(requestAnimationFrame);
  const wheel = (about) => {
    const { left, top, width } = canvas.getBoundingClientRect();
    const at = { clientX: left + width / 2, clientY: top + 40 };
    canvas.dispatchEvent(new WheelEvent("wheel", { ...about, ...at, cancelable: true, bubbles: true }));
  };
  const zoom = (deltaY) => wheel({ deltaY, ctrlKey: true });
  const drawing = [];
  const timed = async (move) => {
    const between = [];
    for (let i = 0; i < frames; i++) {
      const before = await next();
      const began = performance.now();
      move(i);
      const after = await next();
      between.push(after - before);
      drawing.push(performance.now() - Math.max(began, after));
    }
    return between;
  };
  const room = document.documentElement.scrollHeight - innerHeight;
  const scrolled = await timed((i) => scrollTo({ top: (room * (i + 1)) / frames, behavior: "instant" }));
  canvas.scrollIntoView({ behavior: "instant" });
  drawing.length = 0;
  const zoomed = await timed((i) => zoom(i < frames / 2 ? -30 : 30));
  const draws = [...drawing];
  zoom(-576); // a tenth
  const panned = await timed(() => wheel({ deltaX: 10 }));
  const unfolded = [];
  for (let i = 0; i < 3; i++) {
    const box = document.querySelector(".box.now.folded") ?? document.querySelector(".box.folded");
    if (!box) break;
    const began = performance.now();
    box.click();
    await next();
    await new Promise((done) => setTimeout(done));
    unfolded.push(performance.now() - began);
  }
  return { scrolled, zoomed, panned, draws, unfolded };
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
            seen = view.evaluate(MOVES, FRAMES)
            frames = {
                f"{name} ms{rest}": round(float(np.percentile(seen[key], part)), 1)
                for name, key in (("scroll", "scrolled"), ("zoom", "zoomed"), ("pan", "panned"))
                for rest, part in (("", 50), (", 95%", 95))
            }
            rows.append(
                {
                    "ops": ops,
                    "MB": round(file.stat().st_size / 1e6, 2),
                    "write CPU s": round(written, 1),
                    "open s": round(opened / 1e3, 2),
                    **frames,
                    "draw ms": round(float(np.median(seen["draws"])), 1),
                    "most": round(float(np.max(seen["draws"])), 1),
                    "unfold ms": round(max(seen["unfolded"])),
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
    main("The page: size, time to open, time of a frame, and to unfold", measure, **settings)
