"""What is asked and how it is judged: tasks, verifiers, the matrix, drift, the report."""

import json
import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eval import (
    Example, Task, TaskSpec, VerifierError, accuracy, continual_metrics, extract_code, last_boxed, load_task, matrix_drift, mmd,
    pass_at_k, principal_angles, run_program, saved_answers, tool_calls, verify, weight_drift,
)
from grpo import RolloutError
from sdpo import strip_thinking


def gold(answer="", tests=()):
    return Example("0", [], answer, list(tests))


def calls(*pairs):
    return json.dumps([{"Action": name, "Action_Input": json.dumps(given)} for name, given in pairs])


# ---- mathematics -------------------------------------------------------------------------------


@pytest.mark.parametrize("answer, reward", [("15", 1.0), ("12", 0.0)])
def test_math_01_last_box_is_graded(answer, reward):
    verdict = verify("math", r"First I get \boxed{12}. Checking again, it should be \boxed{15}.", gold(answer))
    assert (verdict.reward, verdict.prediction) == (reward, "15")


def test_math_01_nested_braces_balance():
    assert last_boxed(r"so it is \boxed{\frac{3}{\sqrt{2}}}") == r"\frac{3}{\sqrt{2}}"
    assert last_boxed(r"\boxed{1} and then \boxed{2") == "1"
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed("no box") is None


@pytest.mark.parametrize("answer, response, reward", [
    ("8 and 27", r"\boxed{27}", 0.0),
    ("8 and 27", r"\boxed{8, 27}", 1.0),
    ("$8$ and $27$", r"\boxed{8,27}", 1.0),
    ("$8$ and $27$", r"\boxed{27}", 0.0),
    ("8 or 27", r"\boxed{27}", 0.0),
    (r"\$5", r"\boxed{5}", 1.0),
    ("(-1,4]", r"\boxed{(-1, 4]}", 1.0),
    ("(-1,4]", r"\boxed{(-1, 4)}", 0.0),
])
def test_math_02_gold_answers_are_read_whole(answer, response, reward):
    assert verify("math", response, gold(answer)).reward == reward


@pytest.mark.parametrize("answer, box, reward", [
    ("204", "204", 1.0), ("204", "0204", 1.0), ("-7", "7", 0.0), ("0", "-0", 1.0), ("1000", "1,000", 1.0),
    (r"\frac{1}{2}", "0.5", 1.0), (r"\frac{1}{2}", r"\frac{2}{3}", 0.0), (r"\sqrt{8}", r"2\sqrt{2}", 1.0),
    ("3", r"3\text{ apples}", 1.0), ("x^2+2x+1", "(x+1)^2", 1.0), ("12", "12 and 13", 0.0),
])
def test_math_answers_are_equal_as_mathematics(answer, box, reward):
    assert verify("math", rf"\boxed{{{box}}}", gold(answer)).reward == reward


def test_a_collapsed_answer_of_open_boxes_is_read_in_one_pass():
    """4,000 boxes that never close; looking on from each of them would take seconds."""
    assert last_boxed(r"The answer is \boxed{1 " * 4000) is None
    assert last_boxed(r"\boxed{" * 4000 + "7}") == "7"
    assert last_boxed(r"\boxed{a \boxed{b} c}") == "b"


def test_math_box_far_from_the_end_counts():
    assert verify("math", r"\boxed{7}" + " and so on" * 100, gold("7")).reward == 1.0


def test_math_without_a_box_is_malformed_and_says_so():
    verdict = verify("math", "the answer is 7", gold("7"))
    assert (verdict.reward, verdict.well_formed) == (0.0, False)
    assert "boxed" in verdict.feedback


def test_math_time_is_bounded_outside_the_main_thread():
    import threading
    import time

    out = []
    start = time.perf_counter()
    work = threading.Thread(target=lambda: out.append(verify("math", r"\boxed{2^{2^{2^{2^{2^2}}}}}", gold("1"))))
    work.start()
    work.join(timeout=12)
    assert out and out[0].reward == 0.0 and time.perf_counter() - start < 10
    assert verify("math", r"\boxed{\frac{2}{4}}", gold("0.5")).reward == 1.0   # and the next one is judged again


def test_math_huge_answers_are_bounded():
    digits = "7" * 10_000
    assert verify("math", rf"\boxed{{{digits}}}", gold(digits)).reward == 1.0
    assert verify("math", rf"\boxed{{{digits}}}", gold("7")).reward == 0.0
    assert verify("math", r"\boxed{" + "x+" * 50_000 + "1}", gold("7")).reward == 0.0


# ---- multiple choice ---------------------------------------------------------------------------


def test_mcq_01_well_formed_means_well_formed():
    clean, bare = verify("mcq", "<answer>\nC\n</answer>", gold("C")), verify("mcq", "C", gold("C"))
    assert (clean.reward, clean.well_formed) == (1.0, True)
    assert (bare.reward, bare.well_formed) == (0.0, False)


