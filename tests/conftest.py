"""Shared by all tests: the modules on the path, one thread (small tensors gain nothing from two), the
grading, and commands that run beside the tests."""

import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
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
    if session.testsfailed and not session.config.option.continue_on_collection_errors:
        commands = {}
    environment, running, session.beside = dict(os.environ), [], {}

    def run(line):
        with subprocess.Popen(
            line, cwd=Path(__file__).parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        ) as process:
            running[:] = [process]
            try:
                out, err = process.communicate(timeout=600)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(line, process.returncode, out, err)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, ThreadPoolExecutor(1) as worker:
        for command, name in commands.items():
            folder = Path(tempfile.mkdtemp(dir=place, prefix=name))
            try:
                session.beside[command] = folder, worker.submit(run, command(folder))
            except (Exception, pytest.fail.Exception) as e:            # of the tests that wait for it, not of all
                session.beside[command] = folder, Future()
                session.beside[command][1].set_exception(e)
        try:
            return (yield)
        finally:
            worker.shutdown(wait=False, cancel_futures=True)
            for process in running:                                    # one that no test has waited for, and its children
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def beside(request):
    """A function that waits for the end of a command in BESIDE and returns its folder and its outcome (CompletedProcess)."""
    started = request.session.beside
    return lambda command: (started[command][0], started[command][1].result())
