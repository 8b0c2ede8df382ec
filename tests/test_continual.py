"""The run: configuration, one step, and a folder in which nothing is lost."""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

import continual
from continual import (
    ConfigError, RunError, load_config, main, make_config, micro_batches, prompt_indices, rollout_engine, run,
)

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "configs" / "tiny.yaml"
# Two tasks, a few steps, few rows: a whole sequence in a few seconds.
SHORT = ["stage_steps=3", "prompts_per_step=4", "group_size=4", "save_every=1", "eval.samples=1", "variants=[]"]
BATCHES = ["method=sft", "eval.batch_size=2", "eval.max_new_tokens=12"]   # 8 test prompts: 4 batches a task, 8 a row, 24 in a run of two stages


def tiny(tmp_path, *overrides, tasks=2):
    tree = yaml.safe_load(TINY.read_text())
    tree["tasks"] = [t | {"train_limit": 80, "test_limit": 8, "steps": 3} for t in tree["tasks"][:tasks]]
    del tree["ood"], tree["eval"]["probe_every"]                 # tests/test_report.py has them
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    for name in ("tiny",):                                       # relative files are found beside the config
        if not (tmp_path / name).exists():
            (tmp_path / name).symlink_to(TINY.parent / name)
    return load_config(file, [*SHORT, f"out_dir={tmp_path / 'run'}", *overrides])


def two_variants(folder):
    """`python continual.py` from end to end."""
    tiny(folder)
    variants = "variants=[{name: grpo, set: {method: grpo}}, {name: sdpo, set: {method: sdpo, sdpo.teacher: restart}}]"
    return [sys.executable, str(ROOT / "continual.py"), "--config", str(folder / "config.yaml"), *SHORT, variants,
            "tasks.0.steps=2", "tasks.1.steps=1", f"out_dir={folder / 'run'}"]


BESIDE = {"command_line": two_variants}


@pytest.fixture
def command_line(beside):
    return beside(two_variants)


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """They take longer than such a run. The command line draws them, and tests/test_report.py."""
    monkeypatch.setattr(continual, "report", lambda folder, **_: folder)


def log(folder):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def weights(folder):
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


def assert_equal_runs(a, b):
    """Bit for bit: metrics (but for the clock), matrix, and the models of every stage."""
    assert log(a) == log(b)
    assert json.loads((a / "matrix.json").read_text()) == json.loads((b / "matrix.json").read_text())
    stages = sorted(p.name for p in a.glob("stage-*"))
    assert stages and stages == sorted(p.name for p in b.glob("stage-*"))
    for stage in stages:
        first, second = weights(a / stage), weights(b / stage)
        assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


# ---- configuration -----------------------------------------------------------------------------