@pytest.mark.parametrize("response", ["The result is D since a lens bends light.", "<answer>Answer: D</answer>", "D"])
def test_mcq_02_no_letter_is_found_outside_the_tag(response):
    assert verify("mcq", response, gold("A")).reward == 0.0


def test_mcq_02_letters_in_the_reasoning_do_not_count():
    response = "<reasoning>a or b? Not A.</reasoning>\n<answer>\nD\n</answer>"
    assert verify("mcq", response, gold("D")).reward == 1.0
    assert verify("mcq", "<answer>A</answer> no: <answer>B</answer>", gold("B")).reward == 1.0


def test_mcq_boxed():
    assert verify("mcq_boxed", r"so \boxed{\text{B}}", gold("B")).reward == 1.0
    assert verify("mcq_boxed", r"so \boxed{C}", gold("B")).reward == 0.0
    assert verify("mcq_boxed", "B", gold("B")).well_formed is False


@pytest.mark.parametrize("response, reward", [
    ("plan one: <answer>A</answer>\n</think>\n\n<answer>B</answer>", 1.0),
    ("<think>\n<answer>A</answer>\n</think>\n\n<answer>B</answer>", 1.0),
    ("<think>\n<answer>B</answer> never finished", 0.0),
    ("<answer>B</answer>", 1.0),
])
def test_roll_04_only_the_visible_answer_is_judged(response, reward):
    assert verify("mcq", response, gold("B")).reward == reward


# ---- tool calls --------------------------------------------------------------------------------


def test_tool_01_nested_json_is_parsed_not_cut():
    given = {"route": {"from": "OSL", "to": "BGO"}, "note": "use {seat} if free", "max": 3}
    response = f"Action: find_flights\nAction Input: {json.dumps(given)}\nThat uses set {{x}}."
    assert verify("tool", response, gold(calls(("find_flights", given)))).reward == 1.0
    assert tool_calls(response) == [("find_flights", given)]


def test_tool_02_arguments_belong_to_their_call():
    answer = calls(("search", {"q": "x"}), ("book", {"id": 1}))
    right = 'Action: search\nAction Input: {"q": "x"}\nAction: book\nAction Input: {"id": 1}'
    swapped = 'Action: search\nAction Input: {"id": 1}\nAction: book\nAction Input: {"q": "x"}'
    assert verify("tool", right, gold(answer)).reward == 1.0
    assert verify("tool", swapped, gold(answer)).reward == 0.0
    assert verify("tool", swapped, gold(answer), paper_scoring=True).reward == 1.0  # the official comparison


@pytest.mark.parametrize("response, reward", [
    ('Action: a.b\nAction Input: {"x": 1}', 1.0),                     # a dotted name is a whole name
    ('Action: a.b\nAction Input: {"x": 1.0}', 1.0),                   # 1 and 1.0 are one JSON number
    ('Action: a.b\nAction Input: {"x": true}', 0.0),                  # true is none
    ('Action: a.b\nAction Input: {"x": "1"}', 0.0),
    ('Action: a.b\nAction Input: {"x": 1', 0.0),
    ('Action: a.b\nAction Input: none', 0.0),
    ('Action: a.b\nAction Input: {"x": 1}\nAction: a.b\nAction Input: {"x": 1}', 0.0),   # one call too many
    ('Thought: I call Action: a.b\nAction: a.b\nAction Input:\n{"x": 1}', 1.0),
    ("", 0.0),
])
def test_tool_calls_are_compared_as_pairs(response, reward):
    assert verify("tool", response, gold(calls(("a.b", {"x": 1})))).reward == reward


@pytest.mark.parametrize("depth", [600, 5000])
@pytest.mark.parametrize("paper_scoring", [False, True])
def test_json_nested_without_end_is_a_wrong_answer(depth, paper_scoring):
    response = 'Action: a\nAction Input: {"x": ' + "[" * depth + "]" * depth + "}"
    assert verify("tool", response, gold(calls(("a", {}))), paper_scoring).reward == 0.0


def test_tool_feedback_tells_expected_from_got():
    feedback = verify("tool", 'Action: b\nAction Input: {}', gold(calls(("a", {"x": 1})))).feedback
    assert 'a {"x": 1}' in feedback and "b {}" in feedback


# ---- code --------------------------------------------------------------------------------------

ADD = "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize("name, response", [
    ("demo_after", f"```python\n{ADD}```\nUse it:\n```python\nprint(add(1, 2))\nprint(add(3, 4))\nprint(add(5, 6))\n```"),
    ("draft_first", f"```python\ndef add(a, b):\n    total = a - b\n    return total\n```\nThat subtracts. Fixed:\n```python\n{ADD}```"),
    ("open_fence", f"```python\n{ADD}"),
    ("crlf_or_space", f"```py \n{ADD}```"),
    ("crlf", f"```python\r\n{ADD}```".replace("\n", "\r\n")),
    ("fence_in_a_text", f"```python\nFENCE = '```'\n{ADD}```\nDone."),
    ("fence_after_code", f"```python\n{ADD.strip()}```\nDone."),
    ("indented_fence", f"1. Here:\n   ```python\n{ADD}   ```\n2. Done."),
])
def test_code_02_the_submission_is_found(name, response):
    assert verify("code", response, gold(tests=["assert add(5,2)==7"])).reward == 1.0


