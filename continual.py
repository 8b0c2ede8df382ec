"""Continual post-training: one model, a sequence of tasks, one method, and the matrix of what it kept.

    for stage, task in enumerate(tasks):                       (row 0 of the matrix: the base)
        teacher, optimizer = fresh, at the stage's start
        for step in range(steps):
            prompts (P) -> rollout -> responses (N = P * G) -> verify -> rewards
            grpo:  advantages                              -> clipped loss        (grpo.py)
            sdpo:  demonstrations -> teacher prompts       -> token divergence    (sdpo.py)
            sft:   no rollout; cross-entropy on reference answers
            backward over micro-batches -> optimizer -> teacher follows -> one line in metrics.jsonl
        save the model; measure it on every task               (the matrix's next row, eval.py)

A loss is normalised by the tokens of its whole optimizer step, so the micro-batch size changes
nothing. Sampled ids are never decoded and encoded again for the loss. Every step draws its random
numbers from (seed, stage, step) alone: a run that was killed continues bit for bit from its newest
checkpoint, because there is no other random state to lose.

Where we differ from the official code: one process runs the whole sequence (there each stage is a
cluster job, joined by hand); settings live in one YAML file, and a run takes every one from its Config (the
defaults of the losses and of eval.accuracy are for use by hand).

Under torchrun every process takes its share of a step's prompts, groups whole, and of the weights
(FSDP2); a prompt's random numbers are its own, so the number of processes changes nothing either.

    python continual.py --config configs/tiny.yaml [key.sub=value ...]
    torchrun --nproc_per_node 4 continual.py --config configs/qwen3-4b.yaml
    python continual.py --config configs/qwen3-4b.yaml --plan      what that needs, and whether it fits
"""

import argparse
import contextlib
import copy
import dataclasses
import datetime
import difflib
import fcntl
import functools
import hashlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import time
import types
import typing
import warnings
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.utils import logging as transformers_logging

from eval import (
    AT_LEAST_1, FAILURES, NAME, NOT_NEGATIVE, POSITIVE, SHARE, Task, TaskSpec, accuracy, continual_metrics, format_marks,
    format_matrix, load_task, model_folder, one_line, paired_matrices, repeated_ngrams, report, response_drift, saved_answers, verify,
    weight_drift,
)
from grpo import encode, flash_attention, group_advantages, grpo_loss, left_pad, rollout
from kernels import fused_token_kl, fused_token_logps, masked_mean, predicting
from sdpo import FEEDBACK, REPROMPT, SOLUTION, Teacher, drop_tokens, sdpo_loss, strip_thinking, teacher_messages, teacher_prompts


# ------------------------------------------------------------------------------------------------
# Configuration
# ------------------------------------------------------------------------------------------------


class ConfigError(ValueError):
    """A setting, file or model that can't be used; the message is one line for the user."""


class RunError(RuntimeError):
    """A run that had to stop; the message is one line for the user."""


BELOW_1 = (lambda x: 0 <= x < 1, "at least 0 and below 1")
FINITE = (math.isfinite, "a finite number")


@dataclass
class RolloutConfig:
    temperature: Annotated[float, POSITIVE] = 1.0    # of sampling in training; divides the losses' logits too
    batch_size: Annotated[int, NOT_NEGATIVE] = 0     # responses sampled at once; 0: the whole step
    importance_cap: Annotated[float, POSITIVE] = 2.0  # where another copy of the model samples: see `recompute_logps`
    chat_template: dict = field(default_factory=dict)  # arguments of the chat template, e.g. enable_thinking
    engine: Literal["auto", "loop", "continuous", "static"] = "auto"  # see rollout_engine


@dataclass
class OptimConfig:
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.01        # AdamW
    beta1: Annotated[float, BELOW_1] = 0.9                     # AdamW
    beta2: Annotated[float, BELOW_1] = 0.999                   # AdamW
    grad_clip: Annotated[float, POSITIVE] = 1.0                # largest norm of the gradient
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 0             # the learning rate rises linearly, in every stage
    schedule: Literal["constant", "cosine"] = "constant"       # after that; cosine falls to 0 at the stage's end
    updates_per_step: Annotated[int, AT_LEAST_1] = 1           # optimizer updates from one step's rollouts
    micro_batch_tokens: Annotated[int, AT_LEAST_1] = 16384     # padded tokens in one forward pass
    chunk: Annotated[int, AT_LEAST_1] = 1024                   # tokens projected to the vocabulary at once
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16: autocast; the weights stay float32
    gradient_checkpointing: bool = False                       # recompute activations in the backward pass


@dataclass
class GrpoConfig:
    scale_by_std: bool = False                                 # divide advantages by the group's std
    eps: Annotated[float, NOT_NEGATIVE] = 1e-6                 # added to it
    clip_low: Annotated[float, SHARE] = 0.2                    # the ratio's range is [1 - low, 1 + high]
    clip_high: Annotated[float, NOT_NEGATIVE] = 0.28           # asymmetric: rare tokens may rise further
    dual_clip: Annotated[float | None, (lambda x: 1 < x < math.inf, "above 1, or null")] = 3.0  # where A < 0
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"  # every token, or every response, counts alike
    kl_coef: Annotated[float, NOT_NEGATIVE] = 0.0              # weight of the k3 penalty to the stage's start


@dataclass
class SdpoConfig:
    teacher: Literal[Teacher.KINDS] = "frozen"
    rate: Annotated[float, SHARE] = 0.05                       # ema: student's share per update; trust_region: in the logits
    every: Annotated[int, AT_LEAST_1] = 20                     # restart: updates between two copies
    init_from: str | None = None                               # start the teacher from this model instead
    init_mix: Annotated[float, SHARE] = 1.0                    # ... with this share; the student's is the rest
    alpha: Annotated[float, SHARE] = 0.5                       # 0 KL(t||s), 1 KL(s||t), between: the mixture form
    topk: Annotated[int | None, AT_LEAST_1] = None             # the student's k most likely tokens; null: all
    tail: bool = True                                          # the other tokens as one bucket, or left out
    sampled_token: bool = False                                # the sampled token alone (reverse KL; alpha 1)
    is_clip: Annotated[float | None, POSITIVE] = 2.0           # cap of the importance weight; null: no weight
    threshold: Annotated[float, FINITE] = 0.5                  # reward that makes a demonstration
    exclude_self: bool = True                                  # a response is no demonstration for itself
    use_feedback: bool = False                                 # insert the verifier's feedback
    feedback_with_demonstration: bool = False                  # ... beside a demonstration too
    keep_thinking: bool = False                                # leave the reasoning in demonstrations
    mask_ratio: Annotated[float, BELOW_1] = 0.0                # random share of tokens left out of the loss
    max_teacher_tokens: Annotated[int, AT_LEAST_1] = 10240     # the insertion is shortened to fit
    template: str = REPROMPT                                   # {prompt}, {solution}, {feedback}
    solution_template: str = SOLUTION                          # {demonstration}
    feedback_template: str = FEEDBACK                          # {feedback}


@dataclass
class EvalConfig:
    samples: Annotated[int, AT_LEAST_1] = 1                    # answers to each test prompt
    temperature: Annotated[float, NOT_NEGATIVE] = 1.0          # 0: the most likely token
    top_p: Annotated[float, (lambda x: 0 < x <= 1, "above 0 and at most 1")] = 1.0  # 1: no cut
    top_k: Annotated[int, NOT_NEGATIVE] = 0                    # 0: no cut
    max_new_tokens: Annotated[int | None, AT_LEAST_1] = None   # null: as in training
    batch_size: Annotated[int, NOT_NEGATIVE] = 256             # answers sampled at once; 0: all
    probe_every: Annotated[int, NOT_NEGATIVE] = 0              # steps between measurements of drift and teacher; 0: none
    probe_prompts: Annotated[int, AT_LEAST_1] = 24             # test prompts of each task for them


@dataclass
class Variant:
    name: str                                                  # its folder under out_dir
    set: dict = field(default_factory=dict)                    # dotted keys and their values in this variant


@dataclass
class Config:
    model: str                                                 # folder or hub id of the base
    out_dir: str                                               # the run's folder
    tasks: list[TaskSpec]                                      # the sequence; see eval.TaskSpec and `_task` below
    ood: list[TaskSpec] = field(default_factory=list)          # out of distribution: measured like the tasks, never trained on
    method: Literal["grpo", "sdpo", "sft"] = "grpo"            # what turns responses into a gradient
    variants: list[Variant] = field(default_factory=list)      # run one after another from the same base
    grid: dict = field(default_factory=dict)                   # dotted keys and lists of values: each variant with every combination
    seed: Annotated[int, NOT_NEGATIVE] = 0                     # of sampling, prompt order and dropped tokens; not of a task's split
    stage_steps: Annotated[int, AT_LEAST_1] = 50               # training steps for each task
    prompts_per_step: Annotated[int, AT_LEAST_1] = 32          # P
    group_size: Annotated[int, AT_LEAST_1] = 8                 # G, responses to each prompt
    max_prompt_tokens: Annotated[int, AT_LEAST_1] = 2048       # longer prompts are dropped and counted, never cut
    max_new_tokens: Annotated[int, AT_LEAST_1] = 8192          # longest response
    lr: Annotated[float, POSITIVE] = 1e-6                      # learning rate, the warm-up's and the schedule's top
    save_every: Annotated[int, AT_LEAST_1] = 10                # steps between checkpoints (and at a stage's end)
    keep_checkpoints: Annotated[int, AT_LEAST_1] = 2           # the newest so many stay
    device: Literal["auto", "cpu", "cuda"] = "auto"            # auto: CUDA if there is one
    trust_remote_code: bool = False                            # run model code from the hub
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    sdpo: SdpoConfig = field(default_factory=SdpoConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)


class _Raw(str):
    """The text of an override; what it means depends on the type of the field it lands in."""


