"""Nothing lost: a run killed at any moment, a full disk, damaged folders, signals.

    python tests/test_faults.py --kills 100    kill small runs a hundred times, wherever they stand, and compare
    python -m pytest -q tests/test_faults.py   the same twenty times, and the rest
"""

import argparse
import contextlib
import dataclasses
import json
import math
import mmap
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path

import pytest
import yaml

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

torch.set_num_threads(1)

from safetensors.torch import load_file  # noqa: E402
from tqdm import tqdm  # noqa: E402

import continual  # noqa: E402
import grpo  # noqa: E402
from eval import Verdict, VerifierError  # noqa: E402

# ---- a run of a second or two ------------------------------------------------------------------


KINDS = {"math": "math", "science": "mcq", "tool": "tool"}                # task: its verifier


def make_base(folder):
    """A random Qwen3 of one layer with the tiny run's tokenizer, and beside it 40 prompts of three tasks."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs" / "tiny" / "base")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, attention_dropout=0.3, max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True,
    )).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name in KINDS:
        lines = (ROOT / "configs" / "tiny" / f"{name}-train.jsonl").read_text().splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[:40]))
    return str(folder)


def small(base, out_dir, **settings):
    """Three stages of four steps; the learning rate warms up and falls, a checkpoint follows every other step."""
    tasks = [{"name": n, "path": f"{base}/{n}.jsonl", "verifier": v, "train_limit": 20, "test_limit": 4,
              "reference": "{reference}"} for n, v in KINDS.items()]
    return continual.make_config({
        "model": base, "out_dir": str(out_dir), "tasks": tasks, "device": "cpu", "stage_steps": 4, "prompts_per_step": 3,
        "group_size": 3, "max_prompt_tokens": 128, "max_new_tokens": 5, "lr": 1e-2, "save_every": 2,
        "optim": {"warmup_steps": 2, "schedule": "cosine", "micro_batch_tokens": 300},
        "sdpo": {"teacher": "ema", "rate": 0.3, "mask_ratio": 0.2, "max_teacher_tokens": 200}, **settings})


def judged_by_chance(kind, text, example, paper_scoring=False):
    """A random model solves nothing. This gives every text a fixed verdict, right about half the time."""
    return Verdict(float(zlib.crc32(text.encode()) % 2), "", text, True)


METHODS = {"sdpo": {"method": "sdpo"}, "grpo": {"method": "grpo", "grpo": {"kl_coef": 0.1}},
           "restart": {"method": "sdpo", "sdpo": {"teacher": "restart", "every": 4, "max_teacher_tokens": 200}}}


# ---- what two runs must have in common ---------------------------------------------------------


def contents(folder):
    """Everything of a finished run that a kill must not change; the clock and checksums of it are left out."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    read = lambda path: json.loads(path.read_text())  # noqa: E731
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {"metrics": [{k: v for k, v in line.items() if k != "seconds"} for line in lines]}
    found |= {path.name: read(path) for path in (folder / "matrix.json", *folder.glob("evaluation-*.json"))}
    found |= {path.name: path.read_text() for path in folder.glob("answers/*.jsonl")}
    found |= {path.name: load_file(path / "model.safetensors") for path in folder.glob("stage-*")}
    place = folder / "checkpoints" / "003-000004"                          # the last stage's end, with optimizer and teacher
    state = read(place / "state.json")
    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(place, file.name)
        tensors = torch.load(file.name, weights_only=True)
    found[place.name] = {k: state[k] for k in state.keys() - {"checksums", "seal"}}, tensors
    return found


