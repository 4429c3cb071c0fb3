"""Signals: noted, acted on once, and the second one left to the system."""

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress

import pytest

from dwslm.cli.errors import one_line_errors
from dwslm.train.signals import CAUGHT, EXIT_CODE, Preempted, Signals


@pytest.fixture(autouse=True)
def nothing_is_ignored():
    """Tests that a shell runs in its background, or under nohup, begin with signals that are ignored."""
    before = {number: signal.getsignal(number) for number in CAUGHT}
    for number, handler in before.items():
        if handler == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", CAUGHT)
def test_a_signal_is_noted_and_not_taken_for_two_where_a_launcher_passes_it_on(number):
    before = [signal.getsignal(n) for n in CAUGHT]
    with Signals() as signals:
        assert signals.received is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.Signals(number).name
    assert [signal.getsignal(n) for n in CAUGHT] == before


def test_work_that_may_be_dropped_ends_at_once():
    with Signals() as signals:
        with pytest.raises(Preempted, match="asked to leave by SIGTERM") as caught, signals.at_once():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
            raise AssertionError("it went on")
        assert caught.value.name == "SIGTERM" and not isinstance(caught.value, Exception)
        with pytest.raises(Preempted), signals.at_once():  # and one that came before is not forgotten
            raise AssertionError("it began")


def test_after_such_work_a_signal_is_only_noted():
    with Signals() as signals:
        with signals.at_once():
            pass
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.received == "SIGUSR1"


def test_what_is_ignored_stays_ignored():
    """nohup ignores HUP, a shell INT for its background jobs."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_exit_code_is_75():
    with pytest.raises(SystemExit) as caught, one_line_errors():
        raise Preempted("SIGTERM")
    assert caught.value.code == EXIT_CODE == 75


@pytest.mark.parametrize(("works", "told"), [(False, "saves after this step and leaves"), (True, "leaves at once")])
def test_a_signal_is_answered_before_the_step_is_over_and_only_once(works, told, capfd):
    with Signals(says=True) as signals:
        with suppress(Preempted), signals.at_once() if works else nullcontext():
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert capfd.readouterr().err == f"\nSIGINT: {told}; once more ends at once\n"
    with Signals():  # one of several ranks speaks for all
        os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err == ""


SECOND = """
import os, signal, time
from dwslm.train import signals
with signals.Signals():
    os.kill(os.getpid(), signal.SIGTERM)
    print("first", flush=True)
    time.sleep(signals.RELAYED_SECONDS + 0.1)
    os.kill(os.getpid(), signal.SIGINT)
    print("second", flush=True)
"""


def test_a_second_signal_ends_the_process_there_and_then():
    done = subprocess.run([sys.executable, "-c", SECOND], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "first\n")


def test_a_signal_of_another_rank_counts_here_and_the_launchers_own_is_the_same_one():
    with Signals() as signals:
        signals.pass_on(None)
        assert signals.received is None
        signals.pass_on("SIGUSR1")
        os.kill(os.getpid(), signal.SIGTERM)  # a launcher sends it to all of them
        assert signals.received == "SIGUSR1"
        with pytest.raises(Preempted, match="SIGUSR1"), signals.at_once():
            raise AssertionError("it began")