def test_code_01_leaving_early_or_claiming_success_is_no_pass():
    programs = ["import sys\ndef add(a,b):\n    sys.exit(0)\n", "import os\nos._exit(0)\n",
                "print('ALL_TESTS_PASSED', flush=True)\nimport os\nos._exit(0)\n", "def add(a,b):\n    return a+b\n"]
    example = gold(tests=["assert add(1,2)==3", "assert add(2,2)==4"])
    assert [verify("code", f"```python\n{program}```", example).reward for program in programs] == [0.0, 0.0, 0.0, 1.0]


def test_code_03_late_programs_are_killed_and_reaped():
    """Three times: no reward, an answer within the limit and a second, and no child in state Z below this process."""
    for _ in range(3):
        start = time.perf_counter()
        assert run_program("while True:\n    pass\n", ["assert True"], timeout=1)[0] == 0
        assert time.perf_counter() - start < 2
        processes = {}
        for place in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, parent = place.read_text().rpartition(")")[2].split()[:2]
            except OSError:                                               # it ended meanwhile
                continue
            processes[place.parent.name] = state, parent
        mine = {str(os.getpid())}
        for _ in processes:
            mine |= {pid for pid, (_, parent) in processes.items() if parent in mine}
        assert [processes[pid] for pid in mine if processes[pid][0] == "Z"] == []


def test_code_without_a_block():
    verdict = verify("code", ADD, gold(tests=["assert add(5,2)==7"]))
    assert (verdict.reward, verdict.well_formed) == (0.0, False)
    assert extract_code("```\nx = 1\n```", ["assert f()"]) == "x = 1\n"     # nothing better: the last block


# ---- answers that nobody would give ------------------------------------------------------------

KINDS = ["math", "mcq", "mcq_boxed", "tool", "tool_allowed", "exact", "code"]
GOLD = {"math": gold("7"), "mcq": gold("B"), "mcq_boxed": gold("B"), "tool": gold(calls(("a", {"x": 1}))),
        "tool_allowed": gold(calls(("a", {"x": [1]}))), "exact": gold("7"),
        "code": gold(tests=["assert f(1) == 2"])}
FLOOD = {
    "100 MB in a line": 100_000_000 * "x",
    "open boxes": 140_000 * r"\boxed{",
    "boxes and spaces": 2000 * (r"\boxed" + 400 * " "),
    "braces": 900_000 * "}" + 90_000 * "{",
    "spaces in a box": r"\boxed{1" + 900_000 * " " + "x and 2}",
    "commas in a box": r"\boxed{" + 300_000 * "1, " + "}",
    "brackets in a box": r"\boxed{" + 450_000 * "(" + 450_000 * "[" + "}",
    "digits in a box": r"\boxed{" + 900_000 * "7" + "}",
    "powers in a box": r"\boxed{" + 300 * "9^{" + 300 * "}" + "}",
    "fence and spaces": "```" + 900_000 * " " + "x",
    "fences and spaces": 900 * ("```" + 1000 * " " + "x"),
    "fences": 100_000 * "```python\n",
    "ticks": 999_000 * "`",
    "open thoughts": 140_000 * "<think>",
    "closed thoughts": 120_000 * "</think>",
    "thoughts": 60_000 * "<think></think>",
    "open answers": 120_000 * "<answer>",
    "open calls": 60_000 * "Action Input: {",
    "calls": 40_000 * "Action: a\nAction Input: {}\n",
    "calls and spaces": 900 * ("Action Input:" + 1000 * "\n"),
    "deep call": "Action: a\nAction Input: " + 180_000 * '{"x":',
    "long number": 'Action: a\nAction Input: {"x": ' + 900_000 * "9" + "}",
    "huge number": 'Action: a\nAction Input: {"x": 1e999999}',
    "lines": 999_000 * "\n",
    "null": 900_000 * "\0",
    "surrogates": 900_000 * "\ud800",
}


@pytest.mark.parametrize("name", FLOOD)
def test_no_answer_takes_long_or_scores_by_its_size(name):
    for kind in KINDS:
        for paper_scoring in (False, True)[: 1 + (kind == "tool")]:
            start = time.perf_counter()
            assert verify(kind, FLOOD[name], GOLD[kind], paper_scoring).reward == 0.0
            assert time.perf_counter() - start < (8 if kind == "math" else 4), kind
    start = time.perf_counter()
    strip_thinking(FLOOD[name])
    assert time.perf_counter() - start < 4


