"""The assignment: write a student's copy of this repository, and check that it grades what it should.

    python tests/handout.py OUT                    a handout without the solutions of T1 to T15
    python tests/handout.py OUT --tasks T1,T2      ... without these; the others are given
    python tests/handout.py OUT --classroom        ... with a workflow that grades it on GitHub Classroom
    python tests/handout.py --check                the handout, its tests and the tests' teeth; prints the mutants

In the five modules a solution stands between two lines, nbgrader's with the task's id:

    ### BEGIN SOLUTION T3
    ### END SOLUTION

Signature, docstring and equation stay outside; in the handout one line raises NotImplementedError in its
place. What is graded, and how, is in grading.py.
"""

import argparse
import ast
import gc
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch  # here, so that no forked check has to

from grading import MODULES, TASKS
from mutants import MUTANTS

ROOT = Path(__file__).resolve().parent.parent
VISIBLE, HIDDEN = "tests/test_tasks.py", "tests/test_tasks_hidden.py"
COPIED = ["requirements.txt", "LICENSE", ".gitignore", "tests/conftest.py", "tests/grading.py", VISIBLE]


class HandoutError(ValueError):
    """Marks, tasks or a folder that can't be used; the message is one line."""


# ------------------------------------------------------------------------------------------------
# Marks
# ------------------------------------------------------------------------------------------------

MARK = re.compile(r"( *)### (?:BEGIN SOLUTION (T\d+)|END SOLUTION)")
ALMOST = re.compile(r"#.*\b(begin|end)[\W_]*solution", re.IGNORECASE)


def regions(source, name):
    """The solutions in a module: [(task, first line, line behind the last, indent)], marks excluded.

    Raises:
        HandoutError: a mark that is malformed, nested, stray, unclosed or empty, or an unknown task.
    """
    found, start, lines = [], None, source.splitlines()
    for n, line in enumerate(lines):
        where = f"{name}.py, line {n + 1}"
        mark = MARK.fullmatch(line)
        if not mark:
            if ALMOST.search(line):
                allowed = "### BEGIN SOLUTION T1 or ### END SOLUTION"
                raise HandoutError(f"{where}: malformed mark {line.strip()!r}; it must be {allowed}")
            continue
        indent, task = mark.groups()
        if task and start is not None:
            raise HandoutError(f"{where}: {task} begins inside the solution of {start[0]}, which began in line {start[1]}")
        if task and task not in TASKS:
            raise HandoutError(f"{where}: no task {task}; there are T1 to T{len(TASKS)}")
        if task:
            start = task, n + 1, indent
        elif start is None:
            raise HandoutError(f"{where}: END SOLUTION, but none has begun")
        elif indent != start[2] or n == start[1]:
            raise HandoutError(f"{where}: the solution of {start[0]} is empty, or ends at another indent than it began")
        else:
            found.append((start[0], start[1], n, indent))
            start = None
    if start is not None:
        raise HandoutError(f"{name}.py, line {start[1]}: the solution of {start[0]} never ends")
    return found


def sources():
    """{module: its source}. Raises HandoutError unless every task has a solution."""
    texts = {name: (ROOT / f"{name}.py").read_text(encoding="utf-8") for name in MODULES}
    missing = set(TASKS) - {task for name, text in texts.items() for task, *_ in regions(text, name)}
    if missing:
        raise HandoutError(f"no solution is marked for {', '.join(sorted(missing))}")
    return texts


# kernels._gradient writes T4 to T6 out once more, with their derivatives. Where those are asked for, autograd
# takes its place, so that a run trains on what the student wrote.
GRADIENT = '''\
def _gradient(s, t, alpha, topk, tail):
    """D_alpha of log-distributions s, t (n, V), and its derivative in the student's logits (n, V).

    In the handout autograd makes it from your own `_divergence` and `_buckets`: a run trains on what you wrote.
    """
    with torch.enable_grad():
        z = s.detach().requires_grad_()                                    # log-probs are logits of their own softmax
        S, T = z.log_softmax(-1), t
        if topk is not None:
            S, T = _buckets(S, T, s.topk(topk, dim=-1).indices, tail)
        D = _divergence(S, T, alpha)
        (G,) = torch.autograd.grad(D.sum(), z)
    return D.detach(), G
'''


