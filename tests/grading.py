"""Grading with pytest: to which task a test belongs, what it is worth, and a file of results.

    @pytest.mark.task("T3", points=2)                 a test of task T3; hidden=True shows only an error's class
    pytest tests/test_tasks.py -m T3                  that task alone ("T3 or T4": two)
        --results results.json                        ... and a file of results in Gradescope's format
        --modules DIR                                 ... of the five files in DIR, not of those above tests/
        --limit 10                                    ... with so many seconds for a test, its imports included;
                                                      0: no limit, and all in one process

Every marked test runs in a fork of its own, which imports the modules anew: a crash, an early exit or
a hang earns nothing and costs no other test anything. All rows of the results stand in the file with a
score of 0 before the first test, and the file is written anew after each.

That keeps accidents apart. It is no sandbox: in its fork a submission runs as you, beside the test that
judges it, and code that means to cheat can. Grade in a container, and read what looks too good.
"""

import builtins
import contextlib
import importlib
import importlib.util
import json
import math
import os
import select
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from _pytest.runner import runtestprotocol

# In teaching order: a task's tests may need earlier tasks, never later ones.
TASKS = {
    "T1": "masked mean",
    "T2": "token log-probs",
    "T3": "entropy",
    "T4": "forward KL (alpha 0) and reverse KL (alpha 1)",
    "T5": "generalised Jensen-Shannon divergence (alpha between 0 and 1)",
    "T6": "top-k with a tail bucket",
    "T7": "group advantages",
    "T8": "clipped policy loss",
    "T9": "k3 penalty",
    "T10": "choice of demonstrations",
    "T11": "the teacher's message",
    "T12": "EMA and restart teacher",
    "T13": "SDPO loss",
    "T14": "forgetting and backward transfer",
    "T15": "spectral shift and principal angles",
}
STUBS = {f"{task}: {title}" for task, title in TASKS.items()}    # what a missing solution raises
MODULES = ("kernels", "grpo", "sdpo", "eval", "continual")


# ------------------------------------------------------------------------------------------------
# The comparison
# ------------------------------------------------------------------------------------------------


def _comparison(detach=torch.Tensor.detach, tolist=torch.Tensor.tolist, Tensor=torch.Tensor, abs=abs, isfinite=math.isfinite):
    """`same`, with all that it uses bound now, before any submission is imported and can replace it."""

    def shape(x):
        return (len(x), *(shape(x[0]) if x else ())) if type(x) is list else ()

    def first_wrong(got, expected, rtol, atol, index=()):
        """The first index at which two nested lists differ, with both values; None where they don't."""
        if type(expected) is list and type(got) is list and len(got) == len(expected):
            found = (first_wrong(g, e, rtol, atol, (*index, i)) for i, (g, e) in enumerate(zip(got, expected)))
            return next((f for f in found if f), None)
        if type(expected) is dict and type(got) is dict and len(got) == len(expected):
            found = (first_wrong(got.get(key), e, rtol, atol, (*index, key)) for key, e in expected.items())
            return next((f for f in found if f), None)
        number = (int, float)
        if type(expected) in number and type(got) in number:
            fine = isfinite(got) and abs(got - expected) <= atol + rtol * abs(expected)
        else:
            fine = type(got) is type(expected) and got == expected
        return None if fine else (list(index), got, expected)

    def same(concept, got, expected, rtol=1e-5, atol=1e-6):
        """Fail unless `got` (a tensor, list, number, text, ...) is `expected` (nested lists, or one value).

        Numbers may differ by atol + rtol |expected|; everything else must be equal. The message names
        the concept, the shapes, and the first wrong index.
        """
        __tracebackhide__ = True
        if type(got) is Tensor:
            got = tolist(detach(got))
        plain = (list, int, float, bool, str, dict, type(None))
        if type(got) not in plain:
            raise AssertionError(f"{concept}: expected a tensor or plain data, got a {type(got).__name__}")
        if shape(got) != shape(expected):
            raise AssertionError(f"{concept}: expected shape {shape(expected)}, got shape {shape(got)}")
        if wrong := first_wrong(got, expected, rtol, atol):
            index, value, right = wrong
            place = f"first wrong at index {index} of shape {shape(expected)}: " if index else ""
            raise AssertionError(f"{concept}: {place}expected {right!r}, got {value!r}")

    return same


same = _comparison()


def _deaf(module):
    """The canary at every test's end: whether its `same` has come to let a wrong answer pass."""
    pairs = [(1.0, 2.0), ("1", "2"), ([0.0, 1.0], [0.0, 2.0]), (torch.tensor([0.0, 1.0]), [0.0, 2.0]), (True, False)]
    for wrong, right in pairs:
        try:
            getattr(module, "same", same)("canary", wrong, right)
            return True
        except AssertionError:
            pass
    return False


# ------------------------------------------------------------------------------------------------
# The submission's modules
# ------------------------------------------------------------------------------------------------


