"""Signals as the loop sees them."""

import os
import signal

import pytest

from l2r_lab.training.claim import stop_on_signals


def test_the_first_signal_asks_and_the_second_interrupt_ends_at_once():
    with pytest.raises(KeyboardInterrupt), stop_on_signals() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGINT)
        assert stop and stop.signal == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back():
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a second SIGTERM only asks again
        assert stop.signal == signal.SIGTERM
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == before
