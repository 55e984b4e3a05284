"""Work in another process: what it sends arrives, and it ends when it is not wanted any more."""

import os
import signal
import subprocess
import sys
import time

import pytest

from placewise.apart import POSSIBLE, Apart, answer

pytestmark = pytest.mark.skipif(not POSSIBLE, reason="there is no fork here")


def is_alive(process):
    """A zombie is not: nobody has waited for it yet."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_messages_arrive_in_order_however_long_they_are():
    def work(send):
        for message in ("first", bytes(3_000_000), {"last": 1.5}):
            send(message)

    found = []
    with Apart(work) as other:
        while not other.done:
            found += other.received(1.0)
    assert found == ["first", bytes(3_000_000), {"last": 1.5}]


def test_what_fails_there_is_told():
    def fail():
        raise ValueError("no such thing")

    with pytest.raises(RuntimeError, match="no such thing"):
        answer(fail, lambda: True)
    with pytest.raises(RuntimeError, match="without an answer"):
        answer(lambda: os._exit(1), lambda: True)
    assert answer(lambda: 42, lambda: True) == 42


def test_what_is_not_wanted_any_more_ends():
    asked = []

    def twice():
        asked.append(1)
        return len(asked) < 3

    assert answer(lambda: time.sleep(600), twice) is None
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # none is left


def test_interrupts_are_for_the_one_who_asked():
    with Apart(lambda send: (send(os.getpid()), time.sleep(0.5), send("still here"))) as other:
        (process,) = other.received(10.0)
        os.kill(process, signal.SIGINT)
        assert other.received(10.0) == ["still here"]


@pytest.mark.skipif(not os.path.exists("/proc"), reason="needs /proc")
def test_it_ends_with_the_one_who_asked():
    script = """
import os, time
from placewise.apart import Apart
def work(send):
    send(os.getpid())
    time.sleep(600)
with Apart(work) as other:
    print(other.received(10.0)[0], flush=True)
    time.sleep(600)
"""
    asking = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    process = int(asking.stdout.readline())
    assert is_alive(process)
    asking.kill()
    asking.communicate()
    for _ in range(300):
        if not is_alive(process):
            break
        time.sleep(0.1)
    assert not is_alive(process)