# One wrong setting each: what is typed behind the file's name, and what the one line says of key, value and what is allowed.
WRONG = [
    ("lrr=1", "lrr: no such key; did you mean lr?"),
    ("qqqqqq=1", "qqqqqq: no such key; there are model, out_dir, tasks"),
    ("sdpo.alpa=1", "sdpo.alpa: no such key; did you mean alpha?"),
    ("tasks.0.pth=x", "tasks.0.pth: no such key; did you mean path?"),
    ("lr=fast", "lr: 'fast' must be of type float"),
    ("lr=0", "lr: 0.0 isn't allowed; it must be above 0"),
    ("lr=nan", "lr: nan isn't allowed; it must be above 0"),
    ("lr=.inf", "lr: inf isn't allowed; it must be above 0"),
    ("lr=[", "lr: '[' isn't a value that YAML knows"),
    ("lr=2026-99-99", "lr: '2026-99-99' isn't a value that YAML knows"),
    ("lr=1" + 400 * "0", "lr: 1" + 199 * "0" + "... must be of type float"),
    ("seed=1.5", "seed: 1.5 must be of type int"),
    ("seed=true", "seed: True must be of type int"),
    ("seed=-1", "seed: -1 isn't allowed; it must be 0 or more"),
    ("seed=" + 5000 * "9", "seed: '" + 199 * "9" + "... isn't a value that YAML knows"),
    ("stage_steps=0", "stage_steps: 0 isn't allowed; it must be at least 1"),
    ("prompts_per_step=0", "prompts_per_step: 0 isn't allowed; it must be at least 1"),
    ("keep_checkpoints=0", "keep_checkpoints: 0 isn't allowed; it must be at least 1"),
    ("eval.samples=0", "eval.samples: 0 isn't allowed; it must be at least 1"),
    ("stage_steps=null", "stage_steps: None must be of type int"),
    ("save_every=0", "save_every: 0 isn't allowed; it must be at least 1"),
    ("method=ppo", "method: 'ppo' isn't allowed; it must be one of grpo, sdpo, sft"),
    ("method=", "method: '' isn't allowed; it must be one of grpo, sdpo, sft"),
    ("device=tpu", "device: 'tpu' isn't allowed; it must be one of auto, cpu, cuda"),
    ("out_dir=", "out_dir: '' isn't allowed; it must be a folder's path"),
    ("model=", "model: '' isn't allowed; it must be a model's folder or hub id"),
    ("trust_remote_code=maybe", "trust_remote_code: 'maybe' must be of type bool"),
    ("rollout.temperature=0", "rollout.temperature: 0.0 isn't allowed; it must be above 0"),
    ("rollout.chat_template=[1]", "rollout.chat_template: [1] must be of type dict"),
    ("sdpo.alpha=1.5", "sdpo.alpha: 1.5 isn't allowed; it must be between 0 and 1"),
    ("sdpo.teacher=wise", "sdpo.teacher: 'wise' isn't allowed; it must be one of frozen, ema"),
    ("sdpo.topk=0", "sdpo.topk: 0 isn't allowed; it must be at least 1"),
    ("sdpo.topk=many", "sdpo.topk: 'many' must be of type int"),
    ("sdpo.threshold=nan", "sdpo.threshold: nan isn't allowed; it must be a finite number"),
    ("sdpo.sampled_token=true", "sdpo.alpha: 0.5 isn't allowed with sampled_token; it must be 1"),
    ("sdpo.template={prompt} {oops}", "sdpo.template: '{prompt} {oops}' isn't allowed; its placeholders are {feedback}, {prompt}, {solution}"),
    ("sdpo.template={prompt} only", "sdpo.template: '{prompt} only' isn't allowed; its placeholders are"),
    ("sdpo.template={prompt.__class__}{solution}", "sdpo.template: '{prompt.__class__}{solution}' isn't allowed; its placeholders are"),
    ("sdpo.solution_template={demonstration:>99999999999}", "sdpo.solution_template: '{demonstration:>99999999999}' isn't allowed"),
    ("sdpo={alpha: 1}", "sdpo: set its keys one by one, e.g. sdpo.teacher=..."),
    ("grpo.aggregation=mean", "grpo.aggregation: 'mean' isn't allowed; it must be one of token_mean, sequence_mean"),
    ("rollout.engine=vllm", "rollout.engine: 'vllm' isn't allowed; it must be one of auto, loop, continuous, static"),
    ("grpo.dual_clip=1", "grpo.dual_clip: 1.0 isn't allowed; it must be above 1, or null"),
    ("optim.compute_dtype=float16", "optim.compute_dtype: 'float16' isn't allowed; it must be one of float32, bfloat16"),
    ("optim.schedule=linear", "optim.schedule: 'linear' isn't allowed; it must be one of constant, cosine"),
    ("optim.beta2=1", "optim.beta2: 1.0 isn't allowed; it must be at least 0 and below 1"),
    ("optim.updates_per_step=5", "optim.updates_per_step: 5 isn't allowed; it must divide prompts_per_step, 12"),
    ("eval.top_p=0", "eval.top_p: 0.0 isn't allowed; it must be above 0 and at most 1"),
    ("tasks=[]", "tasks: [] isn't allowed; there must be at least one"),
    ("tasks=1", "tasks: 1 must be a list"),
    ("tasks=[1]", "tasks.0: 1 must be a mapping"),
    ("tasks.0.verifier=maths", "tasks.0.verifier: 'maths' isn't allowed; it must be one of math, mcq"),
    ("tasks.0.test_share=1", "tasks.0.test_share: 1.0 isn't allowed; it must be above 0 and below 1"),
    ("tasks.0.prompt={question", "tasks.0.prompt: '{question' isn't allowed; a column's name stands in braces, other braces are doubled"),
    ("tasks.0.option_line={letter}", "tasks.0.option_line: '{letter}' isn't allowed; its placeholders are {label}, {text}"),
    ("tasks.0.answer_pattern=(", "tasks.0.answer_pattern: '(' isn't allowed; it must be a regular expression with a group"),
    ("tasks.0.answer_pattern=\\d+", "tasks.0.answer_pattern: '\\\\d+' isn't allowed; it must be a regular expression with a group"),
    ("tasks.1.name=math", "tasks: the names ['math', 'math', 'tool', 'code', 'math-reworded', "),
    ("tasks.0.name=../up", "tasks.0.name: '../up' isn't allowed; names become folders"),
    ("tasks.0.name=/etc", "tasks.0.name: '/etc' isn't allowed; names become folders"),
    ("ood=[{name: ../up, path: x, verifier: math}]", "ood.0.name: '../up' isn't allowed; names become folders"),
    ("tasks.0.name='..'", "tasks.0.name: \"'..'\" isn't allowed; names become folders"),
    ("tasks.0.name=" + 101 * "n", "tasks.0.name: '" + 101 * "n" + "' isn't allowed; names become folders: 100 letters"),
    ("tasks.9.path=x", "override 'tasks.9.path=x': the file has no such place"),
    ("lr", "override 'lr': must be key=value"),
    ("sdpo.max_teacher_tokens=8", "sdpo.max_teacher_tokens: 8 isn't allowed; it must be at least max_prompt_tokens, 128"),
    ("variants=[{name: a}, {name: a}]", "variants: the names ['a', 'a'] must differ"),
    ("variants=[{name: a, set: {sdpo: {alpha: 1}}}]", "variant a: sdpo: set its keys one by one, e.g. sdpo.alpha"),
    ("variants=[{name: a, set: {out_dir: x}}]", "variant a: out_dir: a variant can't set it"),
    ("variants=[{name: a, set: {tasks.0.name: x}}]", "variant a: tasks: a variant can't change their names"),
    ("variants=[{name: a, set: {lrr: 1}}]", "variant a: lrr: no such key; did you mean lr?"),
    ("variants=[{set: {lr: 1}}]", "variants.0.name: missing, and it has no default"),
    ("variants=[{name: a/b}]", "variants.0.name: 'a/b' isn't allowed; names become folders"),
    ("variants=[{name: base.json}]", "variants.0.name: 'base.json' isn't allowed; names become folders"),
    # What can't be told before files are opened; still no weights are read.
    ("model=no-such-folder/at/all", "model: there is no folder 'no-such-folder/at/all'; it must be a model's folder or a hub id"),
    ("sdpo.topk=100000", "sdpo.topk: 100000 isn't allowed; it must be at most the vocabulary"),
    ("sdpo.max_teacher_tokens=100000", "sdpo.max_teacher_tokens: 100000 isn't allowed; with max_new_tokens 48 it must be at most 464"),
    ("eval.max_new_tokens=500", "sdpo.max_teacher_tokens: 256 isn't allowed; with max_new_tokens 500 it must be at most 12"),
    ("sdpo.init_from=no/such/folder", "sdpo.init_from: there is no folder 'no/such/folder'"),
    ("max_prompt_tokens=2", "task math: no training prompt is left: all are over max_prompt_tokens=2"),
    ("rollout.chat_template={tokenize: true}", "task math: the chat template refuses a training prompt"),
    ("tasks.0.path=none.jsonl", "task math: path: can't read none.jsonl: FileNotFoundError"),
    ("tasks.0.test_path=none.jsonl", "task math: test_path: can't read none.jsonl"),
    ("tasks.0.join=none.jsonl", "task math: join: can't read none.jsonl"),
    ("tasks.0.answer=gold", "task math, row 0 of "),
]


