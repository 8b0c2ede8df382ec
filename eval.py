"""Evaluation: what is asked, how an answer is judged, and what a sequence of tasks did to the model.

A task is data: rows become examples (a chat and a gold answer), a verifier turns a response into a
verdict. After each stage the model is measured on every task, which fills the matrix

    R[i][j] = accuracy on task j after stage i,   row 0 is the base,   tasks and stages 1..K

    last               row K                            average    its mean
    gain               mean_j  R[j][j] - R[0][j]
    forgetting         mean_{j<K}  max_{1<=i<K} R[i][j] - R[K][j]            (Chaudhry et al. 2018)
    backward_transfer  mean_{j<K}  R[K][j] - R[j][j]                   (Lopez-Paz & Ranzato 2017)
    relative           100 (R[i][j] - R[0][j]) / R[0][j]
    pass@k             1 - C(n - c, k) / C(n, k), c right of n samples        (Chen et al. 2021)

How far a stage moved a weight matrix W = U diag(s) V^T:

    spectral shift     |s1 - s0| / |s0|, of the singular values before (0) and after (1)
    principal angles   of the top-k left singular vectors: their cosines are the singular values of U0^T U1

Where we differ from the official code, on purpose: the last balanced box of the whole response is
read (there the last 100 characters); a tool call is compared as a pair of name and arguments (there
all arguments are merged into one dictionary; `paper_scoring` brings that back); the code block that
defines what the tests call is run (there the longest); and there is a matrix at all.

    python eval.py RUN       measures a run's drift and draws its report again
    python eval.py A B       how far apart two models' weights are
"""

import atexit
import base64
import csv
import functools
import hashlib
import inspect
import itertools
import json
import math
import os
import pickletools
import random
import re
import select
import signal
import string
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
from tqdm import tqdm

from grpo import RolloutError, evaluating, rollout
from kernels import masked_mean


# ------------------------------------------------------------------------------------------------
# Tasks: rows become examples
# ------------------------------------------------------------------------------------------------


# What a setting may be, beyond its type: a test, and the words for it. continual.py reads them.
POSITIVE = (lambda x: 0 < x < math.inf, "above 0")
NOT_NEGATIVE = (lambda x: 0 <= x < math.inf, "0 or more")
AT_LEAST_1 = (lambda x: x >= 1, "at least 1")
SHARE = (lambda x: 0 <= x <= 1, "between 0 and 1")
PROPER_SHARE = (lambda x: 0 < x < 1, "above 0 and below 1")

# Characters of a prompt or a response; no verifier takes more than seconds for them.
LONGEST = 1_000_000


@dataclass
class TaskSpec:
    """Where a task's rows are and how to read them. Columns may be dotted: details.level, prompt.0.content.

    Rows as the official code prepares them (columns idx, kind, dataset, prompt, answer, perhaps
    system and tests) are taken as they stand, whatever the filter and the templates here say.
    """

    name: str                           # short, used in folders and tables
    path: str                           # a hub id, or a .json, .jsonl, .parquet or .csv file, here or at a URL
    verifier: Literal["math", "mcq", "mcq_boxed", "tool", "tool_allowed", "code", "exact"]
    subset: str | list[str] | None = None  # the hub's configuration name, or several to be read one after another
    split: str = "train"                # the hub's split
    revision: str | None = None         # a commit of the hub's repository, so that rows can't change
    columns: list[str] = field(default_factory=list)  # the hub's columns to stream; the others are never fetched
    join: str | None = None             # a second file: its columns are added to the rows of the same id
    decoder: Literal["none", "bfcl", "lcb"] = "none"  # code that unpacks a row; see DECODERS
    test: "list[TaskSpec]" = field(default_factory=list)  # the test rows are all rows of these
    test_path: str | None = None        # or those of this file or hub id
    test_split: str | None = None       # or of another split of a hub dataset; none of these: `test_share` is held out
    test_share: Annotated[float, PROPER_SHARE] = 0.1  # of the rows, after a fixed shuffle
    where: dict = field(default_factory=dict)  # column: a value, a list of allowed values, or {match: regular expression}
    system: str | None = None           # template of the system message
    prompt: str = "{prompt}"            # template of the user message; {options}: the rendered options
    remove: str | None = None           # regular expression: what of the user message is left out
    options: str | list[str] | None = None  # mcq: the column of the option texts (labels A, B, ...), or their columns, shuffled
    option_line: str = "{label}: {text}"  # template of one rendered option
    answer: str = "answer"              # column of the gold answer
    answer_pattern: str | None = None   # regular expression; its first group is the answer
    answer_is: Literal["label", "index", "text"] = "label"  # mcq: the option's label, its place from 0, or its text
    tests: str = "tests"                # code: column of the tests, a list or its JSON
    prelude: str = ""                   # code: lines put before every program
    time_limit: Annotated[float, POSITIVE] = 1.0  # code: seconds for a test, and ten times that for all of them
    reference: str | None = None        # template of a right response, which SFT learns from
    train_limit: Annotated[int | None, AT_LEAST_1] = None  # the first so many of the shuffled rows
    test_limit: Annotated[int | None, AT_LEAST_1] = None   # the first so many test rows; those of `path` are shuffled too
    steps: Annotated[int | None, AT_LEAST_1] = None        # this stage's steps, in place of stage_steps
    lr: Annotated[float | None, POSITIVE] = None           # this stage's learning rate, in place of lr
    paper_scoring: bool = False         # tool: the official, merged comparison


@dataclass
class Example:
    """One question. `answer` is the gold answer as text; `tests` belong to code."""

    id: str
    messages: list
    answer: str
    tests: list = field(default_factory=list)
    reference: str | None = None
    prelude: str = ""
    time_limit: float = 1.0


@dataclass
class Task:
    """What `load_task` returns; `dropped` counts the rows left out, by reason."""

    spec: TaskSpec
    train: list
    test: list
    dropped: dict


class _Template(string.Formatter):
    """str.format in one pass, where {a.b} is the column a.b: never an attribute, never code."""

    def get_field(self, name, args, kwargs):
        value = column(kwargs, name)
        if isinstance(value, (dict, list)):
            raise ValueError(f"column {name!r} holds a {type(value).__name__}, not a text; go on into it with a dot")
        return value, name


def column(row, path):
    """The value at a dotted path of a row, through dicts and lists. Raises ValueError with the columns there are."""
    value = row
    for key in path.split("."):
        try:
            value = value[int(key) if isinstance(value, list) else key]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"no column {path!r}; the row has {', '.join(map(str, row))}") from None
    return value


def is_file(path):
    """Whether a path names a local file of rows, rather than a dataset of the hub."""
    return Path(path).suffix.lower() in (".json", ".jsonl", ".csv", ".parquet")


def read_rows(path, subset=None, split="train", revision=None, columns=()):
    """Rows of a file or a hub dataset: an iterable of dicts.

    A file may be at a URL, https://... or hf://datasets/OWNER/NAME@REVISION/FILE; it is fetched once.
    .json may hold one array or one object a line: the official code ships both under that name.
    """
    suffix = Path(path).suffix.lower()
    if "://" in path:
        import datasets

        path = datasets.DownloadManager().download(path)
    if suffix in (".json", ".jsonl"):
        text = Path(path).read_text(encoding="utf-8-sig")
        if text.lstrip()[:1] == "[":
            return json.loads(text)
        return [json.loads(line) for line in text.split("\n") if line.strip()]   # splitlines() splits at U+2028 too
    if suffix == ".csv":
        with open(path, newline="", encoding="utf-8-sig") as f:
            return list(csv.DictReader(f))
    import datasets  # slow to import, and not needed for the formats above

    if suffix == ".parquet":
        return datasets.Dataset.from_parquet(str(path))
    how = {"columns": list(columns), "streaming": True} if columns else {}
    subsets = subset if isinstance(subset, list) else [subset]
    return itertools.chain.from_iterable(
        datasets.load_dataset(path, name, split=split, revision=revision, **how) for name in subsets)


def _bfcl(row):
    """The Berkeley leaderboard's functions as one text, and its answer [{name: {argument: allowed values}}] as calls."""
    tools, calls = [], []
    for function in row["function"]:
        needed = function["parameters"].get("required", [])
        arguments = {name: f"{of.get('type', 'any')}{'' if name in needed else ' (optional)'}. {of.get('description', '')}"
                     for name, of in function["parameters"]["properties"].items()}
        tools.append(f"{function['name']}: {function['description']}\nParameters: {json.dumps(arguments)}\n"
                     "Output: Successful response.\n - Format: application/json")
    for call in row["ground_truth"]:
        calls += [{"Action": name, "Action_Input": allowed} for name, allowed in call.items()]
    return {"tools": "\n".join(tools), "answer": json.dumps(calls)}


def _pickled_text(data):
    """The text in a pickle that holds one text and nothing else. Its opcodes are read; it is never run."""
    texts, names = [], {"PROTO", "FRAME", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "STOP"}
    for opcode, value, _ in pickletools.genops(data):
        if opcode.name in ("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"):
            texts.append(value)
        elif opcode.name not in names:
            raise ValueError(f"a pickle with {opcode.name}, where only a text is allowed")
    if len(texts) != 1:
        raise ValueError(f"a pickle of {len(texts)} texts, where one is allowed")
    return texts[0]


def _lcb(row):
    """LiveCodeBench's private tests, JSON as it is or in base64, zlib and pickle, and its starter code as a request."""
    tests, start = row["private_test_cases"], row["starter_code"]
    if not tests.lstrip().startswith("["):
        try:
            data = zlib.decompressobj().decompress(base64.b64decode(tests, validate=True), 1 << 30)
        except zlib.error as e:
            raise ValueError(f"private tests: {e}") from None
        tests = _pickled_text(data)
    name = json.loads(row["metadata"] or "{}").get("func_name")
    tests = [{k: t[k] for k in ("input", "output")} | ({"fn_name": name} if t["testtype"] == "functional" else {})
             for t in json.loads(tests)]
    signature = f"\n\nYour solution should have the following signature: ```python\n{start}\n```" if start.strip() else ""
    return {"tests": tests, "signature": signature}


DECODERS = {"none": lambda row: {}, "bfcl": _bfcl, "lcb": _lcb}  # row -> columns to add


def _is_prepared(row):
    """Whether a row has the form of the official code's own files."""
    return {"idx", "kind", "dataset", "prompt", "answer"} <= row.keys() and isinstance(row["prompt"], str)


def _matches(row, where):
    def fits(value, wanted):
        if isinstance(wanted, dict):
            return re.search(wanted["match"], str(value)) is not None
        return value in (wanted if isinstance(wanted, list) else [wanted])

    return all(fits(column(row, c), wanted) for c, wanted in where.items())


def _gold(row, spec):
    """The gold answer as text, "" if there is none."""
    answer = column(row, spec.answer)
    answer = json.dumps(answer) if isinstance(answer, (list, dict)) else "" if answer is None else str(answer).strip()
    if answer and spec.answer_pattern:
        found = re.search(spec.answer_pattern, answer, re.DOTALL)
        answer = found.group(1).strip() if found else ""
    return answer


def _option_texts(row, spec, index):
    """The options of a row, in the order in which they're shown."""
    if isinstance(spec.options, str):
        return column(row, spec.options)
    texts = [str(column(row, name)).strip() for name in spec.options]
    random.Random(index).shuffle(texts)                                       # as columns, the right one always comes first
    return texts


