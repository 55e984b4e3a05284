"""`placewise --help` answers at once because it imports nothing heavy. What is imported is checked, not the time."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"numpy", "numba", "scipy", "pydantic", "torch", "ortools", "pandas", "yaml", "rich"}


def imported_by(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.partition(".")[0] for name in done.stdout.splitlines()}


@pytest.mark.parametrize(
    "code",
    [
        "import placewise",
        "import placewise.cli",
        "from placewise.cli import app\ntry: app(['--help'])\nexcept SystemExit: pass",
    ],
)
def test_nothing_heavy_is_imported(code: str):
    assert not imported_by(code) & HEAVY


def test_a_command_parses_before_it_imports():
    """Typer itself needs pydantic to read a command's options."""
    code = "from placewise.cli import app\ntry: app(['plan', '--help'])\nexcept SystemExit: pass"
    assert not imported_by(code) & (HEAVY - {"pydantic"})


def test_the_check_would_notice():
    assert "numpy" in imported_by("import placewise.graph")


# ---- which module knows which ----------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]
MAY = {("planners", "driver"), ("learned", "driver")}  # the `Context` that planners are given


def stages() -> dict[str, int]:
    """The lines of the layout in CONTRIBUTING.md, from top to bottom."""
    layout = (ROOT / "CONTRIBUTING.md").read_text().partition("src/placewise/\n")[2].partition("\npage/")[0]
    lines = [re.match(r"  ((?:[\w.*/]+ )+)", line)[1].split() for line in layout.splitlines()]
    return {re.sub(r"\.(py|\*)$|/$", "", name): i for i, names in enumerate(lines) for name in names}


def known_at_once(path: Path) -> list[str]:
    """The parts of the package that a module imports as it is imported itself."""
    found = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
    dotted = [f"{node.module}.{name.name}" for node in found for name in node.names]
    return [name.split(".")[1] for name in dotted if name.startswith("placewise.")]


def test_a_stage_imports_only_from_stages_left_of_it():
    order, package = stages(), ROOT / "src" / "placewise"
    files = {path: path.relative_to(package).parts[0].removesuffix(".py") for path in package.rglob("*.py")}
    assert set(files.values()) - {"__init__", "__main__"} <= order.keys()
    astray = {
        (stage, known)
        for path, stage in files.items()
        for known in known_at_once(path)
        if stage in order and known in order and order[known] > order[stage]
    }
    assert astray == MAY