@pytest.mark.parametrize("digits", [4_301, 10_000])
def test_answers_of_ten_thousand_digits(digits):
    """More than int() takes; equal ones are equal all the same, where comparing texts or JSON can tell."""
    right, wrong = digits * "7", digits * "7" + "8"
    start = time.perf_counter()
    for kind, form in (("math", r"\boxed{%s}"), ("exact", "%s")):
        assert [verify(kind, form % answer, gold(right)).reward for answer in (right, wrong)] == [1.0, 0.0]
    assert verify("math", rf"\boxed{{{right}.0}}", gold(right)).reward == 0.0     # over 2,000 characters, and no integer
    assert verify("tool", f'Action: a\nAction Input: {{"x": {right}}}', GOLD["tool"]).reward == 0.0
    assert time.perf_counter() - start < 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("response", ["", " ", r"\boxed{}", r"\boxed{\text{}}", "<answer></answer>", "Action: \nAction Input: {}", "```\n```"])
def test_data_01_nothing_equals_a_missing_gold_answer(kind, response):
    assert verify(kind, response, gold("")).reward == 0.0


# ---- tasks -------------------------------------------------------------------------------------


def rows_file(tmp_path, rows, name="rows.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(json.dumps(r) for r in rows))
    return str(path)


def test_data_01_rows_that_cannot_be_graded_stay_out(tmp_path):
    row = lambda q, texts, key: {"question": q, "choices": {"text": texts}, "answerKey": key}  # noqa: E731
    spec = dict(name="science", verifier="mcq", prompt="{question}\n{options}", options="choices.text", answer="answerKey")
    usable = [row("q1", list("wxyz"), "B"), row("q0", list("wxyz"), "A"), row("q2", [], "")]
    task = load_task(spec | {"path": rows_file(tmp_path, usable)})
    assert sorted(e.messages[0]["content"][:2] for e in task.train + task.test) == ["q0", "q1"]
    assert task.dropped == {"without an answer": 1}
    with pytest.raises(ValueError, match="row 3 .*'E' isn't one of the options"):
        load_task(spec | {"path": rows_file(tmp_path, [*usable, row("q3", ["w", "x"], "E")])})
    assert verify("mcq", "<answer></answer>", gold("")).reward == 0.0


def test_data_03_templates_are_filled_in_one_pass(tmp_path):
    row = {"prompt": r"Find \boxed{x} with {answer} set", "hint": "d = {'a': 1}", "answer": "4"}
    task = load_task(dict(name="t", verifier="math", path=rows_file(tmp_path, [row, row | {"prompt": "other"}]),
                          prompt="{prompt}\n{hint}\n{{kept}}"))
    texts = [e.messages[0]["content"] for e in task.train + task.test]
    assert "Find \\boxed{x} with {answer} set\nd = {'a': 1}\n{kept}" in texts


def test_a_prompt_of_over_a_million_characters_is_left_out_and_counted(tmp_path):
    rows = [{"prompt": q, "answer": "1"} for q in ("a", "b", "c", 1_000_001 * "d")]
    assert load_task(dict(name="t", verifier="math", path=rows_file(tmp_path, rows))).dropped == {"over 1,000,000 characters": 1}


def test_templates_reach_columns_but_never_attributes(tmp_path):
    rows = [{"details": {"level": "L3"}, "answer": "1"}, {"details": {"level": "L4"}, "answer": "2"}]
    task = load_task(dict(name="t", verifier="math", path=rows_file(tmp_path, rows), prompt="{details.level}"))
    assert sorted(e.messages[0]["content"] for e in task.train + task.test) == ["L3", "L4"]
    with pytest.raises(ValueError, match="no column 'details.__class__'; the row has details, answer"):
        load_task(dict(name="t", verifier="math", path=rows_file(tmp_path, rows), prompt="{details.__class__}"))


def test_filter_split_and_limits(tmp_path):
    rows = [{"prompt": f"p{i}", "answer": str(i), "level": "L3" if i % 2 else "L1"} for i in range(40)]
    spec = TaskSpec("t", rows_file(tmp_path, rows), "math", where={"level": ["L3"]}, test_share=0.2, train_limit=10)
    first, again = load_task(spec), load_task(spec)
    assert (len(first.train), len(first.test), first.dropped) == (10, 4, {"filtered out": 20})
    assert [e.id for e in first.test] == [e.id for e in again.test]
    assert not {e.messages[0]["content"] for e in first.train} & {e.messages[0]["content"] for e in first.test}


def test_json_array_under_any_name_and_prompts_of_the_test_rows(tmp_path):
    train = tmp_path / "train.json"
    train.write_text(json.dumps([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]))
    test = rows_file(tmp_path, [{"prompt": "b", "answer": "2"}], "test.json")       # lines, named .json
    task = load_task(dict(name="t", verifier="math", path=str(train), test_path=test))
    assert [e.messages[0]["content"] for e in task.train] == ["a"]
    assert task.dropped == {"also in the test rows": 1}


def test_a_row_that_only_looks_prepared_keeps_its_templates(tmp_path):
    rows = [{"kind": "algebra", "prompt": f"q{i}", "answer": "1", "level": i} for i in range(6)]
    task = load_task(dict(name="t", verifier="math", path=rows_file(tmp_path, rows), prompt="{prompt}!", where={"level": [0, 1]}))
    assert sorted(e.messages[0]["content"] for e in task.train + task.test) == ["q0!", "q1!"]


def test_columns_go_through_lists_and_templates_refuse_them(tmp_path):
    rows = [{"prompt": [{"content": f"q{i}"}], "answer": "1"} for i in range(3)]
    spec = dict(name="t", verifier="math", path=rows_file(tmp_path, rows))
    task = load_task(spec | {"prompt": "{prompt.0.content}?"})
    assert sorted(e.messages[0]["content"] for e in task.train + task.test) == ["q0?", "q1?", "q2?"]
    with pytest.raises(ValueError, match="column 'prompt' holds a list"):
        load_task(spec)


def test_prompts_asked_twice_are_kept_once(tmp_path):
    rows = [{"prompt": f"q{i % 10}", "answer": "1"} for i in range(100)]
    task = load_task(dict(name="t", verifier="math", path=rows_file(tmp_path, rows)))
    assert (len(task.train), len(task.test), task.dropped) == (9, 1, {"asked before": 90})


def test_odd_line_ends_inside_texts_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\ufeff" + "\n".join(json.dumps({"prompt": f"a\u2028b{i}", "answer": "1"}, ensure_ascii=False) for i in range(3)), encoding="utf-8")
    task = load_task(dict(name="t", verifier="math", path=str(path)))
    assert {e.messages[0]["content"][:3] for e in task.train + task.test} == {"a\u2028b"}


def test_an_answer_of_two_letters_is_no_option(tmp_path):
    rows = [{"idx": 0, "kind": "mcq", "dataset": "d", "prompt": "?\n\nA: x\nB: y", "answer": "AB"}] * 2
    with pytest.raises(ValueError, match="'AB' isn't one of the options A, B"):
        load_task(dict(name="t", verifier="mcq", path=rows_file(tmp_path, rows)))
    lines = [{"prompt": f"Q: which {i}? (A) x (B) y\nA: ", "answer": "B"} for i in range(2)]   # no list of options
    assert len(load_task(dict(name="t", verifier="mcq", path=rows_file(tmp_path, lines))).train) == 1


def test_prepared_rows_are_taken_as_they_stand(tmp_path):
    rows = [{"idx": i, "kind": "mcq", "dataset": "d", "prompt": f"{i}?\n\nA: x\nB: y", "system": "Choose.", "answer": "B"} for i in range(4)]
    task = load_task(dict(name="t", verifier="mcq", path=rows_file(tmp_path, rows), prompt="{question}", where={"domain": "no"}))
    assert len(task.train) == 3 and task.train[0].messages[0] == {"role": "system", "content": "Choose."}
    rows[0]["answer"] = "C"
    with pytest.raises(ValueError, match="'C' isn't one of the options A, B"):
        load_task(dict(name="t", verifier="mcq", path=rows_file(tmp_path, rows)))


@pytest.mark.parametrize("change, message", [
    (dict(path="missing.jsonl"), "task t: path: can't read missing.jsonl: FileNotFoundError"),
    (dict(answer="gold"), "row 0 .*: no column 'gold'; the row has prompt, answer"),
    (dict(where={"prompt": "none"}), "task t: no training rows .*2 filtered out"),
])
def test_unusable_tasks_say_why_in_one_line(tmp_path, change, message):
    path = rows_file(tmp_path, [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}])
    with pytest.raises(ValueError, match=message) as error:
        load_task(dict(name="t", verifier="math", path=path) | change)
    assert "\n" not in str(error.value)