def flat(tree, key=""):
    """Nested dicts, lists and tuples as one dict of their leaves."""
    if not isinstance(tree, (dict, list, tuple)):
        return {key: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {k: v for name, part in items for k, v in flat(part, f"{key}/{name}").items()}


def differences(a, b):
    """Keys of leaves that aren't equal bit for bit."""
    a, b = flat(a), flat(b)
    same = lambda x, y: torch.equal(x, y) if torch.is_tensor(x) and torch.is_tensor(y) else type(x) is type(y) and x == y  # noqa: E731
    return sorted(k for k in a.keys() | b.keys() if k not in a or k not in b or not same(a[k], b[k]))


# ---- killing it --------------------------------------------------------------------------------

# Where a run stands, and the function of continual.py that it is in then.
PHASES = {"elsewhere": None, "start": "load_tasks", "step": "train_step", "evaluation": "accuracy", "save": "save_checkpoint",
          "model": "save_model", "between stages": "begin_stage"}


class Watch:
    """Memory that a run shares with its killer: the phase it is in, and how often and how long it was in each."""

    def __init__(self):
        self.memory = mmap.mmap(-1, 8 + 16 * len(PHASES))

    def phase(self):
        return list(PHASES)[int(struct.unpack_from("d", self.memory)[0])]

    def enter(self, phase):
        struct.pack_into("d", self.memory, 0, list(PHASES).index(phase))

    def spent(self, phase):
        """(times, seconds)."""
        return struct.unpack_from("dd", self.memory, 8 + 16 * list(PHASES).index(phase))

    def follow(self, phase):
        """Have continual.py's function of this phase note when it begins and ends."""
        function = getattr(continual, PHASES[phase])

        def followed(*args, **kwargs):
            start, (times, seconds) = time.perf_counter(), self.spent(phase)
            place = 8 + 16 * list(PHASES).index(phase)
            struct.pack_into("d", self.memory, place, times + 1)
            self.enter(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.enter("elsewhere")
                struct.pack_into("dd", self.memory, place, times + 1, seconds + time.perf_counter() - start)

        setattr(continual, PHASES[phase], followed)


def start(config, watch, errors, do=None):
    """Fork a process that makes the run: all is imported, so it starts at once."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        for descriptor in (1, 2):
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        sys.stdout, sys.stderr = (open(descriptor, "w", closefd=False) for descriptor in (1, 2))  # pytest's are other ones
        tqdm.set_lock(threading.RLock())                                 # its own is shared with the dead, who may hold it
        signal.alarm(120)
        watch.enter("elsewhere")
        for phase in PHASES:
            if PHASES[phase]:
                watch.follow(phase)
        continual.verify, continual.report = judged_by_chance, lambda folder, **_: folder
        sys.modules["eval"].verify = judged_by_chance
        code = do() if do else 0 * bool(continual.run(config, say=lambda text: print(text, flush=True)))
    except SystemExit as e:
        code = e.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def finish(config, errors):
    """Let a run come to its end. Returns its Watch."""
    watch = Watch()
    _, status = os.waitpid(start(config, watch, errors), 0)
    assert status == 0, Path(errors).read_text()[-3000:]
    return watch


def kill(config, errors, wanted, after, delay):
    """Start a run, kill it `delay` seconds into its `after`-th phase of the kind `wanted`.

    Returns:
        the phase in which it died, or None if it had ended before.
    """
    watch = Watch()
    pid = start(config, watch, errors)
    while watch.phase() != wanted or watch.spent(wanted)[0] < after:
        if os.waitpid(pid, os.WNOHANG) != (0, 0):
            return None
        time.sleep(0.0002)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return watch.phase() if os.WIFSIGNALED(status) else None


def survive(kills, seed, folder):
    """Kill runs `kills` times in all, a few times each, and compare every one with an uninterrupted one.

    Returns:
        {phase: how often a run died in it}. Raises AssertionError where a run isn't the uninterrupted one.
    """
    chance, base, died, turn = random.Random(seed), make_base(folder / "base"), dict.fromkeys(PHASES, 0), 0
    whole = {}
    while sum(died.values()) < kills:
        name = list(METHODS)[turn % len(METHODS)]
        if name not in whole:
            watch = finish(small(base, folder / name, **METHODS[name]), folder / "log")
            whole[name] = contents(folder / name), watch
            compared = " ".join(flat(whole[name][0]))
            other = "reference" if name == "grpo" else "teacher"
            assert all(part in compared for part in ("metrics/11", "optimizer/state", "stage-3", other))
        config, errors = small(base, folder / f"run-{turn}", **METHODS[name]), folder / f"log-{turn}"
        right, watch = whole[name]
        aims = chance.sample([phase for phase in PHASES if PHASES[phase]], 6)
        for wanted in aims[: kills - sum(died.values())]:
            times, seconds = watch.spent(wanted)
            after = chance.randint(1, {"start": 1, "step": 4}.get(wanted, 3))
            phase = kill(config, errors, wanted, after, chance.uniform(0, seconds / times))
            if phase is None:
                break
            died[phase] += 1
        finish(config, errors)
        assert "damaged" not in errors.read_text()
        wrong = differences(right, contents(folder / f"run-{turn}"))
        assert not wrong, f"run {turn} ({name}) differs from an uninterrupted one in {wrong[:5]}"
        turn += 1
    return died


# ---- tests: killed, cut, told to stop ----------------------------------------------------------

SETTINGS = METHODS["sdpo"]


BESIDE = {"killed": lambda folder: [sys.executable, __file__, "--kills", "20"]}


@pytest.fixture
def killed(beside):
    """The harness in a process of its own, which never computed anything that a fork could not carry on."""
    return beside(BESIDE["killed"])[1]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def uninterrupted(base, tmp_path_factory):
    """Contents of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        lightly(patch)
        continual.run(small(base, folder / "run", **SETTINGS), say=lambda text: None)
    return contents(folder / "run")


def lightly(patch):
    patch.setattr(continual, "verify", judged_by_chance)
    patch.setattr("eval.verify", judged_by_chance)
    patch.setattr(continual, "report", lambda folder, **_: folder)


@pytest.fixture
def light(monkeypatch):
    """No verifiers and no figures: what is tested is what stands on the disk."""
    lightly(monkeypatch)


class Death(BaseException):
    """The process ends here."""


def cut(patch, name, n):
    """Have continual.py's function `name` die at its n-th call."""
    *place, name = name.split(".")
    module = getattr(continual, place[0]) if place else continual
    function, calls = getattr(module, name), []

    def fatal(*args, **kwargs):
        calls.append(1)
        if len(calls) == n:
            raise Death
        return function(*args, **kwargs)

    patch.setattr(module, name, fatal)


def run_until(config, name, n):
    """A run that dies at the n-th call of a function."""
    with pytest.MonkeyPatch.context() as patch:
        cut(patch, name, n)
        with pytest.raises(Death):
            continual.run(config, say=lambda text: None)


def resume(config):
    """What a run says that goes on to its end."""
    said = []
    continual.run(config, say=said.append)
    return said


def test_a_run_cut_in_its_second_variant_ends_the_same(tmp_path, base, light):
    """In its second stage; what the first variant has finished isn't touched again. Then it is lost, and the base's row too."""
    variants = [{"name": "a", "set": {"method": "grpo", "stage_steps": 2}}, {"name": "b"}]
    make = lambda name: small(base, tmp_path / name, variants=variants, **SETTINGS)  # noqa: E731

    def assert_the_same():
        for name in ("a/matrix.json", "a/metrics.jsonl", row, "comparison.json"):
            one, two = ((tmp_path / run / name).read_text() for run in ("whole", "run"))
            assert re.sub(r'"seconds": [\d.]+', "", one) == re.sub(r'"seconds": [\d.]+', "", two)
        assert not differences(contents(tmp_path / "run" / "b"), contents(tmp_path / "whole" / "b"))

    continual.run(make("whole"), say=lambda text: None)
    (row,) = (path.name for path in (tmp_path / "whole").glob("base-0-*.json"))
    run_until(make("run"), "train_step", 6 + 7)
    assert any("a: finished before" in text for text in resume(make("run")))
    assert_the_same()
    shutil.rmtree(tmp_path / "run" / "b")
    (tmp_path / "run" / row).write_text('{"row": ')
    resume(make("run"))
    assert_the_same()


def test_cont_01_no_evolving_state_is_lost_or_drawn_again(tmp_path, base, light, uninterrupted):
    """Cut inside the second task, with dropout: everything is equal, and so are the random states at the end."""
    import numpy

    def states():
        name, keys, *place = numpy.random.get_state()
        return torch.get_rng_state().tolist(), random.getstate(), name, keys.tolist(), place

    continual.run(small(base, tmp_path / "whole", **SETTINGS), say=lambda text: None)
    right = states()
    random.seed(7), numpy.random.seed(7), torch.manual_seed(7)
    run_until(small(base, tmp_path / "run", **SETTINGS), "train_step", 7)
    resume(small(base, tmp_path / "run", **SETTINGS))
    assert states() == right
    assert not differences(contents(tmp_path / "run"), uninterrupted)


def test_cont_02_the_first_resumed_step_has_its_own_learning_rate(tmp_path, base, light, monkeypatch):
    """lr max(0, 1 - step / 10), saved after four steps: 0.6 comes next, then 0.5, in the optimizer as in the log."""
    monkeypatch.setattr(continual, "learning_rate", lambda config, spec, step: max(0.0, 1 - step / 10))
    update, used = continual.update, []

    def gentle(model, teacher, reference, optimizer, *args):
        used.append([group["lr"] for group in optimizer.param_groups])
        optimizer.param_groups[0]["lr"] *= 1e-3
        return update(model, teacher, reference, optimizer, *args)

    monkeypatch.setattr(continual, "update", gentle)
    config = small(base, tmp_path / "run", stage_steps=6, save_every=4, **SETTINGS)
    run_until(config, "train_step", 5)
    used.clear()
    resume(config)
    assert used[:2] == [[0.6], [0.5]] and used[2] == [1.0]                 # the next stage begins anew
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["lr"] for line in lines[:7]] == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 1.0])


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("moment", ["start", "evaluation", "step", "step, twice", "save", "model"])
@pytest.mark.skipif(torch.cuda.is_initialized(), reason="a process that holds a GPU can't be forked")
def test_signals_save_and_leave(tmp_path, base, light, uninterrupted, moment, number, code):
    config, errors = small(base, tmp_path / "run", **SETTINGS), tmp_path / "log"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config)))
    watch, phase = Watch(), moment.split(",")[0]
    pid = start(config, watch, errors, lambda: continual.main(["--config", str(tmp_path / "config.yaml")]))
    while watch.phase() != phase or (watch.spent("step")[0] < 3 and phase in ("step", "save")):
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), errors.read_text()
        time.sleep(0.0005)
    os.kill(pid, number)
    if "twice" in moment:
        os.kill(pid, number)
    _, status = os.waitpid(pid, 0)
    told = [line for line in errors.read_text().replace("\r", "\n").splitlines() if "stopped" in line]
    assert os.WEXITSTATUS(status) == code and len(told) == 1 and f"stopped by {signal.Signals(number).name}" in told[0]
    assert "Traceback" not in errors.read_text()
    if phase in ("step", "save") and "twice" not in moment:
        _, state = continual.newest_state(tmp_path / "run")
        assert state["lines"] == len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 3
    resume(config)
    assert not differences(contents(tmp_path / "run"), uninterrupted)


