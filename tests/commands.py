"""What tests of the command line share, beside the fixture `run`."""

from pathlib import Path

from rich.cells import cell_len

ROOT = Path(__file__).parent.parent
COMMANDS = [
    "plan", "compare", "simulate", "check", "explain", "report", "export", "engines", "planners", "devices", "import",
    "profile", "zoo", "train", "verify",
]  # fmt: skip


def without_compiling(err: str) -> str:
    """What was said, except that something is being compiled, which a machine under load may say at any time."""
    return "".join(line for line in err.splitlines(keepends=True) if not line.startswith("preparing "))


def assert_80_columns(text: str) -> None:
    too_long = [line for line in text.splitlines() if cell_len(line) > 80]
    assert not too_long