def _label(answer, spec, texts):
    """The label of the option whose place or text is `answer`; "" if there isn't exactly one."""
    if texts is None:
        raise ValueError(f"answer_is: {spec.answer_is} needs options")
    known = [str(text).strip() if spec.answer_is == "text" else str(i) for i, text in enumerate(texts)]
    return string.ascii_uppercase[known.index(answer)] if known.count(answer) == 1 else ""


def _example(row, spec, index):
    """One row -> Example, or the reason (str) why nobody could grade it. Raises ValueError."""
    fill, labels, texts = _Template().format, None, None
    if _is_prepared(row):
        spec = TaskSpec(spec.name, spec.path, spec.verifier, system="{system}" if row.get("system") else None,
                        reference=spec.reference, prelude=spec.prelude, time_limit=spec.time_limit)
    row = row | DECODERS[spec.decoder](row)
    if spec.options:
        texts = _option_texts(row, spec, index)
        labels = list(string.ascii_uppercase[: len(texts)])
        lines = [spec.option_line.format(label=a, text=t) for a, t in zip(labels, texts)]
        row = row | {"options": "\n".join(lines)}
    messages = [{"role": "system", "content": fill(spec.system, **row)}] if spec.system else []
    content = fill(spec.prompt, **row)
    messages.append({"role": "user", "content": re.sub(spec.remove, "", content) if spec.remove else content})
    if sum(len(m["content"]) for m in messages) > LONGEST:
        return f"over {LONGEST:,} characters"
    answer, tests = "", []
    if spec.verifier == "code":
        tests = column(row, spec.tests)
        tests = json.loads(tests) if isinstance(tests, str) else tests
        if not tests:
            return "without tests"
        if not all(isinstance(t, (str, dict)) for t in tests):
            raise ValueError("a test must be a text or a mapping")
    elif not (answer := _gold(row, spec)):
        return "without an answer"
    if spec.answer_is != "label" and not (answer := _label(answer, spec, texts)):
        return "with an answer that isn't one of the options"
    if spec.verifier in ("mcq", "mcq_boxed"):
        if labels is None:                                                    # read off the prompt, if it lists any
            listed = re.findall(r"^([A-Z])[:.)]\s", messages[-1]["content"], re.MULTILINE)
            labels = listed if len(listed) > 1 and "".join(listed) == string.ascii_uppercase[: len(listed)] else None
        if labels is not None and answer not in labels:
            raise ValueError(f"the gold answer {answer!r} isn't one of the options {', '.join(labels)}")
    if spec.verifier in ("tool", "tool_allowed") and gold_calls(answer) is None:
        return "with a gold call that isn't JSON"
    reference = fill(spec.reference, **row) if spec.reference else None
    id = str(row.get("idx", row.get("id", index)))
    return Example(id, messages, answer, tests, reference, spec.prelude, spec.time_limit)


def _examples(spec, key, split, dropped):
    """All usable examples of the file that `key` of a spec names, in order, no prompt twice; counts the others in `dropped`."""
    examples = {}
    for index, row in enumerate(_read(spec, key, split)):
        try:
            example = "filtered out" if not _is_prepared(row) and not _matches(row, spec.where) else _example(row, spec, index)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, re.error) as e:
            raise ValueError(f"task {spec.name}, row {index} of {getattr(spec, key)}: {one_line(e)}") from None
        if not isinstance(example, str) and examples.setdefault(json.dumps(example.messages), example) is not example:
            example = "asked before"
        if isinstance(example, str):
            dropped[example] = dropped.get(example, 0) + 1
    return list(examples.values())


def one_line(error):
    """An exception's own words in one line; its class where they don't speak for themselves."""
    text = " ".join(str(error).split())[:400]
    return text if type(error) is ValueError and text else f"{type(error).__name__}: {text}"


def _read(spec, key, split):
    """The rows of the file that `key` of a spec names, its second file's columns added. Raises ValueError: one line."""
    reading = "join"
    try:
        added = {row["id"]: row for row in read_rows(spec.join)} if spec.join else {}
        reading = key
        for row in read_rows(getattr(spec, key), spec.subset, split, spec.revision, spec.columns):
            if spec.join and row.get("id") not in added:
                raise ValueError(f"its row with id {row.get('id')!r} has no other half in {spec.join}")
            yield row | added[row["id"]] if spec.join else row
    except Exception as e:  # the hub's and the parsers' errors have no common base
        raise ValueError(f"task {spec.name}: {reading}: can't read {getattr(spec, reading)}: {one_line(e)}") from None


def load_task(spec, evaluate_only=False):
    """Read a task's rows into training and test examples.

    Args:
        spec: TaskSpec, or a dict of its fields. evaluate_only: nothing is trained on, so where the spec
            names no test rows, all its rows are.
    Returns:
        Task. Rows that nobody could grade are left out and counted; so are prompts that were asked
        before, and training rows whose prompt is also a test prompt.
    Raises:
        ValueError: one line naming task and row: a missing column, a gold answer outside the
            options, an unreadable file, an empty task.
    """
    spec = TaskSpec(**spec) if isinstance(spec, dict) else spec
    dropped, train = {}, []
    elsewhere = spec.test or spec.test_path or (spec.test_split and not is_file(spec.path))
    test_key = "test_path" if spec.test_path else "path"
    if not (evaluate_only and elsewhere):
        rows = _examples(spec, "path", spec.split, dropped)
        train = [rows[i] for i in torch.randperm(len(rows), generator=torch.Generator().manual_seed(42)).tolist()]
    if spec.test:
        test = _gathered(spec, dropped)
    elif elsewhere:
        test = _examples(spec, test_key, spec.test_split or spec.split, dropped)
    else:
        held = len(train) if evaluate_only else max(1, round(spec.test_share * len(train)))
        test, train = train[:held], train[held:]
    asked = {json.dumps(e.messages) for e in test}
    kept = [e for e in train if json.dumps(e.messages) not in asked]
    if len(kept) < len(train):
        dropped["also in the test rows"] = len(train) - len(kept)
    for part, examples, key in (("training", kept, "path"), ("test", test, test_key)):
        if not examples and not (evaluate_only and part == "training"):
            raise ValueError(f"task {spec.name}: no {part} rows in {getattr(spec, key)} ({_counted(dropped) or 'the file is empty'})")
    return Task(spec, kept[: spec.train_limit], test[: spec.test_limit], dropped)


def _gathered(spec, dropped):
    """The test rows of all specs in `spec.test`; what they drop is counted in `dropped`."""
    examples = []
    for part in [load_task(part, evaluate_only=True) for part in spec.test]:
        if (part.spec.verifier, part.spec.paper_scoring) != (spec.verifier, spec.paper_scoring):
            raise ValueError(f"task {spec.name}: its test {part.spec.name} must have the same verifier, {spec.verifier}")
        dropped |= {reason: dropped.get(reason, 0) + n for reason, n in part.dropped.items()}
        examples += part.test
    return examples


def _counted(dropped):
    return ", ".join(f"{n} {reason}" for reason, n in dropped.items())


# ------------------------------------------------------------------------------------------------
# Verifiers: a response becomes a verdict
# ------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """reward 0 or 1; feedback a teacher could use ("" if none); what was read as the answer; and
    whether the response kept the format that the task asks for."""

    reward: float
    feedback: str
    prediction: str
    well_formed: bool


def last_boxed(text):
    """Content of the last \\boxed{...} whose braces balance, or None.

    One pass with a stack: a collapsed model's thousand open boxes take no longer than other text.

    >>> last_boxed(r"first \\boxed{12}, no: \\boxed{\\frac{3}{\\sqrt{2}}}")
    '\\\\frac{3}{\\\\sqrt{2}}'
    """
    last, opened = None, []                                                   # where boxes began, None for other braces
    for brace in re.finditer(r"\\boxed\s*\{|\\[{}]|[{}]", text):
        if brace.group() in (r"\{", r"\}"):                                   # escaped: a character, no brace
            continue
        if brace.group() != "}":
            opened.append(brace.end() if brace.group() != "{" else None)
        elif opened and (start := opened.pop()) is not None and (last is None or start > last[0]):
            last = start, brace.start()
    return text[last[0] : last[1]].strip() if last else None


def _latex(answer):
    """An answer as math-verify reads it whole: thousands joined, "a and b" and "a, b" made sets."""
    answer = re.sub(r"\s+", " ", re.sub(r"(?<!\\)\$", "", answer)).strip()  # runs of spaces cost the patterns below their square
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", answer):
        return answer.replace(",", "")
    answer = re.sub(r"\s*,?\s*(?:\\text\{\s*and\s*\}|\band\b)\s*", ", ", answer)
    bare = re.sub(r"\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}", "", answer)          # commas inside brackets don't count
    if "," in bare and not answer.startswith((r"\{", "(", "[")):
        return rf"\{{{answer}\}}"
    return answer


def math_server():
    """In the child: one {"gold", "prediction"} a line -> {"equal"}; math-verify is loaded once."""
    import json, resource, sys                                                # noqa: E401

    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))                # 2^{2^{2^{...}}} takes all there is
    from math_verify import LatexExtractionConfig, parse, verify

    how = [LatexExtractionConfig()]
    print("{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            gold, prediction = (
                parse(f"${request[k]}$", how, parsing_timeout=None) for k in ("gold", "prediction")
            )
            equal = bool(gold and prediction and verify(gold, prediction, timeout_seconds=None))
        except BaseException:                                                 # sympy raises anything, MemoryError too
            equal = False
        print(json.dumps({"equal": equal}), flush=True)


def _same_number(a, b):
    """True or False if both are plain decimal integers or equal texts, None where that isn't known.

    Texts are compared: int() refuses 4,300 digits and more.
    """
    a, b = re.sub(r"\s+", "", a), re.sub(r"\s+", "", b)
    if a == b:
        return True
    if re.fullmatch(r"[+-]?\d+", a) and re.fullmatch(r"[+-]?\d+", b):
        plain = [(x.startswith("-"), x.lstrip("+-").lstrip("0")) for x in (a, b)]
        return plain[0] == plain[1] or not (plain[0][1] or plain[1][1])
    return None


def verify_math(response, example):
    """Last balanced box against the gold answer: as text, as integers, then by math-verify.

    Bounded: 2,000 characters, five seconds in a child process that is killed when it is late (an
    alarm would need the main thread). Limits: an unordered list of values is a set; a unit that
    math-verify doesn't know is ignored or spoils the comparison.
    """
    prediction = last_boxed(response)
    if not prediction:
        return Verdict(0.0, r"Your answer had the wrong format: put the final answer in \boxed{}.", "", False)
    gold, answer = _latex(example.answer), _latex(prediction)
    equal = _same_number(gold, answer)
    if equal is None and len(answer) <= 2000:
        reply = MATH.ask({"gold": gold, "prediction": answer}, timeout=5.0)
        equal = bool(reply and reply["equal"])
    return Verdict(float(bool(equal)), "", prediction, True)


def verify_mcq(response, example):
    """The text between the last <answer> and its </answer> must be the gold letter."""
    opened = response.rpartition("<answer>")
    inside, closed, _ = opened[2].partition("</answer>")
    if not opened[1] or not closed:
        return Verdict(0.0, "Your answer had the wrong format: put the letter between <answer> and </answer>.", "", False)
    prediction = inside.strip()
    return Verdict(float(prediction != "" and prediction == example.answer), "", prediction, len(prediction) == 1)


def verify_mcq_boxed(response, example):
    """The last balanced box must hold the gold letter, \\text{B} included."""
    boxed = last_boxed(response)
    if not boxed:
        return Verdict(0.0, r"Your answer had the wrong format: put the letter in \boxed{}.", "", False)
    prediction = re.sub(r"^\\(?:text|mathrm|textbf)\{(.*)\}$", r"\1", boxed).strip()
    return Verdict(float(prediction == example.answer), "", prediction, len(prediction) == 1)


def _canonical(value):
    """JSON text that is equal for equal values: sorted keys, 3.0 as 3, true never as 1."""

    def plain(v):
        if isinstance(v, dict):
            return {k: plain(x) for k, x in v.items()}
        if isinstance(v, list):
            return [plain(x) for x in v]
        return int(v) if isinstance(v, float) and v.is_integer() else v

    return json.dumps(plain(value), sort_keys=True)


def gold_calls(answer):
    """[(name, arguments)] of a gold answer's JSON list of {"Action", "Action_Input"}, or None."""
    try:
        calls = [(call["Action"], call["Action_Input"]) for call in json.loads(answer)]
        calls = [(name, json.loads(given) if isinstance(given, str) else given) for name, given in calls]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return calls if calls and all(isinstance(given, dict) for _, given in calls) else None