# ---- tests: what stands on the disk ------------------------------------------------------------


@pytest.fixture(scope="module")
def half(base, tmp_path_factory):
    """The folder of a run that died in its second stage, with two checkpoints."""
    folder = tmp_path_factory.mktemp("half")
    with pytest.MonkeyPatch.context() as patch:
        lightly(patch)
        run_until(small(base, folder / "run", **SETTINGS), "train_step", 8)
    assert [p.name for p in continual.checkpoints(folder / "run")] == ["002-000002", "002-000000"]
    return folder / "run"


def harms(folder, count):
    """(words, function that does it) for random damage to a checkpoint: bits flipped, files cut short, files gone."""
    chance, files = random.Random(0), sorted(p.name for p in folder.iterdir())

    def flip(path, at, bit):
        data = bytearray(path.read_bytes())
        data[at] ^= 1 << bit
        path.write_bytes(data)

    for name in files:
        size = (folder / name).stat().st_size
        for _ in range(count):
            at, bit = chance.randrange(size), chance.randrange(8)
            yield f"{name}: bit {bit} of byte {at}", lambda to, name=name, at=at, bit=bit: flip(to / name, at, bit)
        for keep in (0, 1, size // 2, size - 1):
            yield f"{name}: cut to {keep}", lambda to, name=name, keep=keep: os.truncate(to / name, keep)
        yield f"{name}: gone", lambda to, name=name: (to / name).unlink()


def test_any_damage_to_the_newest_checkpoint_is_found_and_the_one_before_used(tmp_path, half):
    good, older = (p.name for p in continual.checkpoints(half))
    state = json.loads((half / "checkpoints" / good / "state.json").read_text())
    for n, (words, harm) in enumerate(harms(half / "checkpoints" / good, 40)):
        folder, said = tmp_path / str(n), []
        shutil.copytree(half / "checkpoints", folder / "checkpoints")
        harm(folder / "checkpoints" / good)
        place, found = continual.newest_state(folder, said.append)
        if found["step"] == 2:                                             # such as 1e0 for 1E0: the same state
            assert found | {"seal": state["seal"]} == state, words
        else:
            assert place.name == older and found["step"] == 0, words
            assert f"{folder / 'checkpoints' / good} is damaged" in said[0] and len(said) == 1, words
        shutil.rmtree(folder)
    assert n > 120


def test_steps_compare_as_numbers(tmp_path):
    for name in ("001-999999", "001-1000000", "002-9", "002-10", "010-000001", "9-000002", "x-1", "unfinished"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    names = [p.name for p in continual.checkpoints(tmp_path)]
    assert names == ["010-000001", "9-000002", "002-10", "002-9", "001-1000000", "001-999999"]


def test_what_a_dead_run_leaves_behind_is_in_nobodys_way(tmp_path, base, half, light, uninterrupted):
    folder = tmp_path / "run"
    shutil.copytree(half, folder)
    for place in ("checkpoints/unfinished", ".stage-2-science.tmp"):
        (folder / place).mkdir(exist_ok=True)
        (folder / place / "__0_0.distcp").write_bytes(b"half of a")
    for file in ("metrics.jsonl.tmp", "matrix.json.tmp", "config.yaml.tmp"):
        (folder / file).write_text('{"sta')
    with open(folder / "metrics.jsonl", "a") as log:
        log.write('{"stage": 2, "task": "sci')                             # a line cut short
    resume(small(base, folder, **SETTINGS))
    assert not differences(contents(folder), uninterrupted)
    assert not list(folder.rglob("*.tmp")) and not (folder / "checkpoints" / "unfinished").exists()


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, base, half, light, uninterrupted):
    folder = tmp_path / "run"
    shutil.copytree(half, folder)
    newest = continual.checkpoints(folder)[0]
    (newest / ".metadata").unlink()
    said = resume(small(base, folder, **SETTINGS))
    assert any(f"{newest} is damaged" in text for text in said) and any("continues from 002-000000" in text for text in said)
    assert not differences(contents(folder), uninterrupted)


@pytest.mark.parametrize("gone, message", [
    ("checkpoints", "no checkpoint is whole"), ("checkpoints/*", "no checkpoint is whole"),
    ("checkpoints/*/state.json", "no checkpoint is whole"), ("metrics.jsonl", "has 0 lines where the checkpoint counts 6"),
    ("lines", "has 1 lines where the checkpoint counts 6")])
def test_missing_files_never_start_a_run_anew_in_silence(tmp_path, base, half, light, gone, message):
    folder = tmp_path / "run"
    shutil.copytree(half, folder)
    for place in folder.glob(gone):
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    if gone == "lines":
        os.truncate(folder / "metrics.jsonl", (folder / "metrics.jsonl").read_bytes().index(b"\n") + 1)
    for _ in range(2):                                                     # nor the next time
        with pytest.raises(continual.RunError, match=message):
            resume(small(base, folder, **SETTINGS))


def test_a_run_that_died_before_its_first_checkpoint_says_so_and_starts_again(tmp_path, base, light, uninterrupted):
    config = small(base, tmp_path / "run", **SETTINGS)
    run_until(config, "train_step", 2)
    assert any("stopped before its first checkpoint" in text for text in resume(config))
    assert not differences(contents(tmp_path / "run"), uninterrupted)


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"rows": 3}'], ids=repr)
def test_a_lost_matrix_is_written_again_and_a_lost_base_row_not_missed(tmp_path, base, half, light, uninterrupted, text):
    folder = tmp_path / "run"
    shutil.copytree(half, folder)
    run_until(small(base, folder, **SETTINGS), "begin_stage", 2)           # in its third stage
    (row,) = (path.name for path in folder.glob("base-0-*.json"))
    for name in ("matrix.json", row):
        (folder / name).unlink()
        if text is not None:
            (folder / name).write_text(text)
    resume(small(base, folder, **SETTINGS))
    assert not differences(contents(folder), uninterrupted)


