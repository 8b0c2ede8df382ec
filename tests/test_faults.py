"""Nothing lost: a run killed at any moment, a full disk, damaged folders, signals.

    python tests/test_faults.py --kills 20     kill small runs twenty times, wherever they stand, and compare
    python -m pytest -q tests/test_faults.py   the same with fewer kills, and the rest
"""

import argparse
import contextlib
import json
import mmap
import os
import random
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

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

torch.set_num_threads(1)

from tqdm import tqdm  # noqa: E402

import continual  # noqa: E402
from eval import Verdict  # noqa: E402

# ---- a run of a second or two ------------------------------------------------------------------


def make_base(folder):
    """A random Qwen3 of one layer with the tiny run's tokenizer."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs" / "tiny" / "base")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, attention_dropout=0.3, max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True,
    )).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def small(base, out_dir, **settings):
    """Three stages of three steps; the learning rate warms up and falls, a checkpoint follows every step."""
    tasks = [{"name": n, "path": str(ROOT / "configs" / "tiny" / f"{n}-train.jsonl"), "verifier": v, "train_limit": 20, "test_limit": 4,
              "reference": "{reference}"} for n, v in (("math", "math"), ("science", "mcq"), ("tool", "tool"))]
    return continual.make_config({
        "model": base, "out_dir": str(out_dir), "tasks": tasks, "device": "cpu", "stage_steps": 3, "prompts_per_step": 3,
        "group_size": 3, "max_prompt_tokens": 128, "max_new_tokens": 5, "lr": 1e-2, "save_every": 1,
        "optim": {"warmup_steps": 2, "schedule": "cosine", "micro_batch_tokens": 300},
        "sdpo": {"teacher": "ema", "rate": 0.3, "mask_ratio": 0.2, "max_teacher_tokens": 200}, **settings})


def judged_by_chance(kind, text, example, paper_scoring=False):
    """A random model solves nothing. This gives every text a fixed verdict, right about half the time."""
    return Verdict(float(zlib.crc32(text.encode()) % 2), "", text, True)


METHODS = {"sdpo": {"method": "sdpo"}, "grpo": {"method": "grpo", "grpo": {"kl_coef": 0.1}}}


# ---- what two runs must have in common ---------------------------------------------------------


def contents(folder):
    """Everything of a finished run that a kill must not change; the clock and checksums of it are left out."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    read = lambda path: json.loads(path.read_text())  # noqa: E731
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {"metrics": [{k: v for k, v in line.items() if k != "seconds"} for line in lines]}
    found |= {path.name: read(path) for path in (folder / "matrix.json", *folder.glob("evaluation-*.json"))}
    found |= {path.name: load_file(path / "model.safetensors") for path in folder.glob("stage-*")}
    place = folder / "checkpoints" / "003-000003"                          # the last stage's end, with optimizer and teacher
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
PHASES = {"start": "load_tasks", "step": "train_step", "evaluation": "accuracy", "save": "save_checkpoint", "model": "save_model",
          "between stages": "begin_stage", "elsewhere": None}


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


def start(config, watch, errors):
    """Fork a process that makes the run: all is imported, so it starts at once."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        for descriptor in (1, 2):
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        tqdm.set_lock(threading.RLock())                                 # its own is shared with the dead, who may hold it
        signal.alarm(120)
        watch.enter("elsewhere")
        for phase in PHASES:
            if PHASES[phase]:
                watch.follow(phase)
        continual.verify, continual.report = judged_by_chance, lambda folder: folder
        sys.modules["eval"].verify = judged_by_chance
        continual.run(config, say=lambda text: print(text, flush=True))
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
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
    for name, settings in METHODS.items():
        watch = finish(small(base, folder / f"whole-{name}", **settings), folder / "log")
        whole[name] = contents(folder / f"whole-{name}"), watch
        compared = " ".join(flat(whole[name][0]))
        assert all(part in compared for part in ("metrics/8", "optimizer/state", "stage-3", "teacher" if name == "sdpo" else "reference"))
    while sum(died.values()) < kills:
        name = list(METHODS)[turn % len(METHODS)]
        config, errors = small(base, folder / f"run-{turn}", **METHODS[name]), folder / f"log-{turn}"
        right, watch = whole[name]
        aims = chance.sample([phase for phase in PHASES if PHASES[phase]], 6)
        for wanted in aims[: kills - sum(died.values())]:
            times, seconds = watch.spent(wanted)
            after = 1 if wanted == "start" else chance.randint(1, 3)
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