@pytest.mark.parametrize("override, message", WRONG, ids=[override[:60] for override, _ in WRONG])
def test_a_wrong_config_stops_before_any_model_loads_with_one_line(tmp_path, monkeypatch, override, message, capsys):
    from transformers import PreTrainedModel

    loaded = []
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(lambda *args, **kwargs: loaded.append(args)))
    common = [f"out_dir={tmp_path / 'run'}", "method=sdpo", *([] if "variants" in override else ["variants=[]"])]
    assert main(["--config", str(TINY), *common, override]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"error: {TINY}: {message}") and len(error.splitlines()) == 1
    assert loaded == [] and not list(tmp_path.glob("run/metrics.jsonl"))


def test_forty_wrong_configs():
    assert len(dict(WRONG)) >= 40


@pytest.mark.parametrize("overrides, message", [
    (["method=grpo", "group_size=1"], "group_size: 1 isn't allowed; grpo compares siblings, so it must be at least 2"),
    (["method=sdpo", "group_size=1"], "group_size: 1 isn't allowed; sdpo compares siblings, so it must be at least 2"),
    (["sdpo.teacher=live", "sdpo.init_from=x"], "sdpo.init_from: 'x' isn't allowed for a live teacher; it must be null"),
    (["method=sft", "tasks.1.reference=null"], "tasks.1.reference: None isn't allowed; method sft needs the template of a right answer"),
    (["device=cuda"], "device: 'cuda' isn't allowed here: PyTorch finds no CUDA device; auto takes the CPU"),
], ids=str)
def test_settings_that_do_not_go_together_or_not_here(tmp_path, monkeypatch, capsys, overrides, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(continual, "load_model", None)
    assert main(["--config", str(TINY), f"out_dir={tmp_path / 'run'}", "variants=[]", *overrides]) == 2
    assert capsys.readouterr().err == f"error: {TINY}: {message}\n"


LAUGHS = "a0: &a0 [ha, ha, ha, ha, ha, ha, ha, ha, ha, ha]\n" + "".join(
    f"a{n}: &a{n} [{', '.join(10 * [f'*a{n - 1}'])}]\n" for n in range(1, 12))
BROKEN = {
    "empty": ("", "the file: None must be a mapping of settings"),
    "list": ("- 1\n- 2", "the file: [1, 2] must be a mapping of settings"),
    "not closed": ("a: [1", "can't read it: ParserError"),
    "not text": (b"model: \xff\xfe", "can't read it: UnicodeDecodeError"),
    "a key twice": ("model: a\nlr: 1e-5\nlr: 1e-3", "can't read it: line 3: the key 'lr' is given twice"),
    "a key twice below": ("sdpo:\n  alpha: 1\n  alpha: 0", "can't read it: line 3: the key 'alpha' is given twice"),
    "alias bomb": (LAUGHS, "can't read it: its aliases stand for more than 100,000 values"),
    "merge bomb": ("a0: &a0 {k: 1, l: 2}\n" + "".join(
        f"a{n}: &a{n}\n  <<: [{', '.join(10 * [f'*a{n - 1}'])}]\n" for n in range(1, 12)), "its aliases stand for more than 100,000 values"),
    "alias of itself": ("tasks: &t [*t]", "its aliases stand for more than 100,000 values"),
    "deep": ("a: " + 5000 * "[" + 5000 * "]", "can't read it: it is nested too deeply"),
    "huge": ("a: " + 2_000_000 * "x", "can't read it: it has more than 1,000,000 characters"),
    "python object": ("a: !!python/object/apply:os.system [touch was-here]", "can't read it: ConstructorError"),
    "python name": ("a: !!python/name:os.system", "can't read it: ConstructorError"),
    "10,000 digits": ("seed: " + 10_000 * "9", "can't read it: Exceeds the limit"),
    "no date": ("seed: 2026-99-99", "can't read it: month must be in 1..12"),
    "unknown key": ('"a\\nb": 1', "a b: no such key"),
    "no model": ("out_dir: o\ntasks: []", "model: missing, and it has no default"),
    "long value": ("out_dir: o\ntasks: []\nmodel: [" + 5000 * "x, " + "]", "model: ['x', "),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_stops_with_one_line_and_at_once(tmp_path, monkeypatch, capsys, name):
    text, message = BROKEN[name]
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "broken.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    start = time.perf_counter()
    assert main(["--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {file}: ") and message in error and len(error.splitlines()) == 1 and len(error) < 600
    assert time.perf_counter() - start < 5 and [p.name for p in tmp_path.iterdir()] == ["broken.yaml"]


def test_a_missing_file_and_a_folder_stop_with_one_line(tmp_path, capsys):
    for file in (tmp_path / "none.yaml", tmp_path):
        assert main(["--config", str(file)]) == 2
        assert f"{file}: can't read it" in capsys.readouterr().err


def test_few_aliases_are_fine():
    text = "base: &b {path: p, verifier: math}\ntasks: [{<<: *b, name: a}, {<<: *b, name: c}]"
    assert [t["path"] for t in continual.read_yaml(text)["tasks"]] == ["p", "p"]


def test_overrides_take_the_type_of_their_field():
    c = load_config(TINY, ["lr=1e-5", "sdpo.topk=null", "tasks.0.prompt={question}", "tasks.0.where={level: [L3]}", "out_dir=1"])
    assert (c.lr, c.sdpo.topk, c.tasks[0].prompt, c.tasks[0].where, c.out_dir) == (1e-5, None, "{question}", {"level": ["L3"]}, "1")
    assert make_config({"model": "m", "out_dir": "o", "lr": "1e-5", "tasks": [{"name": "t", "path": "p", "verifier": "math"}]}).lr == 1e-5


@pytest.mark.parametrize("asked, device, flash, right", [
    ("auto", "cpu", False, "loop"), ("auto", "cuda", True, "continuous"), ("auto", "cuda", False, "static"),
    ("static", "cpu", False, "static"), ("continuous", "cuda", False, "continuous"), ("loop", "cuda", True, "loop"),
])
def test_rollouts_take_the_engine_asked_for_or_the_devices_fastest(tmp_path, monkeypatch, asked, device, flash, right):
    monkeypatch.setattr(continual, "flash_attention", lambda model: flash)
    config = tiny(tmp_path, f"rollout.engine={asked}")
    assert rollout_engine(config, SimpleNamespace(device=torch.device(device))) == right


def test_every_shipped_config_loads():
    for file in (ROOT / "configs").glob("*.yaml"):
        assert load_config(file).tasks


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path):
    shutil.copytree(TINY.parent / "tiny" / "base", tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        run(tiny(tmp_path, f"model={tmp_path / 'base'}"))


@pytest.fixture
def foreign(tmp_path):
    """A copy of the base to do things to."""
    return Path(shutil.copytree(TINY.parent / "tiny" / "base", tmp_path / "base"))


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("asked", [False, True])
def test_code_that_comes_with_a_model_runs_only_if_asked_for(tmp_path, monkeypatch, foreign, asked):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    (foreign / "mine.py").write_text(f"open({str(tmp_path / 'was-here')!r}, 'w')\nraise RuntimeError('it ran')\n")
    change(foreign / "config.json", model_type="mine", auto_map={"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"})
    change(foreign / "tokenizer_config.json", auto_map={"AutoTokenizer": ["mine.T", None]}, tokenizer_class="T")
    with pytest.raises(ConfigError) as error:
        run(tiny(tmp_path, f"model={foreign}", f"trust_remote_code={asked}", tasks=1))
    assert f"model: can't load {str(foreign)!r}" in str(error.value) and "\n" not in str(error.value)
    assert (tmp_path / "was-here").exists() == asked


def test_weights_that_are_a_pickle_are_refused_unread(tmp_path, foreign):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was-here"),)

    (foreign / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Bomb()}, foreign / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="model: can't load .*safetensors") as error:
        run(tiny(tmp_path, f"model={foreign}", tasks=1))
    assert "\n" not in str(error.value) and not (tmp_path / "was-here").exists()


def test_a_tokenizer_of_more_tokens_than_the_model_has_is_refused(tmp_path, foreign):
    change(foreign / "config.json", vocab_size=7)
    with pytest.raises(ConfigError, match=r"its tokenizer has \d+ tokens, which must be at most the vocabulary of the model, 7"):
        run(tiny(tmp_path, f"model={foreign}", tasks=1))


def test_a_teacher_of_other_shapes_is_refused_before_weights_are_read(tmp_path, monkeypatch, foreign):
    monkeypatch.setattr(continual, "load_model", None)
    change(foreign / "config.json", intermediate_size=32)
    with pytest.raises(ConfigError, match="sdpo.init_from: .* isn't allowed; its matrices must have the shapes of those of the model"):
        run(tiny(tmp_path, "method=sdpo", f"sdpo.init_from={foreign}", tasks=1))


def test_a_verifier_that_cannot_work_is_no_wrong_answer(tmp_path, monkeypatch, capsys):
    """A zero for every response would teach nonsense; the run stops with one line."""
    import eval as evaluation

    tiny(tmp_path)
    monkeypatch.setattr(evaluation.MATH, "code", "raise ImportError('no math-verify')")
    evaluation.MATH.stop()
    spelt = r"\boxed{\frac{1}{2}}"
    monkeypatch.setattr(continual, "accuracy", lambda *args, **kwargs: evaluation.verify("math", spelt, evaluation.Example("0", [], "3")))
    assert main(["--config", str(tmp_path / "config.yaml"), *SHORT, f"out_dir={tmp_path / 'run'}"]) == 2
    told = "error: evaluation of task math: math_server: its process doesn't start; what was saved before is whole"
    assert capsys.readouterr().err.splitlines()[-1] == told


def test_long_prompts_are_dropped_and_counted(tmp_path):
    from transformers import AutoTokenizer

    from grpo import encode

    config = tiny(tmp_path, tasks=1)
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    whole = continual.load_tasks(config, tokenizer, say=lambda text: None)[0]
    lengths = [len(encode(tokenizer, e.messages)) for e in whole.train]
    config.max_prompt_tokens = sorted(lengths)[len(lengths) // 2]
    said = []
    cut = continual.load_tasks(config, tokenizer, said.append)[0]
    assert len(cut.train) == sum(n <= config.max_prompt_tokens for n in lengths) < len(whole.train)
    dropped = len(whole.train) - len(cut.train) + len(whole.test) - len(cut.test)
    assert f"; {dropped} over max_prompt_tokens" in said[0]


def test_references_are_never_cut(tmp_path):
    """SFT on answers of more than max_new_tokens: left out, counted, and refused where none is left."""
    with pytest.raises(ConfigError, match="no training prompt is left: all are with a reference that leaves its end no room in max_new_tokens"):
        run(tiny(tmp_path, "method=sft", "max_new_tokens=4"))


# ---- one step ----------------------------------------------------------------------------------


def test_every_pass_over_the_data_asks_every_prompt_once():
    count, size = 10, 4
    stream = [i for step in range(5) for i in prompt_indices(count, size, step, "seed")]
    assert sorted(stream[:10]) == sorted(stream[10:]) == list(range(10))
    assert stream[:10] != stream[10:]                                    # and in another order
    assert len(prompt_indices(3, 8, 0, "s")) == 8                        # more prompts than rows


def test_micro_batches_hold_every_row_within_the_budget():
    lengths = [(6, 1), (1, 2), (2, 7), (1, 0), (1, 3), (3, 1), (20, 10), (7, 2)]
    groups = micro_batches(lengths, 20)
    assert sorted(i for g in groups for i in g) == list(range(8))
    for g in groups:                                                     # padded: the longest prompt and the longest response
        padded = len(g) * (max(lengths[i][0] for i in g) + max(lengths[i][1] for i in g))
        assert padded <= 20 or len(g) == 1
    assert max(map(len, groups)) > 1 and micro_batches([], 20) == []


def gradient(config, budget, seed=0):
    """The gradient of one step's update, and its log."""
    from transformers import AutoTokenizer

    config.optim.micro_batch_tokens = budget
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    task = continual.load_tasks(config, tokenizer, say=lambda text: None)[0]
    model = continual.load_model(config.model, config, "cpu")
    player = continual.Player(model, config)
    _, teacher, reference = continual.begin_stage(model, player, config, "cpu")
    if reference is not None:                                            # a reference that differs from the policy
        with torch.no_grad():
            for p in reference.parameters():
                p.mul_(0.9)
    examples = task.train[:4]
    if config.method == "sft":
        batch, _ = continual.references(tokenizer, examples, config, "cpu")
    else:
        batch, _ = continual.collect(model, player, tokenizer, task, examples, config, seed)
    seen = []

    class Reader(torch.optim.SGD):
        def step(self):
            seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]))

    config.optim.grad_clip = 1e9
    log = continual.update(model, teacher, reference, Reader(model.parameters()), batch, config, tokenizer.pad_token_id)
    return seen[0], log