# ---- tests: disk and neighbours ----------------------------------------------------------------


@contextlib.contextmanager
def file_limit(size):
    """No file grows beyond `size` bytes: what a quota does, without a full disk for everybody else."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name, n, size", [
    ("save_checkpoint", 2, 3000), ("save_checkpoint", 5, 60), ("save_model", 2, 3000), ("write_whole", 9, 10), ("append_line", 4, 10), ("accuracy", 5, 10)])
def test_a_quota_stops_the_run_with_one_line_and_the_last_checkpoint_is_whole(tmp_path, base, light, uninterrupted, name, n, size):
    """The n-th call of a function may write no more than `size` bytes to a file."""
    config, function, calls = small(base, tmp_path / "run", **SETTINGS), getattr(continual, name), []

    def limited(*args, **kwargs):
        calls.append(1)
        with file_limit(size) if len(calls) == n else contextlib.nullcontext():
            return function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continual, name, limited)
        with pytest.raises(continual.RunError, match="can't write: .*File too large.*; what was saved before is whole") as error:
            continual.run(config, say=lambda text: None)
    assert len(calls) == n and str(tmp_path / "run") in str(error.value) and "\n" not in str(error.value)
    said = resume(config)
    assert not any("damaged" in text for text in said)
    assert not differences(contents(tmp_path / "run"), uninterrupted)


@pytest.fixture
def mount(tmp_path):
    """A function that gives a disk of so many kilobytes, or makes it larger."""
    place = tmp_path / "disk"
    place.mkdir()

    def resize(kilobytes):
        how = "remount," if os.path.ismount(place) else ""
        command = ["mount", "-t", "tmpfs", "-o", f"{how}size={kilobytes}k", "tmpfs", str(place)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("only root may mount a small disk; the test with a quota runs everywhere")
        return place

    yield resize
    subprocess.run(["umount", str(place)], capture_output=True)


@pytest.mark.parametrize("kilobytes", [120, 260, 420])
def test_a_full_disk_stops_the_run_with_one_line_and_the_last_checkpoint_is_whole(base, light, mount, uninterrupted, kilobytes):
    config, errors = small(base, mount(kilobytes) / "run", **SETTINGS), []
    for _ in range(2):                                                     # nor does a second try harm anything
        with pytest.raises(continual.RunError, match="can't write: No space left on device; what was saved before is whole") as error:
            continual.run(config, say=errors.append)
        assert "\n" not in str(error.value)
    assert not any("damaged" in text for text in errors)
    mount(50_000)
    resume(config)
    assert not differences(contents(Path(config.out_dir)), uninterrupted)


def test_main_says_it_in_one_line(tmp_path, base, light, capsys):
    config = small(base, tmp_path / "run", **SETTINGS)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continual.dcp, "save", lambda *args, **kwargs: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
        assert continual.main(["--config", str(tmp_path / "config.yaml")]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(told) == 1 and "can't write: No space left on device" in told[0]


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="a process that holds a GPU can't be forked")
def test_a_read_only_folder_is_reported_before_anything_is_loaded(base):
    """Root may write anywhere, so the run is made by somebody else."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o555)
        config, errors = small(base, Path(place) / "run", **SETTINGS), tempfile.NamedTemporaryFile("r")
        os.chmod(errors.name, 0o666)

        def attempt():
            if os.getuid() == 0:
                os.setuid(65534)
            continual._pretrained = continual.load_tasks = None            # whoever calls it fails
            try:
                continual.run(config)
            except continual.ConfigError as e:
                print(e)
                return 3

        _, status = os.waitpid(start(config, Watch(), errors.name, attempt), 0)
        assert os.WEXITSTATUS(status) == 3 and errors.read() == f"out_dir: can't write to {place}/run: Permission denied\n"


