"""For all tests: commands, and Ctrl-C works, even where whoever started them ignores it, as background jobs do."""

import itertools
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from commands import without_compiling
from placewise import cli

signal.signal(signal.SIGINT, signal.default_int_handler)
NUMBER = itertools.count()


@pytest.fixture(autouse=True)
def no_profiles_of_this_machine(monkeypatch, tmp_path_factory):
    """What somebody measured here before changes no test, and no test leaves anything behind.

    The folder is made by who keeps something there: to make thousands takes longer than most tests.
    """
    monkeypatch.setenv("PLACEWISE_PROFILES", str(tmp_path_factory.getbasetemp() / "profiles" / str(next(NUMBER))))


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run a command in an empty folder; gives the exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # `main` has its own

    def run(*args: str | Path) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["placewise", *map(str, args)])
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return SimpleNamespace(code=stopped.value.code, out=out, err=without_compiling(err))

    return run