def _with_autograd(source):
    """kernels.py with GRADIENT for its `_gradient`."""
    (new,) = ast.parse(GRADIENT).body
    old = next((f for f in ast.parse(source).body if isinstance(f, ast.FunctionDef) and f.name == new.name), None)
    if old is None or ast.dump(old.args) != ast.dump(new.args):
        raise HandoutError(f"kernels.py: no {new.name} with the arguments ({ast.unparse(new.args)}); see GRADIENT in handout.py")
    lines = source.splitlines(keepends=True)
    return "".join(lines[: old.lineno - 1]) + GRADIENT + "".join(lines[old.end_lineno :])


def stubbed(source, name, tasks):
    """A module as students get it: no marks, and a line that raises in place of each solution of `tasks`."""
    lines, wanted = source.splitlines(), False
    for task, start, end, indent in reversed(regions(source, name)):
        body = lines[start:end]
        if task in tasks:
            body, wanted = [f'{indent}raise NotImplementedError("{task}: {TASKS[task]}")'], True
        lines[start - 1 : end + 1] = body
    text = "\n".join(lines) + "\n"
    if name == "kernels" and wanted and {"T4", "T5", "T6"} & set(tasks):
        text = _with_autograd(text)
    ast.parse(text)
    return text


# ------------------------------------------------------------------------------------------------
# The handout
# ------------------------------------------------------------------------------------------------

README = """\
# Assignment: self-distillation and its baseline, piece by piece

Five modules, of which {count} pieces are missing. Each missing piece is a line such as

    raise NotImplementedError("{first}: {title}")

Replace it by code that does what the docstring, the comments and the equations at the top of the file
say; where code follows it, define the names which that uses. The tasks build on each other in this
order; a later one may use an earlier one, never the other way round.

| task | file | what | points here |
| --- | --- | --- | ---: |
{table}

## Work

    python3 -m venv .venv && . .venv/bin/activate && pip install -r requirements.txt
    python -m pytest -q tests -m {first:<14} one task
    python -m pytest -q tests{all}

A failed test names the concept, the shape that was expected and the one it got, and the first wrong
index. A test has ten seconds, and a skipped test earns nothing. Some points come from tests that you
don't have: they compare your code with a plain loop on other numbers, and tell only an error's class.

Type matters: most functions take float32 and float64 (and half types, which they widen to float32)
and give back the same. Large and infinite numbers, masks and empty masks matter too: read the docstrings.

## Hand in

The five modules, also those that you didn't change, and nothing else. Don't change signatures; tests
that you change are replaced. With everything in place, the whole project runs on your code:

    python continual.py --config configs/tiny.yaml
"""


def points(text):
    """{task: points} of a file of tests."""
    sums = dict.fromkeys(TASKS, 0)
    for task, n in re.findall(r'@pytest\.mark\.task\("(T\d+)", points=([\d.]+)', text):
        sums[task] += float(n)
    return sums


WORKFLOW = """\
# GitHub Classroom: a step for each task, which earns all of its points or none.
name: Autograding
on: [push, workflow_dispatch]
permissions: {{checks: write, actions: read, contents: read}}
jobs:
  autograding:
    runs-on: ubuntu-latest
    if: github.actor != 'github-classroom[bot]'
    steps:
    - uses: actions/checkout@v4
    - uses: actions/setup-python@v5
      with: {{python-version: "3.12"}}
    - run: pip install torch tqdm pytest --extra-index-url https://download.pytorch.org/whl/cpu
{steps}
    - uses: classroom-resources/autograding-grading-reporter@v1
      env:
{results}
      with: {{runners: "{runners}"}}
"""
STEP = """\
    - id: {id}
      uses: classroom-resources/autograding-command-grader@v1
      with: {{test-name: "{task} {title}", command: python -m pytest -q tests -m {task}, timeout: 10, max-score: {points:g}}}"""


def workflow(tasks, worth):
    """.github/workflows/classroom.yml for some tasks."""
    return WORKFLOW.format(
        steps="\n".join(STEP.format(id=t.lower(), task=t, title=TASKS[t], points=worth[t]) for t in tasks),
        results="\n".join(f"        {t}_RESULTS: ${{{{steps.{t.lower()}.outputs.result}}}}" for t in tasks),
        runners=",".join(t.lower() for t in tasks),
    )