def test_a_variants_folder_is_no_other_runs_out_dir_meanwhile(tmp_path, base, light):
    config = small(base, tmp_path / "run", variants=[{"name": "a"}], **SETTINGS)
    with continual.folder_lock(tmp_path / "run" / "a"):
        with pytest.raises(continual.ConfigError, match="run/a is in use by another process"):
            continual.run(config, say=lambda text: None)
    with continual.folder_lock(tmp_path / "run"):
        with pytest.raises(continual.ConfigError, match="run is in use by another process"):
            continual.run(config, say=lambda text: None)


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="a process that holds a GPU can't be forked")
def test_a_second_process_is_refused_and_a_dead_ones_lock_taken_over(tmp_path, base, light, uninterrupted):
    config, errors, watch = small(base, tmp_path / "run", **SETTINGS), tmp_path / "log", Watch()
    pid = start(config, watch, errors)
    while watch.phase() != "step":
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), errors.read_text()
        time.sleep(0.0005)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(continual.ConfigError, match="is in use by another process"):
        continual.run(config, say=lambda text: None)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert (tmp_path / "run" / ".lock").exists()
    resume(config)
    assert not differences(contents(tmp_path / "run"), uninterrupted)


# ---- tests: numbers gone wrong -----------------------------------------------------------------