def tool_calls(response):
    """[(name, arguments or None)] of a response: each Action line with the JSON object after the
    `Action Input:` that follows it. A real parser reads the object, so braces inside are no end."""
    calls = []
    for part in re.split(r"^[ \t]*Action:", response, flags=re.MULTILINE)[1:]:
        name, _, rest = part.partition("\n")
        given = re.search(r"^[ \t]*Action Input:\s*(?=\{)", rest, flags=re.MULTILINE)
        try:
            arguments = json.JSONDecoder().raw_decode(rest, given.end())[0] if given else None
        except (ValueError, RecursionError):
            arguments = None
        calls.append((name.strip(), arguments))
    return calls


def _permits(allowed, given):
    """Whether each given argument has one of its allowed values, and only those with "" among theirs are left out."""
    plain = lambda text: re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')  # noqa: E731

    def same(value, option):
        if type(value) is not type(option):                                   # 3 and 3.0, and nothing else
            return _canonical(value) == _canonical(option)
        if isinstance(option, dict):
            return _permits(option, value)
        if isinstance(option, list):
            return len(value) == len(option) and all(map(same, value, option))
        return plain(value) == plain(option) if isinstance(option, str) else value == option

    return given.keys() <= allowed.keys() and all(
        any(same(given[name], option) for option in options) if name in given else "" in options
        for name, options in ((k, v if isinstance(v, list) else [v]) for k, v in allowed.items()))


def verify_tool(response, example, paper_scoring=False, allowed=False):
    """The calls of the response against the gold calls, in any order, as (name, arguments) pairs.

    allowed: in the order of the gold calls, whose arguments are lists of allowed values, "" for none at
    all; texts compare without case, spaces and the signs ,./-_*^ (as the Berkeley leaderboard does).
    paper_scoring compares as the official code does: the bag of names, and one dictionary into
    which the arguments of all calls are merged, each read up to the first closing brace.
    """
    gold, calls = gold_calls(example.answer), tool_calls(response)
    well_formed = bool(calls) and all(arguments is not None for _, arguments in calls)
    shown = "; ".join(f"{name} {json.dumps(arguments)}" for name, arguments in calls)
    if paper_scoring:
        merged = {}
        for text in re.findall(r"Action Input:\s*(\{.*?\})", response.rpartition("}")[0] + "}", re.DOTALL):
            try:
                merged |= json.loads(text)
            except ValueError:
                pass
        names = sorted(re.findall(r"Action:\s*(\w+)", response))
        wanted = {k: v for _, arguments in gold for k, v in arguments.items()}
        right = names == sorted(name for name, _ in gold) and merged == wanted
    elif allowed:
        right = well_formed and [name for name, _ in calls] == [name for name, _ in gold] and all(
            _permits(values, given) for (_, values), (_, given) in zip(gold, calls))
    else:
        key = lambda call: (call[0], _canonical(call[1]))                     # noqa: E731
        right = well_formed and sorted(map(key, calls)) == sorted(map(key, gold))
    if right:
        return Verdict(1.0, "", shown, well_formed)
    expected = "; ".join(f"{name} {json.dumps(arguments)}" for name, arguments in gold)
    feedback = f"Expected the calls {expected}, got {shown or 'none'}." if well_formed else (
        "Your answer had the wrong format: write Action: and Action Input: with a JSON object, for each call.")
    return Verdict(0.0, feedback[:2000], shown, well_formed)


def extract_code(response, tests):
    """The last fenced block that defines a name which the tests use, else the last block, or None.

    The last block may be a usage example, and the longest an abandoned draft. An unclosed fence
    runs to the end; one inside a line, as in a text, closes nothing.
    """
    fenced = r"```[^\S\n]*(?:\w+[^\S\n]*)?\n(.*?)(?:^[ \t]*```|```[ \t]*$|\Z)"
    blocks = re.findall(fenced, response.replace("\r\n", "\n"), re.DOTALL | re.MULTILINE)
    used = set(re.findall(r"\w+", " ".join(t if isinstance(t, str) else t.get("fn_name", "") for t in tests)))
    for block in reversed(blocks):
        if used & set(re.findall(r"^(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", block, re.MULTILINE)):
            return block
    return blocks[-1] if blocks else None


def verify_code(response, example):
    """Every test must pass, in a child process (see `run_program` for what it holds back)."""
    program = extract_code(response, example.tests)
    if program is None:
        return Verdict(0.0, "Your answer had the wrong format: put the code in a ```python ... ``` block.", "", False)
    passed, feedback = _run_once(f"{example.prelude}\n{program}", json.dumps(example.tests), example.time_limit)
    return Verdict(float(passed == len(example.tests)), feedback, program, True)


@functools.lru_cache(maxsize=128)  # a group or two: the tests of one contest problem can be megabytes
def _run_once(program, tests, timeout):
    """A group's samples are often the same program to the letter; each is run once."""
    return run_program(program, json.loads(tests), timeout)


def verify_exact(response, example):
    """The whole response must be the gold answer, but for whitespace around it."""
    return Verdict(float(response.strip() == example.answer), "", response.strip(), True)


VERIFIERS = {
    "math": verify_math, "mcq": verify_mcq, "mcq_boxed": verify_mcq_boxed, "tool": verify_tool,
    "tool_allowed": functools.partial(verify_tool, allowed=True), "code": verify_code, "exact": verify_exact,
}


def verify(kind, response, example, paper_scoring=False):
    """Judge one response. Only what follows the thinking is read; unfinished thinking is no answer.

    Args:
        kind: math, mcq, mcq_boxed, tool, tool_allowed, code, exact. response: text. example: Example.
    Returns:
        Verdict. Raises ValueError for an unknown kind.
    """
    if kind not in VERIFIERS:
        raise ValueError(f"verifier {kind!r} must be one of {', '.join(VERIFIERS)}")
    if len(response) > LONGEST:
        return Verdict(0.0, f"Your answer was longer than {LONGEST:,} characters.", "", False)
    if not (example.tests if kind == "code" else example.answer.strip()):     # else an empty answer would equal it
        return Verdict(0.0, "", "", False)
    visible = response.rpartition("</think>")[2].partition("<think>")[0]
    options = {"paper_scoring": True} if kind == "tool" and paper_scoring else {}
    try:
        return VERIFIERS[kind](visible, example, **options)
    except RecursionError:                                                    # JSON nested a thousand deep is no answer
        return Verdict(0.0, "", "", False)


# ------------------------------------------------------------------------------------------------
# Accuracy
# ------------------------------------------------------------------------------------------------


def pass_at_k(n, c, k):
    """Chance that one of k samples drawn from n, of which c are right, is right (unbiased).

    >>> pass_at_k(n=4, c=1, k=2)
    0.5
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k: needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def saved_answers(file):
    """(What was asked, one record a prompt) of a file that `accuracy` keeps. A line cut short is left out.

    A record has the example's id and prompt and, for each sample, responses, rewards, well_formed, truncated, lengths.
    """
    try:
        asked, *records = map(json.loads, Path(file).read_bytes().split(b"\n")[:-1])
    except (OSError, ValueError):                                             # no file, an empty or a damaged one
        return None, []
    return asked, records


def _kept_answers(file, asked, count):
    """The records that `file` has of the same questions, `count` at most; the file is cut to them, or begun anew."""
    known, records = saved_answers(file)
    records = records[:count] if known == asked else []
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    with open(f"{file}.tmp", "w", encoding="utf-8") as f:
        f.writelines(json.dumps(line) + "\n" for line in (asked, *records))
    os.replace(f"{file}.tmp", file)
    return records


def _answer(model, tokenizer, spec, examples, samples, sampling):
    """Sample answers to each example and judge them: a record for each."""
    out = rollout(model, tokenizer, [e.messages for e in examples], samples, **sampling)
    verdicts = [verify(spec.verifier, t, examples[i // samples], spec.paper_scoring) for i, t in enumerate(out.texts)]
    columns = {
        "responses": out.texts, "rewards": [v.reward for v in verdicts], "well_formed": [v.well_formed for v in verdicts],
        "truncated": out.truncated.tolist(), "lengths": out.mask.sum(-1).tolist(),
    }
    return [{"id": e.id, "prompt": e.messages[-1]["content"]}
            | {k: v[i * samples : (i + 1) * samples] for k, v in columns.items()} for i, e in enumerate(examples)]


def _scores(records, samples):
    """What `accuracy` returns, from its records."""
    rewards = torch.tensor([r["rewards"] for r in records])                   # (prompts, samples)
    every = lambda key: [x for r in records for x in r[key]]                  # noqa: E731
    mean = lambda values: sum(values) / len(values)                           # noqa: E731
    ks = sorted({2**i for i in range(samples.bit_length())} | {samples})
    return {
        "accuracy": rewards.mean().item(),
        f"avg@{samples}": rewards.mean().item(),
        **{f"pass@{k}": mean([pass_at_k(samples, int(r.sum()), k) for r in rewards]) for k in ks},
        "well_formed": mean(every("well_formed")),
        "truncated": mean(every("truncated")),
        "length": mean(every("lengths")),
        "rewards": rewards.tolist(),
        "responses": every("responses"),
    }


def accuracy(
    model, tokenizer, task, *, samples=1, max_new_tokens=256, temperature=1.0, top_p=1.0, top_k=0,
    batch_size=0, seed=0, template=None, engine="loop", progress=False, file=None, weights="", after_batch=lambda: None,
    share=(0, 1, lambda part: [part]),
):
    """Sample answers to a task's test examples and have them judged.

    A prompt's random numbers come from the seed and its place alone: they are the same for every model and wherever
    an evaluation was cut, and the caller's random state is untouched.

    Args:
        task: Task. samples: answers to each prompt. batch_size: answers sampled at once, 0 for all.
        engine: of `rollout`. "continuous" is given eight batches at a time, as an answer that ends makes room for the
            next; their random numbers come from the first of these prompts.
        file: keeps the answers as JSON lines. The same questions to the same `weights` (a name) go on behind its
            last whole line; other questions begin it anew. after_batch: called after each batch.
        share: (this process, how many there are, a function that returns what each has): each answers every so
            manieth batch, the first keeps the file, and all return the same.
    Returns:
        dict of floats: accuracy (mean reward over prompts and samples), avg@samples (the same), pass@k for
        k = 1, 2, 4, ... and samples, well_formed, truncated, length (tokens); and rewards (per prompt, a list of
        `samples`), responses.
    """
    spec, examples, records, (mine, processes, gather) = task.spec, task.test, [], share
    at_once = max(1, batch_size // samples) if batch_size else -(-len(examples) // processes)
    at_once *= 8 if engine == "continuous" else 1
    sampling = dict(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, template=template, engine=engine)
    if file and mine == 0:
        digest = hashlib.sha256()
        for example in examples:
            digest.update(repr(example).encode("utf-8", "replace"))
        asked = {"weights": weights, "task": spec.name, "examples": digest.hexdigest(), "verifier": spec.verifier,
                 "paper_scoring": spec.paper_scoring, "samples": samples, "seed": seed} | sampling
        records = _kept_answers(file, json.loads(json.dumps(asked, default=str)), len(examples))
    records = gather(records)[0]
    with tqdm(total=len(examples), initial=len(records), desc=f"evaluate {spec.name}", leave=False, disable=not progress) as bar:
        for i in range(len(records), len(examples), at_once * processes):
            own = examples[i + mine * at_once :][:at_once]
            seeds = range(seed + i + mine * at_once, seed + i + mine * at_once + len(own))
            try:
                part = _answer(model, tokenizer, spec, own, samples, sampling | {"seeds": seeds, "batch_size": batch_size}) if own else []
            except FAILURES as e:                                            # all must hear of it, or they wait for ever
                part = [e]
            part = [record for share in gather(part) for record in share]
            if failed := next((e for e in part if isinstance(e, Exception)), None):
                raise failed
            if file and mine == 0:
                with open(file, "a", encoding="utf-8") as f:
                    f.writelines(json.dumps(record) + "\n" for record in part)
                    f.flush()
                    os.fsync(f.fileno())
            records += part
            bar.update(len(part))
            after_batch()
    return _scores(records, samples)


# ------------------------------------------------------------------------------------------------
# Signs of collapse in a response
# ------------------------------------------------------------------------------------------------


def format_marks(text):
    """How often the marks of an answer's format stand in a response. One or two are normal.

    >>> format_marks("\\\\boxed{1} \\\\boxed{1} \\\\boxed{1}")
    3
    """
    return sum(text.count(mark) for mark in ("\\boxed", "<answer>", "Action:", "```"))


def repeated_ngrams(tokens, n=4):
    """Share of a response's n-grams that stood in it before; 0 for fewer than n tokens.

    >>> repeated_ngrams([1, 2, 1, 2, 1], n=2)
    0.5
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


