"""The paper's data sets: every task file of configs/tasks against rows of the same form, all of them invented."""

import base64
import datetime
import json
import pickle
import re
import zlib
from pathlib import Path

import datasets
import pytest
import yaml

from continual import ConfigError, load_config
from eval import Example, load_task, verify

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "configs" / "tasks").glob("*.yaml"))
BOX = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def config(tmp_path, **entries):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"model": "m", "out_dir": "o"} | entries))
    return load_config(file)


def shipped(tmp_path, name):
    """The TaskSpec of a shipped task file, by way of a config that names it."""
    return config(tmp_path, tasks=[str(ROOT / "configs" / "tasks" / f"{name}.yaml")]).tasks[0]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """hub[id or (id, subset)] = rows of a dataset, hub[URL] = text of a file; `hub.asked`: what was asked for, and how."""
    class Hub(dict):
        asked = []

    rows = Hub()

    def load_dataset(path, subset=None, **how):
        rows.asked.append((path, subset, how))
        return iter(rows[(path, subset) if subset else path])

    def download(self, url):
        rows.asked.append((url, None, {}))
        file = tmp_path / url.replace("/", "_")
        file.write_text(rows[url], encoding="utf-8")
        return str(file)

    monkeypatch.setattr(rows.__class__, "asked", [])
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.DownloadManager, "download", download)
    return rows


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def asked(examples):
    return {e.messages[-1]["content"]: e for e in examples}


# ---- the files themselves ----------------------------------------------------------------------


def test_there_is_a_file_for_each_set():
    assert {f.stem for f in FILES} == set(
        "dapo-math aime24 aime25 math500 sciknoweval gpqa-diamond toolalpaca bfcl-multiple dolci-code lcb-v6 zebralogic "
        "mmlu-redux".split())


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_every_task_file_says_where_its_rows_are_from(tmp_path, file):
    """Source, filter, prompt, verifier, licence, access, revision, a row: and the row is JSON with the columns read."""
    text = file.read_text()
    head = "".join(line[2:] + "\n" for line in text.splitlines() if line.startswith("# "))
    for word in ("filter ", "prompt ", "verifier ", "invented"):
        assert word in head
    assert re.search(r"^(hub|files) ", head, re.MULTILINE) and re.search("(?i)licence|apache|MIT|CC-BY|ODC", head)
    assert "not gated" in head or "GATED" in head
    spec = shipped(tmp_path, file.stem)
    assert re.fullmatch("[0-9a-f]{40}", spec.revision or "") or re.search("[/@][0-9a-f]{40}/", spec.path) \
        or "# revision: not known" in text
    assert spec.path in text and len(spec.name) <= 8
    sample = head[head.index("invented"):]
    for name in re.findall(r"\{([A-Za-z_ ]+)[.}]", spec.prompt + (spec.system or "")):
        assert name in ("options", "tools", "signature") or f'"{name}"' in sample


def test_the_whole_sequence_reads_as_one_config(tmp_path):
    """Four to train on, six out of distribution; names that differ; overrides reach into the files."""
    file = tmp_path / "config.yaml"
    (tmp_path / "tasks").symlink_to(ROOT / "configs" / "tasks")
    file.write_text("""
model: m
out_dir: o
tasks:
  - tasks/dapo-math.yaml
  - {file: tasks/sciknoweval.yaml, test_limit: 100}
  - tasks/toolalpaca.yaml
  - {file: tasks/dolci-code.yaml, steps: 20}
ood: [tasks/math500.yaml, tasks/gpqa-diamond.yaml, tasks/bfcl-multiple.yaml, tasks/lcb-v6.yaml, tasks/zebralogic.yaml,
  tasks/mmlu-redux.yaml]
""")
    c = load_config(file, ["tasks.0.test.1.path=x.jsonl", "tasks.2.path=y.jsonl", "ood.5.test_limit=7"])
    assert [t.name for t in c.tasks] == ["math", "science", "tool", "code"]
    assert [t.name for t in c.ood] == ["math500", "gpqa", "bfcl", "lcb", "zebra", "mmlu"]
    assert [t.name for t in c.tasks[0].test] == ["aime24", "aime25"]
    assert (c.tasks[0].test[1].path, c.tasks[2].path, c.ood[5].test_limit) == ("x.jsonl", "y.jsonl", 7)
    assert (c.tasks[1].test_limit, c.tasks[3].steps, c.tasks[3].test_limit) == (100, 20, 500)