class Submission:
    """Finds the five modules in one folder, and nothing else there: a torch.py beside them changes nothing."""

    def __init__(self, folder):
        self.folder = Path(folder).resolve()

    def find_spec(self, name, path=None, target=None):
        if name not in MODULES:
            return None
        file = self.folder / f"{name}.py"
        if not file.is_file():
            raise ModuleNotFoundError(f"{file.name} isn't in {self.folder}", name=name)
        sys.dont_write_bytecode = True                           # nothing is left in a submission's folder
        return importlib.util.spec_from_file_location(name, file)


_pipe = None                                                     # in a fork: where it reports
_broken = {}                                                     # modules whose import crashed or hung: why


def _import(name):
    """Import a module of the submission, once it's known that this neither hangs nor kills."""
    if name in _broken:
        raise ImportError(_broken[name])
    if _pipe is not None:
        _send(importing=name)
    module = importlib.import_module(name)
    if _pipe is not None:
        _send(importing=None)
    return module


@pytest.fixture
def kernels():
    return _import("kernels")


@pytest.fixture
def grpo():
    return _import("grpo")


@pytest.fixture
def sdpo():
    return _import("sdpo")


@pytest.fixture
def evaluation():
    """eval.py; the builtin of that name stays what it is."""
    return _import("eval")


# ------------------------------------------------------------------------------------------------
# One test, in a fork of its own
# ------------------------------------------------------------------------------------------------


def _send(**message):
    os.write(_pipe, json.dumps(message).encode() + b"\n")


def _child(item, writer):
    """Run one test, send its reports, end. Nothing that happens here is seen elsewhere."""
    global _pipe
    _pipe = writer
    try:
        os.setsid()                                              # a group of its own, to be killed as one
        reports = runtestprotocol(item, nextitem=None, log=False)
        hook = item.config.hook
        _send(reports=[hook.pytest_report_to_serializable(config=item.config, report=r) for r in reports])
        sys.stdout.flush()
    finally:
        os._exit(0)


def _listen(reader, config, deadline):
    """(reports, "") from a fork, or ([], why there are none)."""
    data, importing = b"", None
    while True:
        if not select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            trouble = "took longer than its time limit"
            break
        part = os.read(reader, 1 << 16)
        *lines, data = (data + part).split(b"\n")
        try:
            for message in map(json.loads, lines):
                importing = message.get("importing")
                if "reports" in message:
                    hook = config.hook
                    return [hook.pytest_report_from_serializable(config=config, data=d) for d in message["reports"]], ""
        except Exception:                                        # the submission wrote where only we should
            part = b""
        if not part:
            trouble = "ended the process before the test was over"
            break
    if importing in MODULES:
        _broken[importing] = trouble = f"importing {importing}.py {trouble}"
    return [], trouble


def _run_apart(item, limit):
    """Reports of one test that ran in a fork, or one that says why it has none."""
    sys.stdout.flush()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(item, writer)
    os.close(writer)
    reports, trouble = _listen(reader, item.config, time.monotonic() + limit)
    os.close(reader)
    for kill in (os.kill, os.killpg):                            # and what the test may have started
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if reports:
        return reports
    report = pytest.TestReport(item.nodeid, item.location, {}, "failed", trouble, "call")
    report.told = trouble
    return [report]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    limit = item.config.option.limit
    if not item.get_closest_marker("task") or not limit or item.config.option.usepdb:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _run_apart(item, limit):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _tell(excinfo, hidden):
    """What a student is told about an error: in a hidden test its class alone (a builtin one, as the
    name of a class of their own could carry the test's numbers out)."""
    error = excinfo.value
    if type(error) is NotImplementedError and str(error) in STUBS:
        return f"NotImplementedError: {error}"
    if hidden:
        return next(c.__name__ for c in type(error).__mro__ if c in vars(builtins).values())
    text = str(error) if type(error) is AssertionError else excinfo.exconly()
    places = [e for e in excinfo.traceback if Path(e.path).stem in MODULES]
    return text + (f"\n({Path(places[-1].path).name}, line {places[-1].lineno + 1}, in {places[-1].name})" if places else "")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    """A marked test passes or fails: skipped, or failed as expected, is failed. A hidden one tells little."""
    report = yield
    mark = item.get_closest_marker("task")
    if not mark:
        return report
    if report.when == "teardown" and _deaf(item.module):
        report.outcome, report.longrepr = "failed", "the comparison no longer notices a wrong answer"
    if report.skipped or hasattr(report, "wasxfail"):
        report.__dict__.pop("wasxfail", None)
        report.outcome, report.longrepr = "failed", "a skipped test earns nothing"
    elif report.failed and call.excinfo is not None:
        hidden = mark.kwargs.get("hidden", False)
        report.told = _tell(call.excinfo, hidden)
        if hidden:
            report.longrepr, report.sections = report.told, []
    return report


# ------------------------------------------------------------------------------------------------
# Marks, points and results
# ------------------------------------------------------------------------------------------------


