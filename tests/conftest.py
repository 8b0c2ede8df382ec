"""Shared by all tests: the modules on the path, one thread (small tensors gain nothing from two), the grading."""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)

pytest_plugins = ["grading"]                                     # task marks, points, results; see there


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session):
    """Runs what tests would only wait for beside the tests before them, one command after another.

    A test file says in BESIDE which of its fixtures wait for which command: a function that gets a new folder
    and returns the command line. Only what a test of this session asks for is run, here in tests/.
    """
    commands = {
        command: name for item in session.items for name, command in getattr(item.module, "BESIDE", {}).items()
        if name in item.fixturenames and not session.config.option.collectonly
    }
    session.beside = {}
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(1) as worker:
        for command, name in commands.items():
            folder = Path(place, name)
            folder.mkdir()
            options = {"cwd": Path(__file__).parent, "capture_output": True, "text": True, "timeout": 600}
            session.beside[command] = folder, worker.submit(subprocess.run, command(folder), **options)
        try:
            return (yield)
        finally:
            worker.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def beside(request):
    """A function that waits for the end of a command in BESIDE and returns its folder and its outcome (CompletedProcess)."""
    started = request.session.beside
    return lambda command: (started[command][0], started[command][1].result())