@pytest.mark.parametrize("entries, message", [
    (dict(tasks=["none.yaml"]), r"config.yaml: tasks.0.file: can't read .*none.yaml: FileNotFoundError"),
    (dict(tasks=["list.yaml"]), "tasks.0.file: .*list.yaml must be a mapping"),
    (dict(tasks=["chain.yaml"]), "tasks.0.file: .*chain.yaml must be a mapping of a task's settings, without another file"),
    (dict(tasks=["good.yaml", {"file": "typo.yaml"}]), "tasks.1.verifer: no such key; did you mean verifier?"),
    (dict(tasks=["good.yaml"], ood=["good.yaml"]), r"tasks: the names \['t', 't'\] must differ"),
    (dict(tasks=["good.yaml"], ood=[3]), "ood.0: 3 must be a mapping"),
    (dict(tasks=["self.yaml"]), "tasks: a task file names itself among its tests"),
    (dict(tasks=["good.yaml"], ood=[{"file": "good.yaml", "name": "o", "answer_is": "letter"}]),
     "ood.0.answer_is: 'letter' isn't allowed; it must be one of label, index, text"),
    (dict(tasks=[{"file": "good.yaml", "time_limit": 0}]), "tasks.0.time_limit: 0.0 isn't allowed; it must be above 0"),
])
def test_bad_task_files_stop_with_one_line(tmp_path, entries, message):
    good = "{name: t, path: p, verifier: math}"
    for name, text in {"list": "[1]", "chain": "{file: good.yaml}", "good": good, "typo": "{name: u, path: p, verifer: math}",
                       "self": "{name: t, path: p, verifier: math, test: [self.yaml]}"}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        config(tmp_path, **entries)
    assert "\n" not in str(error.value)


def test_files_are_found_beside_the_file_that_names_them(tmp_path):
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "rows.jsonl").write_text("")
    (tmp_path / "own.jsonl").write_text("")
    (tmp_path / "sets" / "part.yaml").write_text("{name: part, path: rows.jsonl, verifier: math}")
    (tmp_path / "sets" / "set.yaml").write_text("{name: set, path: rows.jsonl, verifier: math, test: [part.yaml]}")
    tasks = config(tmp_path, tasks=["sets/set.yaml", {"file": "sets/part.yaml", "path": "own.jsonl"}]).tasks
    assert tasks[0].path == tasks[0].test[0].path == str(tmp_path / "sets" / "rows.jsonl")
    assert tasks[1].path == str(tmp_path / "own.jsonl")


# ---- mathematics -------------------------------------------------------------------------------

WRAPPED = ("Solve the following math problem step by step. The last line of your response should be of the form Answer: "
           "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its "
           'own line after "Answer:".')


def dapo(question, answer, n=0):
    return {"data_source": "math_dapo", "prompt": [{"content": question, "role": "user"}], "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": f"{n:032x}"}}


def aime(hub):
    hub["math-ai/aime24"] = [
        {"id": 60, "problem": "Find $7n$.", "solution": r"\boxed{204}", "url": "u"},
        {"id": 61, "problem": "Find {n}.", "solution": r"\boxed{\frac{1}{2}}", "url": "u"}]
    hub["math-ai/aime25"] = [{"problem": "Find the number of divisors of 144.", "answer": "15", "id": "0"}]


def test_dapo_math_is_unwrapped_kept_once_and_tested_on_aime(tmp_path, hub):
    aime(hub)
    questions = ["Find the sum\n\nof {odd} integers.", "Solve the following: $x$?", "Find $7n$.", "Is \"Answer:\" a word?"]
    rows = [dapo(WRAPPED.format(q), str(81 - 90 * i), i) for i, q in enumerate(questions)]
    bare = dapo(" A bare one, as in the processed copy \n", "-9")
    hub["BytedTsinghua-SIA/DAPO-Math-17k"] = [*rows, *rows, bare, *rows]
    task = load_task(shipped(tmp_path, "dapo-math"))
    train, test = asked(task.train), asked(task.test)
    assert set(train) == {q.strip() + BOX for q in (*questions[:2], questions[3], "A bare one, as in the processed copy")}
    assert train[questions[1] + BOX].answer == "-9" and all(len(e.messages) == 1 for e in task.train)
    assert {q: e.answer for q, e in test.items()} == {
        "Find $7n$." + BOX: "204", "Find {n}." + BOX: r"\frac{1}{2}", "Find the number of divisors of 144." + BOX: "15"}
    assert task.dropped == {"asked before": 8, "also in the test rows": 1}
    assert verify("math", r"so \boxed{-9}", train[questions[1] + BOX]).reward == 1.0
    assert verify("math", r"so \boxed{9}", train[questions[1] + BOX]).reward == 0.0
    assert [(path, how) for path, _, how in hub.asked] == [
        ("BytedTsinghua-SIA/DAPO-Math-17k", {"split": "train", "revision": "65877096c24ffa7abc4e4fa5edb95cf3413a5674"}),
        ("math-ai/aime24", {"split": "test", "revision": "83a7f387baaa524a8bda0022eac0541582297103"}),
        ("math-ai/aime25", {"split": "test", "revision": "563bb8404243c5f09de6ec262f2db674fe5bce9b"})]