# ---- the matrix --------------------------------------------------------------------------------


def test_metr_01_forgetting_counts_the_best_earlier_value():
    R = [[0.1, 0.2, 0.0], [0.5, 0.0, 0.0], [0.7, 0.6, 0.0], [0.4, 0.6, 0.8]]
    m = continual_metrics(R)
    assert m["forgetting"] == pytest.approx(0.15)             # (max(.5, .7) - .4 + .6 - .6) / 2
    assert m["backward_transfer"] == pytest.approx(-0.05)     # (.4 - .5 + .6 - .6) / 2
    assert m["average"] == pytest.approx(0.6)
    assert m["gain"] == pytest.approx((0.4 + 0.4 + 0.8) / 3)
    assert m["last"] == [0.4, 0.6, 0.8]


def test_metr_01_two_tasks_and_one():
    assert continual_metrics([[0, 0], [0.8, 0.1], [0.5, 0.7]])["forgetting"] == pytest.approx(0.3)
    one = continual_metrics([[0.25], [0.75]])
    assert (one["forgetting"], one["backward_transfer"], one["gain"]) == (0.0, 0.0, 0.5)
    assert one["relative"] == [[0.0], [200.0]]
    assert continual_metrics([[0.25, 0.5]])["gain"] == 0.0     # before any stage