def poison(patch, step, harm):
    """Have the n-th step of the run compute something that isn't finite, or get no samples or verdicts."""
    count, micro_loss, train_step = [0], continual.micro_loss, continual.train_step

    def counted(*args):
        count[0] += 1
        return train_step(*args)

    def poisoned(model, *args):
        loss, numbers = micro_loss(model, *args)
        if count[0] != step:
            return loss, numbers
        if harm == "gradient":                                             # the loss itself is as it was
            loss.register_hook(lambda gradient: gradient * math.inf)
            return loss, numbers
        return loss + {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[harm], numbers

    def broken(logits, *args, **kwargs):
        return sample(logits * math.nan if count[0] == step else logits, *args, **kwargs)

    def failing(*args, **kwargs):
        if count[0] == step:
            raise error(f"no {harm} today")
        return working(*args, **kwargs)

    patch.setattr(continual, "train_step", counted)
    if harm == "logits":
        sample = grpo.sample
        patch.setattr(grpo, "sample", broken)
    elif harm in ("rollout", "verifier"):
        name, error = {"rollout": ("rollout", grpo.RolloutError), "verifier": ("verify", VerifierError)}[harm]
        working = getattr(continual, name)
        patch.setattr(continual, name, failing)
    else:
        patch.setattr(continual, "micro_loss", poisoned)


@pytest.mark.parametrize("method, step, harm", [
    ("sdpo", 1, "nan"), ("sdpo", 2, "inf"), ("sdpo", 4, "gradient"), ("sdpo", 5, "nan"), ("sdpo", 6, "logits"), ("sdpo", 1, "logits"),
    ("grpo", 8, "-inf"), ("grpo", 9, "gradient"), ("sft", 12, "nan"), ("sft", 3, "gradient"), ("sdpo", 3, "rollout"),
    ("sdpo", 5, "verifier")])
def test_a_step_that_cannot_be_made_stops_the_run_before_it_does_harm(tmp_path, base, light, uninterrupted, method, step, harm):
    """Step, stage and rows are named, the state before is saved; healed, the run goes on from there."""
    longer = {"max_new_tokens": 60, "eval": {"max_new_tokens": 5}} if method == "sft" else {}   # references are never cut
    config = small(base, tmp_path / "run", method=method, **longer)
    stage, place = (step - 1) // 4 + 1, (step - 1) % 4 + 1
    task = continual.load_task(config.tasks[stage - 1])
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, step, harm)
        with pytest.raises(continual.RunError) as error:
            continual.run(config, say=lambda text: None)
    rows = [task.train[i].id for i in continual.prompt_indices(len(task.train), 3, place - 1, f"0/{stage}")]
    words = {"nan": "loss nan", "inf": "loss inf", "-inf": "loss -inf", "gradient": "gradient norm", "logits": "logits aren't finite",
             "rollout": "no rollout today", "verifier": "no verifier today"}[harm]
    start = f"stage {stage} ({config.tasks[stage - 1].name}), step {place}: "
    assert str(error.value).startswith(start) and words in str(error.value)
    assert str(error.value).endswith(f"rows {rows}; the state before it is saved")
    _, state = continual.newest_state(tmp_path / "run")
    assert (state["stage"], state["step"], state["lines"]) == (stage, place - 1, step - 1)
    resume(config)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 12
    if method == "sdpo":
        assert not differences(contents(tmp_path / "run"), uninterrupted)