def test_math500(tmp_path, hub):
    hub["math-ai/math500"] = [
        {"problem": f"What is ${n}+3\\cdot 4$?", "solution": "s", "answer": r"\frac{%d}{2}" % n, "subject": "p", "level": 1,
         "unique_id": f"test/{n}.json"} for n in range(3)]
    task = load_task(shipped(tmp_path, "math500"), evaluate_only=True)
    assert len(task.test) == 3 and task.train == []
    example = asked(task.test)["What is $1+3\\cdot 4$?" + BOX]
    assert [verify("math", rf"\boxed{{{x}}}", example).reward for x in ("0.5", r"\frac{2}{4}", "2")] == [1.0, 1.0, 0.0]


# ---- science -----------------------------------------------------------------------------------


def sciknow(n, key="B", texts=("CH4", "C2H6O", "H2O", "NH3"), domain="Chemistry", level="L3", type="mcq-4-choices"):
    return {"prompt": {"default": "d"}, "question": f"Which compound {n}?", "answer": "", "type": type, "domain": domain,
            "details": {"level": level, "task": "t", "subtask": "t", "source": "s"}, "answerKey": key,
            "choices": {"text": list(texts), "label": list("ABCD"[: len(texts)])}}


def test_sciknoweval_is_filtered_and_asked_as_the_papers_code_asks(tmp_path, hub):
    hub["hicai-zju/SciKnowEval", "v2"] = [
        *(sciknow(n) for n in range(10)), sciknow(10, "A", ("yes", "no"), type="mcq-2-choices"), sciknow(11, domain="Physics"),
        sciknow(12, level="L2"), sciknow(13, "", (), type="open-ended-qa"), sciknow(14, type="true_or_false"), sciknow(15, "")]
    task = load_task(shipped(tmp_path, "sciknoweval"))
    assert task.dropped == {"filtered out": 4, "without an answer": 1} and len(task.train) + len(task.test) == 11
    example = asked(task.train + task.test)["Which compound 3?\n\nA: CH4\nB: C2H6O\nC: H2O\nD: NH3\nPlease reason step by step."]
    system = example.messages[0]["content"]
    assert system.startswith("\nGiven a question and four options, please") and system.endswith("<answer>\nA\n</answer>\n")
    assert verify("mcq", "<reasoning>A?</reasoning>\n<answer>\nB\n</answer>", example).reward == 1.0
    assert verify("mcq", r"<answer>\nC\n</answer>", example).reward == 0.0
    assert asked(task.train + task.test)["Which compound 10?\n\nA: yes\nB: no\nPlease reason step by step."].answer == "A"


def test_sciknoweval_with_boxed_answers_is_two_keys(tmp_path, hub):
    hub["hicai-zju/SciKnowEval", "v2"] = [sciknow(n) for n in range(10)]
    entry = {"file": str(ROOT / "configs" / "tasks" / "sciknoweval.yaml"), "verifier": "mcq_boxed", "system": None,
             "prompt": "{question}\n{options}" + BOX.replace("{}", "{{}}")}
    example = load_task(config(tmp_path, tasks=[entry]).tasks[0]).train[0]
    assert len(example.messages) == 1 and example.messages[0]["content"].endswith("D: NH3" + BOX)
    assert verify("mcq_boxed", r"\boxed{B}", example).reward == 1.0