def test_relative_of_a_base_of_zero_is_unknown():
    assert continual_metrics([[0.0, 0.5], [0.5, 0.25]])["relative"] == [[None, 0.0], [None, -50.0]]


@pytest.mark.parametrize("R", [[], [[]], [[0.1], [0.2, 0.3]], [[0.1], [0.2], [0.3]]])
def test_impossible_matrices_are_refused(R):
    with pytest.raises(ValueError):
        continual_metrics(R)


def test_pass_at_k_equals_drawing_every_subset():
    from itertools import combinations

    for n, c, k in [(5, 2, 3), (8, 1, 4), (6, 6, 2), (6, 0, 6)]:
        draws = list(combinations([1] * c + [0] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(any(d) for d in draws) / len(draws))
    with pytest.raises(ValueError):
        pass_at_k(4, 1, 5)


# ---- sampled accuracy --------------------------------------------------------------------------


@pytest.fixture
def sampler(monkeypatch):
    """A rollout whose answers are coin tosses, heads are right. sampler.asked: the prompts, batch by batch; sampler.end:
    the number of the batch in which the process dies."""
    import eval as evaluation  # the module, to replace its rollout

    self = SimpleNamespace(asked=[], end=None, texts=None)

    def rollout(model, tokenizer, prompts, group_size, seeds, **sampling):
        if len(self.asked) + 1 == self.end:
            raise KeyboardInterrupt
        self.asked.append([p[0]["content"] for p in prompts])
        self.sampling = sampling
        tosses = [torch.randint(2, (group_size,), generator=torch.Generator().manual_seed(s)).tolist() for s in seeds]
        texts = ["heads" if toss else "tails" for toss in sum(tosses, [])] if self.texts is None else self.texts
        mask = torch.arange(4) < torch.tensor([1 + len(t) % 2 for t in texts])[:, None]    # heads, tails: 2 tokens
        return SimpleNamespace(texts=texts, mask=mask, truncated=torch.tensor([t == "tails" for t in texts]))

    monkeypatch.setattr(evaluation, "rollout", rollout)
    return self


def questions(n):
    examples = [Example(str(i), [{"role": "user", "content": f"q{i}"}], "heads") for i in range(n)]
    return Task(TaskSpec("coins", "none", "exact"), [], examples, {})


def test_avg_and_pass_at_k_of_known_answers(sampler):
    """Right answers of four: 1, 3, 0. pass@2 = 1 - C(4 - c, 2) / 6: 1/2, 1, 0."""
    sampler.texts = "heads tails tails tails heads heads tails heads tails tails tails tails".split()
    found = accuracy(None, None, questions(3), samples=4)
    assert found["rewards"] == [[1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0]] and found["responses"] == sampler.texts
    assert [found[k] for k in ("accuracy", "avg@4", "pass@1")] == pytest.approx([1 / 3] * 3)
    assert (found["pass@2"], found["pass@4"]) == pytest.approx((0.5, 2 / 3))
    assert (found["truncated"], found["length"], found["well_formed"]) == pytest.approx((8 / 12, 2.0, 1.0))


@pytest.mark.parametrize("samples, ks", [(1, [1]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])])
def test_pass_at_powers_of_two_and_all(sampler, samples, ks):
    found = accuracy(None, None, questions(2), samples=samples)
    assert [key for key in found if key.startswith("pass@")] == [f"pass@{k}" for k in ks] and f"avg@{samples}" in found


@pytest.mark.parametrize("kind", [RolloutError, VerifierError, FloatingPointError])
def test_what_fails_in_one_process_stops_the_evaluation_in_all(monkeypatch, kind):
    """Two threads stand for two processes: the one that is well would wait for the other's answers for ever."""
    import eval as evaluation

    together, parts = threading.Barrier(2, timeout=20), [None, None]

    def answer(process, tokenizer, spec, examples, samples, sampling):
        if process == 1:
            raise kind("gone")
        return [{"rewards": [0.0]} for _ in examples]

    def evaluate(process):
        def gather(part):
            parts[process] = part
            together.wait()
            found = list(parts)
            together.wait()
            return found

        accuracy(process, None, questions(4), share=(process, 2, gather))

    monkeypatch.setattr(evaluation, "_answer", answer)
    with ThreadPoolExecutor(2) as both:
        for done in [both.submit(evaluate, process) for process in (0, 1)]:
            with pytest.raises(kind, match="gone"):
                done.result()


