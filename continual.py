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
cluster job, joined by hand); settings live in one YAML file, and none has two defaults.

    python continual.py --config configs/tiny.yaml [key.sub=value ...]
"""

import argparse
import contextlib
import copy
import dataclasses
import difflib
import fcntl
import hashlib
import json
import math
import os
import random
import shutil
import signal
import sys
import time
import types
import typing
import warnings
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict,
)
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.utils import logging as transformers_logging

from eval import VERIFIERS, TaskSpec, accuracy, continual_metrics, format_matrix, load_task, report, verify
from grpo import encode, group_advantages, grpo_loss, left_pad, rollout, stop_ids
from kernels import fused_token_kl, fused_token_logps, masked_mean, predicting
from sdpo import FEEDBACK, REPROMPT, SOLUTION, Teacher, drop_tokens, sdpo_loss, teacher_prompts


# ------------------------------------------------------------------------------------------------
# Configuration
# ------------------------------------------------------------------------------------------------


class ConfigError(ValueError):
    """A setting, file or model that can't be used; the message is one line for the user."""


class RunError(RuntimeError):
    """A run that had to stop; the message is one line for the user."""


@dataclass
class RolloutConfig:
    temperature: float = 1.0            # of sampling in training; divides the logits in the losses too
    batch_size: int = 0                 # responses sampled at once; 0: the whole step
    chat_template: dict = field(default_factory=dict)  # arguments of the chat template, e.g. enable_thinking


@dataclass
class OptimConfig:
    weight_decay: float = 0.01          # AdamW
    beta1: float = 0.9                  # AdamW
    beta2: float = 0.999                # AdamW
    grad_clip: float = 1.0              # largest norm of the gradient
    warmup_steps: int = 0               # the learning rate rises linearly over these, in every stage
    schedule: str = "constant"          # after them: constant, or cosine (down to 0 at the stage's end)
    updates_per_step: int = 1           # optimizer updates made from one step's rollouts
    micro_batch_tokens: int = 16384     # padded tokens in one forward pass
    chunk: int = 1024                   # tokens projected to the vocabulary at once
    compute_dtype: str = "float32"      # float32 or bfloat16 (autocast; the weights stay float32)
    gradient_checkpointing: bool = False  # recompute activations in the backward pass


@dataclass
class GrpoConfig:
    scale_by_std: bool = False          # divide advantages by the group's standard deviation
    eps: float = 1e-6                   # added to it
    clip_low: float = 0.2               # the ratio's range is [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.28
    dual_clip: float | None = 3.0       # bound of the loss for negative advantages; null: none
    aggregation: str = "token_mean"     # or sequence_mean
    kl_coef: float = 0.0                # weight of the k3 penalty to the stage's start


@dataclass
class SdpoConfig:
    teacher: str = "frozen"             # frozen, ema, restart, trust_region, live
    rate: float = 0.05                  # ema: the student's share per update; trust_region: in the logits
    every: int = 20                     # restart: updates between two copies
    init_from: str | None = None        # start the teacher from this model instead of the student
    init_mix: float = 1.0               # ... with this share, the student's being the rest
    alpha: float = 0.5                  # divergence: 0 KL(t||s), 1 KL(s||t), between: the mixture form
    topk: int | None = None             # only the student's k most likely tokens; null: all
    tail: bool = True                   # with topk: the rest as one bucket, or renormalised without
    sampled_token: bool = False         # the sampled token alone (reverse KL; needs alpha 1)
    is_clip: float | None = 2.0         # cap of the importance weight; null: no weight
    threshold: float = 0.5              # reward that makes a response a demonstration
    exclude_self: bool = True           # a response is no demonstration for itself
    use_feedback: bool = False          # insert the verifier's feedback
    feedback_with_demonstration: bool = False  # ... beside a demonstration too
    keep_thinking: bool = False         # leave the reasoning in demonstrations
    mask_ratio: float = 0.0             # random share of tokens left out of the loss
    max_teacher_tokens: int = 10240     # longest teacher prompt; the insertion is shortened to fit
    template: str = REPROMPT            # {prompt}, {solution}, {feedback}
    solution_template: str = SOLUTION   # {demonstration}
    feedback_template: str = FEEDBACK   # {feedback}


@dataclass
class EvalConfig:
    samples: int = 1                    # answers to each test prompt
    temperature: float = 1.0            # 0: the most likely token
    top_p: float = 1.0
    top_k: int = 0                      # 0: no cut
    max_new_tokens: int | None = None   # null: as in training
    batch_size: int = 256               # answers sampled at once


@dataclass
class Variant:
    name: str                           # its folder under out_dir
    set: dict = field(default_factory=dict)  # dotted keys and the values they take in this variant


@dataclass
class Config:
    model: str                          # folder or hub id of the base
    out_dir: str                        # the run's folder
    tasks: list[TaskSpec]               # the sequence; see eval.TaskSpec
    method: str = "grpo"                # grpo, sdpo, sft
    variants: list[Variant] = field(default_factory=list)  # run one after another from the same base
    seed: int = 0
    stage_steps: int = 50               # training steps for each task
    prompts_per_step: int = 32          # P
    group_size: int = 8                 # G, responses to each prompt
    max_prompt_tokens: int = 2048       # longer prompts are dropped and counted, never cut
    max_new_tokens: int = 8192          # longest response
    lr: float = 1e-6
    save_every: int = 10                # steps between checkpoints (one more at the end of a stage)
    keep_checkpoints: int = 2           # the newest so many stay
    device: str = "auto"                # auto, cpu, cuda
    trust_remote_code: bool = False     # run model code from the hub
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    sdpo: SdpoConfig = field(default_factory=SdpoConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)