def test_gpqa_options_are_shuffled_alike_every_time(tmp_path, hub):
    hub["Idavidrein/gpqa", "gpqa_diamond"] = [
        {"Question": f"Which boson {n}?", "Correct Answer": f"right {n}\n", "Incorrect Answer 1": "bar", "Incorrect Answer 2": " baz",
         "Incorrect Answer 3": "qux", "Record ID": f"rec{n}", "Explanation": "x"} for n in range(40)]
    first, again = (load_task(shipped(tmp_path, "gpqa-diamond"), evaluate_only=True) for _ in range(2))
    assert first.test == again.test and len(first.test) == 40
    for example in first.test:
        n = re.search(r"boson (\d+)\?", example.messages[0]["content"]).group(1)
        question, *options, ask = example.messages[0]["content"].split("\n")
        assert question == f"Which boson {n}?" and "\n" + ask == BOX
        assert sorted(o[3:] for o in options) == ["bar", "baz", "qux", f"right {n}"] and [o[:3] for o in options] == ["A. ", "B. ", "C. ", "D. "]
        assert f"{example.answer}. right {n}" in options
        assert verify("mcq_boxed", rf"\boxed{{{example.answer}}}", example).reward == 1.0
    assert {e.answer for e in first.test} == set("ABCD")


# ---- tool use ----------------------------------------------------------------------------------


def test_toolalpaca_rows_are_taken_as_they_stand(tmp_path, hub):
    spec = shipped(tmp_path, "toolalpaca")
    rows = []
    for n, given in enumerate([{"kind": "green", "minutes": 3}, {"where": {"city": "Oslo {old town}"}}, {}]):
        prompt = f"Your task is to answer the user's question using available tools. \nQuestion: Brew {n}."
        rows.append({"prompt": prompt, "description": prompt, "idx": n, "dataset": "tooluse", "system": None, "tests": None,
                     "answer": json.dumps([{"Action": "[Optional]tea.brew", "Action_Input": json.dumps(given)}]),
                     "kind": "tooluse", "elo": 1500})
    hub[spec.path], hub[spec.test_path] = lines(rows[:2]), lines(rows[1:])
    task = load_task(spec)
    assert ([e.id for e in task.train], [e.id for e in task.test]) == (["0"], ["1", "2"])      # row 1 is a test row
    assert task.train[0].messages == [{"role": "user", "content": rows[0]["prompt"]}]
    answer = 'Thought: x\nAction: [Optional]tea.brew\nAction Input: {"where": {"city": "Oslo {old town}"}}'
    assert [verify("tool", answer, e).reward for e in task.test] == [1.0, 0.0]


AREA = {"id": "multiple_0", "question": [[{"role": "user", "content": "Area of a {triangle}?"}]], "function": [
    {"name": "shape.triangle_area", "description": "Area of a triangle.", "parameters": {"type": "dict", "properties": {
        "base": {"type": "integer", "description": "Base length."}, "unit": {"type": "string", "description": "Unit.", "default": "cm"}},
        "required": ["base"]}},
    {"name": "circle", "description": "Area of a circle.", "parameters": {"type": "dict", "properties": {
        "r": {"type": "float", "description": "Radius."}}, "required": ["r"]}}]}


def bfcl(tmp_path, hub, allowed):
    spec = shipped(tmp_path, "bfcl-multiple")
    hub[spec.path] = lines([AREA, AREA | {"id": "multiple_1", "question": [[{"role": "user", "content": "Another?"}]]}])
    hub[spec.join] = lines([{"id": "multiple_1", "ground_truth": [{"circle": {"r": [1]}}]},
                            {"id": "multiple_0", "ground_truth": [{"shape.triangle_area": allowed}]}])
    return {e.id: e for e in load_task(spec, evaluate_only=True).test}


def test_bfcl_prompt_and_answers_joined_by_id(tmp_path, hub):
    example = bfcl(tmp_path, hub, {"base": [6], "unit": ["cm", ""]})["multiple_0"]
    assert example.messages == [{"role": "user", "content": """\
Your task is to answer the user's question using available tools.
You have access to the following tools:
Name: Tools
Description: A set of functions/tools that you can use to answer the user's question.
Documentation:
shape.triangle_area: Area of a triangle.
Parameters: {"base": "integer. Base length.", "unit": "string (optional). Unit."}
Output: Successful response.
 - Format: application/json
circle: Area of a circle.
Parameters: {"r": "float. Radius."}
Output: Successful response.
 - Format: application/json

Use the following format:
Thought: you should always think about what to do
Action: the action to take, should be one of the tool names.
Action Input: the input to the action, must be in JSON format. All of the action input must be realistic and from the user.

Begin!
Question: Area of a {triangle}?"""}]