@pytest.mark.parametrize("overrides", [
    ["method=grpo"], ["method=grpo", "grpo.aggregation=sequence_mean"], ["method=grpo", "grpo.kl_coef=0.1"],
    ["method=sdpo"], ["method=sdpo", "sdpo.topk=5", "sdpo.mask_ratio=0.3"], ["method=sdpo", "sdpo.teacher=live", "sdpo.alpha=0"],
    ["method=sdpo", "sdpo.sampled_token=true", "sdpo.alpha=1"], ["method=sft"],
], ids=" ".join)
def test_grpo_04_micro_batch_size_changes_nothing(tmp_path, overrides):
    (small, log), (large, whole) = (gradient(tiny(tmp_path, *overrides), budget) for budget in (1, 10**6))
    assert large.norm() > 0
    torch.testing.assert_close(small, large, rtol=1e-4, atol=1e-6 * float(large.abs().max()) + 1e-9)
    assert log == pytest.approx(whole, rel=1e-4, abs=1e-6)


def test_sampled_log_probs_are_those_of_the_loss(tmp_path):
    """On the first update the policy is the one that sampled: every ratio is 1, nothing is clipped."""
    for penalty in (0.0, 0.1):                                           # without it, groups of equal rewards aren't computed
        _, log = gradient(tiny(tmp_path, "method=grpo", "rollout.temperature=0.7", f"grpo.kl_coef={penalty}"), 200)
        assert log["clipped"] == 0.0 and log["ratio"] == pytest.approx(1.0, abs=1e-5)