def read_yaml(text):
    """YAML as plain data: no Python objects, no key given twice, no bomb.

    Ten lines of aliases to aliases stand for a billion values; they are counted before any is made.

    Raises:
        ValueError, yaml.YAMLError: it isn't YAML, or not such as a config needs.
    """
    if len(text) > 1_000_000:
        raise ValueError("it has more than 1,000,000 characters")
    sizes = {}

    def size(node):                                                        # with every alias written out
        if id(node) not in sizes:
            sizes[id(node)] = math.inf                                     # seen again before it is known: it holds itself
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            if isinstance(node, yaml.MappingNode):
                keys = set()
                for key in (k for k, _ in parts if isinstance(k, yaml.ScalarNode)):
                    if key.value in keys:
                        raise ValueError(f"line {key.start_mark.line + 1}: the key {key.value!r} is given twice")
                    keys.add(key.value)
                parts = [part for pair in parts for part in pair]
            sizes[id(node)] = 1 + sum(map(size, parts))
        return sizes[id(node)]

    try:
        node = yaml.compose(text, yaml.SafeLoader)
        if node is not None and size(node) > 100_000:
            raise ValueError("its aliases stand for more than 100,000 values")
        return yaml.safe_load(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _shown(value):
    """A value in a message: its repr, cut where it would be no line any more."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def _build(hint, value, key):
    """`value` as the type `hint`, dataclasses built field by field. Raises ConfigError naming `key`."""
    if typing.get_origin(hint) is Annotated:
        hint, (test, words) = hint.__args__[0], hint.__metadata__[0]
        value = _build(hint, value, key)
        if value is not None and not test(value):
            raise ConfigError(f"{key}: {_shown(value)} isn't allowed; it must be {words}")
        return value
    if isinstance(hint, types.UnionType):                                  # X | None, X | list[X] | None
        kind = next((k for k in hint.__args__ if isinstance(value, list) and typing.get_origin(k) is list), hint.__args__[0])
        return None if value in (None, "null") else _build(kind, value, key)
    if isinstance(value, _Raw):
        try:
            value = str(value) if hint is str or typing.get_origin(hint) is Literal else read_yaml(value)
        except (yaml.YAMLError, ValueError):
            raise ConfigError(f"{key}: {_shown(str(value))} isn't a value that YAML knows") from None
        if dataclasses.is_dataclass(hint):
            raise ConfigError(f"{key}: set its keys one by one, e.g. {key}.{dataclasses.fields(hint)[0].name}=...")
    if typing.get_origin(hint) is Literal:
        if value not in hint.__args__:
            raise ConfigError(f"{key}: {_shown(value)} isn't allowed; it must be one of {', '.join(hint.__args__)}")
        return value
    if dataclasses.is_dataclass(hint):
        return _build_dataclass(hint, value, key)
    if typing.get_origin(hint) is list:
        if not isinstance(value, list):
            raise ConfigError(f"{key}: {_shown(value)} must be a list")
        return [_build(hint.__args__[0], v, f"{key}.{i}") for i, v in enumerate(value)]
    if hint is float and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):    # YAML reads 1e-5 as a text
            value = float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{key}: {_shown(value)} must be of type {hint.__name__}")
    return value


def _build_dataclass(kind, value, key):
    hints, dot = typing.get_type_hints(kind, include_extras=True), f"{key}." if key else ""
    if not isinstance(value, dict):
        raise ConfigError(f"{key or 'the file'}: {_shown(value)} must be a mapping of settings")
    for name in value:
        if name not in hints:
            near = difflib.get_close_matches(str(name), hints, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(hints)}"
            raise ConfigError(f"{dot}{str(name)[:200]}: no such key; {hint}")
    for f in dataclasses.fields(kind):
        if f.name not in value and f.default is f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{dot}{f.name}: missing, and it has no default")
    return kind(**{name: _build(hints[name], v, f"{dot}{name}") for name, v in value.items()})


def _check_whole(c):
    """What one value means for another. Raises ConfigError naming the key to change."""
    tasks, variants, sdpo = [t.name for t in c.tasks + c.ood], [v.name for v in c.variants], c.method == "sdpo"
    rules = [
        (c.model.strip(), f"model: {c.model!r} isn't allowed; it must be a model's folder or hub id"),
        (c.out_dir.strip(), f"out_dir: {c.out_dir!r} isn't allowed; it must be a folder's path"),
        (c.tasks, "tasks: [] isn't allowed; there must be at least one"),
        (len(set(tasks)) == len(tasks), f"tasks: the names {tasks} must differ"),
        (len(set(variants)) == len(variants), f"variants: the names {variants} must differ"),
        (all(isinstance(v, list) and v and all(isinstance(x, str | int | float) for x in v) for v in c.grid.values()),
         f"grid: {_shown(c.grid)} isn't allowed; each key needs a list of numbers or words"),
        (not c.grid or c.variants, "grid: needs variants, of which it makes several"),
        (c.method == "sft" or c.group_size >= 2,
         f"group_size: {c.group_size} isn't allowed; {c.method} compares siblings, so it must be at least 2"),
        (not (c.sdpo.sampled_token and c.sdpo.alpha != 1),
         f"sdpo.alpha: {c.sdpo.alpha} isn't allowed with sampled_token; it must be 1"),
        (not (c.sdpo.teacher == "live" and c.sdpo.init_from),
         f"sdpo.init_from: {c.sdpo.init_from!r} isn't allowed for a live teacher; it must be null"),
        (not sdpo or c.sdpo.max_teacher_tokens >= c.max_prompt_tokens,
         f"sdpo.max_teacher_tokens: {c.sdpo.max_teacher_tokens} isn't allowed; "
         f"it must be at least max_prompt_tokens, {c.max_prompt_tokens}"),
        (c.prompts_per_step % c.optim.updates_per_step == 0,
         f"optim.updates_per_step: {c.optim.updates_per_step} isn't allowed; "
         f"it must divide prompts_per_step, {c.prompts_per_step}"),
    ]
    rules += [(c.method != "sft" or t.reference,
               f"tasks.{i}.reference: {t.reference!r} isn't allowed; method sft needs the template of a right answer")
              for i, t in enumerate(c.tasks)]
    for fine, message in rules:
        if not fine:
            raise ConfigError(message)
    for key, named in (("tasks", c.tasks), ("ood", c.ood), ("variants", c.variants), ("variants", [v for v, *_ in planned(c)])):
        for i, name in enumerate(x.name for x in named):
            if not NAME.fullmatch(name) or len(name.encode()) > 100 or Path(name).suffix in FILES:
                raise ConfigError(f"{key}.{i}.name: {_shown(name)} isn't allowed; names become folders: 100 letters, digits, "
                                  "spaces or .,+=()%@_- at most, the first a letter or digit, the end no file's")
    _check_templates(c)


FILES = (".json", ".jsonl", ".yaml", ".md", ".png", ".tmp")                # what a run writes beside its variants' folders


def _placeholders(template):
    """The names in a template's braces, with what else stands there: "{a} {b.c:>3}" has a and b.c:>3. Raises ValueError."""
    parts = string.Formatter().parse(template)
    return {name + (f"!{how}" if how else "") + (f":{form}" if form else "") for _, name, form, how in parts if name is not None}


def _check_templates(c):
    """Placeholders that a template may hold, those that it needs, and patterns that are none. Raises ConfigError."""
    feedback = {"feedback"}
    rows = [("sdpo.template", c.sdpo.template, {"prompt", "solution"} | (feedback if c.sdpo.use_feedback else set()), feedback),
            ("sdpo.solution_template", c.sdpo.solution_template, {"demonstration"}, set()),
            ("sdpo.feedback_template", c.sdpo.feedback_template, feedback, set())]
    specs = [(f"{name}.{i}", task) for name in ("tasks", "ood") for i, task in enumerate(getattr(c, name))]
    specs += [(f"{place}.test.{i}", test) for place, task in specs for i, test in enumerate(task.test)]
    for place, task in specs:
        rows += [(f"{place}.option_line", task.option_line, {"label", "text"}, set())]
        rows += [(f"{place}.{key}", getattr(task, key) or "", set(), None) for key in ("prompt", "system", "reference")]
        for key, groups in (("answer_pattern", 1), ("remove", 0)):
            pattern = getattr(task, key)
            try:
                right = pattern is None or re.compile(pattern).groups >= groups
            except (re.error, OverflowError, RecursionError):
                right = False
            if not right:
                raise ConfigError(f"{place}.{key}: {_shown(pattern)} isn't allowed; it must be a regular expression"
                                  + " with a group" * groups)
    for key, text, needed, further in rows:                                # further None: any column
        try:
            right = needed <= (found := _placeholders(text)) and (further is None or found <= needed | further)
        except ValueError:
            right = False
        if not right:
            known = ", ".join("{%s}" % name for name in sorted(needed | (further or set())))
            raise ConfigError(f"{key}: {_shown(text)} isn't allowed; "
                              + (f"its placeholders are {known}" if known else "a column's name stands in braces")
                              + ", other braces are doubled")


def _set(tree, dotted, value):
    """Set tree["a"]["0"]["b"] for the dotted key a.0.b, making mappings on the way."""
    *path, last = dotted.split(".")
    for part in path:
        tree = tree[int(part)] if isinstance(tree, list) else tree.setdefault(part, {})
    if isinstance(tree, list):
        tree[int(last)] = value
    elif last in {f.name for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.type)} and isinstance(value, dict):
        raise ConfigError(f"{dotted}: set its keys one by one, e.g. {dotted}.{next(iter(value), 'key')}")
    else:
        tree[last] = value


def _beside(path, folder):
    """A relative file that doesn't exist here but does in `folder` is meant to be that one."""
    return str(Path(folder) / path) if path and not Path(path).exists() and (Path(folder) / path).exists() else path


def _locate(config, folder):
    """Find the files that a config names, here or beside it."""
    config.model, config.sdpo.init_from = _beside(config.model, folder), _beside(config.sdpo.init_from, folder)
    specs = [*config.tasks, *config.ood]
    for task in specs:
        task.path, task.test_path, task.join = (_beside(p, folder) for p in (task.path, task.test_path, task.join))
        specs += task.test
    for variant in config.variants:
        for key in variant.set:
            if key.rpartition(".")[2] in ("model", "init_from", "path", "test_path", "join"):
                variant.set[key] = _beside(variant.set[key], folder)
    return config


def _task(entry, folder, key):
    """An entry of `tasks`, `ood` or a task's `test` as a mapping of TaskSpec's fields.

    It may be the name of a task file, or {file: its name, and what is to differ from it}. Files that an
    entry names are relative to the file in which it stands. Raises ConfigError naming `key`.
    """
    entry = {"file": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, dict):
        return entry                                                       # _build says what is wrong with it
    name, entry = entry.get("file"), {k: v for k, v in entry.items() if k != "file"}
    if isinstance(entry.get("test"), list):
        entry["test"] = [_task(t, folder, f"{key}.test.{i}") for i, t in enumerate(entry["test"])]
    if name is None:
        return entry | {k: _beside(entry[k], folder) for k in ("path", "test_path", "join") if isinstance(entry.get(k), str)}
    file = Path(folder) / str(name)
    if key.count(".test.") > 20:
        raise ConfigError("tasks: a task file names itself among its tests")
    try:
        tree = read_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as e:
        raise ConfigError(f"{key}.file: can't read {file}: {one_line(e)}") from None
    if not isinstance(tree, dict) or "file" in tree:
        raise ConfigError(f"{key}.file: {file} must be a mapping of a task's settings, without another file")
    return _task(tree, file.parent, key) | entry


def make_config(tree, folder="."):
    """A checked Config from nested dicts; `folder` is where the config file lies.

    Raises:
        ConfigError: one line naming key, value and what is allowed.
    """
    config = _locate(_build(Config, tree, ""), folder)
    _check_whole(config)
    for variant, *_ in planned(config):                                    # a mistake in the last one shows now
        variant_config(config, variant)
    return config


def planned(config):
    """All runs of a config with variants: [(Variant, name of what it was made of, {key of the grid: value})]. A key is
    called by its last part where no other one ends alike.

    >>> [v.name for v, *_ in planned(Config("m", "o", [], variants=[Variant("a")], grid={"lr": [0.1, 0.2], "seed": [0]}))]
    ['a-lr=0.1-seed=0', 'a-lr=0.2-seed=0']
    """
    made = []
    for variant in config.variants:
        for values in itertools.product(*config.grid.values()):
            chosen = dict(zip(config.grid, values))
            last = [key.rpartition(".")[2] for key in chosen]
            short = {end if last.count(end) == 1 else key: value for (key, value), end in zip(chosen.items(), last)}
            name = "-".join([variant.name, *(f"{key}={value}" for key, value in short.items())])
            made.append((Variant(name, variant.set | chosen), variant.name, short))
    return made


def load_config(path, overrides=()):
    """Read a YAML file and apply overrides such as "sdpo.alpha=1" or "tasks.0.path=rows.jsonl".

    Returns:
        Config. Raises ConfigError: one line naming file, key, value and what is allowed.
    """
    try:
        tree = read_yaml(Path(path).read_text(encoding="utf-8"))
        for name in ("tasks", "ood"):                                      # first, so that overrides reach into task files
            if isinstance(tree, dict) and isinstance(tree.get(name), list):
                tree[name] = [_task(t, Path(path).parent, f"{name}.{i}") for i, t in enumerate(tree[name])]
        for text in overrides:
            key, equals, value = text.partition("=")
            if not equals:
                raise ConfigError(f"override {text!r}: must be key=value")
            try:
                _set(tree, key, _Raw(value))
            except (AttributeError, IndexError, TypeError, ValueError):
                raise ConfigError(f"override {text!r}: the file has no such place") from None
        return make_config(tree, Path(path).parent)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None
    except (OSError, ValueError, yaml.YAMLError) as e:
        raise ConfigError(f"{path}: can't read it: {one_line(e)}") from None