def write(out, tasks, classroom=False):
    """Write the student's tree of a handout into the folder `out`, which must be new or empty."""
    out, texts = Path(out), sources()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise HandoutError(f"{out}: not an empty folder")
    (out / "tests").mkdir(parents=True, exist_ok=True)
    where = {task: name for name, text in texts.items() for task, *_ in regions(text, name)}
    for name, text in texts.items():
        (out / f"{name}.py").write_text(stubbed(text, name, tasks), encoding="utf-8")
    for name in COPIED:
        shutil.copyfile(ROOT / name, out / name)
    shutil.copytree(ROOT / "configs", out / "configs", ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "pretrain", ".*"))
    worth = points((ROOT / VISIBLE).read_text(encoding="utf-8"))
    (out / "README.md").write_text(README.format(
        count=len(tasks), first=tasks[0], title=TASKS[tasks[0]],
        all=" " * 19 + "all of them" if len(tasks) == len(TASKS) else f' -m "{" or ".join(tasks)}"',
        table="\n".join(f"| {task} | `{where[task]}.py` | {TASKS[task]} | {worth[task]:g} |" for task in tasks),
    ), encoding="utf-8")
    if classroom:
        (out / ".github" / "workflows").mkdir(parents=True)
        (out / ".github" / "workflows" / "classroom.yml").write_text(workflow(tasks, worth), encoding="utf-8")


# ------------------------------------------------------------------------------------------------
# The check
# ------------------------------------------------------------------------------------------------


def _tree(folder, texts):
    folder.mkdir()
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def _grade(case):
    """One pytest session, which takes over the process that it runs in: the rows of its results."""
    folder, *arguments = case
    with open(folder / "log.txt", "w") as log:
        os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"           # other people's plugins take longer than our tests
    gc.freeze()                                                  # nor does the collector need to look through torch
    results = folder / "results.json"
    pytest.main([
        str(ROOT / VISIBLE), str(ROOT / HIDDEN), "-q", "-p", "no:cacheprovider", "-W", "ignore",
        f"--modules={folder}", f"--results={results}", *arguments,
    ])
    return json.loads(results.read_text(encoding="utf-8"))["tests"]


def grade(cases):
    """Rows of results for each of many (folder with modules, arguments of pytest ...), in forks of this process."""
    with multiprocessing.get_context("fork").Pool(min(4, os.cpu_count() or 1), maxtasksperchild=1) as pool:
        return pool.map(_grade, cases, chunksize=1)


def _own_or_earlier(row):
    """Whether a row failed because its own task's solution is missing, or an earlier one's."""
    missing = re.match(r"NotImplementedError: T(\d+): ", row["output"])
    return row["score"] == 0 and missing and int(missing[1]) <= int(row["tags"][0][1:])


def leaks(folder, texts, tasks):
    """Lines of a handout that give a solution away: marks, and longer lines of a solution in any spacing and case."""
    plain = lambda line: re.sub(r"\s", "", line.partition("#")[0]).lower()
    secret = {
        plain(line) for name, text in texts.items() for task, start, end, _ in regions(text, name) if task in tasks
        for line in text.splitlines()[start:end]
    }
    found = []
    for file in sorted(folder.rglob("*")):
        if file.name in (".git", "__pycache__", ".pytest_cache", "handout.py", "mutants.py", Path(HIDDEN).name):
            found.append(f"{file.relative_to(folder)} is in the handout")
        if file.suffix in (".py", ".md", ".yaml", ".txt"):
            for n, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                if ALMOST.search(line) or len(plain(line)) >= 20 and plain(line) in secret:
                    found.append(f"{file.relative_to(folder)}, line {n}: {line.strip()}")
    return found


def mutated(texts, task, before, after):
    """The modules with one piece of a task's solution replaced; the piece occurs once in it."""
    places = []
    for name, text in texts.items():
        lines = text.splitlines(keepends=True)
        for t, start, end, _ in regions(text, name):
            body = "".join(lines[start:end])
            if t == task and before in body:
                changed = "".join(lines[:start]) + body.replace(before, after) + "".join(lines[end:])
                places += [(name, changed)] * body.count(before)
    if len(places) != 1:
        raise HandoutError(f"mutants.py: {before!r} occurs {len(places)} times in the solution of {task}")
    return texts | dict(places)