class Grades:
    """A row for each marked test; the file of results, if one is wanted, always holds them all."""

    def __init__(self, path):
        self.path, self.rows, self.reports, self.alone = path and Path(path), {}, [], False

    def start(self, items):
        """A row with score 0 for each test. Raises pytest.UsageError if the file can't be written."""
        count = dict.fromkeys(TASKS, 0)
        for item in items:
            mark = item.get_closest_marker("task")
            if mark:
                task = mark.args[0]
                count[task] += 1
                self.rows[item.nodeid] = {
                    "name": f"{task} {TASKS[task]}: {item.name.removeprefix('test_').replace('_', ' ')}",
                    "number": f"{task[1:]}.{count[task]}", "score": 0, "max_score": mark.kwargs["points"],
                    "status": "failed", "output": "not run",
                    "visibility": "after_published" if mark.kwargs.get("hidden") else "visible", "tags": [task],
                }
        try:
            self.write()
        except OSError as e:
            raise pytest.UsageError(f"--results {self.path}: {e.strerror}") from None

    def pytest_runtest_logreport(self, report):
        self.reports.append(report)

    def pytest_runtest_logfinish(self, nodeid):
        """A test is over: full points if setup, call and teardown all passed, else none."""
        reports, self.reports = self.reports, []
        if nodeid in self.rows:
            row, failed = self.rows[nodeid], [r for r in reports if not r.passed]
            passed = [r.when for r in reports] == ["setup", "call", "teardown"] and not failed
            row["score"], row["status"] = (row["max_score"], "passed") if passed else (0, "failed")
            row["output"] = "\n".join(getattr(r, "told", str(r.longrepr)) for r in failed)
            self.write()

    def write(self):
        """Beside its place, then renamed: never half a file."""
        if self.path:
            temporary = self.path.with_name(self.path.name + ".tmp")
            temporary.write_text(json.dumps({"tests": list(self.rows.values())}, indent=1) + "\n", encoding="utf-8")
            os.replace(temporary, self.path)

    def table(self):
        """A line for each task and the sum."""
        scored = {task: [r for r in self.rows.values() if r["tags"] == [task]] for task in TASKS}
        lines = []
        for task, rows in [*scored.items(), ("all", list(self.rows.values()))]:
            if rows:
                score, most = (sum(r[key] for r in rows) for key in ("score", "max_score"))
                lines.append(f"{task:<4} {score:>4g} of {most:>3g}   {TASKS.get(task, '')}".rstrip())
        return lines


GRADES = pytest.StashKey()


def pytest_addoption(parser):
    group = parser.getgroup("grading")
    group.addoption("--results", metavar="FILE", help="write a row for each marked test, in Gradescope's format")
    group.addoption("--modules", metavar="DIR", help="the folder with the five modules to grade")
    group.addoption("--limit", metavar="SECONDS", type=float, default=10.0,
                    help="time for each marked test (10; 0: no limit, one process)")


def pytest_configure(config):
    config.addinivalue_line("markers", "task(id, points, hidden=False): a test of an assignment's task")
    for task, title in TASKS.items():
        config.addinivalue_line("markers", f"{task}: {title}")
    folder = config.option.modules
    if folder is not None:
        if not Path(folder).is_dir():
            raise pytest.UsageError(f"--modules {folder}: no such folder")
        sys.meta_path.insert(0, Submission(folder))
        for name in MODULES:
            sys.modules.pop(name, None)
    config.stash[GRADES] = Grades(config.option.results)
    config.pluginmanager.register(config.stash[GRADES])


def _check_mark(item, mark):
    points = mark.kwargs.get("points")
    fine = len(mark.args) == 1 and mark.args[0] in TASKS and type(points) in (int, float) and points > 0
    if not fine or not set(mark.kwargs) <= {"points", "hidden"}:
        raise pytest.UsageError(f'{item.nodeid}: the mark must be task("T1", points=1), T1 to T{len(TASKS)}, points above 0')


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Check the marks, give each test its task's own mark for -m, and run marked tests first: a fork
    is safest before other tests have started threads in this process."""
    for item in items:
        mark = item.get_closest_marker("task")
        if mark:
            _check_mark(item, mark)
            item.add_marker(mark.args[0])
        elif item.path.name.startswith("test_tasks"):
            raise pytest.UsageError(f'{item.nodeid}: no mark; it needs @pytest.mark.task("T1", points=1)')
    items.sort(key=lambda item: item.get_closest_marker("task") is None)


def pytest_runtestloop(session):
    """What is left after -m is run: from here on its rows stand in the file."""
    unmarked = [item.nodeid for item in session.items if not item.get_closest_marker("task")]
    if unmarked and session.config.option.results:
        raise pytest.UsageError(f"--results: {unmarked[0]} has no task; name the task files, or choose tasks with -m")
    grades = session.config.stash[GRADES]
    grades.start(session.items)
    grades.alone = not unmarked


def pytest_terminal_summary(terminalreporter, config):
    grades = config.stash[GRADES]
    if grades.rows and grades.alone:
        terminalreporter.section("points")
        for line in grades.table():
            terminalreporter.write_line(line)