def _one_of(*names):
    return lambda x: x in names, "one of " + ", ".join(names)


_AT_LEAST_1 = (lambda x: x >= 1, "at least 1")
_NOT_NEGATIVE = (lambda x: 0 <= x < math.inf, "0 or more")
_POSITIVE = (lambda x: 0 < x < math.inf, "above 0")
_SHARE = (lambda x: 0 <= x <= 1, "between 0 and 1")

# What a value may be, beyond its type. Dotted key: (test, the words for it). None always passes.
ALLOWED = {
    "method": _one_of("grpo", "sdpo", "sft"), "device": _one_of("auto", "cpu", "cuda"),
    "stage_steps": _AT_LEAST_1, "prompts_per_step": _AT_LEAST_1, "group_size": _AT_LEAST_1,
    "max_prompt_tokens": _AT_LEAST_1, "max_new_tokens": _AT_LEAST_1, "lr": _POSITIVE,
    "save_every": _AT_LEAST_1, "keep_checkpoints": _AT_LEAST_1, "seed": _NOT_NEGATIVE,
    "rollout.temperature": _POSITIVE, "rollout.batch_size": _NOT_NEGATIVE,
    "optim.weight_decay": _NOT_NEGATIVE, "optim.grad_clip": _POSITIVE, "optim.warmup_steps": _NOT_NEGATIVE,
    "optim.beta1": (lambda x: 0 <= x < 1, "at least 0 and below 1"),
    "optim.beta2": (lambda x: 0 <= x < 1, "at least 0 and below 1"),
    "optim.updates_per_step": _AT_LEAST_1, "optim.micro_batch_tokens": _AT_LEAST_1, "optim.chunk": _AT_LEAST_1,
    "optim.schedule": _one_of("constant", "cosine"), "optim.compute_dtype": _one_of("float32", "bfloat16"),
    "grpo.eps": _NOT_NEGATIVE, "grpo.clip_low": _SHARE, "grpo.clip_high": _NOT_NEGATIVE,
    "grpo.dual_clip": (lambda x: 1 < x < math.inf, "above 1, or null"), "grpo.kl_coef": _NOT_NEGATIVE,
    "grpo.aggregation": _one_of("token_mean", "sequence_mean"),
    "sdpo.teacher": _one_of(*Teacher.KINDS), "sdpo.rate": _SHARE, "sdpo.every": _AT_LEAST_1,
    "sdpo.init_mix": _SHARE, "sdpo.alpha": _SHARE, "sdpo.is_clip": _POSITIVE,
    "sdpo.topk": (lambda x: x >= 1, "at least 1, or null for the whole vocabulary"),
    "sdpo.mask_ratio": (lambda x: 0 <= x < 1, "at least 0 and below 1"), "sdpo.max_teacher_tokens": _AT_LEAST_1,
    "eval.samples": _AT_LEAST_1, "eval.temperature": _NOT_NEGATIVE, "eval.max_new_tokens": _AT_LEAST_1,
    "eval.top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"), "eval.top_k": _NOT_NEGATIVE,
    "eval.batch_size": _NOT_NEGATIVE,
    "tasks.verifier": _one_of(*VERIFIERS), "tasks.steps": _AT_LEAST_1, "tasks.lr": _POSITIVE,
    "tasks.train_limit": _AT_LEAST_1, "tasks.test_limit": _AT_LEAST_1,
    "tasks.test_share": (lambda x: 0 < x < 1, "above 0 and below 1"),
}


class _Raw(str):
    """The text of an override; what it means depends on the type of the field it lands in."""


def _build(hint, value, key):
    """`value` as the type `hint`, dataclasses built field by field. Raises ConfigError naming `key`."""
    if isinstance(hint, types.UnionType):                                  # X | None
        return None if value in (None, "null") else _build(hint.__args__[0], value, key)
    if isinstance(value, _Raw):
        value = str(value) if hint is str else yaml.safe_load(value)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ConfigError(f"{key or 'the file'}: {value!r} must be a mapping of settings")
        hints, dot = typing.get_type_hints(hint), f"{key}." if key else ""
        for name in value:
            if name not in hints:
                near = difflib.get_close_matches(str(name), hints, n=1) or sorted(hints)
                raise ConfigError(f"{dot}{name}: no such key; " + (f"did you mean {near[0]}?" if len(near) == 1 else f"there are {', '.join(near)}"))
        for f in dataclasses.fields(hint):
            if f.name not in value and f.default is f.default_factory is dataclasses.MISSING:
                raise ConfigError(f"{dot}{f.name}: missing, and it has no default")
        built = hint(**{name: _build(hints[name], v, f"{dot}{name}") for name, v in value.items()})
        return built
    if typing.get_origin(hint) is list:
        if not isinstance(value, list):
            raise ConfigError(f"{key}: {value!r} must be a list")
        return [_build(hint.__args__[0], v, f"{key}.{i}") for i, v in enumerate(value)]
    if hint is float and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):                   # YAML reads 1e-5 as a text
            value = float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{key}: {value!r} must be of type {hint.__name__}")
    generic = ".".join(p for p in key.split(".") if not p.isdigit())
    test, words = ALLOWED.get(generic, (lambda x: True, ""))
    if not test(value):
        raise ConfigError(f"{key}: {value!r} isn't allowed; it must be {words}")
    return value