@pytest.mark.parametrize("end", [1, 2, 3, 4])
def test_a_cut_evaluation_asks_nothing_twice_and_ends_the_same(sampler, tmp_path, end):
    """Seven prompts, two at a time: batches of 2, 2, 2 and 1."""
    how = dict(samples=3, batch_size=6, seed=5, temperature=0.6, top_p=0.95, file=tmp_path / "new" / "a.jsonl")
    whole = accuracy(None, None, questions(7), **how | {"file": None})
    assert sampler.asked == [["q0", "q1"], ["q2", "q3"], ["q4", "q5"], ["q6"]]
    assert whole["responses"][:6] != whole["responses"][6:12]                 # each prompt has its own randomness
    sampler.asked, sampler.end = [], end
    with pytest.raises(KeyboardInterrupt):
        accuracy(None, None, questions(7), **how)
    sampler.end = None
    torch.manual_seed(99)                                                     # whatever the next process has drawn before
    assert accuracy(None, None, questions(7), **how) == whole
    assert sampler.asked == [["q0", "q1"], ["q2", "q3"], ["q4", "q5"], ["q6"]]
    assert accuracy(None, None, questions(7), **how) == whole and len(sampler.asked) == 4
    torch.manual_seed(99)
    state = torch.get_rng_state()
    accuracy(None, None, questions(7), **how | {"file": None})
    assert torch.equal(torch.get_rng_state(), state)                          # the caller's randomness is its own
    asked, records = saved_answers(tmp_path / "new" / "a.jsonl")
    assert (asked["samples"], asked["temperature"]) == (3, 0.6) and [r["id"] for r in records] == list("0123456")
    assert [r["rewards"] for r in records] == whole["rewards"] and sum([r["responses"] for r in records], []) == whole["responses"]


def test_continuous_batching_is_given_eight_batches_at_once(sampler):
    """20 prompts of 2 answers, 4 at once: a batch is 2 prompts, the queue has 16, then the other 4."""
    accuracy(None, None, questions(20), samples=2, batch_size=4, engine="continuous")
    assert [len(x) for x in sampler.asked] == [16, 4]
    assert sampler.sampling["engine"] == "continuous" and sampler.sampling["batch_size"] == 4
    sampler.asked = []
    accuracy(None, None, questions(5), samples=2, batch_size=4)
    assert [len(x) for x in sampler.asked] == [2, 2, 1] and sampler.sampling["engine"] == "loop"


@pytest.mark.parametrize("change", [
    dict(engine="static"), dict(seed=6), dict(samples=2), dict(temperature=0.5), dict(top_p=0.9), dict(top_k=3), dict(max_new_tokens=9),
    dict(template={"enable_thinking": False}), dict(weights="stage-2"), "question", "answer", "verifier"])
def test_other_questions_begin_the_answers_anew(sampler, tmp_path, change):
    how, task = dict(samples=3, batch_size=6, file=tmp_path / "a.jsonl", weights="stage-1"), questions(4)
    accuracy(None, None, task, **how)
    if change == "question":
        task.test[3].messages[0]["content"] = "other"
    elif change == "answer":
        task.test[3].answer = "edge"
    elif change == "verifier":
        task.spec.verifier = "math"
    sampler.asked = []
    accuracy(None, None, task, **how | (change if isinstance(change, dict) else {}))
    assert sum(sampler.asked, [])[:3] == ["q0", "q1", "q2"] and len(sum(sampler.asked, [])) == 4
    assert len(saved_answers(tmp_path / "a.jsonl")[1]) == 4


@pytest.mark.parametrize("harm, kept", [
    (lambda text: text[:-1], 5), (lambda text: text + '{"id": "9', 6), (lambda text: "\n".join(text.split("\n")[:5]) + "\n", 4),
    (lambda text: text.replace('"id": "3"', '"id": 3"'), 0), (lambda text: "", 0), (lambda text: "\0" * 10 + text, 0)])
def test_damaged_answers_are_asked_again(sampler, tmp_path, harm, kept):
    """Six prompts, two at a time. A line without its end, half a line more, half a batch, a broken line, nothing, noise."""
    file = tmp_path / "a.jsonl"
    whole = accuracy(None, None, questions(6), batch_size=2, file=file)
    file.write_text(harm(file.read_text()))
    sampler.asked = []
    assert accuracy(None, None, questions(6), batch_size=2, file=file) == whole
    assert sum(sampler.asked, []) == [f"q{i}" for i in range(kept, 6)]
    assert len(file.read_text().splitlines()) == 7


def test_after_every_batch_somebody_may_stop_it(sampler, tmp_path):
    seen = []

    def stop():
        seen.append(len(saved_answers(tmp_path / "a.jsonl")[1]))
        if len(seen) == 2:
            raise SystemExit

    with pytest.raises(SystemExit):
        accuracy(None, None, questions(6), batch_size=2, file=tmp_path / "a.jsonl", after_batch=stop)
    assert seen == [2, 4]


# ---- drift -------------------------------------------------------------------------------------