def check():
    """Everything that a handout promises. Prints the mutants' table; returns what is wrong, a line each."""
    texts, tasks, wrong = sources(), list(TASKS), []
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        # The handout itself, as a student gets it and runs it.
        write(place / "handout", tasks)
        wrong += [f"leak: {leak}" for leak in leaks(place / "handout", texts, tasks)]
        run = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "tests", "--results=results.json"]
        beside = subprocess.Popen(run, cwd=place / "handout", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        # The solution; one task after another unlocked; one mistake after another made.
        cases = [(texts, tasks)]
        for k in range(len(tasks)):                              # with all of them missing each test; then those at the border
            modules = {name: stubbed(text, name, tasks[k:]) for name, text in texts.items()}
            cases.append((modules, tasks[k - 1 : k + 1] if k else tasks))
        for task, _, before, after in MUTANTS:
            cases.append((mutated(texts, task, before, after), [task]))
        quick = "--limit=0", "--tb=no", "-m"                     # a traceback takes as long as the test
        graded = grade([
            (_tree(place / str(n), modules), *quick, " or ".join(chosen)) for n, (modules, chosen) in enumerate(cases)
        ])
        beside.wait()
        rows = json.loads((place / "handout" / "results.json").read_text(encoding="utf-8"))["tests"]

    wrong += [f"handout: {row['name']}: {row['output'] or 'passes'}" for row in rows if not _own_or_earlier(row)]
    unlocked = graded[1 : len(tasks) + 1]
    wrong += [f"solution: {row['name']}: {row['output']}" for row in graded[0] if row["score"] != row["max_score"]]
    for k, rows in enumerate(unlocked):
        for row in rows:
            early, passed = row["tags"][0] in tasks[:k], row["score"] == row["max_score"]
            if early != passed or not early and not _own_or_earlier(row):
                wrong.append(f"with T1..T{k} unlocked: {row['name']}: {row['output'] or 'passes'}")
    print("| task | mistake | caught by (hidden tests in parentheses) |\n| --- | --- | --- |")
    for (task, what, *_), rows in zip(MUTANTS, graded[len(tasks) + 1 :]):
        caught = [row for row in rows if row["score"] < row["max_score"]]
        form = {"visible": "{}", "after_published": "({})"}
        names = [form[row["visibility"]].format(row["name"].partition(": ")[2]) for row in caught]
        print(f"| {task} | {what} | {', '.join(names)} |")
        if not any(row["visibility"] == "visible" for row in caught):
            wrong.append(f"mutant: {task} {what}: no visible test of {task} notices it")
    count = len(graded[0])
    print(f"{len(tasks)} tasks, {count} tests, {len(MUTANTS)} mutants, {len(wrong)} faults")
    return wrong


def main(argv):
    """Write a handout, or check it."""
    parser = argparse.ArgumentParser(description="Write a student's copy of this repository, or check what it grades.")
    parser.add_argument("out", nargs="?", help="a new or empty folder")
    parser.add_argument("--tasks", help="the tasks to take out, such as T1,T2; the others are given (all)")
    parser.add_argument("--classroom", action="store_true", help="add a workflow for GitHub Classroom")
    parser.add_argument("--check", action="store_true", help="check the handout, its tests and the tests' teeth")
    options = parser.parse_args(argv)
    tasks = options.tasks.split(",") if options.tasks is not None else list(TASKS)
    try:
        if unknown := [task for task in tasks if task not in TASKS]:
            raise HandoutError(f"--tasks: no task {unknown[0]!r}; there are T1 to T{len(TASKS)}, with commas between them")
        if not options.out and not options.check:
            raise HandoutError("name a folder to write to, or --check")
        if options.out:
            write(options.out, [task for task in TASKS if task in tasks], options.classroom)
            print(f"wrote {options.out}: {len(set(tasks))} tasks to do")
        wrong = check() if options.check else []
    except (HandoutError, OSError) as e:
        wrong = [e]
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