def test_logits_that_are_not_finite_in_an_evaluation_stop_the_run(tmp_path, base, light, monkeypatch):
    config = small(base, tmp_path / "run", **SETTINGS)
    accuracy, calls = continual.accuracy, []

    def broken(model, *args, **kwargs):
        calls.append(1)
        if len(calls) == 5:                                                # the second task after the first stage
            with torch.no_grad():
                model.get_output_embeddings().weight[3] = math.inf
        return accuracy(model, *args, **kwargs)

    monkeypatch.setattr(continual, "accuracy", broken)
    with pytest.raises(continual.RunError, match="evaluation of task science: the model's logits aren't finite"):
        continual.run(config, say=lambda text: None)


# What every sampled response of a stage is like: a way to sample, and a verdict.
def always(token):
    def sample(logits, temperature, top_p=1.0, top_k=0, drawn=None):
        tokens = logits.new_full((len(logits),), token, dtype=torch.long)
        return tokens, continual_logps(logits, tokens, temperature)
    return sample


def continual_logps(logits, tokens, temperature):
    return (logits.float() / temperature).log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)


@pytest.mark.parametrize("case, method, token, reward, shows, warned", [
    ("nothing is ever right", "grpo", "word", 0.0, {"reward": 0, "solved": 0, "mixed": 0, "updates": 0},
     ["no response was right", "nothing to learn", "ran into max_new_tokens"]),
    ("nothing is ever right", "sdpo", "word", 0.0, {"reward": 0, "targets": 0, "updates": 0},
     ["no response was right", "nothing to learn", "ran into max_new_tokens"]),
    ("all is right", "grpo", "word", 1.0, {"reward": 1, "mixed": 0, "updates": 0}, ["nothing to learn", "ran into max_new_tokens"]),
    ("all is right", "sdpo", "word", 1.0, {"reward": 1, "targets": 1, "updates": 1}, ["ran into max_new_tokens"]),
    ("empty", "grpo", "end", None, {"empty": 1, "length": 1, "truncated": 0}, ["without any text"]),
    ("empty", "sdpo", "end", None, {"empty": 1, "length": 1, "targets": 0, "updates": 0}, ["without any text", "nothing to learn"]),
    ("longest", "grpo", "word", None, {"empty": 0, "length": 5, "truncated": 1}, ["ran into max_new_tokens"]),
    ("longest", "sdpo", "word", None, {"length": 5, "truncated": 1}, ["ran into max_new_tokens"]),
], ids=lambda x: x if isinstance(x, str) else "")
def test_stages_without_a_lesson_are_defined_warned_of_once_and_counted(
        tmp_path, base, light, monkeypatch, capsys, case, method, token, reward, shows, warned):
    """Each stage has two such steps: two lines in the log, one warning of a kind, weights that stay where nothing is taught."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    id = tokenizer.eos_token_id if token == "end" else tokenizer.encode("colour", add_special_tokens=False)[0]
    monkeypatch.setattr(grpo, "sample", always(id))
    turn = [0]

    def judge(kind, text, example, paper_scoring=False):
        turn[0] += 1
        return Verdict(float(turn[0] % 2) if reward is None else reward, "", text, True)

    monkeypatch.setattr(continual, "verify", judge)
    continual.run(small(base, tmp_path / "run", method=method, stage_steps=2), say=lambda text: None)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    for line in lines:
        assert {key: line[key] for key in shows} == pytest.approx(shows)
        assert all(math.isfinite(value) for value in line.values() if not isinstance(value, str))
    told = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if "warning: " in line]
    for stage in (1, 2, 3):
        mine = sorted(line for line in told if f"stage {stage} " in line)
        assert len(mine) == len(warned) and all(any(words in line for line in mine) for words in warned)
    if shows.get("updates") == 0:
        before, after = (load_file(folder / "model.safetensors") for folder in (Path(base), tmp_path / "run" / "stage-3-tool"))
        assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("method, signal, targets", [("grpo", [0, 0, 0, 0, 0, 0, 1, 1, 1], None), ("sdpo", [1, 1, 1, 0, 0, 0, 0, 1, 1], 5 / 9)])
def test_groups_all_right_or_all_wrong_beside_a_mixed_one(tmp_path, base, monkeypatch, method, signal, targets):
    """GRPO learns from the mixed group alone, SDPO wherever somebody else was right; the log counts both kinds."""
    rewards = iter([1, 1, 1, 0, 0, 0, 1, 0, 0])
    monkeypatch.setattr(continual, "verify", lambda kind, text, *args: Verdict(float(next(rewards)), "", text, True))
    config = small(base, tmp_path / "run", method=method)
    tokenizer, model = continual.load_tokenizer(config), continual.load_model(config.model, config, "cpu")
    monkeypatch.setattr(continual, "rollout", lambda *args, **kwargs: said(grpo.rollout(*args, **kwargs)))
    task = continual.load_task(config.tasks[0])

    def said(out):                                                         # a demonstration needs some text
        return dataclasses.replace(out, texts=["some words"] * len(out.texts))

    batch, log = continual.collect(model, continual.Player(model, config), tokenizer, task, task.train[:3], config)
    assert batch.signal == [bool(s) for s in signal]
    assert (log["reward"], log["solved"], log["mixed"]) == pytest.approx((4 / 9, 2 / 3, 1 / 3)) and log.get("targets") == targets


def test_a_resumed_stage_does_not_warn_again(tmp_path, base, light, monkeypatch, capsys):
    monkeypatch.setattr(continual, "verify", lambda *args: Verdict(0.0, "", "", False))
    config = small(base, tmp_path / "run", **SETTINGS)
    run_until(config, "train_step", 4)
    assert capsys.readouterr().err.count("no response was right") == 1
    resume(config)
    assert capsys.readouterr().err.count("no response was right") == 2     # of stages 2 and 3


CUTS = [("train_step", 1), ("train_step", 7), ("dcp.save", 2), ("dcp.save", 6), ("dcp.save", 9), ("accuracy", 1), ("accuracy", 5),
        ("accuracy", 12), ("save_model", 1), ("write_whole", 6), ("write_whole", 8), ("write_whole", 9), ("write_whole", 10),
        ("_flush", 3), ("_flush", 4), ("shutil.rmtree", 6)]


@pytest.fixture(scope="module")
def cuts(base, tmp_path_factory):
    """Runs that died at each of these calls and were continued, in forks, two at once. Returns their folder."""
    place, alive = tmp_path_factory.mktemp("cuts"), []

    def die_and_go_on(config, name, n):
        run_until(config, name, n)
        resume(config)
        return 0

    for name, n in CUTS:
        config, errors = small(base, place / f"{name}-{n}", **SETTINGS), place / f"{name}-{n}.log"
        alive.append((start(config, Watch(), errors, lambda: die_and_go_on(config, name, n)), errors))
        while len(alive) == 2 or alive and (name, n) == CUTS[-1]:
            pid, errors = alive.pop(0)
            assert os.waitpid(pid, 0)[1] == 0, errors.read_text()[-3000:]
    return place


@pytest.mark.parametrize("name, n", CUTS)
def test_a_run_cut_anywhere_ends_the_same(cuts, uninterrupted, name, n):
    """The process dies at the start of the n-th step, save, evaluation, model folder or small file; before a whole
    checkpoint gets its name, just after that, or where an old one goes."""
    assert not differences(contents(cuts / f"{name}-{n}"), uninterrupted)


def test_kills_at_random_moments(killed):
    assert killed.returncode == 0, killed.stdout + killed.stderr[-3000:]
    assert "survived 20 kills" in killed.stdout


def main(argv=None):
    parser = argparse.ArgumentParser(description="Kill small runs wherever they stand, and compare them with uninterrupted ones.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None, help="of the moments; without it, other ones each time")
    options = parser.parse_args(argv)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        died = survive(options.kills, seed, Path(folder))
    print(f"survived {sum(died.values())} kills: " + ", ".join(f"{n} in {phase}" for phase, n in died.items()))


if __name__ == "__main__":
    main()
