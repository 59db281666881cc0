"""Signals: at once where work may be thrown away, later elsewhere, and a second one always."""

import os
import signal

import pytest

from megatron_ext.rl.signals import Interrupted, Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_work_that_may_be_thrown_away(number):
    before = signal.getsignal(number)
    with Signals() as signals, pytest.raises(Interrupted, match=signal.Signals(number).name):
        with signals.discardable():
            os.kill(os.getpid(), number)
            raise AssertionError("the signal should have ended this")
    assert signal.getsignal(number) is before


def test_other_work_is_finished_first():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        finished = True
        with pytest.raises(Interrupted):
            signals.check()
        with pytest.raises(Interrupted), signals.discardable():
            raise AssertionError("nothing new should begin")
    assert finished


def test_a_second_signal_ends_at_once():
    with Signals(), pytest.raises(KeyboardInterrupt, match="second signal"):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