def rotation(degrees, n=4):
    angle, Q = math.radians(degrees), torch.eye(n)
    Q[0, 0] = Q[2, 2] = math.cos(angle)
    Q[2, 0], Q[0, 2] = math.sin(angle), -math.sin(angle)
    return Q


@pytest.mark.parametrize("degrees", [0.0, 0.001, 3.0, 60.0, 89.9])
def test_principal_angle_of_a_known_rotation(degrees):
    """The plane of e1, e2 turned towards e3 by d degrees: one angle d, the other 0."""
    U = torch.eye(4)[:, :2]
    angles = principal_angles(U, rotation(degrees) @ U)
    torch.testing.assert_close(angles, torch.tensor([0.0, degrees]), atol=1e-4, rtol=1e-4)


def test_scaled_spectrum_shifts_without_turning():
    W = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    d = matrix_drift(W, 1.1 * W, k=4)
    assert d["spectral_shift"] == pytest.approx(0.1, rel=1e-4) and d["update"] == pytest.approx(0.1, rel=1e-4)
    assert d["angle_max"] < 1e-2 and d["mask_overlap"] == 1.0 and d["changed"] == 1.0


def test_turned_matrix_keeps_its_spectrum():
    W = torch.diag(torch.tensor([4.0, 3.0, 0.2, 0.1]))
    d = matrix_drift(W, rotation(30) @ W, k=2)
    assert d["spectral_shift"] < 1e-6
    assert d["angle_max"] == pytest.approx(30, abs=1e-3) and d["angle_mean"] == pytest.approx(15, abs=1e-3)


def test_masks_of_a_known_change():
    """W is 10 x 10, its ten largest entries on the diagonal; one of those and one other change."""
    W = torch.diag(torch.arange(11.0, 21.0)) + 0.001
    V = W.clone()
    V[0, 0] += 1.0
    V[0, 1] += 0.0005
    d = matrix_drift(W, V, k=10)
    assert d["mask_overlap"] == 1.0
    assert d["changed"] == pytest.approx(0.02) and d["changed_in_mask"] == pytest.approx(0.5)
    assert d["update"] == pytest.approx(1.0 / W.norm().item(), rel=1e-3)


def test_weight_drift_of_folders_equals_that_of_modules(tmp_path):
    from safetensors.torch import save_file

    torch.manual_seed(0)
    nets = [torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5)) for _ in range(2)]
    for i, net in enumerate(nets):
        (tmp_path / str(i)).mkdir()
        save_file(net.state_dict(), tmp_path / str(i) / "model.safetensors")
    drift = weight_drift(*nets)
    assert set(drift) == {"0.weight", "mean"}                                  # no norm, no bias
    assert weight_drift(tmp_path / "0", tmp_path / "1") == drift
    with pytest.raises(ValueError, match="differ"):
        weight_drift(nets[0], torch.nn.Linear(6, 5))


def test_mmd_against_a_loop_and_its_limits():
    torch.manual_seed(0)
    x, y = torch.randn(5, 3), torch.randn(4, 3) + 2
    points = [p.double().tolist() for p in (*x, *y)]
    squared = [[sum((a - b) ** 2 for a, b in zip(p, q)) for q in points] for p in points]
    off = sorted(squared[i][j] for i in range(9) for j in range(9) if i != j)
    h2 = off[(len(off) - 1) // 2]
    k = [[math.exp(-d / (2 * h2)) for d in row] for row in squared]
    expected = (sum(k[i][j] for i in range(5) for j in range(5)) / 25 + sum(k[i][j] for i in range(5, 9) for j in range(5, 9)) / 16
                - 2 * sum(k[i][j] for i in range(5) for j in range(5, 9)) / 20)
    assert mmd(x, y) == pytest.approx(expected, rel=1e-9)
    assert mmd(x, x) == 0.0 and 0 < mmd(x, x + 0.1) < mmd(x, y)


def test_equal_programs_are_run_once(monkeypatch):
    import eval as evaluation  # the module, to count its calls; elsewhere names are imported from it

    runs = []
    monkeypatch.setattr(evaluation, "run_program", lambda program, tests, timeout: (runs.append(program), (1, ""))[1])
    example = gold(tests=["assert only_here(1) == 2"])
    for body in ("return x + 1", "return x + 1", "return x + 2"):
        evaluation.verify("code", f"```python\ndef only_here(x):\n    {body}\n```", example)
    assert len(runs) == 2


def test_parquet_and_csv_are_read_like_json(tmp_path):
    import datasets

    rows = [{"prompt": f"q{i}", "answer": str(i)} for i in range(10)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("prompt,answer\n" + "".join(f"q{i},{i}\n" for i in range(10)))
    expected = load_task(dict(name="t", verifier="math", path=rows_file(tmp_path, rows)))
    for name in ("rows.parquet", "rows.csv"):
        task = load_task(dict(name="t", verifier="math", path=str(tmp_path / name)))
        assert (task.train, task.test) == (expected.train, expected.test)
