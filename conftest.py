"""The tests run on up to four cores where pytest-xdist is installed."""
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # or the processes' threads would wait for another


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    alone = config.option.usepdb or not config.pluginmanager.hasplugin("xdist")
    if not alone and config.option.numprocesses is None:
        config.option.numprocesses = min(4, os.cpu_count())
