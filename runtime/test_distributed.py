"""Tests of runtime/distributed.py."""


import pytest

from runtime import distributed
from runtime.testing import on_the_cpu  # used automatically


def test_second_signal_stops_at_once(capfd):
    stop = distributed.Stop()
    stop.note()
    stop.note()  # torchrun repeats the first one
    stop.first_signal -= 2
    with pytest.raises(KeyboardInterrupt):
        stop.note()