def _check_whole(c):
    """What one value means for another. Raises ConfigError naming the key to change."""
    names = [t.name for t in c.tasks]
    rules = [
        (names, "tasks: at least one is needed"),
        (len(set(names)) == len(names), f"tasks: the names {names} must differ"),
        (c.method == "sft" or c.group_size >= 2,
         f"group_size: {c.group_size} isn't allowed; {c.method} compares siblings, so it must be at least 2"),
        (not (c.sdpo.sampled_token and c.sdpo.alpha != 1), f"sdpo.alpha: {c.sdpo.alpha} isn't allowed with sampled_token; it must be 1"),
        (not (c.sdpo.teacher == "live" and c.sdpo.init_from), f"sdpo.init_from: {c.sdpo.init_from!r} isn't allowed for a live teacher; it must be null"),
        (c.sdpo.max_teacher_tokens >= c.max_prompt_tokens,
         f"sdpo.max_teacher_tokens: {c.sdpo.max_teacher_tokens} must be at least max_prompt_tokens ({c.max_prompt_tokens})"),
        (c.prompts_per_step % c.optim.updates_per_step == 0,
         f"optim.updates_per_step: {c.optim.updates_per_step} must divide prompts_per_step ({c.prompts_per_step})"),
        (c.method != "sft" or all(t.reference for t in c.tasks), "tasks: method sft needs a reference template in every task"),
    ]
    for fine, message in rules:
        if not fine:
            raise ConfigError(message)
    for name in [*names, *(v.name for v in c.variants)]:
        if not name or name.startswith(".") or set(name) & set("/\\\0"):
            raise ConfigError(f"name: {name!r} isn't allowed; names become folders, so no slash and no leading dot")
    for key, template, fields in (("template", c.sdpo.template, ("prompt", "solution", "feedback")),
                                  ("solution_template", c.sdpo.solution_template, ("demonstration",)),
                                  ("feedback_template", c.sdpo.feedback_template, ("feedback",))):
        try:
            template.format(**dict.fromkeys(fields, ""))
        except (KeyError, IndexError, ValueError, AttributeError) as e:
            raise ConfigError(f"sdpo.{key}: {template!r}: {e!r}; its placeholders are {{{'}, {'.join(fields)}}}, other braces are doubled") from None


def _set(tree, dotted, value):
    """Set tree["a"]["0"]["b"] for the dotted key a.0.b, making mappings on the way."""
    *path, last = dotted.split(".")
    for part in path:
        tree = tree[int(part)] if isinstance(tree, list) else tree.setdefault(part, {})
    if isinstance(tree, list):
        tree[int(last)] = value
    else:
        tree[last] = value


def make_config(tree, folder="."):
    """A checked Config from nested dicts; relative files that exist beside the config are found there.

    Raises:
        ConfigError: one line naming key, value and what is allowed.
    """
    config = _build(Config, tree, "")

    def locate(path):
        beside = Path(folder) / path if path else None
        return str(beside) if path and not Path(path).exists() and beside.exists() else path

    config.model, config.sdpo.init_from = locate(config.model), locate(config.sdpo.init_from)
    for task in config.tasks:
        task.path, task.test_path = locate(task.path), locate(task.test_path)
    _check_whole(config)
    for variant in config.variants:                                        # a mistake in the last one shows now
        variant_config(config, variant)
    return config


def load_config(path, overrides=()):
    """Read a YAML file and apply overrides such as "sdpo.alpha=1" or "tasks.0.path=rows.jsonl".

    Returns:
        Config. Raises ConfigError: one line naming file, key, value and what is allowed.
    """
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        for text in overrides:
            key, equals, value = text.partition("=")
            if not equals:
                raise ConfigError(f"override {text!r}: must be key=value")
            try:
                _set(tree, key, _Raw(value))
            except (AttributeError, IndexError, TypeError, ValueError):
                raise ConfigError(f"override {text!r}: the file has no such place") from None
        return make_config(tree, Path(path).parent)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise ConfigError(f"{path}: can't read it: {' '.join(str(e).split())}") from None
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None


def variant_config(config, variant):
    """The Config of one variant: the common one with its own values, in its own folder."""
    tree = dataclasses.asdict(dataclasses.replace(config, variants=[]))
    try:
        for key, value in variant.set.items():
            _set(tree, key, value)
        tree["out_dir"] = str(Path(config.out_dir) / variant.name)
        made = _build(Config, tree, "")
        _check_whole(made)
    except (ConfigError, AttributeError, IndexError, TypeError) as e:
        raise ConfigError(f"variant {variant.name}: {e}") from None
    return made


# ------------------------------------------------------------------------------------------------
# Model and data
# ------------------------------------------------------------------------------------------------


def check_local(name):
    """A name that can't be a hub id must be a folder: the hub isn't asked for it. Raises ConfigError."""
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise ConfigError(f"model: there is no folder {name!r}")


