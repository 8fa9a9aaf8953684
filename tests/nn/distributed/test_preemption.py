"""Signals that request the end of a run, and what happens to those that follow."""

import os
import signal

import pytest

from nn.distributed.preemption import SIGNALS, StopRequest
from tests.helpers.command import kept_signals


@pytest.mark.parametrize("may_get_stuck", [False, True])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_signals_after_the_request_are_ignored_and_others_restored(is_stopped, may_get_stuck):
    arrived = []
    with kept_signals():
        for signum in SIGNALS:
            signal.signal(signum, lambda signum, _: arrived.append(signum))
        with StopRequest(may_get_stuck, lambda: "") as stop:
            if is_stopped:
                os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.signum == (signal.SIGUSR1 if is_stopped else 0)
        for signum in SIGNALS:
            os.kill(os.getpid(), signum)
    assert arrived == ([] if is_stopped else list(SIGNALS))