def test_updates_per_step_and_the_teachers_pace(tmp_path):
    config = tiny(tmp_path, "method=sdpo", "sdpo.teacher=ema", "optim.updates_per_step=2", tasks=1)
    seen = []
    original = continual.Teacher.update
    continual.Teacher.update = lambda self, student: (original(self, student), seen.append(self.updates))
    try:
        run(config)
    finally:
        continual.Teacher.update = original
    done = [line["updates"] for line in log(tmp_path / "run")]
    assert all(0 <= u <= 2 for u in done) and seen == list(range(1, sum(done) + 1))


def test_warm_up_and_learning_rate_restart_with_the_stage(tmp_path):
    run(tiny(tmp_path, "optim.warmup_steps=2", "lr=1e-3", "method=sft"))
    assert [line["lr"] for line in log(tmp_path / "run")] == pytest.approx([5e-4, 1e-3, 1e-3] * 2)


# ---- a folder in which nothing is lost (and see test_faults.py) --------------------------------


def test_a_save_before_the_first_update_changes_nothing(tmp_path, monkeypatch):
    """Steps without a signal, saved or not, then a resume: PyTorch fills an empty optimizer when asked for its state."""
    original, weights_of = continual.collect, {}

    def silent_at_first(*args):
        batch, numbers = original(*args)
        if len(log(Path(args[5].out_dir))) in (0, 1, 3, 4):
            batch.signal = [False] * len(batch.signal)
        return batch, numbers

    monkeypatch.setattr(continual, "collect", silent_at_first)
    for name, every, cut in (("plain", 1000, None), ("cut", 1, 5)):
        settings = ["method=grpo", "lr=1e-2", f"save_every={every}", f"out_dir={tmp_path / name}"]
        if cut:
            with monkeypatch.context() as patch:
                patch.setattr(continual, "train_step", _fail_at(continual.train_step, cut))
                with pytest.raises(KeyError):
                    run(tiny(tmp_path, *settings))
        run(tiny(tmp_path, *settings))
        weights_of[name] = weights(tmp_path / name / "stage-2-science")
    assert all(torch.equal(w, weights_of["cut"][k]) for k, w in weights_of["plain"].items())