def variant_config(config, variant):
    """The Config of one variant: the common one with its own values, in its own folder."""
    tree = dataclasses.asdict(dataclasses.replace(config, variants=[], grid={}))
    try:
        for key, value in variant.set.items():
            if key in ("out_dir", "variants", "grid"):
                raise ConfigError(f"{key}: a variant can't set it")
            _set(tree, key, value)
        tree["out_dir"] = str(Path(config.out_dir) / variant.name)
        made = _build(Config, tree, "")
        _check_whole(made)
        if [t.name for t in made.tasks + made.ood] != [t.name for t in config.tasks + config.ood]:
            raise ConfigError("tasks: a variant can't change their names or order, or the comparison would be of other things")
    except (AttributeError, IndexError, TypeError) as e:
        raise ConfigError(f"variant {variant.name}: {one_line(e)}") from None
    except ConfigError as e:
        raise ConfigError(f"variant {variant.name}: {e}") from None
    return made


# ------------------------------------------------------------------------------------------------
# Processes: one, or under torchrun one for each GPU
# ------------------------------------------------------------------------------------------------


def rank():
    """This process's number, from 0, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def every_rank(value):
    """The list of what each process has, the same everywhere."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def summed(numbers):
    """Dicts of numbers added up over the processes, key by key."""
    parts = every_rank(numbers)
    return {key: sum(part.get(key, 0) for part in parts) for key in dict.fromkeys(k for part in parts for k in part)}


def first_only(action):
    """Have the first process do something; all get its result, or raise its ConfigError or RunError."""
    result = error = None
    if rank()[0] == 0:
        try:
            result = action()
        except (ConfigError, RunError) as e:
            error = e
    result, error = every_rank((result, error))[0]
    if error is not None:
        raise error
    return result


def all_or_none(action):
    """Each process's own result of something that may fail in one of them: then all raise that error."""
    result = error = None
    try:
        result = action()
    except FAILURES as e:
        error = e
    if failed := next((e for e in every_rank(error) if e is not None), None):
        raise failed
    return result