def load_model(name, config, device):
    """A causal language model in float32, its weights from safetensors. Raises ConfigError."""
    check_local(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, use_safetensors=True, trust_remote_code=config.trust_remote_code
        ).to(device)
    except Exception as e:  # a missing file, a refused repository, a bad config: no common base
        raise ConfigError(f"model: can't load {name!r}: {type(e).__name__}: {str(e).splitlines()[0]}") from None
    if config.optim.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # The losses apply the head to the last hidden states themselves; some architectures scale or cap
    # their logits after it, which would silently be left out.
    with torch.no_grad():
        ids = torch.arange(4, device=device)[None]
        logits = model(input_ids=ids).logits.float()
        direct = model.get_output_embeddings()(model.base_model(input_ids=ids).last_hidden_state).float()
    if not torch.allclose(logits, direct, rtol=1e-3, atol=1e-3):
        raise ConfigError(f"model: {name!r} changes its logits after the output head; such architectures aren't supported")
    return model


def load_tokenizer(config):
    """The base's tokenizer. Raises ConfigError if it has no chat template or no end token."""
    check_local(config.model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
    except Exception as e:
        raise ConfigError(f"model: can't load the tokenizer of {config.model!r}: {type(e).__name__}: {str(e).splitlines()[0]}") from None
    for part, value in (("chat template", tokenizer.chat_template), ("end token", tokenizer.eos_token_id)):
        if value is None:
            raise ConfigError(f"model: the tokenizer of {config.model!r} has no {part}; chat models have one")
    return tokenizer


def load_tasks(config, tokenizer, say=print):
    """All tasks of the sequence, without prompts longer than allowed. Raises ConfigError."""
    tasks = []
    for spec in config.tasks:
        try:
            task = load_task(spec)
        except ValueError as e:
            raise ConfigError(str(e)) from None
        for part in ("train", "test"):
            examples = getattr(task, part)
            kept = [e for e in examples if len(encode(tokenizer, e.messages, **config.rollout.chat_template)) <= config.max_prompt_tokens]
            if len(kept) < len(examples):
                reason = f"over max_prompt_tokens ({part})"
                task.dropped[reason] = len(examples) - len(kept)
            if not kept:
                raise ConfigError(f"task {spec.name}: every {part} prompt is longer than max_prompt_tokens ({config.max_prompt_tokens})")
            setattr(task, part, kept)
        say(f"task {spec.name}: {len(task.train)} training and {len(task.test)} test prompts"
            + "".join(f"; {n} {reason}" for reason, n in task.dropped.items()))
        tasks.append(task)
    return tasks


def check_lengths(config, model):
    """The longest sequence must fit the model, and topk the vocabulary. Raises ConfigError."""
    vocabulary, room = model.config.get_text_config().vocab_size, model.config.get_text_config().max_position_embeddings
    if config.sdpo.topk is not None and config.sdpo.topk > vocabulary:
        raise ConfigError(f"sdpo.topk: {config.sdpo.topk} isn't allowed; it must be at most the vocabulary, {vocabulary}")
    prompt = config.sdpo.max_teacher_tokens if config.method == "sdpo" else config.max_prompt_tokens
    longest = prompt + max(config.max_new_tokens, config.eval.max_new_tokens or 0)
    if longest > room:
        key = "sdpo.max_teacher_tokens" if config.method == "sdpo" else "max_prompt_tokens"
        raise ConfigError(f"{key}: {prompt} + max_new_tokens {longest - prompt} is more than the model's {room} positions")


def step_seed(*parts):
    """A seed from (seed, stage, step, ...), the only source of randomness in a run."""
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
    ids, present = torch.cat([ids, responses], 1), torch.cat([present, mask.long()], 1)
    positions = (present.cumsum(-1) - 1).clamp(min=0)
    states = model.base_model(input_ids=ids, attention_mask=present, position_ids=positions, use_cache=False)
    return predicting(states.last_hidden_state, responses.shape[1])


def micro_batches(lengths, budget):
    """Indices in groups of similar length whose padded size (rows * longest) stays within `budget`.

    A single row longer than the budget is a group of its own.
    >>> micro_batches([5, 1, 2, 2], 6)
    [[1, 2, 3], [0]]
    """
    groups, current = [], []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if current and (len(current) + 1) * lengths[i] > budget:
            groups.append(current)
            current = []
        current.append(i)
    return [*groups, current] if current else groups


@dataclass
class Batch:
    """What the loss of one step needs; N rows. `signal` marks the rows whose loss isn't 0 by design."""

    prompts: list                       # N lists of ids: what the student saw
    responses: torch.Tensor             # (N, T)
    mask: torch.Tensor                  # (N, T) bool: tokens that the loss counts
    signal: list                        # N bools
    old_logps: torch.Tensor | None = None   # (N, T)
    advantages: torch.Tensor | None = None  # (N,) grpo
    teacher_prompts: list | None = None     # N lists of ids or None: sdpo


def collect(model, tokenizer, task, examples, config):
    """Sample, verify, and turn rewards into what the method learns from.

    Returns:
        Batch, and the step's numbers for the log.
    """
    spec, G = task.spec, config.group_size
    chats = [e.messages for e in examples]
    out = rollout(
        model, tokenizer, chats, G, config.max_new_tokens, config.rollout.temperature,
        batch_size=config.rollout.batch_size, template=config.rollout.chat_template,
    )
    verdicts = [verify(spec.verifier, text, examples[i // G], spec.paper_scoring) for i, text in enumerate(out.texts)]
    rewards = torch.tensor([v.reward for v in verdicts]).view(-1, G)       # (P, G)
    advantages = group_advantages(rewards, config.grpo.scale_by_std, config.grpo.eps).flatten()
    batch = Batch([out.prompts[i // G] for i in range(len(out))], out.response_ids, out.mask, [], out.logps)
    log = {
        "reward": rewards.mean().item(),
        "solved": (rewards > 0).any(-1).float().mean().item(),
        "mixed": (rewards.amin(-1) < rewards.amax(-1)).float().mean().item(),
        "well_formed": sum(v.well_formed for v in verdicts) / len(verdicts),
        "length": out.mask.sum(-1).float().mean().item(),
        "truncated": out.truncated.float().mean().item(),
        "entropy": masked_mean(-out.logps, out.mask).item(),
        "marks": sum(t.count("\\boxed") + t.count("<answer>") + t.count("Action:") + t.count("```") for t in out.texts) / len(out),
    }
    if config.method == "grpo":
        batch.advantages = advantages.to(model.device)
        # Without a contrast in the group the loss is 0, but for the penalty.
        batch.signal = [a != 0 or config.grpo.kl_coef > 0 for a in advantages.tolist()]
        return batch, log
    s = config.sdpo
    cut = "Your response was truncated because it exceeded the maximum length."
    feedback = [v.feedback or (cut if t and not v.reward else "") for v, t in zip(verdicts, out.truncated.tolist())]
    batch.teacher_prompts = teacher_prompts(
        lambda messages: encode(tokenizer, messages, **config.rollout.chat_template),
        chats, out.texts, rewards.flatten().tolist(), feedback, G,
        threshold=s.threshold, exclude_self=s.exclude_self, use_feedback=s.use_feedback,
        feedback_with_demonstration=s.feedback_with_demonstration, keep_thinking=s.keep_thinking,
        max_tokens=s.max_teacher_tokens, template=s.template, solution_template=s.solution_template,
        feedback_template=s.feedback_template,
    )
    batch.signal = [p is not None for p in batch.teacher_prompts]
    batch.mask = drop_tokens(batch.mask, s.mask_ratio) & torch.tensor(batch.signal, device=out.mask.device)[:, None]
    log["targets"] = sum(batch.signal) / len(batch.signal)
    return batch, log


def references(tokenizer, examples, config, device):
    """The Batch of SFT: reference answers, each with an end token."""
    ids = [tokenizer.encode(e.reference, add_special_tokens=False) + [tokenizer.eos_token_id] for e in examples]
    ids = [i[: config.max_new_tokens] for i in ids]
    T = max(map(len, ids))
    responses = torch.tensor([i + [tokenizer.eos_token_id] * (T - len(i)) for i in ids], device=device)
    mask = torch.arange(T, device=device) < torch.tensor([len(i) for i in ids], device=device)[:, None]
    prompts = [encode(tokenizer, e.messages, **config.rollout.chat_template) for e in examples]
    return Batch(prompts, responses, mask, [True] * len(ids)), {"length": mask.sum(-1).float().mean().item()}


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
    head, o, temperature = model.get_output_embeddings(), config.optim, config.rollout.temperature
    states = response_states(model, prompts, responses, reach, pad_id)[mask]   # (tokens, H)
    spread = lambda x: x.new_zeros(mask.shape).masked_scatter(mask, x)     # (tokens,) -> (n, T)  # noqa: E731
    if config.method == "sdpo":
        s, old = config.sdpo, batch.old_logps[rows, :T]
        with torch.no_grad():
            seen = [batch.teacher_prompts[i] for i in rows]
            taught = response_states(teacher.model, seen, responses, reach, pad_id)[mask]
        loss, divergence, logps, _ = fused_token_kl(
            states, head, taught, teacher.model.get_output_embeddings(), torch.full_like(old[mask], 1 / total), tokens,
            alpha=s.alpha, topk=s.topk, tail=s.tail, sampled=s.sampled_token, temperature=temperature, chunk=o.chunk,
            old_logps=old[mask], is_clip=s.is_clip, teacher_mix=teacher.mix,
        )
        return loss, sdpo_loss(spread(divergence), spread(logps), old, mask, s.is_clip, total)[1]
    logps = spread(fused_token_logps(states, head, tokens, temperature=temperature if config.method == "grpo" else 1.0, chunk=o.chunk)[0])
    if config.method == "sft":
        return -(logps * mask).sum() / total, {}
    g, ref = config.grpo, None
    if g.kl_coef:
        with torch.no_grad():
            first = response_states(reference, prompts, responses, reach, pad_id)[mask]
            ref = spread(fused_token_logps(first, reference.get_output_embeddings(), tokens, temperature=temperature, chunk=o.chunk)[0])
    return grpo_loss(
        logps, batch.old_logps[rows, :T], batch.advantages[rows], mask, clip_low=g.clip_low, clip_high=g.clip_high,
        dual_clip=g.dual_clip, aggregation=g.aggregation, ref_logps=ref, kl_coef=g.kl_coef, total=total,
    )


def update(model, teacher, reference, optimizer, batch, config, pad_id):
    """Gradients of a batch over micro-batches, then the optimizer, then the teacher; several times
    on parts of the batch with updates_per_step. Rows without a signal aren't computed, but count.

    Returns:
        dict of floats: means over the updates. Raises FloatingPointError before a bad update.
    """
    N, parts = len(batch.prompts), config.optim.updates_per_step
    logs = []
    for part in (range(i * N // parts, (i + 1) * N // parts) for i in range(parts)):
        if config.method == "grpo" and config.grpo.aggregation == "sequence_mean":
            total = len(part)
        else:
            total = max(1, int(batch.mask[part.start : part.stop].sum()))
        rows = [i for i in part if batch.signal[i]]
        if not rows:                                                       # nothing to learn: no update at all
            continue
        longest = [len(batch.prompts[i]) if batch.teacher_prompts is None else max(len(batch.prompts[i]), len(batch.teacher_prompts[i])) for i in rows]
        lengths = [n + int(batch.mask[i].sum()) for n, i in zip(longest, rows)]
        model.train()
        optimizer.zero_grad(set_to_none=True)
        log = {"loss": 0.0}
        for group in micro_batches(lengths, config.optim.micro_batch_tokens):
            with autocast(model.device, config):
                loss, numbers = micro_loss(model, teacher, reference, batch, [rows[i] for i in group], total, config, pad_id)
            loss.backward()
            for key, value in (numbers | {"loss": loss.item()}).items():
                log[key] = log.get(key, 0.0) + value
        log["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip).item()
        if not (math.isfinite(log["loss"]) and math.isfinite(log["grad_norm"])):
            raise FloatingPointError(f"loss {log['loss']}, gradient norm {log['grad_norm']}")
        optimizer.step()
        if teacher is not None:
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


def write_whole(path, text):
    """Write a file beside its place, flush it to the disk, then rename: never half a file."""
    path, temporary = Path(path), Path(f"{path}.tmp")
    with open(temporary, "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


@contextlib.contextmanager
def folder_lock(folder):
    """The folder belongs to this process until the block ends; the system frees a dead one's lock."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = open(Path(folder) / ".lock", "a+")
    except OSError as e:
        raise ConfigError(f"out_dir: can't write to {folder}: {e.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"out_dir: {folder} is in use by another process") from None
        yield


@contextlib.contextmanager
def stop_signals():
    """SIGTERM and Ctrl-C set a flag in the yielded list, so that the step in progress can finish."""
    caught, former = [], {}

    def note(number, frame):
        if caught:                                                         # asked twice: at once
            raise KeyboardInterrupt
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


def _tensors(model, optimizer, teacher, reference):
    """Everything of a stage with weights in it, as the tree that PyTorch's distributed checkpoint saves."""
    tree = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        tree["optimizer"] = get_optimizer_state_dict(model, optimizer)
    if teacher is not None and teacher.model is not model:
        tree["teacher"] = teacher.model.state_dict()
    if reference is not None:
        tree["reference"] = reference.state_dict()
    return tree


def save_checkpoint(folder, state, keep, model, optimizer=None, teacher=None, reference=None):
    """Write a checkpoint beside its place, with checksums, then rename it; all but `keep` old ones go.

    Between two stages (step 0) the model is all there is.
    """
    place = folder / "checkpoints" / f"{state['stage']:03d}-{state['step']:06d}"
    temporary = folder / "checkpoints" / "unfinished"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    dcp.save(_tensors(model, optimizer, teacher, reference), checkpoint_id=temporary, no_dist=True)
    for file in temporary.iterdir():
        with open(file, "rb") as f:
            os.fsync(f.fileno())
    extra = {"teacher_updates": teacher.updates if teacher else 0, "checksums": _checksums(temporary)}
    write_whole(temporary / "state.json", json.dumps(state | extra))
    shutil.rmtree(place, ignore_errors=True)
    os.replace(temporary, place)
    for old in checkpoints(folder)[keep:]:
        shutil.rmtree(old)


def checkpoints(folder):
    """Finished checkpoints, the newest first; stage and step compare as numbers."""
    found = (folder / "checkpoints").glob("*-*")
    return sorted(found, key=lambda p: tuple(map(int, p.name.split("-"))), reverse=True)


def newest_state(folder, say=print):
    """(path, state) of the newest checkpoint whose files are as they were written, or None."""
    for place in checkpoints(folder):
        try:
            state = json.loads((place / "state.json").read_text())
            if state["checksums"] == _checksums(place):
                return place, state
            raise ValueError("a file differs from what was written")
        except (OSError, ValueError, KeyError) as e:
            say(f"checkpoint {place} is damaged ({e}); looking for the one before it")
    return None


def load_checkpoint(place, model, optimizer=None, teacher=None, reference=None):
    """Put a checkpoint's weights, and those of what else is given, in place."""
    tree = _tensors(model, optimizer, teacher, reference)
    dcp.load(tree, checkpoint_id=place, no_dist=True)
    set_model_state_dict(model, tree["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, tree["optimizer"])
    if "teacher" in tree:
        teacher.model.load_state_dict(tree["teacher"])
    if "reference" in tree:
        reference.load_state_dict(tree["reference"])


def claim_folder(config, folder):
    """Note the configuration in the run folder, or compare with the one noted. Raises ConfigError."""
    file = folder / "config.yaml"
    own = dataclasses.asdict(config)
    if file.exists():
        noted = yaml.safe_load(file.read_text()) or {}
        for key in sorted(own.keys() | noted.keys()):
            if own.get(key) != noted.get(key) and key not in ("device", "save_every", "keep_checkpoints", "out_dir", "variants"):
                raise ConfigError(f"out_dir: {folder} belongs to another config: {key} is {noted.get(key)!r} there, "
                                  f"{own.get(key)!r} here; choose another out_dir or delete it")
    write_whole(file, yaml.safe_dump(own, sort_keys=False, allow_unicode=True))


# ------------------------------------------------------------------------------------------------
# The sequence of tasks
# ------------------------------------------------------------------------------------------------


def measure(model, tokenizer, tasks, config):
    """One row of the matrix and its details: accuracy on every task, from the same seeds each time."""
    e, row, details = config.eval, [], {}
    for j, task in enumerate(tasks):
        with autocast(model.device, config):
            found = accuracy(
                model, tokenizer, task, samples=e.samples, max_new_tokens=e.max_new_tokens or config.max_new_tokens,
                temperature=e.temperature, top_p=e.top_p, top_k=e.top_k, batch_size=e.batch_size,
                seed=step_seed(config.seed, "evaluate", j), template=config.rollout.chat_template, progress=True,
            )
        row.append(found["accuracy"])
        details[task.spec.name] = {k: v for k, v in found.items() if k not in ("rewards", "responses")}
    return row, details


def base_row(model, tokenizer, tasks, config, folder):
    """The base's row, measured once for all variants that ask it the same questions."""
    file = Path(folder) / "base.json"
    asked = {k: v for k, v in dataclasses.asdict(config).items() if k in ("model", "tasks", "eval", "seed", "max_new_tokens", "max_prompt_tokens")}
    asked |= {"chat_template": config.rollout.chat_template, "compute_dtype": config.optim.compute_dtype}
    if file.exists() and (noted := json.loads(file.read_text()))["asked"] == asked:
        return noted["row"]
    row, details = measure(model, tokenizer, tasks, config)
    write_whole(file, json.dumps({"asked": asked, "row": row, "details": details}))
    return row


def save_model(folder, name, model, tokenizer):
    """An ordinary model folder that from_pretrained opens, whole or not at all."""
    temporary = folder / f".{name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    shutil.rmtree(folder / name, ignore_errors=True)
    os.replace(temporary, folder / name)


def begin_stage(model, config, device):
    """What a stage starts with: optimizer, teacher (sdpo), reference (grpo with a penalty)."""
    teacher = reference = None
    if config.method == "sdpo":
        s = config.sdpo
        init = load_model(s.init_from, config, device) if s.init_from else None
        teacher = Teacher(model, s.teacher, s.rate, s.every, init, s.init_mix)
    if config.method == "grpo" and config.grpo.kl_coef:
        reference = copy.deepcopy(model).eval().requires_grad_(False)
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


def train_step(model, tokenizer, task, teacher, reference, optimizer, config, stage, step):
    """One step of a stage. Returns its line for the log. Raises RunError on a loss that isn't finite."""
    start, seed = time.perf_counter(), (config.seed, stage, step)
    set_seed(step_seed(*seed))                                             # python, numpy and torch
    chosen = prompt_indices(len(task.train), config.prompts_per_step, step, f"{config.seed}/{stage}")
    examples = [task.train[i] for i in chosen]
    lr = learning_rate(config, task.spec, step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if config.method == "sft":
        batch, log = references(tokenizer, examples, config, model.device)
    else:
        with autocast(model.device, config):
            batch, log = collect(model, tokenizer, task, examples, config)
    try:
        log |= update(model, teacher, reference, optimizer, batch, config, pad_id)
    except FloatingPointError as e:
        raise RunError(f"stage {stage} ({task.spec.name}), step {step + 1}: {e}; rows {[x.id for x in examples]}") from None
    place = {"stage": stage, "task": task.spec.name, "step": step + 1}
    return place | log | {"lr": lr, "seconds": round(time.perf_counter() - start, 3)}


def run_variant(config, folder, shared, loaded, label, say=print):
    """Train one variant through all its tasks, from wherever it stands. Returns its matrix.

    Args:
        folder: the variant's. shared: the run's, with the base's row. loaded: tasks that another
            variant has read already, by what they depend on.

    Raises:
        ConfigError, RunError: one line. SystemExit: after a signal, with everything saved.
    """
    claim_folder(config, folder)
    matrix_file, log_file = folder / "matrix.json", folder / "metrics.jsonl"
    names, K = [t.name for t in config.tasks], len(config.tasks)
    if matrix_file.exists() and len(rows := json.loads(matrix_file.read_text())["rows"]) == K + 1:
        say(f"{label}: finished before, in {folder}")
        return rows
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: 'cuda' isn't allowed here: PyTorch finds no CUDA device; auto takes the CPU")
    tokenizer = load_tokenizer(config)
    key = repr((config.model, config.tasks, config.max_prompt_tokens, config.rollout.chat_template))
    loaded[key] = tasks = loaded.get(key) or load_tasks(config, tokenizer, say)
    model = load_model(config.model, config, device)
    check_lengths(config, model)
    found = newest_state(folder, say)
    place, state = found or (None, {"stage": 1, "step": 0, "rows": [], "lines": 0})
    if place is None and checkpoints(folder):
        raise RunError(f"{folder}: no checkpoint is whole; delete the folder to start again")
    if place is not None:
        say(f"{label}: continues from {place.name} (stage {state['stage']}, step {state['step']})")
    lines = log_file.read_text().splitlines(keepends=True)[: state["lines"]] if log_file.exists() else []
    write_whole(log_file, "".join(lines))                                  # lines after the checkpoint are made again
    if not state["rows"]:
        state["rows"] = [base_row(model, tokenizer, tasks, config, shared)]
    if place is not None:
        load_checkpoint(place, model)
    with stop_signals() as caught, open(log_file, "a", encoding="utf-8") as log:
        while state["stage"] <= K:
            task = tasks[state["stage"] - 1]
            optimizer, teacher, reference = stage_parts = begin_stage(model, config, device)
            if place is not None and state["step"]:
                load_checkpoint(place, model, *stage_parts)
                if teacher is not None:
                    teacher.updates = state["teacher_updates"]
            place = None
            keep = lambda: save_checkpoint(folder, state, config.keep_checkpoints, model, *stage_parts)  # noqa: E731
            train_stage(model, tokenizer, task, teacher, reference, optimizer, config, state, folder, log, keep, caught, label)
            save_model(folder, f"stage-{state['stage']}-{task.spec.name}", model, tokenizer)
            row, details = measure(model, tokenizer, tasks, config)
            state |= {"stage": state["stage"] + 1, "step": 0, "rows": [*state["rows"], row]}
            save_checkpoint(folder, state, config.keep_checkpoints, model)
            matrix = {"tasks": names, "rows": state["rows"], "metrics": continual_metrics(state["rows"])}
            write_whole(folder / f"evaluation-{state['stage'] - 1}.json", json.dumps(details, indent=1))
            write_whole(matrix_file, json.dumps(matrix, indent=1))
            stop_if_asked(caught, folder)
    return state["rows"]


def stop_if_asked(caught, folder):
    """Leave with the signal's exit code, if one came."""
    if caught:
        tqdm.write(f"stopped by {signal.Signals(caught[0]).name}; saved in {folder}; the same command continues", file=sys.stderr)
        raise SystemExit(128 + caught[0])


def train_stage(model, tokenizer, task, teacher, reference, optimizer, config, state, folder, log, keep, caught, label):
    """The steps of one stage that are still to do; `state` moves along, `keep` saves it.

    Steps fresh from the start of a stage have no checkpoint yet: the stage before ended with one.
    """
    steps = task.spec.steps or config.stage_steps
    shown = [("reward", "reward", "{:.2f}"), ("divergence", "kl", "{:.3f}"), ("length", "length", "{:.0f}"), ("loss", "loss", "{:.3f}")]
    with tqdm(total=steps, initial=state["step"], desc=f"{label} {state['stage']}/{len(config.tasks)} {task.spec.name}") as bar:
        while state["step"] < steps:
            try:
                line = train_step(model, tokenizer, task, teacher, reference, optimizer, config, state["stage"], state["step"])
            except RunError as e:
                keep()
                raise RunError(f"{e}; the state before this step is saved") from None
            state["step"] += 1
            state["lines"] += 1
            log.write(json.dumps(line) + "\n")
            log.flush()
            bar.set_postfix_str(", ".join(f"{name} {f.format(line[key])}" for key, name, f in shown if key in line))
            bar.update()
            if state["step"] % config.save_every == 0 or state["step"] == steps or caught:
                os.fsync(log.fileno())
                keep()
            stop_if_asked(caught, folder)


def run(config, say=print):
    """Train every variant of a config and write the report.

    Returns:
        {variant: matrix rows}. Raises ConfigError, RunError, SystemExit (see `run_variant`).
    """
    out, results, loaded = Path(config.out_dir), {}, {}
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process: it is meant to be
    with folder_lock(out):
        if config.variants:
            claim_folder(config, out)
        for variant in config.variants or [None]:
            own, name = (variant_config(config, variant), variant.name) if variant else (config, out.name)
            folder = Path(own.out_dir)
            folder.mkdir(parents=True, exist_ok=True)
            results[name] = run_variant(own, folder, out, loaded, name, say)
            if variant:
                write_whole(out / "comparison.json", json.dumps({n: continual_metrics(r) for n, r in results.items()}, indent=1))
        names = [t.name for t in config.tasks]
        for name, rows in results.items():
            m = continual_metrics(rows)
            say(f"\n{name}\n{format_matrix(names, rows)}")
            say("last " + ", ".join(f"{n} {x:.3f}" for n, x in zip(names, m["last"]))
                + f" | average {m['average']:.3f} | gain {m['gain']:+.3f} | forgetting {m['forgetting']:+.3f}")
        say(f"\nreport: {report(out)}")
    return results


def main(argv=None):
    """The command line. Returns the exit code: 0, 2 after one line on stderr, 130 or 143 after a signal."""
    parser = argparse.ArgumentParser(prog="continual.py", description="Train a model on a sequence of tasks; run again to continue.")
    parser.add_argument("--config", required=True, help="a YAML file, e.g. configs/tiny.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="e.g. lr=1e-5 sdpo.teacher=ema tasks.0.path=rows.jsonl")
    options = parser.parse_args(argv)
    try:
        run(load_config(options.config, options.overrides))
    except (ConfigError, RunError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command continues from the newest checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