def _fail_at(function, n):
    calls = []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == n:
            raise KeyError("cut")
        return function(*args, **kwargs)

    return failing


def test_finished_runs_end_at_once_and_other_configs_are_refused(tmp_path, monkeypatch):
    config = tiny(tmp_path, "method=sft", tasks=1)
    rows = run(config)
    monkeypatch.setattr(continual, "load_model", None)                   # a finished run loads no model
    assert run(tiny(tmp_path, "method=sft", tasks=1)) == rows
    with pytest.raises(ConfigError, match="belongs to another config: optim.chunk is 1024 there, 512 here"):
        run(tiny(tmp_path, "method=sft", "optim.chunk=512", tasks=1))


def test_a_mistake_found_before_the_run_claims_no_folder(tmp_path):
    with pytest.raises(ConfigError, match="no folder"):
        run(tiny(tmp_path, "method=sft", "model=./typo", tasks=1))
    assert run(tiny(tmp_path, "method=sft", tasks=1))


def test_a_bad_second_update_of_a_step_is_not_saved_over(tmp_path, monkeypatch):
    """Its first update has moved the weights already: the checkpoint from before the step stands."""
    original, calls = continual.micro_loss, []

    def poisoned(*args, **kwargs):
        loss, numbers = original(*args, **kwargs)
        calls.append(1)
        return (loss * float("nan") if len(calls) == 4 else loss), numbers

    settings = ["method=sft", "optim.updates_per_step=2", "save_every=1"]
    with monkeypatch.context() as patch:
        patch.setattr(continual, "micro_loss", poisoned)
        with pytest.raises(RunError, match="step 2: .*the newest checkpoint is from before it"):
            run(tiny(tmp_path, *settings))
    run(tiny(tmp_path, *settings))
    run(tiny(tmp_path, *settings, f"out_dir={tmp_path / 'whole'}"))
    assert_equal_runs(tmp_path / "whole", tmp_path / "run")