@pytest.mark.parametrize("allowed, given, reward", [
    ({"base": [6], "unit": ["cm", ""]}, {"base": 6}, 1.0),                    # "" among the values: may be left out
    ({"base": [6], "unit": ["cm", ""]}, {"base": 6, "unit": "CM"}, 1.0),
    ({"base": [6], "unit": ["cm", ""]}, {"base": 6.0, "unit": "cm"}, 1.0),
    ({"base": [6], "unit": ["cm", ""]}, {"base": 6, "unit": "mm"}, 0.0),
    ({"base": [6], "unit": ["cm", ""]}, {"unit": "cm"}, 0.0),                 # base is missing
    ({"base": [6], "unit": ["cm", ""]}, {"base": 6, "height": 4}, 0.0),       # nobody asked for a height
    ({"base": [6], "unit": ["cm", ""]}, {"base": "6"}, 0.0),
    ({"base": [1], "unit": [True]}, {"base": True, "unit": True}, 0.0),       # true isn't 1
    ({"base": [1], "unit": [True]}, {"base": 1, "unit": 1}, 0.0),
    ({"base": [5, 7], "unit": ["April 1, 2024"]}, {"base": 7, "unit": "april 1 2024"}, 1.0),
    ({"base": [[3, 4], [4, 3]], "unit": [["a b", "c"]]}, {"base": [4, 3], "unit": ["A-B", "c"]}, 1.0),
    ({"base": [[3, 4]], "unit": [""]}, {"base": [4, 3]}, 0.0),                # a list has its order
    ({"base": [[3, 4]], "unit": [""]}, {"base": [3, 4, 5]}, 0.0),
    ({"base": [{"min": [3, 4], "max": [9, ""]}], "unit": [""]}, {"base": {"min": 4}}, 1.0),
    ({"base": [{"min": [3], "max": [9]}], "unit": [""]}, {"base": {"min": 3}}, 0.0),
    ({"base": [[{"x": [1]}, {"x": [2, 3]}]], "unit": [""]}, {"base": [{"x": 1}, {"x": 3}]}, 1.0),
    ({"base": [None], "unit": [{"n": 4}]}, {"base": None, "unit": {"n": 4}}, 1.0),  # a bare value allows itself
])
def test_bfcl_lists_of_allowed_values(tmp_path, hub, allowed, given, reward):
    example = bfcl(tmp_path, hub, allowed)["multiple_0"]
    response = f"Thought: t\nAction: shape.triangle_area\nAction Input: {json.dumps(given)}"
    assert verify("tool_allowed", response, example).reward == reward
    assert verify("tool_allowed", response.replace("shape.", ""), example).reward == 0.0
    assert verify("tool_allowed", f"{response}\n{response}", example).reward == 0.0
    assert verify("tool_allowed", "Action: shape.triangle_area\nAction Input: none", example).well_formed is False


# ---- code --------------------------------------------------------------------------------------


def dolci(n, prompt, tests, kind="code", constraint=None):
    return {"ground_truth": [json.dumps(tests)], "dataset": [kind], "id": f"request-{n}", "constraint_type": constraint, "prompt": prompt}


def test_dolci_code_keeps_every_letter_of_its_prompts(tmp_path, hub):
    texts = ["user: reverse a list", "user: user: twice", "user: sure, use a set", "no prefix"]
    tests = ["assert slow(1) == 2", "from math import inf\nassert slow(inf) == inf"]
    rows = [dolci(i, text, tests) for i, text in enumerate(texts)] + [
        dolci(8, "user: stdio", [{"input": "1", "output": "2"}], "code_stdio"), dolci(9, "user: c", tests, constraint="length"),
        dolci(10, "user: sum", "5", "math")]
    hub["allenai/Dolci-Think-RL-7B"] = rows + [dolci(20 + i, f"user: p{i}", tests) for i in range(16)]
    task = load_task(shipped(tmp_path, "dolci-code"))
    everything = asked(task.train + task.test)
    assert {"reverse a list", "user: twice", "sure, use a set", "no prefix"} <= set(everything)
    assert task.dropped == {"filtered out": 3} and (len(task.train), len(task.test)) == (18, 2)
    assert hub.asked[0][2] == {"split": "train", "revision": "0fb6466d31ef3a9dd16985ef635e6429e05a6491", "streaming": True,
                               "columns": ["prompt", "ground_truth", "dataset", "id", "constraint_type"]}
    program = "```python\nimport time\ndef slow(x):\n    time.sleep({})\n    return x + 1\n```"
    assert verify("code", program.format(1.2), everything["no prefix"]).reward == 1.0
    verdict = verify("code", program.format(30), everything["no prefix"])
    assert verdict.reward == 0.0 and "time limit of 2 s exceeded" in verdict.feedback


