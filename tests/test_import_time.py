"""`placewise --help` answers at once because it imports nothing heavy. What is imported is checked, not the time."""

import subprocess
import sys

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