@pytest.fixture
def batches(monkeypatch):
    """The evaluation's batches are counted, and the process dies in number batches[0]."""
    import eval as evaluation

    counted, original = [None], evaluation.rollout

    def rollout(*args, **kwargs):
        if len(counted) == counted[0]:
            raise KeyError("cut")
        counted.append(args[2])
        return original(*args, **kwargs)

    monkeypatch.setattr(evaluation, "rollout", rollout)
    return counted


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    run(tiny(folder, *BATCHES))
    return folder / "run"


@pytest.mark.parametrize("end", [2, 12, 24])
def test_a_run_cut_inside_an_evaluation_goes_on_behind_the_last_batch(tmp_path, batches, evaluated, end):
    batches[0] = end
    with pytest.raises(KeyError):
        run(tiny(tmp_path, *BATCHES))
    batches[0] = None
    run(tiny(tmp_path, *BATCHES))
    assert len(batches) - 1 == 24
    assert_equal_runs(evaluated, tmp_path / "run")

    def noted(folder):
        """What its evaluations left; the base's answers are named by what was asked, the folder of the tasks included."""
        base = json.loads((folder / "base.json").read_text())["answers"]
        files = [*(folder / "answers").iterdir(), folder / "evaluation-1.json", folder / "evaluation-2.json"]
        same = lambda text: text.replace(base, "base").replace(str(folder.parent), "")  # noqa: E731
        return {same(file.name): same(file.read_text()) for file in files}

    whole = noted(evaluated)
    assert noted(tmp_path / "run") == whole
    assert {f"{w}-{t}.jsonl" for w in ("base", "stage-1", "stage-2") for t in ("math", "science")} == {n for n in whole if n.endswith("l")}