def lcb(n, tests, date="2025-03-01T00:00:00", start="", metadata="{}"):
    return {"question_title": "t", "question_content": f"Problem {n}: print 2n for {{n}}.", "platform": "atcoder",
            "question_id": f"abc{n}", "contest_id": "abc", "contest_date": date, "starter_code": start, "difficulty": "easy",
            "public_test_cases": "[]", "private_test_cases": tests, "metadata": metadata}


def packed(value, protocol=4):
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol=protocol))).decode()


STDIN = json.dumps([{"input": "5\n", "output": "10\n", "testtype": "stdin"}, {"input": "7\n", "output": "14\n", "testtype": "stdin"}])


def lcb_task(tmp_path, hub, rows):
    spec = shipped(tmp_path, "lcb-v6")
    assert spec.path == "hf://datasets/livecodebench/code_generation_lite@0fe84c3912ea0c4d4a78037083943e8f0c4dd505/test6.jsonl"
    hub[spec.path] = lines(rows)
    return load_task(spec, evaluate_only=True)


def test_lcb_window_prompt_and_packed_tests(tmp_path, hub):
    dates = {1: "2025-01-31T23:59:59", 2: "2025-02-01T00:00:00", 3: "2025-04-30 12:00:00", 4: "2025-05-01T00:00:00", 5: "2024-03-01"}
    rows = [lcb(n, STDIN if n < 3 else packed(STDIN), date) for n, date in dates.items()]
    task = lcb_task(tmp_path, hub, rows)
    assert task.dropped == {"filtered out": 3} and len(task.test) == 2
    start = "You are a coding expert. You will be given a coding problem, and you need to write a correct Python program that " \
        "matches the specification and passes all tests. The time limit is 1 second. You may start by outlining your thought " \
        "process. In the end, please provide the complete code in a code block enclosed with ``` ```.\n\n"
    tests = [{"input": "5\n", "output": "10\n"}, {"input": "7\n", "output": "14\n"}]
    assert {q: e.tests for q, e in asked(task.test).items()} == {start + f"Problem {n}: print 2n for {{n}}.": tests for n in (2, 3)}
    assert [verify("code", f"```python\nprint({k} * int(input()))\n```", task.test[0]).reward for k in (2, 3)] == [1.0, 0.0]
    assert task.test[0].time_limit == 6


def test_lcb_reads_a_date_that_is_one(tmp_path, hub):
    """As Parquet copies of the set have it."""
    spec = shipped(tmp_path, "lcb-v6")
    spec.path = "someone/a-copy"
    hub[spec.path] = [lcb(1, STDIN, datetime.datetime(2025, 2, 1)), lcb(2, STDIN, datetime.datetime(2025, 1, 31))]
    assert [e.tests for e in load_task(spec, evaluate_only=True).test] == [[{"input": "5\n", "output": "10\n"}, {"input": "7\n", "output": "14\n"}]]


def test_lcb_functional_tests_call_the_named_function(tmp_path, hub):
    tests = json.dumps([{"input": "[3, 1, 2]\n2", "output": "[2, 3]", "testtype": "functional"}])
    start = "class Solution:\n    def top(self, nums: List[int], k: int) -> List[int]:\n        "
    example = lcb_task(tmp_path, hub, [lcb(1, packed(tests), start=start, metadata='{"func_name": "top"}')]).test[0]
    assert example.messages[0]["content"].endswith(
        f"for {{n}}.\n\nYour solution should have the following signature: ```python\n{start}\n```")
    assert example.tests == [{"input": "[3, 1, 2]\n2", "output": "[2, 3]", "fn_name": "top"}]
    right = f"```python\n{start}return sorted(nums)[-k:]\n```"                # List comes from the prelude
    assert verify("code", right, example).reward == 1.0
    assert verify("code", right.replace("-k:", "-k - 1:"), example).reward == 0.0
    assert verify("code", "```python\nprint([2, 3])\n```", example).reward == 0.0


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("length", [1, 300, 70_000])
def test_a_packed_text_is_read_whatever_the_pickle_protocol(tmp_path, hub, protocol, length):
    text = json.dumps([{"input": "é\u2028\n" + "x" * length, "output": "10\n", "testtype": "stdin"}], ensure_ascii=False)
    assert lcb_task(tmp_path, hub, [lcb(1, packed(text, protocol))]).test[0].tests == [{"input": "é\u2028\n" + "x" * length, "output": "10\n"}]


