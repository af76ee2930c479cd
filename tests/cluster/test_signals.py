import os
import signal

import pytest

from cluster.signals import stop_on_signals


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_and_the_second_insists(number, status):
    with pytest.raises(KeyboardInterrupt), stop_on_signals() as stop:
        assert not stop.requested.is_set()
        os.kill(os.getpid(), number)
        assert stop.requested.wait(10)
        assert stop.exit_status == status
        os.kill(os.getpid(), number)
        signal.sigtimedwait([], 1)  # the handler runs at the next bytecode


def test_the_handlers_of_before_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stop_on_signals() as stop:
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert stop.exit_status == 0