def test_answers_of_weights_that_are_trained_again_are_asked_again(tmp_path, batches, evaluated):
    """Cut in the second stage's evaluation, then its last checkpoint is lost: one step more makes these weights anew."""
    batches[0] = 19
    with pytest.raises(KeyError):
        run(tiny(tmp_path, *BATCHES))
    newest = continual.checkpoints(tmp_path / "run")[0]
    assert newest.name == "002-000003" and (tmp_path / "run" / "answers" / "stage-2-math.jsonl").exists()
    (newest / "state.json").write_text("{}")
    batches[:] = [None]
    run(tiny(tmp_path, *BATCHES))
    assert len(batches) - 1 == 8                                          # the whole row again, and no other
    assert_equal_runs(evaluated, tmp_path / "run")


def test_sets_out_of_distribution_are_measured_and_never_trained_on(tmp_path, evaluated):
    tree = yaml.safe_load(TINY.read_text())
    tree["tasks"] = [t | {"train_limit": 80, "test_limit": 8, "steps": 3} for t in tree["tasks"]]
    tree["tasks"], tree["ood"] = tree["tasks"][:2], [t | {"name": f"far-{t['name']}", "test_limit": 5} for t in tree["tasks"][2:]]
    tree["ood"][1] |= {"path": tree["ood"][1].pop("test_path"), "test_limit": 20}    # no test rows of its own: all 96 are
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "tiny").symlink_to(TINY.parent / "tiny")
    rows = run(load_config(tmp_path / "config.yaml", [*SHORT, *BATCHES, f"out_dir={tmp_path / 'run'}"]))
    matrix = json.loads((tmp_path / "run" / "matrix.json").read_text())
    plain = json.loads((evaluated / "matrix.json").read_text())
    assert {k: matrix[k] for k in plain} == plain and rows == {"run": plain["rows"]}     # the tasks' own numbers don't change
    assert matrix["ood"]["tasks"] == ["far-tool", "far-code"]
    assert [len(r) for r in matrix["ood"]["rows"]] == [2, 2, 2]
    details = json.loads((tmp_path / "run" / "evaluation-2.json").read_text())
    assert matrix["ood"]["rows"][2] == [details["far-tool"]["accuracy"], details["far-code"]["accuracy"]]
    assert {line["task"] for line in log(tmp_path / "run")} == {"math", "science"}
    answers = [(tmp_path / "run" / "answers").glob(f"base-0-*-far-{name}.jsonl") for name in ("tool", "code")]
    assert [[len(path.read_text().splitlines()) - 1 for path in paths] for paths in answers] == [[5], [20]]


# ---- the whole thing ---------------------------------------------------------------------------


def test_command_line_from_end_to_end(command_line, tmp_path, capsys):
    """Two variants over two tasks; every promised file is there, and the models open."""
    import eval as evaluation
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, done = command_line
    assert done.returncode == 0, done.stderr
    assert "| after stage" in done.stdout and "forgetting" in done.stdout and "reward" in done.stderr
    for name in ("grpo", "sdpo"):
        place = folder / "run" / name
        matrix = json.loads((place / "matrix.json").read_text())
        assert matrix["tasks"] == ["math", "science"] and len(matrix["rows"]) == 3
        assert [line["step"] for line in log(place)] == [1, 2, 1]
        model = AutoModelForCausalLM.from_pretrained(place / "stage-2-science")
        assert AutoTokenizer.from_pretrained(place / "stage-2-science").chat_template
        assert model.num_parameters() < 10**6
    text = (folder / "run" / "report.md").read_text()
    for figure in ("accuracy.png", "steps.png", "final.png"):
        assert figure in text and (folder / "run" / figure).stat().st_size > 5000
    assert evaluation.main([str(tmp_path)]) == 2 and "is this the folder of a run?" in capsys.readouterr().err


@pytest.mark.parametrize("override, message", [
    ("variants=[{name: a}, {name: b, set: {sdpo.topk: 100000}}]", "variant b: sdpo.topk: 100000 isn't allowed"),
    ("variants=[{name: a}, {name: b, set: {sdpo.init_from: no/such/folder}}]", "variant b: sdpo.init_from: there is no folder"),
    ("variants=[{name: a}, {name: b, set: {tasks.0.path: none.jsonl}}]", "variant b: task math: path: can't read none.jsonl"),
])
def test_a_mistake_in_the_last_variant_shows_before_the_first_is_trained(tmp_path, monkeypatch, capsys, override, message):
    monkeypatch.setattr(continual, "load_model", None)
    assert main(["--config", str(TINY), f"out_dir={tmp_path / 'run'}", "method=sdpo", override]) == 2
    assert capsys.readouterr().err.strip().startswith(f"error: {TINY}: {message}")