@contextlib.contextmanager
def processes():
    """Join the group that torchrun started, if it did; leave it at the end."""
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # One may wait for hours where another process measures the base (base_row); torchrun sees it if one dies.
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=datetime.timedelta(days=1))
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(model, config):
    """Split a model's weights over the processes, in place: one unit a decoder layer, one for the rest.

    The losses need hidden states and the head, never logits, so `states` is what it is asked for: as a
    forward pass of FSDP's, it gathers embedding and head, and the head stays until the backward pass.
    """
    bfloat16 = config.optim.compute_dtype == "bfloat16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bfloat16 else MixedPrecisionPolicy()
    mesh = init_device_mesh(torch.device(model.device).type, (rank()[1],))
    for layer in [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.states = types.MethodType(lambda self, **inputs: self.base_model(**inputs).last_hidden_state, model)
    register_fsdp_forward_method(model, "states")
    return model


def settle(model):
    """Split embedding and head again, which FSDP leaves whole after a pass without a backward one."""
    if isinstance(model, FSDPModule):
        model.reshard()


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Player:
    """The model that samples: the policy itself, or a whole copy in the type of its products.

    A sharded model would gather its layers anew for every token, and float32 weights under autocast
    keep a float32 cache. So there the copy is refreshed once a step.
    """

    def __init__(self, model, config):
        """`model`: the policy before it is sharded."""
        self.apart = rank()[1] > 1 or config.optim.compute_dtype == "bfloat16"
        self.model = model
        if self.apart:
            dtype = getattr(torch, config.optim.compute_dtype)
            self.model = copy.deepcopy(model).to(dtype).eval().requires_grad_(False)

    @torch.no_grad()
    def refresh(self, policy):
        """Take over the policy's weights."""
        if self.apart:
            settle(policy)
            for mine, other in zip(self.model.parameters(), policy.parameters(), strict=True):
                mine.copy_(_whole(other))


def frozen_copy(model, player, config, exact=False):
    """A copy of the policy that isn't trained: sharded like it; in bfloat16 if that is what computes, unless `exact`."""
    if not isinstance(model, FSDPModule):
        made = copy.deepcopy(model)
        return (made if exact else made.to(player.model.dtype)).eval().requires_grad_(False)
    settle(model)
    made = copy.deepcopy(player.model)
    made = shard((made.to(model.dtype) if exact else made).to(model.device), config)
    with torch.no_grad():
        for mine, other in zip(made.parameters(), model.parameters(), strict=True):
            mine.copy_(other)
    return made.eval().requires_grad_(False)


# ------------------------------------------------------------------------------------------------
# Model and data
# ------------------------------------------------------------------------------------------------


def _pretrained(kind, name, config, key="model", **options):
    """kind.from_pretrained(name), its errors in one line. Raises ConfigError naming `key`."""
    # A name that can't be a hub id must be a folder: the hub isn't asked for it.
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise ConfigError(f"{key}: there is no folder {name!r}; it must be a model's folder or a hub id")
    try:
        return kind.from_pretrained(name, trust_remote_code=config.trust_remote_code, **options)
    except Exception as e:  # a missing file, a refused repository, a bad config: no common base
        raise ConfigError(f"{key}: can't load {name!r}: {one_line(e)}") from None


def load_model(name, config, device, key="model"):
    """A causal language model in float32, its weights from safetensors. Raises ConfigError."""
    model = _pretrained(AutoModelForCausalLM, name, config, key, dtype=torch.float32, use_safetensors=True).to(device)
    if config.optim.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    # The losses apply the head to the last hidden states themselves; some architectures scale or cap
    # their logits after it, which would silently be left out.
    with torch.no_grad():
        ids = torch.arange(4, device=device)[None]
        logits = model(input_ids=ids).logits.float()
        direct = model.get_output_embeddings()(model.base_model(input_ids=ids).last_hidden_state).float()
    if not torch.allclose(logits, direct, rtol=1e-3, atol=1e-3):
        raise ConfigError(f"{key}: {name!r} changes its logits after the output head; such architectures aren't supported")
    return model


def load_tokenizer(config):
    """The base's tokenizer. Raises ConfigError if it has no chat template or no end token."""
    tokenizer = _pretrained(AutoTokenizer, config.model, config)
    for part, value in (("chat template", tokenizer.chat_template), ("end token", tokenizer.eos_token_id)):
        if value is None:
            raise ConfigError(f"model: the tokenizer of {config.model!r} has no {part}; chat models have one")
    return tokenizer


def load_tasks(config, tokenizer, say=print):
    """All tasks of the sequence, then those out of distribution, without what is longer than allowed. Raises ConfigError."""

    def too_long(example):
        if len(encode(tokenizer, example.messages, **config.rollout.chat_template)) > config.max_prompt_tokens:
            return f"over max_prompt_tokens={config.max_prompt_tokens}"
        reference = example.reference if config.method == "sft" else None     # test sets of their own may have none
        if reference and len(tokenizer.encode(reference, add_special_tokens=False)) >= config.max_new_tokens:
            return f"with a reference that leaves its end no room in max_new_tokens={config.max_new_tokens}"

    tasks = []
    for i, spec in enumerate(config.tasks + config.ood):
        try:
            task = load_task(spec, evaluate_only=i >= len(config.tasks))
        except ValueError as e:
            raise ConfigError(str(e)) from None
        parts = {"test": task.test} if i >= len(config.tasks) else {"training": task.train, "test": task.test}
        for part, examples in parts.items():
            try:
                reasons = [too_long(e) for e in examples]
            except Exception as e:  # chat templates raise what they like, e.g. at a system message
                raise ConfigError(f"task {spec.name}: the chat template refuses a {part} prompt: {one_line(e)}") from None
            for reason in filter(None, reasons):
                task.dropped[reason] = task.dropped.get(reason, 0) + 1
            examples[:] = [e for e, reason in zip(examples, reasons) if not reason]
            if not examples:
                raise ConfigError(f"task {spec.name}: no {part} prompt is left: all are {reasons[0]}")
        say(f"task {spec.name}: {len(task.train)} training and {len(task.test)} test prompts"
            + "".join(f"; {n} {reason}" for reason, n in task.dropped.items()))
        tasks.append(task)
    return tasks


def check_model(config, tokenizer):
    """topk and the tokenizer must fit the vocabulary, the longest sequence the model, init_from the student.

    All of it stands in the models' own configurations: no weights are read. Raises ConfigError.
    """
    whole, sdpo = _pretrained(AutoConfig, config.model, config), config.sdpo
    text, key, prompt = whole.get_text_config(), "max_prompt_tokens", config.max_prompt_tokens
    if len(tokenizer) > text.vocab_size:
        raise ConfigError(f"model: {config.model!r} isn't allowed; its tokenizer has {len(tokenizer)} tokens, "
                          f"which must be at most the vocabulary of the model, {text.vocab_size}")
    if config.method == "sdpo":
        key, prompt = "sdpo.max_teacher_tokens", sdpo.max_teacher_tokens
        if sdpo.topk is not None and sdpo.topk > text.vocab_size:
            raise ConfigError(f"sdpo.topk: {sdpo.topk} isn't allowed; it must be at most the vocabulary, {text.vocab_size}")
        if sdpo.init_from:
            other, shapes = _pretrained(AutoConfig, sdpo.init_from, config, "sdpo.init_from"), []
            for made_from in (whole, other):
                with torch.device("meta"):                                 # shapes without memory
                    made = AutoModelForCausalLM.from_config(made_from, trust_remote_code=config.trust_remote_code)
                shapes.append([p.shape for p in made.parameters()])
            if shapes[0] != shapes[1]:
                raise ConfigError(f"sdpo.init_from: {sdpo.init_from!r} isn't allowed; "
                                  f"its matrices must have the shapes of those of the model, {config.model!r}")
    new = max(config.max_new_tokens, config.eval.max_new_tokens or 0)
    room = getattr(text, "max_position_embeddings", math.inf)
    if prompt + new > room:
        raise ConfigError(f"{key}: {prompt} isn't allowed; with max_new_tokens {new} it must be at most {room - new}, "
                          f"as the model has {room} positions")


def step_seed(*parts):
    """A seed from (seed, stage, step, ...): nothing else is random in a step or an evaluation."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")


def prompt_indices(count, size, step, seed):
    """The `size` examples of training step `step`: consecutive places in reshuffled passes over all.

    >>> sorted(prompt_indices(4, 2, 0, "s") + prompt_indices(4, 2, 1, "s"))
    [0, 1, 2, 3]
    """
    places = range(step * size, (step + 1) * size)
    passes = {p // count for p in places}
    order = {e: random.Random(f"{seed}/{e}").sample(range(count), count) for e in passes}
    return [order[p // count][p % count] for p in places]


# ------------------------------------------------------------------------------------------------
# One training step
# ------------------------------------------------------------------------------------------------


def response_states(model, prompts, responses, mask, pad_id):
    """The hidden states that predict the response tokens.

    Args:
        prompts: n lists of ids. responses, mask: (n, T), padded on the right.
    Returns:
        (n, T, H).
    """
    ids, present = left_pad(prompts, pad_id, responses.device)             # (n, L)
    ids, present = torch.cat([ids, responses], 1), torch.cat([present, mask.long()], 1)      # (n, L + T)
    positions = (present.cumsum(-1) - 1).clamp(min=0)
    inputs = dict(input_ids=ids, attention_mask=present, position_ids=positions, use_cache=False)
    states = model.states(**inputs) if isinstance(model, FSDPModule) else model.base_model(**inputs).last_hidden_state
    return predicting(states, responses.shape[1])


def micro_batches(lengths, budget):
    """Indices in groups of similar length whose padded size stays within `budget` tokens.

    Prompts are padded on the left, responses on the right, so a group is as wide as its longest
    prompt and its longest response together. A single row over the budget is a group of its own.

    Args:
        lengths: (prompt, response) tokens of each row.
    >>> micro_batches([(4, 1), (1, 0), (1, 1), (1, 1)], 6)
    [[1, 2, 3], [0]]
    """
    groups, prompt, response = [], 0, 0
    for i in sorted(range(len(lengths)), key=lambda i: sum(lengths[i])):
        wide = max(prompt, lengths[i][0]), max(response, lengths[i][1])
        if not groups or (len(groups[-1]) + 1) * sum(wide) > budget:
            groups.append([])
            wide = lengths[i]
        groups[-1].append(i)
        prompt, response = wide
    return groups


@dataclass
class Batch:
    """What the loss of one step needs; N rows. `signal` marks the rows that teach: grpo's in a mixed group, sdpo's with a target."""

    prompts: list                       # N lists of ids: what the student saw
    responses: torch.Tensor             # (N, T)
    mask: torch.Tensor                  # (N, T) bool: tokens that the loss counts
    signal: list                        # N bools
    old_logps: torch.Tensor | None = None   # (N, T)
    importance: torch.Tensor | None = None  # (N, T), where another copy of the model sampled
    advantages: torch.Tensor | None = None  # (N,) grpo
    teacher_prompts: list | None = None     # N lists of ids or None: sdpo


def rollout_engine(config, model):
    """The engine of grpo.rollout; auto: the loop on a CPU, on CUDA continuous batching if flash attention is
    installed (without it each response reads, masked, the cache of all others), else the static cache."""
    if config.rollout.engine != "auto":
        return config.rollout.engine
    on_cuda = "continuous" if flash_attention(model) else "static"
    return on_cuda if model.device.type == "cuda" else "loop"


def collect(model, player, tokenizer, task, examples, config, seed=0, pad_id=0):
    """Sample, verify, and turn rewards into what the method learns from.

    Args:
        examples: the step's; each process takes its share of them. seed: of the step.
    Returns:
        Batch of this process, and the whole step's numbers for the log.
    """
    spec, G, (mine, world) = task.spec, config.group_size, rank()
    places = range(len(examples))[mine::world]
    examples = [examples[i] for i in places]
    chats = [e.messages for e in examples]
    out = all_or_none(lambda: rollout(
        player.model, tokenizer, chats, G, config.max_new_tokens, config.rollout.temperature,
        batch_size=config.rollout.batch_size, template=config.rollout.chat_template, seeds=[step_seed(seed, i) for i in places],
        engine=rollout_engine(config, player.model),
    ))
    verdicts = all_or_none(
        lambda: [verify(spec.verifier, text, examples[i // G], spec.paper_scoring) for i, text in enumerate(out.texts)])
    rewards = torch.tensor([v.reward for v in verdicts]).view(-1, G)       # (P, G)
    advantages = group_advantages(rewards, config.grpo.scale_by_std, config.grpo.eps).flatten()
    batch = Batch([out.prompts[i // G] for i in range(len(out))], out.response_ids, out.mask, [], out.logps)
    if player.apart or out.logps is None:
        recompute_logps(model, batch, config, pad_id)
    s = config.sdpo
    if config.method == "grpo":
        batch.advantages = advantages.to(model.device)
        # Without a contrast in the group the loss is 0, but for the penalty.
        batch.signal = [a != 0 or config.grpo.kl_coef > 0 for a in advantages.tolist()]
    else:
        cut = "Your response was truncated because it exceeded the maximum length."
        feedback = [cut if t and not v.reward else v.feedback for v, t in zip(verdicts, out.truncated.tolist())]
        batch.teacher_prompts = teacher_prompts(
            lambda messages: encode(tokenizer, messages, **config.rollout.chat_template),
            chats, out.texts, rewards.flatten().tolist(), feedback, G,
            threshold=s.threshold, exclude_self=s.exclude_self, use_feedback=s.use_feedback,
            feedback_with_demonstration=s.feedback_with_demonstration, keep_thinking=s.keep_thinking,
            max_tokens=s.max_teacher_tokens, template=s.template, solution_template=s.solution_template,
            feedback_template=s.feedback_template,
        )
        batch.signal = [p is not None for p in batch.teacher_prompts]
    log = sample_numbers(batch, out, verdicts, rewards)
    if config.method == "sdpo":
        kept = drop_tokens(batch.mask, s.mask_ratio, [step_seed(seed, i, "drop", j) for i in places for j in range(G)])
        batch.mask = kept & torch.tensor(batch.signal, device=kept.device)[:, None]
    return batch, log


def sample_numbers(batch, out, verdicts, rewards):
    """Means over the samples of all processes, for the log."""
    mask = batch.mask
    sums = {
        "samples": len(out), "groups": len(rewards), "tokens": mask.sum().item(), "reward": rewards.sum().item(),
        "solved": (rewards > 0).any(-1).sum().item(), "mixed": (rewards.amin(-1) < rewards.amax(-1)).sum().item(),
        "well_formed": sum(v.well_formed for v in verdicts), "truncated": out.truncated.sum().item(),
        "empty": sum(not t.strip() for t in out.texts),
        "entropy": -(batch.old_logps * mask).sum().item(), "targets": sum(batch.signal),
        "marks": sum(map(format_marks, out.texts)),
        "repeats": sum(repeated_ngrams(ids[kept].tolist()) for ids, kept in zip(out.response_ids, out.mask)),
    }
    if batch.importance is not None:
        sums["rollout_weight"] = (batch.importance * mask).sum().item()
    sums = summed(sums)
    samples, groups, tokens = (sums.pop(key) for key in ("samples", "groups", "tokens"))
    per = {"solved": groups, "mixed": groups, "entropy": tokens, "rollout_weight": tokens}
    log = {key: value / max(1, per.get(key, samples)) for key, value in sums.items()} | {"length": tokens / samples}
    if batch.teacher_prompts is None:
        del log["targets"]
    return log


@torch.no_grad()
def recompute_logps(model, batch, config, pad_id):
    """Log-probs of the sampled tokens under the policy itself, where a copy sampled them or the engine gave none.

    A copy computes in another precision or with other kernels, so it samples from a slightly different distribution.
    These log-probs become the old ones; where the sampler's are known, each token gets the truncated importance weight
    min(exp(logp_old - logp_sampled), cap), a constant for the gradient.
    """
    sampled, batch.old_logps = batch.old_logps, torch.zeros_like(batch.mask, dtype=torch.float32)
    lengths = [(len(p), n) for p, n in zip(batch.prompts, batch.mask.sum(-1).tolist())]
    model.eval()
    for rows, _ in together(micro_batches(lengths, config.optim.micro_batch_tokens), [0]):
        mask = batch.mask[rows]                                            # (n, T)
        with autocast(model.device, config):
            states = response_states(model, [batch.prompts[i] for i in rows], batch.responses[rows], mask, pad_id)[mask]  # (tokens, H)
            logps, _ = fused_token_logps(
                states, model.get_output_embeddings(), batch.responses[rows][mask],
                temperature=config.rollout.temperature, chunk=config.optim.chunk)
        batch.old_logps[rows] = batch.old_logps.new_zeros(mask.shape).masked_scatter(mask, logps)
    if sampled is not None:
        log_ratio = (batch.old_logps - sampled).masked_fill(~batch.mask, 0.0)
        batch.importance = log_ratio.exp().clamp(max=config.rollout.importance_cap)


def together(groups, spare):
    """The groups, each with True; where another process has more, `spare` with False: FSDP's passes need all of them."""
    for k in range(max(every_rank(len(groups)))):
        yield (groups[k], True) if k < len(groups) else (spare, False)


def references(tokenizer, examples, config, device):
    """The Batch of SFT: this process's share of the reference answers, each with an end token."""
    mine, world = rank()
    examples = examples[mine::world]
    ids = [tokenizer.encode(e.reference, add_special_tokens=False) + [tokenizer.eos_token_id] for e in examples]
    T = max(map(len, ids))
    responses = torch.tensor([i + [tokenizer.eos_token_id] * (T - len(i)) for i in ids], device=device)
    mask = torch.arange(T, device=device) < torch.tensor([len(i) for i in ids], device=device)[:, None]
    prompts = [encode(tokenizer, e.messages, **config.rollout.chat_template) for e in examples]
    sums = summed({"tokens": mask.sum().item(), "answers": len(ids)})
    return Batch(prompts, responses, mask, [True] * len(ids)), {"length": sums["tokens"] / sums["answers"]}


def micro_loss(model, teacher, reference, batch, rows, total, config, pad_id):
    """Loss of some rows of a batch, as its share of the whole optimizer step.

    Args:
        teacher: sdpo.Teacher or None. reference: the stage's first model or None.
        rows: indices. total: tokens or responses in the step (the loss's denominator).
    Returns:
        loss (scalar), dict of floats that add up over micro-batches.
    """
    whole = batch.mask[rows]
    T = max(1, int((whole * torch.arange(1, whole.shape[1] + 1, device=whole.device)).max()))
    mask, responses = whole[:, :T], batch.responses[rows, :T]              # (n, T)
    # Attention covers the response without gaps; the loss's mask may have some (mask_ratio).
    reach = mask.flip(-1).cumsum(-1).flip(-1) > 0
    tokens = responses[mask]                                               # (tokens,)
    prompts = [batch.prompts[i] for i in rows]
    o, temperature = config.optim, config.rollout.temperature
    importance = None if batch.importance is None else batch.importance[rows, :T]
    states = response_states(model, prompts, responses, reach, pad_id)[mask]   # (tokens, H)
    head = model.get_output_embeddings()                                   # after the pass that gathers it, if sharded
    spread = lambda x: x.new_zeros(mask.shape).masked_scatter(mask, x)     # (tokens,) -> (n, T)  # noqa: E731
    if config.method == "sdpo":
        s, old = config.sdpo, batch.old_logps[rows, :T]
        weights = torch.full_like(old[mask], 1 / total) if importance is None else importance[mask] / total
        with torch.no_grad():
            seen = [batch.teacher_prompts[i] or batch.prompts[i] for i in rows]
            taught = response_states(teacher.model, seen, responses, reach, pad_id)[mask]        # (tokens, H)
        # This loss carries the gradient; sdpo_loss, below, is asked for its metrics alone, from detached numbers.
        loss, divergence, logps, _ = fused_token_kl(
            states, head, taught, teacher.model.get_output_embeddings(), weights, tokens,
            alpha=s.alpha, topk=s.topk, tail=s.tail, sampled=s.sampled_token, temperature=temperature, chunk=o.chunk,
            old_logps=old[mask], is_clip=s.is_clip, teacher_mix=teacher.mix,
        )
        return loss, sdpo_loss(spread(divergence), spread(logps), old, mask, s.is_clip, total)[1]
    temperature = 1.0 if config.method == "sft" else temperature
    logps = spread(fused_token_logps(states, head, tokens, temperature=temperature, chunk=o.chunk)[0])
    if config.method == "sft":
        return -(logps * mask).sum() / total, {}
    g, ref = config.grpo, None
    if g.kl_coef:
        with torch.no_grad():
            first = response_states(reference, prompts, responses, reach, pad_id)[mask]
            ref_head = reference.get_output_embeddings()
            ref = spread(fused_token_logps(first, ref_head, tokens, temperature=temperature, chunk=o.chunk)[0])
    return grpo_loss(
        logps, batch.old_logps[rows, :T], batch.advantages[rows], mask, clip_low=g.clip_low, clip_high=g.clip_high,
        dual_clip=g.dual_clip, aggregation=g.aggregation, ref_logps=ref, kl_coef=g.kl_coef, importance=importance, total=total,
    )


class FailedStep(RuntimeError):
    """A step that can't be made: numbers that aren't finite, or samples or verdicts that don't come. `updates` of it
    had been made before, and `place` says in words where in the run it was."""

    updates, place = 0, ""


def update(model, teacher, reference, optimizer, batch, config, pad_id):
    """Gradients of a batch over micro-batches, then the optimizer, then the teacher; several times on parts of the
    batch with updates_per_step. Rows without a signal aren't computed; under grpo their tokens count in the mean.

    Returns:
        dict of floats: means over the updates. Raises FailedStep before a bad update.
    """
    N, parts = len(batch.prompts), config.optim.updates_per_step
    per_response = config.method == "grpo" and config.grpo.aggregation == "sequence_mean"
    logs = []
    for part in (range(i * N // parts, (i + 1) * N // parts) for i in range(parts)):
        rows = [i for i in part if batch.signal[i]]
        total, computed = (len(x) if per_response else int(batch.mask[list(x)].sum()) for x in (part, rows))
        sizes = summed({"total": total, "computed": computed, "rows": len(rows)})
        total, computed = max(1, sizes["total"]), max(1, sizes["computed"])
        if not sizes["rows"]:                                              # nothing to learn: no update at all
            continue
        seen = [max(len(batch.prompts[i]), len(batch.teacher_prompts[i]) if batch.teacher_prompts else 0) for i in rows]
        ends = torch.arange(1, batch.mask.shape[1] + 1, device=batch.mask.device)
        reach = (batch.mask[rows] * ends).amax(-1).tolist()                # up to the last token that counts
        groups = micro_batches(list(zip(seen, reach)), config.optim.micro_batch_tokens)
        model.train()
        log = {"loss": 0.0}
        for chosen, counts in together([[rows[i] for i in group] for group in groups], [part[0]]):
            with autocast(model.device, config):
                loss, numbers = micro_loss(model, teacher, reference, batch, chosen, total, config, pad_id)
            (loss * counts * rank()[1]).backward()                         # FSDP takes the mean over the processes
            if counts:
                log["loss"] += loss.item()
                for key, value in numbers.items():                         # means over what was computed
                    log[key] = log.get(key, 0.0) + value * total / computed
        log = summed(log)
        log["grad_norm"] = _whole(torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip)).item()
        if not (math.isfinite(log["loss"]) and math.isfinite(log["grad_norm"])):
            optimizer.zero_grad(set_to_none=True)
            error = FailedStep(f"loss {log['loss']}, gradient norm {log['grad_norm']}")
            error.updates = len(logs)
            raise error
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if teacher is not None:
            settle(teacher.model)
            teacher.update(model)
        logs.append(log)
    keys = logs[0] if logs else {}
    return {key: sum(log[key] for log in logs) / len(logs) for key in keys} | {"updates": len(logs)}


def autocast(device, config):
    """bfloat16 compute over float32 weights, or nothing."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=config.optim.compute_dtype == "bfloat16")


# ------------------------------------------------------------------------------------------------
# The run folder: nothing is lost
# ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def writing(place):
    """Make what the disk refuses in the block one line: full, over a quota, suddenly read-only. Raises RunError.

    All is written beside its place first, so the newest checkpoint stays whole.
    """
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as e:
        e = next(iter(e.failures.values()))[0] if isinstance(e, CheckpointException) else e
        while e.__context__ is not None:                                   # the first, not what followed from it
            e = e.__context__
        raise RunError(f"{place}: can't write: {getattr(e, 'strerror', None) or one_line(e)}; what was saved before is "
                       "whole: mend that, and the same command continues") from None


def write_whole(path, text):
    """Write a file beside its place, flush it to the disk, then rename: never half a file."""
    path, temporary = Path(path), Path(f"{path}.tmp")
    with writing(path):
        with open(temporary, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)


def append_line(file, text):
    """Add a line to an open file."""
    with writing(file.name):
        file.write(text + "\n")
        file.flush()


@contextlib.contextmanager
def folder_lock(folder, name=".lock", wait=False):
    """The folder belongs to this process until the block ends; the system frees a dead one's lock."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = open(Path(folder) / name, "a+")
    except OSError as e:
        raise ConfigError(f"out_dir: can't write to {folder}: {e.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            raise ConfigError(f"out_dir: {folder} is in use by another process, or its disk knows no locks") from None
        yield


@contextlib.contextmanager
def stop_signals():
    """SIGTERM and Ctrl-C set a flag in the yielded list, so that the step in progress can finish."""
    caught, former = [], {}

    def note(number, frame):
        if caught:                                                         # asked twice: at once
            raise KeyboardInterrupt(number)
        caught.append(number)

    with contextlib.suppress(ValueError):                                  # not in the main thread: no handlers
        former = {s: signal.signal(s, note) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _checksums(folder):
    """CRC-32 of every file but state.json: finds what was cut short or flipped, at the disk's speed."""
    sums = {}
    for path in sorted(folder.iterdir()):
        if path.name != "state.json":
            with open(path, "rb") as f:
                sums[path.name] = 0
                while block := f.read(1 << 24):
                    sums[path.name] = zlib.crc32(block, sums[path.name])
    return sums


def _seal(state):
    """The checksum of the state itself: one flipped bit may make step 3 of step 2, and JSON would not mind."""
    return zlib.crc32(json.dumps(state).encode())


def _tensors(model, optimizer, teacher, reference):
    """Everything of a stage with weights in it, as the tree that PyTorch's distributed checkpoint saves."""
    tree = {"model": get_model_state_dict(model)}
    if optimizer is not None:  # never of an optimizer that hasn't stepped: PyTorch would make it step
        tree["optimizer"] = get_optimizer_state_dict(model, optimizer)
    if teacher is not None and teacher.model is not model:
        tree["teacher"] = teacher.model.state_dict()
    if reference is not None:
        tree["reference"] = reference.state_dict()
    return tree


def _flush(folder):
    """Have the disk hold every file of a folder, and the folder's own list of them."""
    for path in (*filter(Path.is_file, Path(folder).iterdir()), Path(folder)):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def save_checkpoint(folder, state, keep, model, optimizer=None, teacher=None, reference=None):
    """Write a checkpoint beside its place, with checksums, then rename it; all but `keep` old ones go.

    Between two stages (step 0) the model is all there is.
    """
    place = folder / "checkpoints" / f"{state['stage']:03d}-{state['step']:06d}"
    temporary = folder / "checkpoints" / "unfinished"

    @writing(place)
    def begin():
        if place.exists():                                                 # the same state, made a second time
            return False
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        return True

    @writing(place)
    def finish():
        extra = {"stepped": optimizer is not None, "teacher_updates": teacher.updates if teacher else 0}
        whole = state | extra | {"checksums": _checksums(temporary)}
        write_whole(temporary / "state.json", json.dumps(whole | {"seal": _seal(whole)}))
        _flush(temporary)
        os.replace(temporary, place)
        _flush(place.parent)
        for old in checkpoints(folder)[keep:]:
            shutil.rmtree(old)

    if first_only(begin):
        optimizer = optimizer if optimizer is not None and optimizer.state else None
        with writing(place):
            dcp.save(_tensors(model, optimizer, teacher, reference), checkpoint_id=temporary, no_dist=not dist.is_initialized())
        first_only(finish)


def checkpoints(folder):
    """Finished checkpoints, the newest first; stage and step compare as numbers."""
    found = [p for p in (folder / "checkpoints").glob("*-*") if re.fullmatch(r"\d+-\d+", p.name)]
    return sorted(found, key=lambda p: tuple(map(int, p.name.split("-"))), reverse=True)


def newest_state(folder, say=print):
    """(path, state) of the newest checkpoint whose files are as they were written, or None.

    Damaged ones are set aside under another name, so that they never count again.
    """
    for place in checkpoints(folder):
        try:
            state = json.loads((place / "state.json").read_text(encoding="utf-8"))
            if state.pop("seal") == _seal(state) and state["checksums"] == _checksums(place):
                return place, state
            raise ValueError("a file differs from what was written")
        except (OSError, ValueError, KeyError, AttributeError) as e:
            say(f"checkpoint {place} is damaged ({one_line(e)}); looking for the one before it")
            os.replace(place, place.with_name(f"damaged-{place.name}-{time.time_ns()}"))
    return None


def load_checkpoint(place, model, optimizer=None, teacher=None, reference=None):
    """Put a checkpoint's weights, and those of what else is given, in place."""
    tree = _tensors(model, optimizer, teacher, reference)
    dcp.load(tree, checkpoint_id=place, no_dist=not dist.is_initialized())
    set_model_state_dict(model, tree["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, tree["optimizer"])
    if "teacher" in tree:
        teacher.model.load_state_dict(tree["teacher"])
    if "reference" in tree:
        reference.load_state_dict(tree["reference"])


def _flat(tree, key=""):
    """Nested dicts and lists as one dict of dotted keys."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return {k: v for name, part in items for k, v in _flat(part, f"{key}.{name}" if key else str(name)).items()} or {key: tree}


def claim_folder(config, folder):
    """Note the configuration in the run folder; where a run has begun, it must be the one noted. Raises ConfigError."""
    file, own = folder / "config.yaml", dataclasses.asdict(config)
    begun = any(path.name in ("checkpoints", "metrics.jsonl") or path.match("base-*.json") for path in folder.iterdir())
    if begun and file.exists():
        try:
            noted, mine = _flat(read_yaml(file.read_text(encoding="utf-8"))), _flat(own)
        except (ValueError, yaml.YAMLError) as e:
            raise ConfigError(f"out_dir: {file} can't be read ({one_line(e)}); put it back, or choose another out_dir") from None
        for key in sorted(noted.keys() | mine.keys()):
            free = key.partition(".")[0] in ("device", "save_every", "keep_checkpoints", "out_dir", "variants", "grid")
            if not free and noted.get(key) != mine.get(key):
                raise ConfigError(f"out_dir: {folder} belongs to another config: {key} is {noted.get(key)!r} there, "
                                  f"{mine.get(key)!r} here; choose another out_dir or delete that one")
    write_whole(file, yaml.safe_dump(own, sort_keys=False, allow_unicode=True))


def claim_shared(config, folder):
    """`claim_folder` where other parts of the same run may do it at this moment."""
    with folder_lock(folder, ".config.lock", wait=True):
        claim_folder(config, folder)


# ------------------------------------------------------------------------------------------------
# The sequence of tasks
# ------------------------------------------------------------------------------------------------


def ask(model, tokenizer, task, config, key="evaluate", **how):
    """`eval.accuracy` of a model with the config's settings; `how` says what is different. Raises RunError.

    `key` and the task's name make the seed, the same each time; processes share the prompts.
    """
    c = config.eval
    settings = dict(
        samples=c.samples, temperature=c.temperature, top_p=c.top_p, top_k=c.top_k, batch_size=c.batch_size,
        max_new_tokens=c.max_new_tokens or config.max_new_tokens, template=config.rollout.chat_template,
        engine=rollout_engine(config, model), seed=step_seed(config.seed, key, task.spec.name), share=(*rank(), every_rank))
    try:
        with autocast(model.device, config):
            return accuracy(model, tokenizer, task, **settings | how)
    except FAILURES as e:
        raise RunError(f"evaluation of task {task.spec.name}: {e}; what was saved before is whole") from None


def measure(player, tokenizer, tasks, config, answers, stop=lambda: None):
    """One row of the matrix and its details: accuracy on every task.

    Args:
        answers: where the answers are kept, as FOLDER/LABEL; the label says whose weights these are. What is
            there already isn't asked again.
    """
    row, details = [], {}
    weights = f"{answers.name}, from {config.model}, {config.optim.compute_dtype}"
    for task in tasks:
        file = answers.with_name(f"{answers.name}-{task.spec.name}.jsonl")
        with writing(file):
            found = ask(player.model, tokenizer, task, config, file=file, weights=weights, after_batch=stop, progress=rank()[0] == 0)
        row.append(found["accuracy"])
        details[task.spec.name] = {k: v for k, v in found.items() if k not in ("rewards", "responses")}
    return row, details


def _noted(file):
    """The dict in a JSON file, {} where it is missing or damaged and must be made again."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def finished_rows(config, folder):
    """The matrix in a run's folder if it has a row for each stage, else None."""
    rows = _noted(folder / "matrix.json").get("rows")
    return rows if isinstance(rows, list) and len(rows) == len(config.tasks) + 1 else None


def base_asked(config):
    """(what the base of a config is asked, a name for its answers): variants that ask the same share them."""
    tree = dataclasses.asdict(config)
    asked = {k: tree[k] for k in ("model", "tasks", "ood", "eval", "seed", "max_new_tokens", "max_prompt_tokens", "rollout")}
    text = json.dumps(asked | {"compute_dtype": config.optim.compute_dtype}, default=str)
    return json.loads(text), f"base-{config.seed}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def base_row(player, tokenizer, tasks, config, folder, stop):
    """The base's row, measured once for all variants that ask it the same questions; others wait for it meanwhile."""
    asked, label = base_asked(config)
    file = Path(folder) / f"{label}.json"
    with contextlib.ExitStack() as held:
        first_only(lambda: held.enter_context(folder_lock(folder, ".base.lock", wait=True)))
        noted = first_only(lambda: _noted(file))
        if noted.get("asked") == asked:
            return noted["row"]
        row, details = measure(player, tokenizer, tasks, config, Path(folder) / "answers" / label, stop)
        first_only(lambda: write_whole(file, json.dumps({"asked": asked, "row": row, "details": details})))
        return row


def check_probe(model, config):
    """A model whose drift can't be measured is told before hours of training. Raises ConfigError."""
    if not config.eval.probe_every:
        return
    try:
        paired_matrices(model_folder(config.model), model)
    except ValueError as e:
        raise ConfigError(f"eval.probe_every: {config.eval.probe_every} isn't allowed with model {config.model!r}: {e}") from None


def demonstrated(task, answers, tokenizer, config):
    """A task's test prompts as a teacher sees them, with a right answer of the base's in each; prompts without one,
    and those that grow over max_teacher_tokens by it, are left out."""
    s, shown = config.sdpo, []
    for example, record in zip(task.test, answers):
        right = next((t for t, r in zip(record["responses"], record["rewards"]) if r >= s.threshold), "")
        messages = teacher_messages(
            example.messages, right if s.keep_thinking else strip_thinking(right), template=s.template,
            solution_template=s.solution_template, feedback_template=s.feedback_template)
        if messages != example.messages and len(encode(tokenizer, messages, **config.rollout.chat_template)) <= s.max_teacher_tokens:
            shown.append(dataclasses.replace(example, messages=messages))
    return Task(task.spec, [], shown[: config.eval.probe_prompts], {})


def probe(model, player, tokenizer, tasks, teacher, config, stage, shared):
    """Drift from the base and what the teacher can do, in the middle of a stage: numbers for the step's line.

    weight_drift's means. test_accuracy, similarity: of the policy on the stage's test prompts (response_drift's mean).
    taught: {task: the teacher's accuracy with a right answer of the base's in the prompt}; without a teacher the policy
    is asked, and of a trust region's the frozen part. teacher_accuracy: taught[the stage's task].
    """
    n, started = config.eval.probe_prompts, tasks[stage - 1]
    base = base_asked(config)[1]
    kept = {t.spec.name: saved_answers(shared / "answers" / f"{base}-{t.spec.name}.jsonl")[1] for t in tasks}
    player.refresh(model)
    now = ask(player.model, tokenizer, dataclasses.replace(started, test=started.test[:n]), config)
    found = weight_drift(model_folder(config.model), model)["mean"] | {"test_accuracy": now["accuracy"]}
    settle(model)
    before = [text for record in kept[started.spec.name][:n] for text in record["responses"]]
    if len(before) == len(now["responses"]):
        reader = load_model(config.model, config, player.model.device).to(player.model.dtype)
        found["similarity"] = response_drift(reader, tokenizer, before, now["responses"]).mean().item()
    if teacher is not None:
        player.refresh(teacher.model)
    asked = player.model if teacher is None or player.apart else teacher.model
    shown = {t.spec.name: demonstrated(t, kept[t.spec.name], tokenizer, config) for t in tasks}
    once = dict(samples=1, temperature=config.rollout.temperature, top_p=1.0, top_k=0)
    found["taught"] = {name: ask(asked, tokenizer, task, config, "probe", **once)["accuracy"] for name, task in shown.items() if task.test}
    return found | {"teacher_accuracy": found["taught"].get(started.spec.name)}


def save_model(folder, name, model, player, tokenizer):
    """An ordinary model folder that from_pretrained opens, in float32, whole or not at all."""
    whole = None
    if isinstance(model, FSDPModule):
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if model.config.tie_word_embeddings:                               # one matrix under two names
            whole.pop("lm_head.weight", None)

    @writing(folder / name)
    def write():
        temporary = folder / f".{name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        (player.model if whole else model).save_pretrained(temporary, state_dict=whole)
        tokenizer.save_pretrained(temporary)
        _flush(temporary)
        shutil.rmtree(folder / name, ignore_errors=True)
        os.replace(temporary, folder / name)

    first_only(write)


def begin_stage(model, player, config, device):
    """What a stage starts with: optimizer, teacher (sdpo), reference (grpo with a penalty)."""
    teacher = reference = None
    player.refresh(model)
    if config.method == "sdpo":
        s = config.sdpo
        init = load_model(s.init_from, config, device, "sdpo.init_from") if s.init_from else None
        init = shard(init, config) if init is not None and isinstance(model, FSDPModule) else init
        copied = functools.partial(frozen_copy, player=player, config=config, exact=s.teacher == "ema")
        teacher = Teacher(model, s.teacher, s.rate, s.every, init, s.init_mix, copied)
    if config.method == "grpo" and config.grpo.kl_coef:
        reference = frozen_copy(model, player, config)
    o = config.optim
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(o.beta1, o.beta2), weight_decay=o.weight_decay)
    return optimizer, teacher, reference


def learning_rate(config, spec, step):
    """Of a stage's step (from 0): a function of nothing else, so that a resumed run has it right."""
    steps, warmup = spec.steps or config.stage_steps, config.optim.warmup_steps
    scale = min(1.0, (step + 1) / max(1, warmup))
    if config.optim.schedule == "cosine" and step >= warmup:
        scale = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
    return (spec.lr or config.lr) * scale


def train_step(model, player, tokenizer, task, teacher, reference, optimizer, config, stage, step):
    """One step of a stage. Returns its line for the log. Raises FailedStep, its `place` filled in."""
    start, seed = time.perf_counter(), (config.seed, stage, step)
    set_seed(step_seed(*seed))                                             # python, numpy and torch
    chosen = prompt_indices(len(task.train), config.prompts_per_step, step, f"{config.seed}/{stage}")
    examples = [task.train[i] for i in chosen]
    lr = learning_rate(config, task.spec, step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    try:
        if config.method == "sft":
            batch, log = references(tokenizer, examples, config, model.device)
        else:
            player.refresh(model)
            batch, log = collect(model, player, tokenizer, task, examples, config, step_seed(*seed), pad_id)
        log |= update(model, teacher, reference, optimizer, batch, config, pad_id)
    except (*FAILURES, FailedStep) as e:
        bad = e if isinstance(e, FailedStep) else FailedStep(str(e))
        bad.place = f"stage {stage} ({task.spec.name}), step {step + 1}: {e}; rows {[x.id for x in examples]}"
        raise bad from None
    place = {"stage": stage, "task": task.spec.name, "step": step + 1}
    return place | log | {"lr": lr, "seconds": round(time.perf_counter() - start, 3)}


# What in a step's line deserves a look, in words. It is said once a stage; the log counts every time.
REMARKS = {
    "no response was right (reward)": lambda line: line.get("reward") == 0,
    "nothing to learn from, so no update: no group has both right and wrong responses, or no sample a demonstration (updates)":
        lambda line: line["updates"] == 0,
    "a response without any text (empty)": lambda line: line.get("empty", 0) > 0,
    "every response ran into max_new_tokens (truncated)": lambda line: line.get("truncated") == 1,
}


def remark(line, said):
    """Warn of what is remarkable in a step's line and hasn't been said in this stage; `said` notes it."""
    for words, remarkable in REMARKS.items():
        if remarkable(line) and words not in said:
            said.append(words)
            if rank()[0] == 0:
                tqdm.write(f"warning: stage {line['stage']} ({line['task']}), step {line['step']}: {words}; "
                           "said once a stage, metrics.jsonl has every step", file=sys.stderr)


def train_stage(model, player, tokenizer, tasks, config, state, place, folder, shared, label, stop):
    """The steps of one stage that are still to do. `state` moves along and is saved now and then.

    Optimizer and teacher live here, so that their memory is free when the stage is measured.

    Args:
        place: checkpoint to start from, or None. stop: called when all is saved; leaves if asked to.
    """
    task, every = tasks[state["stage"] - 1], config.eval.probe_every
    optimizer, teacher, reference = begin_stage(model, player, config, model.device)
    if place is not None and state["step"]:
        load_checkpoint(place, model, optimizer if state["stepped"] else None, teacher, reference)
        if teacher is not None:
            teacher.updates = state["teacher_updates"]
    steps = task.spec.steps or config.stage_steps
    save = lambda: save_checkpoint(folder, state, config.keep_checkpoints, model, optimizer, teacher, reference)  # noqa: E731
    shown = [("reward", "{:.2f}"), ("divergence", "{:.3f}"), ("length", "{:.0f}"), ("loss", "{:.3f}")]
    name = f"{label} {state['stage']}/{len(config.tasks)} {task.spec.name}"
    bar = tqdm(total=steps, initial=state["step"], desc=name, disable=rank()[0] > 0)
    with bar, open(folder / "metrics.jsonl" if rank()[0] == 0 else os.devnull, "a", encoding="utf-8") as log:
        while state["step"] < steps:
            try:
                line = train_step(
                    model, player, tokenizer, task, teacher, reference, optimizer, config, state["stage"], state["step"]
                )
            except FailedStep as e:
                if not e.updates:                                          # else the weights are in the middle of a step
                    save()
                saved = "the newest checkpoint is from before it" if e.updates else "the state before it is saved"
                raise RunError(f"{e.place}; {saved}") from None
            state["step"] += 1
            state["lines"] += 1
            if every and (state["step"] % every == 0 or state["step"] == steps):
                line |= probe(model, player, tokenizer, tasks[: len(config.tasks)], teacher, config, state["stage"], shared)
            first_only(lambda: append_line(log, json.dumps(line)))
            remark(line, state.setdefault("said", []))
            bar.set_postfix_str(", ".join(f"{key} {form.format(line[key])}" for key, form in shown if key in line))
            bar.update()
            if state["step"] % config.save_every == 0 or state["step"] == steps or stop(ask=True):
                if rank()[0] == 0:
                    os.fsync(log.fileno())
                save()
                stop()


def prepare(config, loaded, say):
    """(device, tokenizer, tasks) of one variant: what can be told of it without weights is told here. Raises ConfigError."""
    world = rank()[1]
    if config.prompts_per_step % (config.optim.updates_per_step * world):
        raise ConfigError(f"prompts_per_step: {config.prompts_per_step} isn't allowed with {world} processes; it must be a multiple "
                          f"of optim.updates_per_step times their number, {config.optim.updates_per_step * world}")
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: 'cuda' isn't allowed here: PyTorch finds no CUDA device; auto takes the CPU")
    tokenizer = load_tokenizer(config)
    read = config.tasks, config.ood, config.max_prompt_tokens, config.rollout.chat_template, config.method == "sft"
    key = repr((config.model, read))
    loaded[key] = tasks = loaded.get(key) or load_tasks(config, tokenizer, say)
    check_model(config, tokenizer)
    return device, tokenizer, tasks


def prepare_all(config, variants, loaded, say):
    """A mistake in the last variant shows before the first one is trained. Raises ConfigError naming the variant."""
    out = Path(config.out_dir)
    for variant in variants:
        own = variant_config(config, variant)
        done = finished_rows(own, Path(own.out_dir))
        made_here = any(Path(p).resolve().is_relative_to(out.resolve()) for p in (own.model, own.sdpo.init_from) if p)
        if done or made_here:                                              # by an earlier variant, perhaps: it can't be there yet
            continue
        try:
            prepare(own, loaded, say)
        except ConfigError as e:
            raise ConfigError(f"variant {variant.name}: {e}") from None


def run_variant(config, folder, shared, loaded, label, say=print):
    """Train one variant through all its tasks, from wherever it stands. Returns its matrix.

    Args:
        folder: the variant's. shared: the run's, with the base's row. loaded: tasks that another
            variant has read already, by what they depend on.

    Raises:
        ConfigError, RunError: one line. SystemExit: after a signal, with everything saved.
    """
    K, world = len(config.tasks), rank()[1]

    def finished():
        claim_folder(config, folder)
        return finished_rows(config, folder)

    if rows := first_only(finished):
        say(f"{label}: finished before, in {folder}")
        return rows
    device, tokenizer, tasks = prepare(config, loaded, say)
    model = load_model(config.model, config, device)
    check_probe(model, config)
    player = Player(model, config)
    model = shard(model, config) if world > 1 else model
    place, state = first_only(lambda: stand(folder, say))
    if place is not None:
        say(f"{label}: continues from {place.name} (stage {state['stage']}, step {state['step']})")
        load_checkpoint(place, model)
    player.refresh(model)
    with stop_signals() as caught:

        def stop(ask=False):
            """Whether a signal came to any process (ask), or leave with its exit code if one did."""
            came = [number for numbers in every_rank(list(caught)) for number in numbers]
            if came and not ask:
                if rank()[0] == 0:
                    name = signal.Signals(came[0]).name
                    tqdm.write(f"stopped by {name}; saved in {folder}; the same command continues", file=sys.stderr)
                raise SystemExit(128 + came[0])
            return bool(came)

        first_only(lambda: write_whole(folder / "base.json", json.dumps({"model": config.model, "answers": base_asked(config)[1]})))
        if not state["rows"]:
            state["rows"] = [base_row(player, tokenizer, tasks, config, shared, stop)]
        if state["stage"] > 1:
            first_only(lambda: write_matrix(folder, config, state["rows"]))   # it may be gone, or damaged
        while state["stage"] <= K:
            stage, task = state["stage"], tasks[state["stage"] - 1]
            if state["step"] < (task.spec.steps or config.stage_steps):    # answers of weights that are yet to be made again
                first_only(lambda: forget_answers(folder, stage))
            train_stage(model, player, tokenizer, tasks, config, state, place, folder, shared, label, stop)
            place = None
            save_model(folder, f"stage-{stage}-{task.spec.name}", model, player, tokenizer)
            player.refresh(model)
            row, details = measure(player, tokenizer, tasks, config, folder / "answers" / f"stage-{stage}", stop)
            rows = [*state["rows"], row]                                   # of the tasks, then of those out of distribution
            first_only(lambda: write_row(folder, stage, config, rows, details))
            state = {"stage": stage + 1, "step": 0, "rows": rows, "lines": state["lines"]}
            save_checkpoint(folder, state, config.keep_checkpoints, model)
            stop()
    return [r[:K] for r in state["rows"]]


def stand(folder, say):
    """Where a run stands: (checkpoint, its state), or (None, the first state); the log is cut to it. Raises RunError."""
    log_file = folder / "metrics.jsonl"
    begun = [p for p in (*folder.glob("checkpoints/*"), *folder.glob("evaluation-*.json")) if p.name != "unfinished"]
    place, state = newest_state(folder, say) or (None, {"stage": 1, "step": 0, "rows": [], "lines": 0})
    if place is None and begun:                                            # damaged ones, or the work of those that are gone
        raise RunError(f"{folder}: no checkpoint is whole; delete the folder to start again")
    lines = log_file.read_text(encoding="utf-8").splitlines(keepends=True)[: state["lines"]] if log_file.exists() else []
    if len(lines) < state["lines"]:
        raise RunError(f"{log_file}: has {len(lines)} lines where the checkpoint counts {state['lines']}; put it back, or start again")
    if place is None and log_file.exists():
        say(f"{folder}: starts again: it was stopped before its first checkpoint")
    write_whole(log_file, "".join(lines))                                  # lines after the checkpoint are made again
    return place, state


def forget_answers(folder, stage):
    """Remove the answers of stages whose weights are yet to be made again."""
    for old in (folder / "answers").glob("stage-*"):
        if int(old.name.split("-")[1]) >= stage:
            old.unlink()


def write_row(folder, stage, config, rows, details):
    """The matrix so far, and the details of its last row."""
    (folder / "drift.json").unlink(missing_ok=True)                        # of the rows before
    write_whole(folder / f"evaluation-{stage}.json", json.dumps(details, indent=1))
    write_matrix(folder, config, rows)


def write_matrix(folder, config, rows):
    """The matrix so far."""
    names, K = [t.name for t in config.tasks], len(config.tasks)
    matrix = {"tasks": names, "rows": [r[:K] for r in rows], "metrics": continual_metrics([r[:K] for r in rows])}
    if config.ood:
        matrix["ood"] = {"tasks": [t.name for t in config.ood], "rows": [r[K:] for r in rows]}
    write_whole(folder / "matrix.json", json.dumps(matrix, indent=1))


def run_variants(config, held, say, part):
    """Train a part of a config's variants, or the config itself where there are none. Returns {name: matrix rows}.

    held: an ExitStack for the folders' locks.
    """
    out, results, comparison, loaded, whole = Path(config.out_dir), {}, {}, {}, part[1] == 1
    if whole:
        first_only(lambda: held.enter_context(folder_lock(out)))
    if config.variants:
        first_only(lambda: claim_shared(config, out))
    mine = planned(config)[part[0] - 1 :: part[1]]
    prepare_all(config, [variant for variant, *_ in mine], loaded, say)
    for variant, kind, grid in mine or [(None, None, None)] * (not config.variants):
        own, name = (variant_config(config, variant), variant.name) if variant else (config, out.name)
        folder = Path(own.out_dir)
        if variant:                                                        # it could be another run's out_dir
            first_only(lambda: held.enter_context(folder_lock(folder)))
        results[name] = run_variant(own, folder, out, loaded, name, say)
        if variant and whole:
            comparison[name] = continual_metrics(results[name]) | {"variant": kind, "grid": grid}
            first_only(lambda: write_whole(out / "comparison.json", json.dumps(comparison, indent=1)))
    return results


def run(config, say=print, part=(1, 1)):
    """Train every variant of a config and write the report.

    Args:
        part: (i, K): every K-th variant only, from the i-th, and no report: others do the rest.
    Returns:
        {variant: matrix rows}. Raises ConfigError, RunError, SystemExit (see `run_variant`).
    """
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process: it is meant to be
    with contextlib.ExitStack() as held:
        with processes():
            first = rank()[0] == 0
            say = say if first else lambda text: None
            results = run_variants(config, held, say, part)
        if first and part[1] == 1:                                         # the others needn't wait: drift takes a while
            for name, rows in results.items():
                m = continual_metrics(rows)
                say(f"\n{name}\n{format_matrix([t.name for t in config.tasks], rows)}")
                say("last " + ", ".join(f"{t.name} {x:.3f}" for t, x in zip(config.tasks, m["last"]))
                    + f" | average {m['average']:.3f} | gain {m['gain']:+.3f} | forgetting {m['forgetting']:+.3f}")
            with writing(config.out_dir):
                say(f"\nreport: {report(config.out_dir, again=False)}")
    return results


def run_jobs(config, command, jobs):
    """Run the variants in `jobs` processes of `command --part i/jobs`, each with its share of the cores. Raises RunError.

    What each says goes to part-i.log in the run folder. They stop as this process does.
    """
    out, runs = Path(config.out_dir), planned(config)
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    done = lambda: sum(finished_rows(config, out / v.name) is not None for v, *_ in runs)  # noqa: E731
    with folder_lock(out), contextlib.ExitStack() as held:
        claim_folder(config, out)
        logs = [out / f"part-{i}.log" for i in range(1, jobs + 1)]
        workers = []
        try:
            for i, log in enumerate(logs, 1):
                file = held.enter_context(open(log, "w", encoding="utf-8"))
                workers.append(subprocess.Popen([*command, "--part", f"{i}/{jobs}"], stdout=file, stderr=file, env=environment))
            with tqdm(total=len(runs), desc="variants") as bar:
                while any(w.poll() is None for w in workers):
                    bar.update(done() - bar.n)
                    time.sleep(1)
                bar.update(done() - bar.n)
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait()
    for worker, log in zip(workers, logs):
        if worker.returncode:
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or ["nothing"]
            raise RunError(f"{log}: a part ended with exit code {worker.returncode}: {last[0].rpartition(chr(13))[2]}")


# ------------------------------------------------------------------------------------------------
# --plan: what a run needs and costs, from shapes alone
# ------------------------------------------------------------------------------------------------

# Vendors' figures: GB (10^9 bytes) of memory, dense bfloat16 TFLOP/s, TB/s of the memory.
CARDS = {"H200": (141, 989, 4.8), "H100-80GB": (80, 989, 3.35), "A100-80GB": (80, 312, 2.04), "L40S": (48, 362, 0.864),
         "RTX4090": (24, 165, 1.01), "L4": (24, 121, 0.3)}
COMPUTE, BANDWIDTH, ROOM, MEAN, TEST_PROMPTS = 0.4, 0.5, 0.9, 0.25, 500    # assumed, and printed with every plan


def model_shape(config, folder):
    """Sizes of the model (a dense decoder), without its weights. Raises ConfigError.

    models/NAME/config.json beside the config comes first: it needs no network, whose absence takes half a minute to
    find out. Then a folder or the hub's cache, then the hub's config.json, which is kept nowhere.
    """
    shape = Path(folder) / "models" / config.model
    try:
        found = _pretrained(AutoConfig, str(shape) if shape.is_dir() else config.model, config, local_files_only=True)
    except ConfigError:
        with tempfile.TemporaryDirectory() as nowhere:
            found = _pretrained(AutoConfig, config.model, config, cache_dir=nowhere)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(found, trust_remote_code=config.trust_remote_code)
    count = lambda module: sum(p.numel() for p in module.parameters())     # a tied head counts once  # noqa: E731
    layers = next(m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList))
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    t, N = found.get_text_config(), count(model)
    width = getattr(t, "head_dim", None) or t.hidden_size // t.num_attention_heads
    return types.SimpleNamespace(                                          # used: what a token is multiplied with
        N=N, used=N - (0 if head is embedding else embedding.numel()), layer=max(map(count, layers)), root=N - count(layers),
        L=len(layers), V=len(head), H=t.hidden_size, I=getattr(t, "intermediate_size", None) or 4 * t.hidden_size,
        q=width * t.num_attention_heads, kv=width * (getattr(t, "num_key_value_heads", None) or t.num_attention_heads),
    )


def plan_rows(c, gpus):
    """Responses that a GPU samples at once, in training and in evaluation (whole groups), and the evaluation's prompts."""
    tests = sum(t.test_limit or TEST_PROMPTS for t in c.tasks + c.ood)
    rows = [group * min(math.ceil(prompts / gpus), max(1, size // group) if size else prompts) for size, group, prompts in (
        (c.rollout.batch_size, c.group_size, c.prompts_per_step), (c.eval.batch_size, c.eval.samples, tests))]
    return 0 if c.method == "sft" else rows[0], rows[1], tests


def plan_memory(s, c, gpus):
    """Bytes on each GPU for a shape s under a Config c: {part: bytes}, and {phase: the sum of its parts}.

    From above: the parts of a phase don't all meet at their largest. From below: CUDA itself, padding, fragments (ROOM).
    """
    half, whole, (rows, test_rows, _) = c.optim.compute_dtype == "bfloat16", gpus == 1, plan_rows(c, gpus)
    b, shard, longest = 2 if half else 4, s.N / gpus, c.max_prompt_tokens + c.max_new_tokens
    test_longest = c.max_prompt_tokens + (c.eval.max_new_tokens or c.max_new_tokens)
    tokens = max(c.optim.micro_batch_tokens, longest)                      # a longer row is a micro-batch of its own
    exact = c.method == "sdpo" and c.sdpo.teacher == "ema"                 # bfloat16 would round its steps to nothing
    second = c.sdpo.teacher != "live" if c.method == "sdpo" else c.method == "grpo" and c.grpo.kl_coef > 0
    # Per token, in bytes: the stream between layers, and what a layer keeps for its backward pass, as counted in
    # transformers' Qwen3. Autocast leaves stream and norms in float32, shards compute all in bfloat16.
    stream = 2 if half and not whole else 4
    kept = (26 if whole else 16) * s.H + 10 * (s.q + s.kv) + 8 * s.I if half else 24 * s.H + 16 * (s.q + s.kv) + 16 * s.I
    parts = {
        "weights": 4 * shard,                                              # float32 masters
        "optimizer": 8 * shard,                                            # AdamW's two moments, float32
        "teacher": (4 if exact else b) * shard if second else 0,           # or GRPO's reference
        "rollout replica": b * s.N if half or not whole else 0,            # whole, on every GPU
        "gradients": 4 * shard,                                            # float32
        "layer inputs": s.L * tokens * (stream * s.H if c.optim.gradient_checkpointing else kept),
        "one layer": tokens * (kept + 6 * s.H + 2 * b * s.I),              # made again, with its widest gradients
        "loss kernel": 2 * c.optim.chunk * s.V * 4 + s.V * s.H * 4,        # a chunk's logits; the head's gradient
        # Several GPUs: the largest layer, and embedding, head, last norm. One: the copy that autocast makes of all.
        "gathered": b * (s.N if whole else s.layer + s.root) if half or not whole else 0,
        "AdamW's temporaries": 4 * shard,
        "cache": 2 * s.L * s.kv * b * rows * longest,                      # keys and values
        "evaluation's cache": 2 * s.L * s.kv * b * test_rows * test_longest,
    }
    total = lambda *names: sum(parts[name] for name in names)              # noqa: E731
    always = total("weights", "optimizer", "teacher", "rollout replica")
    return parts, {
        "rollout": always + parts["cache"] + 24 * rows * s.V,              # logits, and what sampling makes of them
        "training": always + total("gradients", "layer inputs", "one layer", "loss kernel", "gathered"),
        "update": always + total("gradients", "AdamW's temporaries"),
        "evaluation": total("weights", "rollout replica", "evaluation's cache") + 24 * test_rows * s.V,
    }


def plan_work(s, c, gpus, share):
    """What a step and an evaluation compute and read, prompts of p and responses of T tokens at `share` of the longest.

        forward(n) = 2 used n + 2 L q n^2 FLOPs over n tokens        (products with weights; causal attention)

    A prompt is read once for its group. Backward is two such passes, checkpointing one more: 6 or 8 `used` a token.
    Decoding reads weights and cache for each token of all rows; a row that ends makes room for the next.

    Returns:
        {part: (FLOPs, bytes that each GPU reads)}, and N, p, T.
    """
    forward = lambda n: 2 * s.used * n + 2 * s.L * s.q * n * n             # noqa: E731
    lengths = c.max_prompt_tokens, c.max_new_tokens, c.eval.max_new_tokens or c.max_new_tokens
    (p, T, test_T), (rows, test_rows, tests) = (math.ceil(share * n) for n in lengths), plan_rows(c, gpus)
    half, P = c.optim.compute_dtype == "bfloat16", c.prompts_per_step
    N = P * c.group_size if rows else P                                    # sft learns from one reference a prompt

    def sampling(prompts, responses, T, rows):
        flops = prompts * forward(p) + responses * (forward(p + T) - forward(p))
        return flops, responses * T / gpus / rows * (2 if half else 4) * (s.N + rows * (p + T / 2) * 2 * s.L * s.kv)

    seen = {"sdpo": min(p + T, c.sdpo.max_teacher_tokens), "grpo": p if c.grpo.kl_coef else 0}.get(c.method, 0)
    return {
        "rollout": sampling(P, N, T, rows) if rows else (0, 0),
        "old log-probs": (N * forward(p + T) if rows and (half or gpus > 1) else 0, 0),        # of what the replica sampled
        "training": (N * forward(p + T) * (4 if c.optim.gradient_checkpointing else 3), 0),
        "teacher": (N * forward(seen + T) if seen else 0, 0),              # it saw a prompt and a sibling's response
        "evaluation": sampling(tests, tests * c.eval.samples, test_T, test_rows),
    }, (N, p, T)


def plan_seconds(work, card, gpus):
    """Of a step's rollout, the rest of it, and an evaluation: what computing or reading takes, whichever is longer."""
    _, speed, bandwidth = CARDS[card]
    speed, bandwidth = gpus * COMPUTE * speed * 1e12, BANDWIDTH * bandwidth * 1e12
    took = {part: max(flops / speed, read / bandwidth) for part, (flops, read) in work.items()}
    return took["rollout"], took["old log-probs"] + took["training"] + took["teacher"], took["evaluation"]


def plan(config, folder, card=None, gpus=1, say=print):
    """Print what each variant needs on each of `gpus` cards, whether it fits, how long it takes. Loads and writes nothing.

    Raises:
        ConfigError: one line.
    """
    variants = {v.name: variant_config(config, v) for v in config.variants} or {Path(config.out_dir).name: config}
    if card not in (None, *CARDS):
        raise ConfigError(f"--card: {card!r} isn't known; it must be one of {', '.join(CARDS)}")
    if gpus < 1 or any(c.prompts_per_step % (c.optim.updates_per_step * gpus) for c in variants.values()):
        raise ConfigError(f"--gpus: {gpus} isn't allowed; prompts_per_step must be a multiple of it times optim.updates_per_step")
    shapes = {c.model: model_shape(c, folder) for c in variants.values()}
    shown = [(shapes[c.model], c, gpus) for c in variants.values()]
    row = lambda label, cells: say(f"{label:<36}" + "".join(f"{cell:>18}" for cell in cells))     # noqa: E731
    for name, s in shapes.items():
        say(f"{name}: {s.N:,} parameters")
    row(f"GB on each of {gpus} GPU{'s' * (gpus > 1)}", variants)
    memory, works = [plan_memory(*x) for x in shown], {}
    for i, words in enumerate(("", "all at once in ")):
        for part in memory[0][i]:
            row(f"  {words}{part}", [f"{m[i][part] / 1e9:.2f}" for m in memory])
    for words, share in (("mean", MEAN), ("longest", 1)):
        works[words] = [plan_work(*x, share) for x in shown]
        row(f"Step, {words}: N x (p+T) tokens", [f"{N} x ({p}+{T})" for _, (N, p, T) in works[words]])
        for part in works[words][0][0]:
            row(f"  PFLOP, {part}", [f"{w[part][0] / 1e15:.4g}" for w, _ in works[words]])
    steps, stages = sum(t.steps or config.stage_steps for t in config.tasks), len(config.tasks)
    runs = math.prod(map(len, config.grid.values()))                       # of each variant; 1 without a grid
    for name in [card] if card else CARDS:
        room = ROOM * CARDS[name][0]
        peaks = [max(phases.values()) / 1e9 for _, phases in memory]
        row(f"{name}: at most {room:.1f} GB", [f"{x:.1f} " + ("fits" if x <= room else "doesn't fit") for x in peaks])
        for words, work in works.items() if min(peaks) <= room else ():
            took = [plan_seconds(w, name, gpus) for w, _ in work]
            row(f"  {words}: s, rollout + training", [f"{r:.0f} + {t:.0f}" for r, t, _ in took])
            hours = [(steps * (r + t) / 3600, stages * e / 3600) for r, t, e in took]
            total = runs * sum(map(sum, hours)) + hours[0][1] / stages     # the base is evaluated once
            row(f"  {words}: h, steps + tests ({total:.0f})", [f"{a:.1f} + {b:.1f}" for a, b in hours])
    say(f"{steps} steps, {stages} evaluations; in parentheses the hours of all runs, the grid's too, and of the base's evaluation.\n"
        f"Assumed, not measured: mean lengths of {MEAN:.0%} of the longest; {COMPUTE:.0%} of a card's dense bfloat16 FLOP/s;\n"
        f"{BANDWIDTH:.0%} of its bandwidth in decoding, where a response that ends makes room for the next;\n"
        f"{1 - ROOM:.0%} of its memory for CUDA and fragments; {TEST_PROMPTS} test prompts where a task has no test_limit.\n"
        "Not counted: loading (8 bytes a parameter on each GPU), verifying, traffic between GPUs, probes. In float32 all takes longer.")


# ------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------


def main(argv=None):
    """The command line. Returns the exit code: 0, 2 after one line on stderr, 130 or 143 after a signal."""
    parser = argparse.ArgumentParser(
        prog="continual.py", description="Train a model on a sequence of tasks; the same command again continues."
    )
    parser.add_argument("--config", required=True, help="a YAML file, e.g. configs/tiny.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="e.g. lr=1e-5 sdpo.teacher=ema")
    parser.add_argument("--plan", action="store_true", help="print memory, tokens and time that a run needs; load nothing")
    parser.add_argument("--card", help=f"with --plan: {', '.join(CARDS)} (all of them)")
    parser.add_argument("--gpus", type=int, default=1, metavar="K", help="with --plan: how many of them (1)")
    parser.add_argument("--jobs", type=int, default=1, metavar="K", help="run K variants at the same time, each on its share of the cores")
    parser.add_argument("--part", default="1/1", metavar="i/K", help="run every K-th variant only, from the i-th, and write no report")
    options = parser.parse_args(argv)

    def leave(number, frame):                                              # outside of training there is nothing to save
        raise KeyboardInterrupt(number)

    former = signal.signal(signal.SIGTERM, leave)
    try:
        config = load_config(options.config, options.overrides)
        if not options.plan and (options.card or options.gpus != 1):
            raise ConfigError("--card and --gpus belong to --plan; torchrun says on how many a run goes")
        part = tuple(map(int, options.part.split("/"))) if re.fullmatch(r"\d+/\d+", options.part) else (0, 0)
        if not 1 <= part[0] <= part[1] or options.jobs < 1:
            raise ConfigError(f"--part {options.part} --jobs {options.jobs}: not allowed; a part is 1/K to K/K, jobs are 1 or more")
        if not config.variants and (part != (1, 1) or options.jobs > 1):
            raise ConfigError("--part and --jobs divide variants among processes, and there are none")
        try:
            if options.plan:
                plan(config, Path(options.config).parent, options.card, options.gpus)
            else:
                if options.jobs > 1:
                    run_jobs(config, [sys.executable, __file__, "--config", options.config, *options.overrides], options.jobs)
                run(config, part=part)
        except ConfigError as e:                                           # of a file, a model or a folder that it names
            raise ConfigError(f"{options.config}: {e}") from None
    except (ConfigError, RunError) as e:
        if os.environ.get("RANK", "0") == "0":
            print("error:", " ".join(str(e).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt as e:
        number = e.args[0] if e.args else signal.SIGINT
        if os.environ.get("RANK", "0") == "0":
            print(f"stopped by {signal.Signals(number).name}; the same command continues from the newest checkpoint", file=sys.stderr)
        return 128 + number
    finally:
        signal.signal(signal.SIGTERM, former or signal.SIG_DFL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