# ------------------------------------------------------------------------------------------------
# The matrix
# ------------------------------------------------------------------------------------------------


def continual_metrics(R):
    """The header's numbers from a matrix.

    Args:
        R: K + 1 rows (base first), each with an accuracy for each task. A list counts from 0, the header's
            tasks from 1: column j is trained in stage j + 1. A sequence still running has fewer rows than tasks + 1.
    Returns:
        dict: last (list), average, gain, forgetting, backward_transfer (0 for a single stage), and
        relative (rows like R, percent of the base; None where the base is 0).
    Raises:
        ValueError: no base row, rows of unequal length, or more stages than tasks.
    >>> continual_metrics([[.2, .1], [.8, .1], [.5, .7]])["forgetting"]
    0.30000000000000004
    """
    K, base = len(R) - 1, R[0] if R else []
    if not base or any(len(row) != len(base) for row in R) or K > len(base):
        raise ValueError("continual_metrics: needs a base row and one equally long row for each stage")
    mean = lambda values: sum(values) / len(values) if values else 0.0        # noqa: E731
    ### BEGIN SOLUTION T14
    forgetting = mean([max(R[i][j] for i in range(1, K)) - R[K][j] for j in range(K - 1)])
    backward_transfer = mean([R[K][j] - R[j + 1][j] for j in range(K - 1)])
    ### END SOLUTION
    return {
        "last": list(R[K]),
        "average": mean(R[K]),
        "gain": mean([R[j + 1][j] - base[j] for j in range(K)]),
        "forgetting": forgetting,
        "backward_transfer": backward_transfer,
        "relative": [[100 * (r - b) / b if b else None for r, b in zip(row, base)] for row in R],
    }


# ------------------------------------------------------------------------------------------------
# Drift: how far the weights, the responses and the prompts lie apart
# ------------------------------------------------------------------------------------------------


def principal_angles(U, V):
    """Angles in degrees, ascending, between the column spaces of orthonormal U, V (n, k): (k,).

    Their cosines are the singular values of U^T V, their sines those of the part of V outside U.
    Both are needed: in float32 an arccosine alone knows nothing below 0.02 degrees.
    """
    ### BEGIN SOLUTION T15
    cosines = torch.linalg.svdvals(U.T @ V).clamp(max=1.0)
    sines = torch.linalg.svdvals(V - U @ (U.T @ V)).clamp(max=1.0).flip(0)
    return torch.rad2deg(torch.atan2(sines, cosines))
    ### END SOLUTION


@torch.no_grad()
def spectrum(W, k, rows=8192):
    """Singular values of W (m, n), descending, and an orthonormal basis (m, k) of its top-k left singular vectors.

    From the eigenvalues of the smaller of W W^T and W^T W, in float64 (float32's squares would lose the small ones):
    many times faster than a singular value decomposition, and an embedding of 150,000 rows goes by `rows` of them.
    """
    flat, blocks = W.shape[0] < W.shape[1], W.split(rows)
    gram = W.double() @ W.double().T if flat else sum(block.double().T @ block.double() for block in blocks)
    values, vectors = torch.linalg.eigh(gram)                              # ascending
    top = vectors.flip(1)[:, :k]
    if not flat:
        top = torch.linalg.qr(torch.cat([block.double() @ top for block in blocks])).Q     # W v_i = s_i u_i
    return values.clamp(min=0).sqrt().flip(0), top


def principal_mask(W, U, share):
    """The `share` largest entries of the rank-k approximation U U^T W: (m, n) bool."""
    U = U.to(W.dtype)
    size = (U @ (U.T @ W)).abs().flatten()
    top = size.topk(max(1, int(share * W.numel())), sorted=False).indices
    return torch.zeros_like(size, dtype=torch.bool).index_fill_(0, top, True).view_as(W)


@torch.no_grad()
def matrix_drift(before, after, k=64, share=0.1, threshold=1e-3):
    """How far one weight matrix moved. Both (m, n), taken as float32.

    Returns:
        dict of floats: spectral_shift |s1 - s0| / |s0| of the singular values; angle_mean and
        angle_max between the top-k left singular subspaces (degrees); mask_overlap, the share of
        the principal mask (the 10% largest entries of the rank-k approximation) that stays;
        changed, the share of entries with |dW| > threshold max(|W0|, |W1|), and
        changed_in_mask, the share of those inside the first principal mask; update |dW| / |W0|.
    """
    W0, W1 = before.float(), after.float()
    k = min(k, *W0.shape)
    (s0, U0), (s1, U1) = spectrum(W0, k), spectrum(W1, k)
    masks = principal_mask(W0, U0, share), principal_mask(W1, U1, share)
    ### BEGIN SOLUTION T15
    shift = (s1 - s0).norm() / s0.norm()
    angles = principal_angles(U0, U1)
    ### END SOLUTION
    changed = (W1 - W0).abs() > threshold * torch.maximum(W0.abs(), W1.abs())
    return {
        "spectral_shift": shift.item(),
        "angle_mean": angles.mean().item(),
        "angle_max": angles.max().item(),
        "mask_overlap": (masks[0] & masks[1]).sum().item() / masks[0].sum().item(),
        "changed": changed.float().mean().item(),
        "changed_in_mask": (changed & masks[0]).sum().item() / max(1, changed.sum().item()),
        "update": ((W1 - W0).norm() / W0.norm()).item(),
    }


