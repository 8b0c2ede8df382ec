"""The assignment: marks, handouts, and a grading that accidents and simple cheats don't bend."""

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import handout
from grading import STUBS, TASKS, same
from handout import HandoutError, regions, sources, stubbed

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"


def run(*command, cwd=ROOT, **options):
    return subprocess.run([sys.executable, *map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=900, **options)


# ---- marks -------------------------------------------------------------------------------------


def module(*lines):
    return "\n".join(["def f(x):", *("    " + line for line in lines)]) + "\n"


B, E = "### BEGIN SOLUTION T1", "### END SOLUTION"


def test_a_solution_is_what_stands_between_its_marks():
    text = module('"""Doc."""', B, "a = x", "return a", E)
    assert regions(text, "m") == [("T1", 3, 5, "    ")]
    assert stubbed(text, "m", ["T1"]) == module('"""Doc."""', 'raise NotImplementedError("T1: masked mean")')
    assert stubbed(text, "m", ["T2"]) == module('"""Doc."""', "a = x", "return a")


@pytest.mark.parametrize("lines, message", [
    ([B, "return x", "### BEGIN SOLUTION T2", "return x", E],
     "line 4: T2 begins inside the solution of T1, which began in line 2"),
    ([B, "return x"], "line 2: the solution of T1 never ends"),
    (["return x", E], "line 3: END SOLUTION, but none has begun"),
    ([B, "return x", E, E], "line 5: END SOLUTION, but none has begun"),
    (["### BEGIN SOLUTION", "return x", E], "line 2: malformed mark"),
    (["## BEGIN SOLUTION T1", "return x", E], "line 2: malformed mark"),
    ([B, "return x", "### End Solution"], "line 4: malformed mark"),
    ([B, "return x", "### END SOLUTION T1"], "line 4: malformed mark"),
    (["return x  " + B], "line 2: malformed mark"),
    (["### BEGIN_SOLUTION T1", "return x", "### END_SOLUTION"], "line 2: malformed mark"),
    (["### BEGIN SOLUTION T99", "return x", E], "line 2: no task T99; there are T1 to T15"),
    ([B, E], "line 3: the solution of T1 is empty"),
    ([B, "return x", "    " + E], "line 4: the solution of T1 is empty, or ends at another indent"),
])
def test_wrong_marks_are_refused_with_their_place(lines, message):
    with pytest.raises(HandoutError, match="m.py, " + message):
        regions(module(*lines), "m")


def test_a_piece_of_a_mutant_must_occur_once():
    texts = {"m": module(B, "return x + x", E, "return x - 1")}
    assert handout.mutated(texts, "T1", "x + x", "x")["m"] == module(B, "return x", E, "return x - 1")
    for piece in ("x", "x - 1"):                                           # twice; outside the solution
        with pytest.raises(HandoutError, match="occurs"):
            handout.mutated(texts, "T1", piece, "y")


# ---- the handout -------------------------------------------------------------------------------


def test_a_handout_holds_what_students_need_and_nothing_else(tmp_path, capsys):
    assert handout.main([str(tmp_path / "out")]) == 0
    files = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    own = {f for f in files if not f.startswith("configs/")}
    assert own == {"kernels.py", "grpo.py", "sdpo.py", "eval.py", "continual.py", "README.md", "LICENSE", "requirements.txt",
                   ".gitignore", "tests/conftest.py", "tests/grading.py", "tests/test_tasks.py"}
    assert "configs/tiny/base/model.safetensors" in files and not any("pretrain" in f or "pycache" in f for f in files)
    readme = (tmp_path / "out" / "README.md").read_text()
    assert all(f"| {task} | " in readme and title in readme for task, title in TASKS.items())
    assert handout.leaks(tmp_path / "out", sources(), list(TASKS)) == []
    assert handout.main([str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'out'}: not an empty folder\n"
    assert handout.main([str(tmp_path / "out" / "README.md" / "deeper")]) == 1
    assert capsys.readouterr().err.startswith("error: [Errno")


def test_leaks_are_noticed(tmp_path):
    handout.write(tmp_path / "out", list(TASKS))
    for file, text in (("README.md", "    ### BEGIN SOLUTION T1\n"), ("grpo.py", "# END SOLUTION\n"),
                       ("configs/x.py", "M = torch.logaddexp(S+math.log(1-alpha), T+math.log(alpha))\n"),
                       ("tests/test_tasks_hidden.py", "")):
        before = (tmp_path / "out" / file).read_text() if (tmp_path / "out" / file).exists() else None
        (tmp_path / "out" / file).write_text(text)
        assert len(handout.leaks(tmp_path / "out", sources(), list(TASKS))) == 1, file
        (tmp_path / "out" / file).unlink() if before is None else (tmp_path / "out" / file).write_text(before)


def test_a_partial_handout_gives_the_other_solutions(tmp_path, capsys):
    assert handout.main([str(tmp_path / "out"), "--tasks", "T9,T2"]) == 0
    out, stubs = tmp_path / "out", []
    for name, text in sources().items():
        left = (out / f"{name}.py").read_text()
        stubs += [line.strip() for line in left.splitlines() if "NotImplementedError" in line]
        for task, start, end, _ in regions(text, name):
            assert ("\n".join(text.splitlines()[start:end]) in left) == (task not in ("T2", "T9"))
    assert stubs == ['raise NotImplementedError("T2: token log-probs")', 'raise NotImplementedError("T9: k3 penalty")']
    readme = (out / "README.md").read_text()
    assert '-m "T2 or T9"' in readme and "| T1 |" not in readme
    for wrong in ("T16", "", "t1", "T1;T2"):
        assert handout.main([str(tmp_path / "other"), "--tasks", wrong]) == 1
        assert f"no task {wrong!r}" in capsys.readouterr().err and not (tmp_path / "other").exists()
    assert handout.main([]) == 1


def test_the_workflow_for_github_classroom_has_a_step_for_each_task(tmp_path):
    """Its reporter looks for ID_RESULTS, in capitals, for each of its runners."""
    import yaml

    assert handout.main([str(tmp_path / "out"), "--tasks", "T1,T7", "--classroom"]) == 0
    job = yaml.safe_load((tmp_path / "out" / ".github" / "workflows" / "classroom.yml").read_text())["jobs"]["autograding"]
    *steps, reporter = job["steps"]
    graders = {step["id"]: step["with"] for step in steps if "id" in step}
    assert {i: (w["command"], w["max-score"]) for i, w in graders.items()} == {
        "t1": ("python -m pytest -q tests -m T1", 4), "t7": ("python -m pytest -q tests -m T7", 4)}
    assert reporter["with"]["runners"] == "t1,t7"
    assert reporter["env"] == {"T1_RESULTS": "${{steps.t1.outputs.result}}", "T7_RESULTS": "${{steps.t7.outputs.result}}"}


@pytest.mark.parametrize("alpha, topk, tail", [(0.0, None, True), (1.0, 3, True), (0.3, 3, False), (0.5, None, True)])
def test_autograd_stands_in_for_the_gradient_written_out(tmp_path, alpha, topk, tail):
    """With the students' pieces in place, a handout trains like the project."""
    import kernels

    solved = stubbed(sources()["kernels"], "kernels", [])
    (tmp_path / "theirs.py").write_text(handout._with_autograd(solved))
    spec = importlib.util.spec_from_file_location("theirs", tmp_path / "theirs.py")
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    s, t = (torch.randn(4, 5, generator=torch.Generator().manual_seed(i), dtype=torch.float64).log_softmax(-1) for i in (0, 1))
    for mine, their in zip(kernels._gradient(s, t, alpha, topk, tail), theirs._gradient(s, t, alpha, topk, tail), strict=True):
        torch.testing.assert_close(mine, their)


def test_check_finds_no_fault(checked):
    """The solution earns everything, a handout nothing; each task unlocks its own tests; each mutant is caught."""
    assert checked.returncode == 0, checked.stdout[-2000:] + checked.stderr
    assert "15 tasks, " in checked.stdout and ", 0 faults" in checked.stdout and len(handout.MUTANTS) >= 30


# ---- the comparison ----------------------------------------------------------------------------


@pytest.mark.parametrize("got, expected, message", [
    (torch.tensor([[1.0, 2.0]]), [1.0, 2.0], "entropy: expected shape (2,), got shape (1, 2)"),
    (torch.tensor(1.0), [1.0], "entropy: expected shape (1,), got shape ()"),
    (torch.tensor([[1.0, 2.0], [3.0, 4.5]]), [[1.0, 2.0], [3.0, 4.0]],
     "entropy: first wrong at index [1, 1] of shape (2, 2): expected 4.0, got 4.5"),
    (math.nan, 1.0, "entropy: expected 1.0, got nan"),
    (math.inf, 1.0, "expected 1.0, got inf"),
    (1.0001, 1.0, "expected 1.0, got 1.0001"),
    ([1, None], [1, 0], "first wrong at index [1] of shape (2,): expected 0, got None"),
    ([[1], [2]], [[1], [2, 3]], "first wrong at index [1] of shape (2, 1): expected [2, 3], got [2]"),
    (None, 0.0, "expected 0.0, got None"),
    (True, 1.0, "expected 1.0, got True"),
    ([{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}],
     "first wrong at index [0, 'content'] of shape (1,): expected 'b', got 'a'"),
    ([{"role": "user"}], [{"role": "user", "content": "b"}], "first wrong at index [0]"),
    ((1.0,), [1.0], "expected a tensor or plain data, got a tuple"),
])
def test_a_failure_names_concept_shapes_and_the_first_wrong_index(got, expected, message):
    with pytest.raises(AssertionError) as error:
        same("entropy", got, expected)
    assert message in str(error.value)


def test_equal_values_are_equal():
    for got, expected in ((torch.tensor([[1.0]]), [[1.000001]]), (torch.tensor([]), []), (2, 2.0), ("a", "a"), (None, None),
                          ([{"a": 1.0}], [{"a": 1.0}]), (torch.ones(2, requires_grad=True), [1.0, 1.0])):
        same("anything", got, expected)


def test_values_that_equal_everything_are_not_equal():
    class Sly(str):
        def __eq__(self, other):
            return True

        __hash__ = str.__hash__

    class Always(torch.Tensor):
        def tolist(self):
            return [2.0]

    always = torch.ones(1).as_subclass(Always)
    for got, expected in ((Sly("x"), "y"), ([Sly("x")], ["y"]), ({"a": Sly("x")}, {"a": "y"}), (always, [2.0])):
        with pytest.raises(AssertionError):
            same("anything", got, expected)


# ---- marks and options of the tests ------------------------------------------------------------


MARKED = 'import pytest\n\n@pytest.mark.task("T1", points=1)\ndef test_x():\n    pass\n'
UNUSABLE = [
    (MARKED.replace('@pytest.mark.task("T1", points=1)', mark), "test_tasks_x.py", [], message) for mark, message in [
        ("", "test_tasks_x.py::test_x: no mark; it needs @pytest.mark.task"),
        ('@pytest.mark.task("T1")', "test_tasks_x.py::test_x: the mark must be"),
        ("@pytest.mark.task(points=1)", "the mark must be"),
        ('@pytest.mark.task("T16", points=1)', "the mark must be"), ('@pytest.mark.task("T1", points=0)', "the mark must be"),
        ('@pytest.mark.task("T1", points="2")', "the mark must be"),
        ('@pytest.mark.task("T1", points=1, hiden=True)', "the mark must be"),
    ]
] + [
    ("def test_x():\n    pass\n", "test_other.py", ["--results=r.json"], "test_other.py::test_x has no task"),
    (MARKED, "test_tasks_x.py", ["--results=no/r.json"], "--results no/r.json: No such file or directory"),
    (MARKED, "test_tasks_x.py", ["--modules=no"], "--modules no: no such folder"),
]


def test_wrong_marks_and_options_are_usage_errors(tmp_path):
    """Each in a fork of one process, which prints exit codes and outputs."""
    script = (
        "import json, os, sys, tempfile, pytest, torch, grading\n"
        "for folder, *options in json.loads(sys.argv[1]):\n"
        "    with tempfile.TemporaryFile('w+') as out:\n"
        "        if (pid := os.fork()) == 0:\n"
        "            os.dup2(out.fileno(), 1), os.dup2(out.fileno(), 2)\n"
        "            os._exit(pytest.main(['-q', '-p', 'no:cacheprovider', folder, *options]))\n"
        "        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "        print(json.dumps([code, out.seek(0) or out.read()]))\n"
    )
    cases = [*UNUSABLE, (MARKED, "test_tasks_x.py", ["-m", "T1", "--results=r.json"], "T1      1 of   1")]
    for n, (text, name, *_) in enumerate(cases):
        (tmp_path / str(n)).mkdir()
        (tmp_path / str(n) / "conftest.py").write_text((TESTS / "conftest.py").read_text())
        (tmp_path / str(n) / name).write_text(text)
    arguments = json.dumps([[str(tmp_path / str(n)), *options] for n, (*_, options, _) in enumerate(cases)])
    done = run("-c", script, arguments, cwd=tmp_path, env={**FAST, "PYTHONPATH": str(TESTS)})
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    codes = [pytest.ExitCode.USAGE_ERROR] * len(UNUSABLE) + [pytest.ExitCode.OK]
    for (code, output), right, (*_, message) in zip(outcomes, codes, cases, strict=True):
        assert code == right and message in output, output


FAST = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


# ---- grading submissions -----------------------------------------------------------------------


def submission(solved=(), **changes):
    """A student's five modules: the solutions of some tasks, and text put behind the imports of some modules."""
    texts = {name: stubbed(text, name, [t for t in TASKS if t not in solved]) for name, text in sources().items()}
    for name, change in changes.items():
        head = "import torch\n" if "import torch\n" in texts[name] else "import sys\n"
        texts[name] = texts[name].replace(head, head + change + "\n", 1)
    return texts


def solve(texts, task, body):
    """One stub of a task replaced by other code."""
    stub = f'raise NotImplementedError("{task}: {TASKS[task]}")'
    name = next(n for n, text in texts.items() if stub in text)
    return texts | {name: texts[name].replace(stub, body, 1)}


ALL = list(TASKS)
CHEATS = {
    "torch's comparisons":
        "import torch.testing\ntorch.allclose = torch.equal = torch.testing.assert_close = lambda *a, **k: True",
    "a tensor's own": "torch.Tensor.__eq__ = torch.Tensor.all = lambda *a, **k: True",
    "a tensor's values": "torch.Tensor.tolist = torch.Tensor.detach = lambda *a: 7 / 3",
    "the grading's": "import grading\ngrading.same = grading._comparison = lambda *a, **k: None",
    "the grading's code":
        "from grading import same\n"
        "same.__code__ = (lambda *a, **k: None).__code__.replace(co_freevars=same.__code__.co_freevars)",
    "the test's": "import sys\nfor m in list(sys.modules.values()):\n    if hasattr(m, 'same'): m.same = lambda *a, **k: None",
    "builtins": "import builtins\nbuiltins.zip = lambda *a: iter(())",
    "skipping": "import pytest\npytest.skip('not today', allow_module_level=True)",
    "expecting failure": "import pytest\npytest.xfail('known')",
    "leaving": "import os\nos._exit(0)",
    "leaving politely": "raise SystemExit(0)",
    "pytest's end": "import pytest\npytest.exit('done', returncode=0)",
}


def submissions(place):
    """A command that grades many submissions, all in forks of one fresh process."""
    echo = "raise ValueError(f'secret {x.tolist()}')"
    rename = "raise type(f'secret {x.tolist()}', (RuntimeError,), {})()"
    cases = {
        "some": (submission(ALL[:3]), ["-m", "T1 or T3 or T4 or T10"]),
        "hang": (solve(submission(["T1", *ALL[2:]]), "T2", "while temperature != 1: pass\n    raise ValueError"),
                 ["-m", "T1 or T2 or T3", "--limit=1"]),
        "hang in C": (submission(ALL, grpo="sum(range(10**13))"), ["-m", "T1 or T7 or T10", "--limit=1"]),
        "crash": (submission(ALL, eval="raise OSError('gone')", sdpo="import ctypes; ctypes.string_at(0)"),
                  ["-m", "T1 or T7 or T10 or T14"]),
        "no module": ({k: v for k, v in submission(ALL).items() if k != "sdpo"}, ["-m", "T1 or T10"]),
        "syntax": (submission(ALL, eval="this is no Python"), ["-m", "T1 or T14"]),
        "shadow": (submission(ALL) | {"torch": "raise OSError", "math": "raise OSError"}, ["-m", "T1"]),
        "echo": (solve(submission(), "T1", f"print('secret'); {echo}"), ["-m", "T1", "-rA"]),
        "rename": (solve(submission(), "T1", rename), ["-m", "T1"]),
        "forge": (submission([], kernels=FORGE), ["-m", "T1"]),
    }
    wrong = "return x.nan_to_num(0, 0, 0).sum() * 0 + 8.0"                 # in every test
    for name, text in CHEATS.items():
        cases[f"cheat: {name}"] = (solve(submission(kernels=text), "T1", wrong), ["-m", "T1"])
    for case, (texts, _) in cases.items():
        handout._tree(place / case, texts)
    (place / "cases.json").write_text(json.dumps({case: arguments for case, (_, arguments) in cases.items()}))
    script = ("import json, sys; from pathlib import Path; import handout; place = Path(sys.argv[1])\n"
              "cases = json.loads((place / 'cases.json').read_text())\n"
              "rows = handout.grade([(place / case, *arguments) for case, arguments in cases.items()])\n"
              "(place / 'rows.json').write_text(json.dumps(dict(zip(cases, rows))))")
    return [sys.executable, "-c", script, str(place)]


BESIDE = {"checked": lambda folder: [sys.executable, str(TESTS / "handout.py"), "--check"], "graded": submissions}


@pytest.fixture
def checked(beside):
    return beside(BESIDE["checked"])[1]


@pytest.fixture(scope="module")
def graded(beside):
    """{case: (rows of its results, what pytest printed)}."""
    place, done = beside(submissions)
    assert done.returncode == 0, done.stderr
    assert not list(place.rglob("__pycache__"))                            # nothing is left in a submission's folder
    return {case: (rows, (place / case / "log.txt").read_text()) for case, rows in json.loads((place / "rows.json").read_text()).items()}


# What isn't a report, where one is due.
FORGE = '''
import os, grading
os.write(grading._pipe, b'{"reports": "passed"}\\n[1]\\n')
'''


def score(rows, *tasks):
    """Of the tests of some tasks: points earned, points there are."""
    rows = [r for r in rows if r["tags"][0] in (tasks or TASKS)]
    return sum(r["score"] for r in rows), sum(r["max_score"] for r in rows)


def test_solved_tasks_earn_their_points(graded):
    rows, log = graded["some"]
    for task, right in (("T1", (6, 6)), ("T3", (5, 5)), ("T4", (0, 6)), ("T10", (0, 6))):
        assert score(rows, task) == right and f"{task:<4} {right[0]:>4} of {right[1]:>3}   {TASKS[task]}\n" in log
    assert "all    11 of  23\n" in log


def test_a_hang_costs_its_own_tests_only(graded):
    rows, log = graded["hang"]
    assert score(rows, "T1") == (6, 6) and score(rows, "T3") == (5, 5) and score(rows, "T2") == (0, 6)
    outputs = [r["output"].partition(" (")[0].partition("\n")[0] for r in rows if r["tags"] == ["T2"]]
    assert sorted(set(outputs)) == ["ValueError", "took longer than its time limit"]
    rows, log = graded["hang in C"]
    assert score(rows, "T1") == (6, 6) and score(rows, "T10") == (6, 6) and score(rows, "T7") == (0, 6)
    outputs = [r["output"] for r in rows if r["tags"] == ["T7"]]
    assert all("importing grpo.py took longer than its time limit" in o for o in outputs if o != "ImportError")
    seconds = float(log.rsplit(" in ", 1)[1].split("s")[0])
    assert seconds < 8                                                     # the import is tried once, not for each of 10 tests


def test_a_crash_costs_its_own_modules_tests_only(graded):
    rows, log = graded["crash"]
    assert score(rows, "T1", "T7") == (12, 12) and score(rows, "T10", "T14") == (0, 11)
    assert "OSError: gone" in next(r["output"] for r in rows if r["tags"] == ["T14"])
    assert "importing sdpo.py ended the process" in next(r["output"] for r in rows if r["tags"] == ["T10"])
    assert score(graded["no module"][0], "T1") == (6, 6) and score(graded["no module"][0], "T10")[0] == 0
    assert score(graded["syntax"][0], "T1") == (6, 6) and score(graded["syntax"][0], "T14")[0] == 0
    assert score(graded["shadow"][0], "T1") == (6, 6)


@pytest.mark.parametrize("cheat", CHEATS)
def test_simple_cheats_earn_nothing(graded, cheat):
    rows, _ = graded[f"cheat: {cheat}"]
    assert score(rows) == (0, 6) and len(rows) == 5


def test_a_forged_report_is_no_report(graded):
    rows, _ = graded["forge"]
    assert score(rows) == (0, 6)


@pytest.mark.parametrize("case", ["echo", "rename"])
def test_a_hidden_test_shows_an_errors_class_only(graded, case):
    rows, log = graded[case]
    visible, hidden = [[r["output"] for r in rows if (r["visibility"] == "visible") == v] for v in (True, False)]
    assert hidden == [{"echo": "ValueError", "rename": "RuntimeError"}[case]]
    assert all("secret" in output and "kernels.py, line " in output for output in visible)
    part = log[log.index("test_masked_mean_equals_a_loop"):].split("\n___")[0]
    assert "secret" not in part.split("short test summary")[0]


def test_an_early_exit_of_everything_loses_nothing_earned(tmp_path):
    """Even one that kills pytest itself: the rows stand in the file, earned ones with their points."""
    kill = f"import os; os.kill(os.getppid(), {int(signal.SIGKILL)})"
    folder = handout._tree(tmp_path / "s", solve(submission(["T1"]), "T2", kill))
    done = run("-m", "pytest", "-q", "tests/test_tasks.py", "--modules", folder, "--results", tmp_path / "r.json", env=FAST)
    rows = json.loads((tmp_path / "r.json").read_text())["tests"]
    assert done.returncode == -signal.SIGKILL and score(rows, "T1") == (4, 4) and score(rows) == (4, len(rows)) and len(rows) > 50
    assert rows[-1]["output"] == "not run" and not (tmp_path / "r.json.tmp").exists()


def test_seeds_change_the_hidden_numbers():
    """And the solution passes whatever they are."""
    script = ("import pytest, sys\ncode = pytest.main(['-q', 'test_tasks_hidden.py', '--limit=0'])\n"
              "import test_tasks_hidden as t\nprint(t.rng('x').random())\nsys.exit(code)")
    done = run("-c", script, cwd=TESTS, env={**FAST, "TASK_SEED": "another"})
    assert done.returncode == 0, done.stdout
    import test_tasks_hidden

    assert float(done.stdout.splitlines()[-1]) != test_tasks_hidden.rng("x").random()


# ---- end to end --------------------------------------------------------------------------------


def valid(results):
    """Gradescope's format, as far as it is used here (its documentation, "Output format"). Fails if it isn't."""
    assert set(results) == {"tests"} and results["tests"]
    for row in results["tests"]:
        assert set(row) == {"name", "number", "score", "max_score", "status", "output", "visibility", "tags"}
        assert all(type(row[key]) is str for key in ("name", "number", "status", "output", "visibility"))
        assert row["status"] in ("passed", "failed")
        assert row["visibility"] in ("visible", "hidden", "after_due_date", "after_published")
        assert {type(row["score"]), type(row["max_score"])} <= {int, float} and 0 <= row["score"] <= row["max_score"]
        passed = row["status"] == "passed"
        assert (row["score"] == row["max_score"] > 0) == passed and (row["output"] == "") == passed
        assert type(row["tags"]) is list and all(type(tag) is str for tag in row["tags"])
    numbers = [row["number"] for row in results["tests"]]
    assert len(set(numbers)) == len(numbers)


def test_a_handout_is_worked_on_and_graded_end_to_end(tmp_path):
    """A student does T1 and half of T7, runs the visible tests, hands in; the instructor grades all tests."""
    out = tmp_path / "handout"
    assert handout.main([str(out)]) == 0
    kernels, grpo = (out / "kernels.py").read_text(), (out / "grpo.py").read_text()
    mine = "mask = mask.bool(); x = x.masked_fill(~mask, 0.0); axes = () if dim is None else (dim,)\n    " \
           "return x.sum(axes) / mask.sum(axes).clamp(min=1)"
    (out / "kernels.py").write_text(kernels.replace('raise NotImplementedError("T1: masked mean")', mine))
    half = "return rewards - masked_mean(rewards, torch.ones_like(rewards), dim=-1).unsqueeze(-1)"
    (out / "grpo.py").write_text(grpo.replace('raise NotImplementedError("T7: group advantages")', half))
    tried = run("-m", "pytest", "-q", "tests", "-m", "T1 or T7", cwd=out, env=FAST)
    assert tried.returncode == 1 and "T1      4 of   4   masked mean" in tried.stdout
    assert "T7      1 of   4   group advantages" in tried.stdout
    assert "scaled advantages, eps 0.0: first wrong" in tried.stdout

    done = run("-m", "pytest", "-q", "--tb=no", "tests/test_tasks.py", "tests/test_tasks_hidden.py", "--modules", out,
               "--results", tmp_path / "results.json", env=FAST)
    assert done.returncode == 1
    results = json.loads((tmp_path / "results.json").read_text())
    valid(results)
    rows = results["tests"]
    assert score(rows, "T1") == (6, 6) and score(rows, "T7") == (1, 6)
    assert score(rows, *[t for t in TASKS if t not in ("T1", "T7")])[0] == 0 and score(rows)[1] == 90
    missing = [r["output"].removeprefix("NotImplementedError: ") for r in rows if r["tags"][0] not in ("T1", "T7")]
    assert set(missing) == STUBS - {f"{task}: {TASKS[task]}" for task in ("T1", "T5", "T7")}  # T5's tests meet T4's first


def blocks(heading):
    """The bash blocks of one section of the README."""
    section = (ROOT / "README.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [part.split("```")[0] for part in section.split("```bash\n")[1:]]


@pytest.fixture
def clone(tmp_path):
    """A copy of the repository, and a shell in it in which only T1 is graded."""
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".pytest_cache", "pretrain")
    shutil.copytree(ROOT, tmp_path / "clone", ignore=ignored)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def bash(script, cwd=tmp_path / "clone"):
        environment = FAST | {"PATH": path, "PYTEST_ADDOPTS": "-m T1"}
        done = subprocess.run(["bash", "-ec", script], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return tmp_path / "clone", bash


def test_the_readmes_way_to_grade_plain_folders_works(clone):
    folder, bash = clone
    make, plain, _ = blocks("For instructors")
    bash(make.splitlines()[0])
    (folder / "submissions").mkdir()
    handout._tree(folder / "submissions" / "ann", sources())
    shutil.copytree(folder / "handout", folder / "submissions" / "b o b")
    assert bash(plain).splitlines()[-2:] == ["submissions/ann.json 6", "submissions/b o b.json 0"]


@pytest.mark.skipif(not shutil.which("zip"), reason="zip isn't installed")
def test_the_readmes_gradescope_archive_grades(clone):
    """Its grader, unpacked where this process may write."""
    folder, bash = clone
    bash(blocks("For instructors")[2])
    place = folder.parent / "autograder"
    shutil.unpack_archive(folder / "autograder.zip", place / "source")
    names = {str(p.relative_to(place / "source")) for p in (place / "source").rglob("*") if p.is_file()}
    files = ("conftest", "grading", "test_tasks", "test_tasks_hidden")
    assert names == {"setup.sh", "run_autograder", *(f"tests/{name}.py" for name in files)}
    (place / "results").mkdir()
    handout._tree(place / "submission", submission(["T1"]))
    script = (place / "source" / "run_autograder").read_text()
    bash(script.replace("/autograder/", f"{place}/").replace("/venv/bin/python", sys.executable), place)
    results = json.loads((place / "results" / "results.json").read_text())
    valid(results)
    assert score(results["tests"]) == (6, 6)