class Trap:
    def __reduce__(self):
        return open, ("trap-was-sprung", "w")


@pytest.mark.parametrize("tests, message", [
    (packed(Trap()), "a pickle with (GLOBAL|STACK_GLOBAL|TUPLE2|REDUCE)"),
    (packed(Trap(), 0), "a pickle with (GLOBAL|MARK)"),
    (packed([json.loads(STDIN)]), "a pickle with EMPTY_LIST"),
    (packed(("a", "b"), 2), "a pickle with TUPLE2"),
    (packed(5), "a pickle with BININT1"),
    (base64.b64encode(zlib.compress(b"\x80\x04N.")).decode(), "a pickle with NONE"),
    (base64.b64encode(zlib.compress(b"\x80\x04.")).decode(), "a pickle of 0 texts"),
    (base64.b64encode(zlib.compress(pickle.dumps(STDIN)[:-30])).decode(), "row 0"),
    (base64.b64encode(b"no zlib").decode(), "private tests: Error -3"),
    ("not base64!", "row 0"),
    (packed("no JSON"), "row 0"),
    (packed(STDIN)[:-40], "row 0"),
])
def test_nothing_of_a_row_is_ever_unpickled(tmp_path, hub, monkeypatch, tests, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        lcb_task(tmp_path, hub, [lcb(0, tests)])
    assert not (tmp_path / "trap-was-sprung").exists() and "\n" not in str(error.value)
    assert str(error.value).startswith("task lcb, row 0 of hf://")


# ---- logic and knowledge -----------------------------------------------------------------------


def test_zebralogic_answers_are_texts_of_options(tmp_path, hub):
    names = [f"house {n}" for n in range(1, 11)]
    row = {"id": "z#0", "puzzle": "There are houses.", "question": "Where does Bob live?", "choices": names[:2], "answer": "house 2",
           "created_at": "t"}
    hub["allenai/ZebraLogicBench-private", "mc_mode"] = [
        row, row | {"question": "q1", "choices": names, "answer": "house 10"}, row | {"question": "q2", "answer": "house 3"},
        row | {"question": "q3", "choices": ["B", "A"], "answer": "A"}, row | {"question": "q4", "choices": ["A", "A"], "answer": "A"}]
    task = load_task(shipped(tmp_path, "zebralogic"), evaluate_only=True)
    assert {q.split("\n")[1]: e.answer for q, e in asked(task.test).items()} == {"Where does Bob live?": "B", "q1": "J", "q3": "B"}
    assert "There are houses.\nWhere does Bob live?\nA. house 1\nB. house 2" + BOX in asked(task.test)
    assert task.dropped == {"with an answer that isn't one of the options": 2}
    assert hub.asked[0][2]["split"] == "test[:500]"


def test_mmlu_redux_reads_subset_after_subset(tmp_path, hub):
    spec = shipped(tmp_path, "mmlu-redux")
    assert len(set(spec.subset)) == 57
    for i, name in enumerate(spec.subset):                                    # null columns have other types in some subsets
        hub[spec.path, name] = [
            {"question": f"{name} {n}?", "choices": ["red", "green", "blue", "plaid"], "answer": n % 4, "error_type": "ok" if n else
             "wrong_groundtruth", "source": float("nan") if i % 2 else None, "correct_answer": None, "potential_reason": None}
            for n in range(12)]
    task = load_task(spec, evaluate_only=True)
    assert len(task.test) == 500 and task.dropped == {"filtered out": 57}
    assert len({e.messages[0]["content"].split()[0] for e in task.test}) == 57     # drawn from all subjects, not the first ones
    spec.test_limit = None
    everything = asked(load_task(spec, evaluate_only=True).test)
    assert len(everything) == 57 * 11
    assert everything["virology 7?\nA. red\nB. green\nC. blue\nD. plaid" + BOX].answer == "D"
    assert verify("mcq_boxed", r"\boxed{\text{A}}", everything["anatomy 8?\nA. red\nB. green\nC. blue\nD. plaid" + BOX]).reward == 1.0


# ---- the mechanisms they share -----------------------------------------------------------------


def spec(**fields):
    return {"name": "t", "verifier": "math", "path": "set"} | fields


def test_a_task_may_be_tested_on_several_sets(hub):
    hub["set"] = [{"prompt": f"p{n}", "answer": "1"} for n in range(5)]
    hub["a"] = [{"q": "p1", "answer": "1"}, {"q": "?", "answer": ""}]
    hub["b"] = [{"prompt": f"b{n}", "answer": "2"} for n in range(4)]
    parts = [spec(name="a", path="a", prompt="{q}"), spec(name="b", path="b", test_limit=3)]
    task = load_task(spec(test=parts))
    assert sorted(e.messages[0]["content"] for e in task.train) == ["p0", "p2", "p3", "p4"]
    assert len(task.test) == 4 and task.test[0].messages[0]["content"] == "p1" and {e.answer for e in task.test[1:]} == {"2"}
    assert task.dropped == {"without an answer": 1, "also in the test rows": 1}
    assert len(load_task(spec(test=parts), evaluate_only=True).test) == 4 and hub.asked[-1][0] == "b"
    with pytest.raises(ValueError, match="task t: its test a must have the same verifier, exact"):
        load_task(spec(test=parts, verifier="exact"))


def test_evaluate_only_takes_the_test_rows_where_there_are_some(hub, tmp_path):
    hub["set"] = [{"prompt": f"p{n}", "answer": "1"} for n in range(5)]
    hub["held"] = [{"prompt": "h", "answer": "1"}]
    assert [e.messages[0]["content"] for e in load_task(spec(test_path="held"), evaluate_only=True).test] == ["h"]
    assert len(load_task(spec(), evaluate_only=True).test) == 5 and len(load_task(spec(test_limit=2), evaluate_only=True).test) == 2


def test_failures_while_rows_stream_in_name_the_set(hub):
    def broken():
        yield {"prompt": "p", "answer": "1"}
        raise OSError("connection\nlost")

    hub["set"] = broken()
    with pytest.raises(ValueError, match="^task t: path: can't read set: OSError: connection lost$"):
        load_task(spec())


def test_a_row_without_its_other_half_is_an_error(hub):
    hub["set"] = [{"id": "1", "prompt": "p"}]
    hub["https://x/y.jsonl"] = lines([{"id": "2", "answer": "1"}])
    with pytest.raises(ValueError, match="task t: path: can't read set: its row with id '1' has no other half in https://x/y.jsonl"):
        load_task(spec(join="https://x/y.jsonl"))


@pytest.mark.parametrize("fields, message", [
    (dict(where={"prompt": {"mach": "x"}}), "row 0 of set: KeyError: 'match'"),
    (dict(remove="("), "row 0 of set: "),
    (dict(verifier="mcq_boxed", answer_is="index"), "row 0 of set: answer_is: index needs options"),
])
def test_settings_that_fit_no_row_say_so(hub, fields, message):
    hub["set"] = [{"prompt": "p", "answer": "1"}]
    with pytest.raises(ValueError, match=message):
        load_task(spec(**fields))


def test_files_at_urls_are_read_by_their_names(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps([{"prompt": f"p{n}", "answer": "1"} for n in range(3)]))
    assert len(load_task(spec(path=f"file://{tmp_path}/rows.json"), evaluate_only=True).test) == 3


def test_streamed_columns_come_alone(tmp_path):
    """Against the real library: a Parquet dataset in a folder, two of its columns."""
    from eval import read_rows

    (tmp_path / "set").mkdir()
    rows = [{"prompt": f"p{n}", "answer": ["1"], "input_ids": list(range(50))} for n in range(4)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "set" / "train-00000-of-00001.parquet")
    read = list(read_rows(str(tmp_path / "set"), columns=["prompt", "answer"]))
    assert read == [{"prompt": f"p{n}", "answer": ["1"]} for n in range(4)]
    assert list(read_rows(str(tmp_path / "set"), split="train[:2]")) == rows[:2]


def test_example_without_a_time_limit_has_one_second():
    assert Example("0", [], "").time_limit == 1.0