def _matrices(model):
    """name -> a function that fetches the matrix, of a module or of a folder of safetensors."""
    if isinstance(model, torch.nn.Module):
        whole = lambda p: p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()     # sharded, or not  # noqa: E731
        return {n: functools.partial(whole, p) for n, p in model.named_parameters() if p.ndim == 2}
    from safetensors import safe_open

    def fetch(file, name):
        with safe_open(file, framework="pt") as weights:
            return weights.get_tensor(name)

    found = {}
    for file in sorted(Path(model).glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            names = [n for n in weights.keys() if len(weights.get_slice(n).get_shape()) == 2]
        found |= {name: functools.partial(fetch, file, name) for name in names}
    return found


def paired_matrices(before, after):
    """{name: (load, load)} of two models' matrices, which aren't read yet. Raises ValueError: the names differ.

    A head that only one of them names is the embedding under another name (tied), and counts once.
    """
    first, second = _matrices(before), _matrices(after)
    differ = sorted((first.keys() ^ second.keys()) - {"lm_head.weight"})[:3]
    if differ or not first.keys() & second.keys():
        raise ValueError(f"weight_drift: the matrices of the models differ: {', '.join(differ) or 'there are none'}")
    return {name: (first[name], second[name]) for name in first if name in second}


def weight_drift(before, after, k=64, device=None):
    """`matrix_drift` of every matrix (norms and biases excluded), one pair of matrices in memory at a time.

    Args:
        before, after: modules, or model folders with safetensors. device: where to compute; None: where they are.
    Returns:
        dict: name of the matrix -> its numbers, and "mean" -> their mean over the matrices.
    Raises:
        ValueError: as `paired_matrices`; a matrix of two shapes.
    """
    drift = {}
    for name, (first, second) in paired_matrices(before, after).items():
        W0, W1 = first(), second()
        if W0.shape != W1.shape:
            raise ValueError(f"weight_drift: {name} has the shapes {tuple(W0.shape)} and {tuple(W1.shape)}")
        device = device or W1.device
        drift[name] = matrix_drift(W0.to(device), W1.to(device), k)
    keys = next(iter(drift.values()))
    return drift | {"mean": {key: sum(d[key] for d in drift.values()) / len(drift) for key in keys}}


def embed(model, tokenizer, texts, batch_size=32):
    """Mean last hidden state of each text under a model: (len(texts), H) float32. Equal texts are read once."""
    rows, places = [], {text: i for i, text in enumerate(sorted(set(texts), key=len))}
    distinct = list(places)                                                # by length: little padding
    with evaluating(model):
        for i in range(0, len(distinct), batch_size):
            ids = [tokenizer.encode(t, add_special_tokens=False) or [tokenizer.eos_token_id] for t in distinct[i : i + batch_size]]
            length = max(map(len, ids))
            batch = torch.tensor([x + [0] * (length - len(x)) for x in ids], device=model.device)
            mask = torch.tensor([[1] * len(x) + [0] * (length - len(x)) for x in ids], device=model.device)
            hidden = model.base_model(input_ids=batch, attention_mask=mask).last_hidden_state  # (n, L, H)
            rows.append(masked_mean(hidden.float(), mask.unsqueeze(-1).expand_as(hidden), dim=1))
    return torch.cat(rows)[[places[text] for text in texts]]


def response_drift(base, tokenizer, before, after):
    """Cosine similarity of paired responses (same prompts, same seeds) embedded by the base: (N,)."""
    if len(before) != len(after):
        raise ValueError(f"response_drift: {len(before)} responses before, {len(after)} after: they must pair up")
    return torch.cosine_similarity(embed(base, tokenizer, before), embed(base, tokenizer, after), dim=-1)


@torch.no_grad()
def mmd(x, y):
    """Squared maximum mean discrepancy between two clouds of embeddings, (n, H) and (m, H).

    RBF kernel exp(-|a - b|^2 / (2 h^2)), h the median distance in the pooled cloud (Gretton et al.
    2012); the biased estimate, which is >= 0, and 0 for a cloud against itself.
    """
    pooled = torch.cat([x, y]).double()
    squared = torch.cdist(pooled, pooled).square()
    off = ~torch.eye(len(pooled), dtype=torch.bool, device=pooled.device)
    h2 = squared[off].median().clamp(min=1e-12)                            # h^2
    kernel, n = torch.exp(-squared / (2 * h2)), len(x)                     # (n + m, n + m)
    return (kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()).clamp(min=0).item()


# ------------------------------------------------------------------------------------------------
# The report of a run
# ------------------------------------------------------------------------------------------------

# Okabe and Ito's colours, apart for colour-blind eyes (their yellow darkened, to show on white); markers and dashes keep
# them apart in grey.
STYLES = [("#0072B2", "o", "-"), ("#D55E00", "s", "--"), ("#009E73", "^", "-."), ("#CC79A7", "D", ":"),
          ("#E69F00", "v", "-"), ("#56B4E9", "P", "--"), ("#000000", "X", "-."), ("#7A6A00", "*", ":")]


def format_matrix(tasks, R):
    """The matrix as a Markdown table, which also reads well in a terminal."""
    width = max(map(len, [*tasks, "accuracy"]))
    label = max(len("after stage 0"), *(len(f"{i} {t}") for i, t in enumerate(tasks, 1))) + 2
    lines = [f"| {'after stage':<{label}} | " + " | ".join(f"{t:>{width}}" for t in tasks) + " |"]
    lines.append(f"| {'-' * label} | " + " | ".join("-" * (width - 1) + ":" for _ in tasks) + " |")
    for i, row in enumerate(R):
        name = "0 base" if i == 0 else f"{i} {tasks[i - 1]}"
        lines.append(f"| {name:<{label}} | " + " | ".join(f"{r:>{width}.3f}" for r in row) + " |")
    return "\n".join(lines)


NAME = re.compile(r"\w[\w .,+=()%@-]*")                                   # of a task or a variant: it becomes a folder's


def load_runs(folder):
    """{name: run} of a run folder, with or without variants, in order; each has a matrix.json already.

    A run is a dict: place and shared (its folder, and the one with the base's answers), tasks, rows, ood (tasks,
    rows), steps (the lines of metrics.jsonl), and variant, setting and seed: what it is one of (see `grid` in continual.py).
    """
    folder, read = Path(folder), lambda path: json.loads(path.read_text(encoding="utf-8"))
    known = {folder.name: {}}
    if not (folder / "matrix.json").exists() and (folder / "comparison.json").exists():
        known = read(folder / "comparison.json")
    runs = {}
    for name, entry in known.items():
        place = folder / name if entry else folder
        if entry and not NAME.fullmatch(name):
            raise ValueError(f"{folder / 'comparison.json'}: {name!r} isn't the name of a folder in it")
        if not (place / "matrix.json").exists():
            raise ValueError(f"{place}: no matrix.json; is this the folder of a run?")
        grid, log = dict(entry.get("grid", {})), place / "metrics.jsonl"
        steps = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
        runs[name] = {"place": place, "shared": folder, "steps": steps, "ood": {"tasks": [], "rows": []}} | read(place / "matrix.json")
        for task in runs[name]["tasks"] + runs[name]["ood"]["tasks"]:
            if not NAME.fullmatch(str(task)):
                raise ValueError(f"{place / 'matrix.json'}: {task!r} isn't the name of a task")
        runs[name] |= {"variant": entry.get("variant", name), "seed": grid.pop("seed", None),
                       "setting": ", ".join(f"{key} {value}" for key, value in grid.items())}
    return runs


def model_folder(name):
    """The folder with a model's files: `name` itself, or where the hub's cache keeps it. Raises ValueError."""
    if Path(name).is_dir():
        return Path(name)
    from transformers.utils import cached_file

    try:
        return Path(cached_file(name, "config.json", local_files_only=True)).parent
    except (OSError, ValueError) as e:
        raise ValueError(f"the model {name!r} isn't here any more: {one_line(e)}") from None


def measure_drift(run):
    """How far each stage of a run is from its base, from the saved models and answers; kept in the run's drift.json.

    Returns:
        dict: sets (the tasks, then those out of distribution), mmd (between their prompts, a matrix), and stages: for
        each one weights (`weight_drift`'s mean) and similarity (for each set `response_drift`, a list).
    Raises:
        ValueError: a model or an answer is missing.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    place, device = run["place"], "cuda" if torch.cuda.is_available() else "cpu"
    try:
        noted = json.loads((place / "base.json").read_text(encoding="utf-8"))
        name, label = str(noted["model"]), NAME.fullmatch(noted["answers"])[0]
    except (OSError, KeyError, TypeError, ValueError) as e:
        raise ValueError(f"{place / 'base.json'}: can't tell the base and its answers: {one_line(e)}") from None
    base, sets = model_folder(name), run["tasks"] + run["ood"]["tasks"]
    model = AutoModelForCausalLM.from_pretrained(base, use_safetensors=True).to(device)
    tokenizer = AutoTokenizer.from_pretrained(base)

    def answers(folder, label):
        found = {t: saved_answers(folder / "answers" / f"{label}-{t}.jsonl")[1] for t in sets}
        if missing := [t for t in sets if not found[t]]:
            raise ValueError(f"{folder}: no answers of {label} to task {missing[0]}")
        return found

    responses = lambda records: [text for record in records for text in record["responses"]]  # noqa: E731
    before = answers(run["shared"], label)
    prompts = [embed(model, tokenizer, [record["prompt"] for record in before[t]]) for t in sets]
    drift = {"sets": sets, "mmd": [[mmd(x, y) for y in prompts] for x in prompts], "stages": []}
    for i, task in enumerate(run["tasks"][: len(run["rows"]) - 1], 1):
        after = answers(place, f"stage-{i}")
        drift["stages"].append({
            "weights": weight_drift(base, place / f"stage-{i}-{task}", device=device)["mean"],
            "similarity": {t: response_drift(model, tokenizer, responses(before[t]), responses(after[t])).tolist() for t in sets},
        })
    (place / "drift.json").write_text(json.dumps(drift), encoding="utf-8")
    return drift


# What the figures show of a step's line, and their labels.
COLLAPSE = {"reward": "mean reward", "divergence": "divergence\n(nats/token)", "teacher_accuracy": "teacher's accuracy",
            "marks": "format marks\nper response", "loss": "loss"}
DRIFT = {"spectral_shift": "spectral shift", "angle_mean": "principal angle\n(mean, degrees)",
         "mask_overlap": "overlap of the\nprincipal mask", "update": "|ΔW| / |W|"}


class _Canvas:
    """How the figures of a run look: a panel for each setting of its grid, a line for each variant, a band over seeds."""

    def __init__(self, runs, folder, measured):
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        self.plt, self.folder, self.paths, self.measured = plt, folder, {}, measured
        self.variants = list(dict.fromkeys(run["variant"] for run in runs.values()))
        self.styles = dict(zip(self.variants, STYLES * (1 + len(self.variants) // len(STYLES))))
        self.settings = list(dict.fromkeys(run["setting"] for run in runs.values()))
        self.alike = {}                                                    # (setting, variant) -> its runs, one a seed
        for run in runs.values():
            self.alike.setdefault((run["setting"], run["variant"]), []).append(run)
        first = next(iter(runs.values()))
        self.tasks, self.ood = first["tasks"], first["ood"]["tasks"]
        self.steps = list(itertools.accumulate(max(s["step"] for s in g) for _, g in itertools.groupby(
            max((run["steps"] for run in runs.values()), key=len), key=lambda s: s["stage"])))    # where each stage ends
        n = sorted({len(same) for same in self.alike.values()})
        self.words = "one seed" if n == [1] else f"mean and range of {' or '.join(map(str, n))} seeds"

    def axes(self, rows, columns, width, height, **options):
        return self.plt.subplots(rows, columns, figsize=(width * columns + 1, height * rows + 1), layout="constrained",
                                 squeeze=False, **options)

    def finish(self, figure, name):
        """Put one legend above all panels, and save."""
        found = {}
        for ax in figure.axes:
            found |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels()) if label not in found}
        if found:
            figure.legend(found.values(), found, loc="outside upper center", ncols=min(4, len(found)), frameon=False)
        figure.savefig(self.folder / f"{name}.png", dpi=110)
        self.plt.close(figure)
        self.paths[name] = f"{name}.png"

    def each(self, setting):
        """(variant, its runs) under a setting."""
        return [(v, self.alike[setting, v]) for v in self.variants if (setting, v) in self.alike]

    def line(self, ax, variant, curves, **options):
        """The mean of curves {x: y}, one a seed, over the x that all have, and the range between them."""
        color, marker, dashes = self.styles[variant]
        xs = sorted(set.intersection(*map(set, curves)))
        columns = [[curve[x] for curve in curves] for x in xs]
        if xs:
            style = {"color": color, "marker": marker, "linestyle": dashes, "label": variant, "markersize": 4}
            ax.plot(xs, [sum(c) / len(c) for c in columns], **style | options)
        if xs and len(curves) > 1:
            ax.fill_between(xs, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.15, linewidth=0)

    def stages(self, axes):
        """Grey lines between stages on axes that share their steps, the tasks' names above the first row."""
        starts = [0, *self.steps[:-1]]
        for ax in axes.flat:
            for n in starts[1:]:
                ax.axvline(n + 0.5, color="0.8", zorder=0)
        for ax in axes[0]:
            for n, task in zip(starts, self.tasks):
                ax.text(n + 1, 1.02, task, transform=ax.get_xaxis_transform(), fontsize=8, color="0.3")
        for ax in axes[-1]:
            ax.set_xlabel("training step over the whole sequence")


def _draw_accuracy(c):
    figure, axes = c.axes(len(c.settings), len(c.tasks), 2.6, 2.6, sharey=True, sharex=True)
    for row, setting in zip(axes, c.settings):
        for j, (ax, task) in enumerate(zip(row, c.tasks)):
            for variant, runs in c.each(setting):
                c.line(ax, variant, [{i: r[j] for i, r in enumerate(run["rows"])} for run in runs])
            ax.axvline(j + 1, color="0.8", zorder=0)
            ax.set(xticks=range(len(c.tasks) + 1), ylim=(-0.03, 1.03))
            ax.set_xticklabels(["base", *c.tasks], rotation=45, ha="right")
            if ax.get_subplotspec().is_first_row():
                ax.set_title(f"accuracy on {task}")
        row[0].set_ylabel(f"{setting}\naccuracy".strip())
    figure.supylabel(c.words, fontsize=9)
    c.finish(figure, "accuracy")


def _relative(rows):
    """{tasks learnt: percent by which the mean accuracy is above the base's} of a matrix's rows."""
    means = [sum(row) / len(row) for row in rows]
    return {i: 100 * (m / means[0] - 1) for i, m in enumerate(means)} if means and means[0] else {}


def _draw_relative(c):
    parts = [("tasks", lambda run: run["rows"])] + [("out of distribution", lambda run: run["ood"]["rows"])] * bool(c.ood)
    figure, axes = c.axes(len(parts), len(c.settings), 3.6, 2.3, sharex=True, sharey="row")
    for row, (words, rows) in zip(axes, parts):
        for ax, setting in zip(row, c.settings):
            for variant, runs in c.each(setting):
                c.line(ax, variant, [_relative(rows(run)) for run in runs])
            ax.axhline(0, color="0.6", linewidth=1, zorder=0)
            if ax.get_subplotspec().is_first_row():
                ax.set_title(setting, fontsize=10)
            if ax.get_subplotspec().is_last_row():
                ax.set(xlabel="tasks learnt", xticks=range(len(c.tasks) + 1))
        row[0].set_ylabel(f"{words}:\nchange to the base (%)")
    figure.supylabel(f"mean accuracy, {c.words}", fontsize=9)
    c.finish(figure, "relative")


def _draw_final(c):
    sets, n = c.tasks + c.ood, len(c.variants)
    figure, axes = c.axes(len(c.settings), 1, max(6, 0.16 * n * len(sets) + 0.4 * len(sets)), 2.4, sharex=True)
    for ax, setting in zip(axes[:, 0], c.settings):
        last = lambda run: run["rows"][-1] + (run["ood"]["rows"] or [[]])[-1]  # noqa: E731
        for i, (variant, runs) in enumerate(c.each(setting)):
            columns = list(zip(*map(last, runs)))
            places = [j + (i - (n - 1) / 2) * 0.84 / n for j in range(len(columns))]
            means = [sum(x) / len(x) for x in columns]
            spread = [[m - min(x) for m, x in zip(means, columns)], [max(x) - m for m, x in zip(means, columns)]]
            hatch = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")[c.variants.index(variant) % 8]
            ax.bar(places, means, 0.78 / n, color=c.styles[variant][0], hatch=hatch, edgecolor="white", linewidth=0, label=variant,
                   yerr=spread if len(runs) > 1 else None, error_kw={"linewidth": 0.8})
        base = [run["rows"][0] + (run["ood"]["rows"] or [[]])[0] for _, runs in c.each(setting) for run in runs]
        for j, values in enumerate(zip(*base)):
            ax.hlines(sum(values) / len(values), j - 0.44, j + 0.44, color="black", linewidth=1.5, label="base" if j == 0 else None)
        if c.ood:
            ax.axvline(len(c.tasks) - 0.5, color="0.7", zorder=0)
        ax.set(xticks=range(len(sets)), ylim=(0, 1.05), ylabel=f"{setting}\nfinal accuracy".strip())
        ax.set_xticklabels(sets, rotation=20 if c.ood else 0, ha="right" if c.ood else "center")
    figure.supxlabel(f"{c.words}; right of the grey line: out of distribution" if c.ood else c.words, fontsize=9)
    c.finish(figure, "final")


def _over_steps(run, key):
    """{step over the whole sequence: value} of what the log says at some or all steps."""
    return {n: s[key] for n, s in enumerate(run["steps"], 1) if s.get(key) is not None}


def _draw_steps(c, name, labels):
    """Numbers of metrics.jsonl over the steps, a row each; those that no step has are left out."""
    logged = {key for same in c.alike.values() for run in same for s in run["steps"] for key in s if s[key] is not None}
    labels = {key: words for key, words in labels.items() if key in logged and (key != "loss" or "reward" not in logged)}
    if not labels:
        return
    figure, axes = c.axes(len(labels), len(c.settings), 7 if len(c.settings) == 1 else 4.2, 1.5, sharex=True, sharey="row")
    for row, (key, words) in zip(axes, labels.items()):
        for ax, setting in zip(row, c.settings):
            for variant, runs in c.each(setting):
                curves = [_over_steps(run, key) for run in runs]
                c.line(ax, variant, curves, **({"marker": None} if len(curves[0]) > 40 else {}), linewidth=1.2)
        row[0].set_ylabel(words, fontsize=9)
    for ax, setting in zip(axes[0], c.settings):
        ax.set_title(setting, fontsize=10, pad=16)
    axes[0][0].set_xlim(left=0)                                            # all share it; the first stage's name stands there
    c.stages(axes)
    figure.supylabel(c.words, fontsize=9)
    c.finish(figure, name)


def _draw_similarity(c):
    """Split violins: how like the base's answers are those of the first variant (left halves) and each other one (right)."""
    first, *others = c.variants
    groups = [("tasks", c.tasks)] + [("out of distribution", c.ood)] * bool(c.ood)
    if not others:
        return
    figure, axes = c.axes(len(c.settings), len(groups), 1.2 * len(others) + 1, 2.2, sharey=True, sharex=True)

    def values(setting, variant, sets):
        return [x for run in c.alike.get((setting, variant), []) for t in sets for x in run["drift"]["stages"][-1]["similarity"][t]]

    for row, setting in zip(axes, c.settings):
        for ax, (words, sets) in zip(row, groups):
            for place, other in enumerate(others):
                for variant, side in ((first, 0), (other, 1)):
                    if not (found := values(setting, variant, sets)):
                        continue
                    body = ax.violinplot([found], [place], widths=0.9, showextrema=False, points=60, side=("low", "high")[side])["bodies"][0]
                    body.set(facecolor=c.styles[variant][0], edgecolor="black", alpha=0.75, linewidth=0.6, hatch=("", "///")[side])
                    middle = sorted(found)[len(found) // 2]
                    ax.hlines(middle, place - 0.3 * (1 - side), place + 0.3 * side, color="black", linewidth=1.6)
            ax.set(xticks=range(len(others)))
            ax.set_xticklabels(others, rotation=30, ha="right")
            if ax.get_subplotspec().is_first_row():
                ax.set_title(words, fontsize=10)
        row[0].set_ylabel(f"{setting}\ncosine similarity".strip())
    seeds = c.words.replace("mean and range", "all answers")
    figure.suptitle(f"left halves: {first}; right halves: the variant below; lines: medians; {seeds}", fontsize=9)
    c.finish(figure, "similarity")


def _draw_distance(c):
    """What a stage changed on every other set, against how far that set's prompts are from the stage's."""
    figure, axes = c.axes(1, len(c.settings), max(4, 9 - 3 * len(c.settings)), 3, sharex=True, sharey=True)
    for ax, setting in zip(axes[0], c.settings):
        for variant, runs in c.each(setting):
            points = []
            for run in runs:
                rows = [a + b for a, b in zip(run["rows"], run["ood"]["rows"] or [[]] * len(run["rows"]))]
                distance = run["drift"]["mmd"]
                points += [(distance[i][j], rows[i + 1][j] - rows[i][j]) for i in range(len(rows) - 1) for j in range(len(distance)) if i != j]
            points.sort()
            color, marker, dashes = c.styles[variant]
            ax.plot(*zip(*points), color=color, marker=marker, linestyle="", markersize=3, alpha=0.35)
            quarter = -(-len(points) // 4)
            quarters = [points[i : i + quarter] for i in range(0, len(points), quarter)]
            mean = [[sum(x) / len(x) for x in zip(*part)] for part in quarters]
            ax.plot(*zip(*mean), color=color, marker=marker, linestyle=dashes, label=variant)
        ax.axhline(0, color="0.6", linewidth=1, zorder=0)
        ax.set(xlabel="MMD² between the prompts", title=setting)
    axes[0][0].set_ylabel("change of accuracy in a stage")
    figure.supxlabel(f"points: a stage, a set and a seed each ({c.words.removeprefix('mean and range of ')}); "
                     "lines: means of their quarters by distance", fontsize=9)
    c.finish(figure, "distance")


def _draw_mmd(c, drift):
    n = len(drift["sets"])
    figure, axes = c.axes(1, 1, 0.62 * n + 1.4, 0.52 * n + 0.8)
    ax, top = axes[0][0], max(map(max, drift["mmd"]))
    image = ax.imshow(drift["mmd"], cmap="cividis", vmin=0)
    for i, row in enumerate(drift["mmd"]):
        for j, value in enumerate(row):
            ax.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color="white" if value < 0.55 * top else "black")
    ax.set(xticks=range(n), yticks=range(n), yticklabels=drift["sets"])
    ax.set_xticklabels(drift["sets"], rotation=40, ha="right")
    ax.set_title("MMD² between the sets' prompts", fontsize=10)
    figure.colorbar(image)
    c.finish(figure, "mmd")


READING = {
    "relative": "Mean accuracy against the base in percent, over the tasks learnt. Upper row: the tasks; lower row, if "
                "there is one: sets that no stage trains. A line that falls loses what it, or the base, could do.",
    "accuracy": "One panel a task, one line a variant; the grey line marks the stage that trains the task. Left of "
                "it a line shows transfer from other tasks, right of it a fall is forgetting.",
    "final": "Accuracy after the last stage. The black line is the base: a bar below it lost what the base could do.",
    "drift": "How far the weights are from the base's, means over all matrices: singular values, directions, where the large "
             "entries stand, and all together. Overlap falls, the others rise; compare methods at equal accuracy.",
    "similarity": "Cosine between embeddings of an answer and of the base's to the same prompt from the same random numbers, "
                  "after the last stage. Mass at 1 is answers that stayed; a longer tail downwards is more drift.",
    "distance": "Each point is one stage's effect on one other set; the lines join the means of the four quarters by distance. "
                "Above 0 a stage helped, below 0 it harmed.",
    "mmd": "How far apart the sets' prompts lie for the base: 0 for the same, more for less alike. It depends on the words of "
           "the prompts as much as on the skill.",
    "steps": "Where divergence and reward fall together, a teacher follows its student into collapse; format marks that "
             "multiply are another sign. The teacher's accuracy is on test prompts that hold a right demonstration.",
}


def _mean_and_range(values):
    mean = sum(values) / len(values)
    return f"{mean:.3f}" if len(values) == 1 else f"{mean:.3f} ({min(values):.3f} to {max(values):.3f})"


def _summary(c):
    """The table of a report: a row for each variant and setting, means over seeds with their range."""
    columns = ["average", "gain", "forgetting", "backward transfer"] + ["out of distribution"] * bool(c.ood)
    columns += ["spectral shift", "similarity"] * c.measured
    settings = len(c.settings) > 1
    lines = ["| variant | " + "setting | " * settings + " | ".join([*(f"last: {t}" for t in c.tasks), *columns]) + " |"]
    lines.append("| --- |" + " --- |" * settings + " ---: |" * (len(c.tasks) + len(columns)))
    for setting in c.settings:
        for variant, runs in c.each(setting):
            cells = []
            for run in runs:
                m, last = continual_metrics(run["rows"]), run["drift"]["stages"][-1] if c.measured else {}
                ood = [sum(run["ood"]["rows"][-1]) / len(c.ood)] if c.ood else []
                alike = [x for values in last.get("similarity", {}).values() for x in values]
                drift = [last["weights"]["spectral_shift"], sum(alike) / len(alike)] if c.measured else []
                cells.append([*m["last"], m["average"], m["gain"], m["forgetting"], m["backward_transfer"], *ood, *drift])
            lines.append(f"| {variant} | " + f"{setting} | " * settings + " | ".join(map(_mean_and_range, zip(*cells))) + " |")
    return lines


def report(folder, again=True):
    """Write report.md and its figures of a run folder; returns report.md's path.

    Args:
        again: measure drift anew from the saved models; else only where no drift.json is.
    Raises:
        ValueError: the folder holds no run.
    """
    folder, runs, missing = Path(folder), load_runs(folder), ""
    for run in tqdm(runs.values(), desc="drift", leave=False, disable=len(runs) == 1):
        kept = run["place"] / "drift.json"
        try:
            run["drift"] = measure_drift(run) if again or not kept.exists() else json.loads(kept.read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:                                 # a stage's model is large, and may be gone
            missing = f"Drift wasn't measured: {one_line(e)}."
            break
    c = _Canvas(runs, folder, measured=not missing)
    _draw_relative(c)
    _draw_accuracy(c)
    _draw_final(c)
    _draw_steps(c, "drift", DRIFT)
    if c.measured:
        _draw_similarity(c)
    if c.measured and len(c.tasks + c.ood) > 1:
        _draw_distance(c)
        _draw_mmd(c, next(iter(runs.values()))["drift"])
    _draw_steps(c, "steps", COLLAPSE)
    text = [f"# Report of {folder.name}", "", f"Sampled accuracy on each task's test rows, {c.words}."
            + " A difference of a few points may be noise." * (c.words == "one seed"), missing, "", *_summary(c)]
    for name, file in c.paths.items():
        text += ["", f"![{name}]({file})", "", READING[name]]
    for name, run in runs.items():
        text += ["", f"## {name}", "", format_matrix(run["tasks"], run["rows"])]
    path = folder / "report.md"
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def compare(before, after):
    """The weight drift between two model folders as a table, a line for each matrix."""
    drift = weight_drift(before, after, device="cuda" if torch.cuda.is_available() else None)
    wide, keys = max(map(len, drift)), list(drift["mean"])
    lines = [" " * wide + "".join(f"{key:>16}" for key in keys)]
    return "\n".join(lines + [f"{name:<{wide}}" + "".join(f"{numbers[key]:>16.3g}" for key in keys) for name, numbers in drift.items()])


# ------------------------------------------------------------------------------------------------
# Appendix: running what a model wrote, such that its score can't be forged
# ------------------------------------------------------------------------------------------------

#     trainer --JSON--> M (judge: deadlines, verdict) --fork--> T (tester: runs the tests; holds proxies of the solution)
#                       M --"start one"--> F (forker) --fork--> S (solution: the model's code) <--plain values--> T
#
# S never holds a test or an expected value: it is forked from F, which has never seen a request. T decides with values
# of builtin types only and reports over a pipe that S never had, so nothing S prints, patches or overrides is a pass.
# What S and T may do: see confine() and system_calls(). Limits: see run_program().


class VerifierError(RuntimeError):
    """A verifier that can't work here, so that no answer can be judged; the message is one line."""


FAILURES = FloatingPointError, RolloutError, VerifierError                 # no samples or no verdicts: what a run stops at


class Child:
    """A warm child process that answers one JSON request at a time; killed and restarted when it is late or dies.

    `server` is a module-level function that needs nothing but the standard library (imports inside) and the functions
    in `helpers`; it says {} once it is ready, then answers each line of JSON on stdin with one on stdout. Their source
    runs in a fresh interpreter: a fork of the trainer would carry its memory, its threads and its CUDA state along.
    """

    def __init__(self, server, *helpers):
        sources = [inspect.getsource(function) for function in (*helpers, server)]
        self.code, self.name = "\n\n".join([*sources, f"{server.__name__}()"]), server.__name__
        self.process, self.owner, self.lock = None, None, threading.Lock()
        atexit.register(self.stop)

    def ask(self, request: dict, timeout: float) -> dict | None:
        """The answer, or None if the child was late, died, or said something else than one line of JSON.

        Raises VerifierError where it doesn't even start: that is no wrong answer.
        """
        with self.lock:
            if self.owner != os.getpid():  # first use, or this is a fork of the process that started the child
                self.process, self.owner = None, os.getpid()
            if self.process is None or self.process.poll() is not None:
                self.stop()
                self.process = subprocess.Popen(
                    [sys.executable, "-I", "-c", self.code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, bufsize=0, env={}, cwd="/", start_new_session=True)
                os.set_blocking(self.process.stdin.fileno(), False)
                try:
                    self._exchange(b"", time.monotonic() + 60)
                except (OSError, ValueError):
                    self.stop()
                    raise VerifierError(f"{self.name}: its process doesn't start") from None
            try:
                reply = json.loads(self._exchange(json.dumps(request).encode() + b"\n", time.monotonic() + timeout))
            except (OSError, ValueError, RecursionError):
                reply = None
            if not isinstance(reply, dict):
                self.stop()
                return None
            return reply

    def _exchange(self, data: bytes, deadline: float) -> bytes:
        """Write a line and read a line, waiting for neither beyond the deadline."""
        inlet, outlet = self.process.stdin.fileno(), self.process.stdout.fileno()
        poller, reply = select.poll(), b""
        poller.register(inlet, select.POLLOUT)
        poller.register(outlet, select.POLLIN)
        while not reply.endswith(b"\n"):
            ready = [fd for fd, _ in poller.poll(max(0, (deadline - time.monotonic()) * 1000))]
            if not ready or time.monotonic() > deadline:
                raise TimeoutError
            if inlet in ready:
                data = data[os.write(inlet, data[:65536]):]
                if not data:
                    poller.unregister(inlet)
            if outlet in ready:
                part = os.read(outlet, 65536)
                reply += part
                if not part or len(reply) > 1 << 20:
                    raise OSError("the child ended, or said too much")
        return reply

    def stop(self):
        """Kill the child with its process group, and reap it."""
        process, self.process = self.process, None
        if process is None or self.owner != os.getpid():
            return
        process.stdin.close()  # an idle server ends by itself and reaps its own children
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except OSError:  # no process of the group is left
            pass
        process.stdout.close()
        process.wait()


def pack(value, other):
    """Plain data as nested tuples and lists of None, bool, int, str and bytes: its ascii() crosses, for literal_eval.

    Exact builtin types only, so that whatever T compares compares by T's rules; other(value) names anything else.
    """
    from collections import Counter, OrderedDict, defaultdict
    kind = type(value)
    if value is None or kind in (bool, str, bytes) or kind is int and abs(value) < 1 << 64:
        return value
    if kind in (float, complex):
        return kind.__name__, repr(value)  # as text: inf and nan are no literals
    if kind is int:
        return "int", hex(value)  # decimal text is limited to 4300 digits
    if kind in (list, tuple, set, frozenset):
        return kind.__name__, [pack(item, other) for item in value]
    if kind in (dict, Counter, OrderedDict, defaultdict):  # each equals a dict with the same items
        return "dict", [[pack(key, other), pack(item, other)] for key, item in value.items()]
    return other(value)


def unpack(value, other):
    """The inverse of pack(): other(number) gives what pack's other() named ("object", number)."""
    if type(value) is not tuple:
        return value
    kind, content = value
    if kind in ("float", "complex", "int", "object"):
        return {"float": float, "complex": complex, "int": lambda text: int(text, 16), "object": other}[kind](content)
    if kind == "dict":
        return {unpack(key, other): unpack(item, other) for key, item in content}
    kinds = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    return kinds[kind]([unpack(item, other) for item in content])


def write_back(old, new):
    """Give a list, dict or set that a test passed the contents that the solution left in its copy."""
    if type(old) is list:
        old[:] = new
    elif type(old) in (dict, set):
        old.clear()
        old.update(new)


def system_calls():
    """A seccomp filter: the system calls that Python needs to compute and to use files pass, all others fail (EPERM).

    Without socket and io_uring there is no network; without fork, clone and exec no other process or thread; without
    kill, prlimit and ptrace no way to touch one; without mkdir, link and chmod the folder stays easy to remove.
    """
    import platform, struct
    architecture, calls = {
        "x86_64": (0xC000003E, "0-15 17-25 28 32-39 60 63 77 79 85 87 89 96 98-100 102 104 107-108 110 131 186 201-202 "
                               "204 217 219 228-231 257 262-263 267 269-271 292-293 318 332 334 439"),
        "aarch64": (0xC00000B7, "17 23-24 35 46 48 56-57 59 61-68 72-73 78-80 93-94 98 101-103 113-115 123-124 128 132 "
                                "134-135 139 153 160 165 169 172-179 214-216 222 226 233 278 291 293 439"),
    }.get(platform.machine(), (0, ""))
    load, if_equal, if_at_least, answer, allow, refuse = 0x20, 0x15, 0x35, 0x06, 0x7FFF0000, 0x00050001
    program = [(load, 0, 0, 4), (if_equal, 1, 0, architecture), (answer, 0, 0, refuse), (load, 0, 0, 0)]
    for part in calls.split():
        low, high = int(part.split("-")[0]), int(part.split("-")[-1])
        program += [(if_at_least, 0, 2, low), (if_at_least, 1, 0, high + 1), (answer, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *step) for step in [*program, (answer, 0, 0, refuse)] if architecture)


def confine(fds, folder, memory_mb, seconds, calls, parent):
    """Give up everything but computing, `fds` (as 0, 1, 2, ...) and the files in `folder`. For S, and T likewise."""
    import ctypes, fcntl, os, resource, signal, struct, sys
    for number, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in fds]):
        os.dup2(fd, number)
    os.closerange(len(fds), 256)  # the trainer's pipes, the report pipe, the forker's socket
    os.setsid()  # out of the judge's group, should signals be possible at all
    os.chdir(folder)
    for name, limit in (("CPU", seconds), ("AS", memory_mb << 20), ("FSIZE", 8 << 20), ("NOFILE", 64), ("CORE", 0),
                        ("NPROC", 0)):  # NPROC 0: it can start no process and no thread
        try:
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
        except (AttributeError, ValueError, OSError):  # macOS refuses AS
            pass
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc:
        libc.prctl(38, 1, 0, 0, 0)  # NO_NEW_PRIVS: no set-uid program gives rights back; a condition of the rest
        version = libc.syscall(444, None, ctypes.c_size_t(0), 1)
        if version > 0:  # Landlock (Linux 5.13 and up): no file outside the folder is opened, made or removed
            rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
            rules = libc.syscall(444, struct.pack("Q", rights), ctypes.c_size_t(8), 0)
            libc.syscall(445, rules, 1, struct.pack("=Qi", rights, os.open(".", os.O_RDONLY)), 0)
            libc.syscall(446, rules, 0)
            os.closerange(len(fds), 64)
    if os.getuid() == 0:  # rlimits and file modes don't bind root, and "nobody" can't touch the trainer's processes
        try:
            os.chroot(".")  # where Landlock is missing
        except OSError:  # a container may forbid it
            pass
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    if libc:
        libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PDEATHSIG: die with the parent
        if os.getppid() != parent:
            os._exit(1)
        if calls:
            code = ctypes.create_string_buffer(calls)
            libc.prctl(22, 2, struct.pack("HxxxxxxQ", len(calls) // 8, ctypes.addressof(code)), 0, 0)


def solution():
    """Process S: do what T asks with the model's program and its objects. T sees only plain data and numbers."""
    import ast, builtins, operator, os, sys, types
    reader, writer, objects = open(3, "rb"), open(3, "wb", closefd=False), {}

    def keep(value):
        objects[id(value)] = value
        return "object", id(value)

    def execute(program, name):
        sys.modules[name] = module = types.ModuleType(name)
        exec(compile(program, "solution.py", "exec"), vars(module))
        return {key: value for key, value in vars(module).items()
                if not key.startswith("__") and type(value) is not types.ModuleType}

    def run(program, text):
        for fd, name, content in ((0, "stdin", text), (1, "stdout", "")):
            with open(name, "w", encoding="utf-8", errors="replace") as file:
                file.write(content)
            os.dup2(os.open(name, os.O_RDWR), fd)
        sys.stdin = open(0, encoding="utf-8", closefd=False)
        sys.stdout = output = open(1, "w", encoding="utf-8", errors="replace", closefd=False)
        try:
            execute(program, "__main__")
        except SystemExit:
            pass
        output.flush()
        return open("stdout", encoding="utf-8", errors="replace").read()

    does = {name: getattr(builtins, name) for name in "getattr setattr iter next len str repr int float".split()}
    does.update({name: getattr(operator, name) for name in "getitem setitem delitem".split()}, run=run, load=execute)
    does["call"] = lambda function, /, *args, **kwargs: function(*args, **kwargs)
    for line in reader:
        try:
            operation, packed = ast.literal_eval(line.decode())
            args, kwargs = unpack(packed, objects.__getitem__)
            value = pack(does[operation](*args, **kwargs), keep)
            after = pack(args, keep)  # a list, dict or set may have been changed in place
            reply = "ok", value, None if after == packed[1][0] else after
        except BaseException as error:  # SystemExit as well
            lone = len(error.args) == 1 and type(error.args[0]) is str  # a KeyError's str() is a repr()
            reply = "error", type(error).__name__, error.args[0] if lone else str(error)
        writer.write(ascii(reply).encode() + b"\n")
        writer.flush()


def connect():
    """T's side: remote(operation, *args) has S do something; `trouble` gets a text once S is of no use any more."""
    import ast, builtins
    reader, writer, handles, numbers, trouble = open(3, "rb"), open(3, "wb", closefd=False), {}, {}, []

    class Broken(BaseException):
        """Not an Exception, as a test may expect one."""

    class Handle:
        """Something in S. Its equality, hash and truth are its own identity: S has no say in them."""
        __bool__ = lambda self: True

    def method(name):
        return lambda *args, **kwargs: remote(name, *args, **kwargs)

    for name in "getattr setattr iter next len str repr int float getitem setitem delitem call".split():
        setattr(Handle, f"__{name}__", method(name))

    def give_up(text):  # the judge goes on with a fresh pair
        trouble.append(text)
        raise Broken(text)

    def number(value):
        if type(value) is not Handle:
            give_up(f"the sandbox can't pass a {type(value).__name__} to the solution, only plain data")
        return "object", numbers[value]

    def handle(n):
        if n not in handles:
            handles[n] = Handle()
            numbers[handles[n]] = n
        return handles[n]

    def remote(operation, /, *args, **kwargs):
        try:
            writer.write(ascii((operation, pack(([*args], kwargs), number))).encode() + b"\n")
            writer.flush()
            line = reader.readline(1 << 20)
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            give_up("more than 1 MB came back" if line else "the program ended")
        try:
            status, value, more = ast.literal_eval(line.decode())
            if status == "ok":
                for pair in zip(args, unpack(more, handle) or ()):
                    write_back(*pair)
                return unpack(value, handle)
            kind, text = getattr(builtins, value, None), str(more)
        except BaseException:
            give_up("what came back is no plain data")
        if isinstance(kind, type) and issubclass(kind, BaseException) and not issubclass(kind, UnicodeError):
            raise kind(text)
        raise RuntimeError(f"{value}: {text}")

    return remote, trouble


def tester(program, tests):
    """Process T: run the tests, and tell the judge after each "" or why it failed, over fd 4."""
    import ast, builtins, json, os
    remote, trouble = connect()
    modules = "math re itertools collections functools json string random copy heapq bisect".split()
    own, solution = {**vars(builtins), **{name: __import__(name) for name in modules}}, {}

    def load():  # T's own names win: what `len` or `abs` means in a test isn't for S to say
        if not solution:
            solution.update(remote("load", program, "solution"))
        return {**solution, **own}

    def run_assert(test):
        tree, space = ast.parse(test), load()
        used = {node.id for node in ast.walk(tree) if type(node) is ast.Name} & (solution.keys() - own.keys())
        for node in tree.body:  # keep the left side of `assert f(x) == y`, for the feedback
            if type(node) is ast.Assert:
                place, field = (node.test, "left") if type(node.test) is ast.Compare else (node, "test")
                setattr(place, field, ast.NamedExpr(ast.Name("_got", ast.Store()), getattr(place, field)))
        try:
            exec(compile(ast.fix_missing_locations(tree), "test", "exec"), space)
        except AssertionError as error:
            return f"got {space['_got']!r:.300}" if "_got" in space else repr(error)
        # Were the solution called `sum`, the test would have tried T's own, and any program would pass.
        return "" if used else "the test uses nothing that the program defines (a builtin's name means the builtin)"

    def run_call(test):
        space, args = load(), [json.loads(line) for line in test["input"].splitlines() if line.strip()]
        function = getattr(space["Solution"](), test["fn_name"]) if "Solution" in space else space[test["fn_name"]]
        got = json.loads(json.dumps(function(*args)))
        return "" if got == json.loads(test["output"]) else f"got {got!r:.300}"

    def run_stdin(test):
        got = remote("run", program, test["input"])
        lines = [[line.rstrip() for line in text.strip().splitlines()] for text in (got, test["output"])]
        return "" if lines[0] == lines[1] else f"got {got[:300]!r}"

    for test in tests:
        run = run_assert if type(test) is str else run_call if "fn_name" in test else run_stdin
        try:
            text = run(test)
        except BaseException as error:  # SystemExit as well
            text = f"{type(error).__name__}: {error}"
        text = trouble[0] if trouble else text or ""
        os.write(4, json.dumps(text[:600]).encode() + b"\n")
        if trouble:  # the judge starts a fresh pair for the other tests
            return


def forker(control, calls):
    """Process F: fork an S when the judge says so; kill and reap it when the judge says so. It never sees a request."""
    import json, os, signal, socket
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1000, 4)
        if not message:  # the judge is gone
            os._exit(0)
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                confine(fds, *json.loads(message), calls, parent)
                solution()
            finally:
                os._exit(0)
        for fd in fds:
            os.close(fd)
        control.recv(1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        control.send(b"x")


def judge(request, control, calls):
    """Process M: run a program's tests in a pair of S and T; a fresh pair goes on where one broke, none where late."""
    import json, math, os, select, signal, socket, subprocess, tempfile, time
    program, tests, timeout, memory_mb = (request[name] for name in ("program", "tests", "timeout", "memory_mb"))
    end, late = time.monotonic() + 10 * timeout, f"time limit of {timeout:g} s exceeded"

    def collect(report, count):
        """What T tells about its tests, until it ends or is late."""
        texts, data, limit = [], b"", min(end, time.monotonic() + timeout)
        while len(texts) < count:
            if not select.select([report], [], [], max(0, limit - time.monotonic()))[0]:
                return texts + [late]
            part = os.read(report, 65536)
            if not part:
                return texts or ["the test can't be run"]
            *lines, data = (data + part).split(b"\n")
            if lines:
                texts, limit = texts + [json.loads(line) for line in lines], min(end, time.monotonic() + timeout)
        return texts

    def run_pair(tests):
        folder, nothing = tempfile.mkdtemp(prefix=f"solution-{os.getpid()}-"), os.open(os.devnull, os.O_RDWR)
        if os.getuid() == 0:
            os.chown(folder, 65534, 65534)
        (ours, theirs), (report, told) = socket.socketpair(), os.pipe()
        limits = folder, memory_mb, math.ceil(10 * timeout) + 1
        socket.send_fds(control, [json.dumps(limits).encode()], [nothing, nothing, nothing, theirs.fileno()])
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                confine([nothing, nothing, nothing, ours.fileno(), told], *limits, calls, parent)
                tester(program, tests)
            finally:
                os._exit(0)
        os.close(told), ours.close(), theirs.close()
        texts = collect(report, len(tests))
        control.send(b"x")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        control.recv(1)  # S is gone as well
        os.close(report), os.close(nothing)
        try:
            os.rmdir(folder)
        except OSError:  # it isn't empty, or gone
            for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", folder]):
                subprocess.run(command, stderr=subprocess.DEVNULL)
        return texts

    texts = []
    while len(texts) < len(tests) and late not in texts:
        texts += run_pair(tests[len(texts):])
    feedback = []
    for test, text in zip(tests, texts):
        if type(test) is dict:
            given, expected, name = (str(test.get(key, "")) for key in ("input", "output", "fn_name"))
            test = f"{name} input {given[:120]!r}: expected {expected[:120]!r}"
        feedback += [f"{test.strip()[:300]}: {text}"] if text else []
    return {"passed": texts.count(""), "feedback": "\n".join(feedback[:2])[:2000]}


def code_server():
    """Process M: start F, then answer requests."""
    import ctypes, gc, importlib, json, os, socket, sys
    modules = ("__future__ abc array ast base64 binascii bisect calendar cmath collections.abc contextlib copy csv "
               "datetime dataclasses decimal difflib enum fractions functools hashlib heapq inspect io itertools "
               "json keyword math numbers operator pprint queue random re resource fcntl select statistics string "
               "struct subprocess time tempfile textwrap threading timeit traceback types typing unicodedata uuid "
               "warnings zlib _strptime")
    for name in modules.split():  # all that a program can import, as its process can read no file of the library
        importlib.import_module(name)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # not DUMPABLE: none of us can be traced or read through /proc
    gc.freeze()  # the collector won't touch, and so copy, what the forks share
    (control, theirs), calls = socket.socketpair(), system_calls()
    pid = os.fork()
    if pid == 0:
        control.close()
        os.dup2(2, 0), os.dup2(2, 1)  # the trainer's pipes aren't for F
        forker(theirs, calls)
    theirs.close()
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(judge(json.loads(line), control, calls)), flush=True)
    control.close()
    os.waitpid(pid, 0)


CODE = Child(code_server, pack, unpack, write_back, system_calls, confine, solution, connect, tester, forker, judge)


def run_program(program: str, tests: list, timeout: float = 1.0, memory_mb: int = 512) -> tuple[int, str]:
    """(Number of tests passed, feedback on the first two that failed or "").

    A test is statements such as `assert add(1, 2) == 3`; or {"input", "output"}: the program's stdin and stdout; or
    {"fn_name", "input", "output"}: a JSON argument per line and the JSON result. Each has `timeout` seconds, all of
    them 10 times that; the first late test ends the run, and those after it count as failed.
    Limits: a test can pass the solution plain data only, no function; objects that the solution returns answer to
    attributes, calls, len(), iteration, indexing, str(), repr(), int() and float(), but equal nothing but themselves,
    don't compare or calculate; a test's builtins and modules are its own, even if the solution defines `len`, and a
    test that uses no other name of the program fails; a program has no threads and can import no more than
    code_server() loads; at most 1 MB comes back at once; a name kept in a module or in a global of the program lasts
    from one test to the next.
    Linux with seccomp and Landlock (5.13 and up, x86_64 or aarch64) holds all of it, as root or not. Elsewhere rlimits,
    the pair of processes and, for root, another user and chroot remain: the score can't be forged, but the network is
    open, and an ordinary user's files and processes are in reach. Nowhere is the disk that a program fills limited
    but by its time, 8 MB a file.
    """
    request = {"program": program, "tests": tests, "timeout": timeout, "memory_mb": memory_mb}
    reply = CODE.ask(request, 10 * timeout + 5)
    if reply is None:  # is it this program, or does none run any more? A zero for all would teach nonsense
        honest = CODE.ask(request | {"program": "x = 1", "tests": ["assert x == 1"], "timeout": 10.0}, 60)
        if not honest or honest["passed"] != 1:
            raise VerifierError("code: no program can be run any more; is the disk of temporary files full?")
    return (reply["passed"], reply["feedback"]) if reply else (0, "the sandbox failed")


MATH = Child(math_server)


# ------------------------------------------------------------------------------------------------
# python eval.py RUN, python eval.py A B
# ------------------------------------------------------------------------------------------------


def main(argv):
    """python eval.py RUN: measure a run's drift and draw its report again. python eval.py A B: compare two models."""
    if len(argv) not in (1, 2):
        print("usage: python eval.py RUN        (the out_dir of a run)\n       python eval.py A B        (two model folders)")
        return 2
    try:
        if missing := [name for name in argv if not Path(name).is_dir()]:
            raise ValueError(f"there is no folder {missing[0]}")
        print(f"wrote {report(argv[0])}" if len(argv) == 1 else compare(*argv))
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
