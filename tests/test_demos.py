"""What teaches: the modules' demos show true drawings, the same with and without colour; the README's path holds."""

import contextlib
import doctest
import importlib
import io
import re
import time
from pathlib import Path

import pytest

import grpo
import sdpo
from grading import TASKS

ROOT = Path(__file__).resolve().parent.parent
COLOUR = re.compile(r"\033\[\d+m")


@pytest.fixture(scope="module")
def shown():
    """{(module, terminal): output}; terminals: none, a colour one, one whose user wants no colour."""
    texts = {}
    for module, demo in ((grpo, lambda: grpo.main([])), (sdpo, sdpo.main)):
        for terminal in ("none", "colour", "plain"):
            with pytest.MonkeyPatch.context() as patch:
                patch.delenv("NO_COLOR", raising=False)
                if terminal == "plain":
                    patch.setenv("NO_COLOR", "1")
                with contextlib.redirect_stdout(io.StringIO()) as lines:
                    patch.setattr(lines, "isatty", lambda: terminal != "none")
                    start = time.process_time()
                    demo()
                    assert time.process_time() - start < 10
                texts[module.__name__, terminal] = lines.getvalue()
    return texts


@pytest.mark.parametrize("module", ["grpo", "sdpo"])
def test_colour_is_for_terminals_that_want_it_and_changes_no_word(shown, module):
    plain = shown[module, "none"]
    assert not COLOUR.search(plain) and shown[module, "plain"] == plain
    assert COLOUR.search(shown[module, "colour"]) and COLOUR.sub("", shown[module, "colour"]) == plain


def test_each_siblings_advantage_is_a_bar_on_its_side(shown):
    bars = re.findall(r"^.{14} +([01]) +([+-]\d\.\d\d)   ( *)(#*)\|(#*)$", shown["grpo", "none"], re.MULTILINE)
    assert [(reward, advantage) for reward, advantage, *_ in bars] == [("1", "+0.50"), ("0", "-0.50")] * 2
    for _, advantage, space, left, right in bars:
        assert len(space) + len(left) == 10                                # the line in the middle stands still
        assert (len(left), len(right)) == ((0, 5) if float(advantage) > 0 else (5, 0))


def test_the_inserted_demonstration_is_marked_and_the_question_is_not(shown):
    text = shown["sdpo", "none"]
    asked, taught = text.split("the same model, is asked")
    question = [line for line in asked.split("and answered")[0].splitlines() if line.startswith("    ")]
    taught = taught.split("\nBoth read")[0].splitlines()[2:]
    assert question and taught[: len(question)] == question
    marked = [line for line in taught[len(question):] if line]
    assert all(line.startswith("  +") for line in marked)
    assert "  + Correct solution:" in marked and "  + Correctly solve the original question." in marked


def test_each_tokens_divergence_hangs_under_it_in_its_length(shown):
    """The column's length against the number in the table, and as many columns as there are lengths above 0."""
    text = shown["sdpo", "none"]
    drawing = text.split("a row for 0.05 nats.\n\n")[1].split("\n\n")[0].splitlines()
    table = re.findall(r"^(\S+) +[\d.]+ +[\d.]+ +(\d\.\d{4})$", text, re.MULTILINE)
    words, rows = drawing[0], drawing[1:]
    depth = {m.start(): sum(row[m.start():m.start() + 1] == "#" for row in rows) for m in re.finditer(r"\S+", words)}
    lengths = sorted((d for d in depth.values() if d), reverse=True)
    assert len(table) == 5 and lengths == sorted((n for _, d in table if (n := round(float(d) / 0.05))), reverse=True) != []
    deepest = words[max(depth, key=depth.get):].split()[0]
    assert deepest == max(table, key=lambda row: float(row[1]))[0]


# ---- the README's reading path -----------------------------------------------------------------


@pytest.fixture(scope="module")
def steps():
    """The numbered steps of the path, as texts."""
    _, _, section = (ROOT / "README.md").read_text().partition("\n## From the token KL to the collapse, in one sitting\n")
    section = section.partition("\n## ")[0]
    return re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]


def test_the_readmes_examples_run():
    result = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert result.failed == 0 and result.attempted > 20


def test_each_step_of_the_path_names_what_there_is(steps):
    """A function, an equation, an example or a command; and tests and tasks, but for the last, which is a run."""
    tests = set(re.findall(r"^def (test_\w+)", "".join(p.read_text() for p in (ROOT / "tests").glob("test_*.py")), re.MULTILINE))
    asked = []
    for step in steps:
        functions = re.findall(r"`(kernels|grpo|sdpo|eval|continual)\.(\w+)`", step)
        assert functions and all(hasattr(importlib.import_module(module), name) for module, name in functions), step
        scripts = re.findall(r"`python\s+(\w+\.py)", step)
        assert all((ROOT / script).exists() for script in scripts) and (scripts or ">>> " in step), step
        assert set(re.findall(r"\btest_\w+", step)) <= tests, step
        if step is not steps[-1]:
            assert re.search(r"`[^`]+[-+/(|][^`]*`", step) and re.search(r"[Pp]inned\s+by\s+`test_", step), step
            asked += re.findall(r"\bT\d+\b", step)
    assert sorted(asked) == sorted(TASKS)
