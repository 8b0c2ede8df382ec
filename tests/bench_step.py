"""Whole training steps side by side: ours, and those of TRL's GRPOTrainer and experimental SDPOTrainer.

    step = sample N = P * G responses -> reward -> advantages, or teacher prompts -> loss -> backward -> AdamW

Both sides train the same small random Qwen3 in float32 on the CPU, in one process and in turn: each time TRL
has finished a step, its callback runs one of ours. So both see the same machine, and the ratio is the median
over such pairs. Nothing collects this file. TRL is no requirement; an environment to throw away has it:

    python3 -m venv /tmp/trl && /tmp/trl/bin/pip install -r requirements.txt 'trl==1.16.0'
    OMP_NUM_THREADS=1 /tmp/trl/bin/python tests/bench_step.py

Made equal: weights at the start, prompts of a step, group size, response length, reward, learning rate,
AdamW's settings, clipping of the gradient, token-mean loss without a KL penalty, one update a step, everything
in one micro-batch, and for SDPO a frozen teacher, alpha 0.5 over the full vocabulary and the same templates.
Every response has exactly T tokens (the end token's id is outside the model's vocabulary), every second one
is right: so all N * T tokens are generated and trained on both sides, and neither has rows to leave out.

Not equal, and left as each side has it:
    - We prefill a prompt once for its group; TRL's `generate` prefills it for each response.
    - We collect log-probs while sampling, and importance weights use them; with one update a step TRL
      takes the ratio as 1 and needs none. It logs more numbers than we do.
    - TRL's AdamW is PyTorch's fused one, its default; ours is PyTorch's plain one.
    - TRL's SDPO loss is a mean over responses of means over tokens: the same number at equal lengths.
"""

import argparse
import itertools
import logging
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
warnings.filterwarnings("ignore")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback,
)

import continual  # noqa: E402
import eval as measures  # noqa: E402
from sdpo import FEEDBACK, REPROMPT, SOLUTION  # noqa: E402

P, G, T, PROMPT, WORDS = 16, 8, 32, 64, 4096           # prompts, samples each, tokens of a response and of a prompt, vocabulary


def make_base(folder, layers=2, hidden=128):
    """A random model, and a tokenizer with one token a word whose end token the model can't say."""
    torch.manual_seed(0)
    words = ["<pad>", "<unk>", *(f"w{i}" for i in range(WORDS - 2)), "<end>"]
    rule = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    rule.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rule, pad_token="<pad>", unk_token="<unk>", eos_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}w0"
    tokenizer.save_pretrained(folder)
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=WORDS, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, head_dim=32,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, pad_token_id=0, bos_token_id=None, eos_token_id=WORDS,
    )).save_pretrained(folder)
    chooser = random.Random(0)
    texts = [" ".join(f"w{chooser.randrange(WORDS - 2)}" for _ in range(PROMPT - 1)) for _ in range(4 * P)]
    return [[{"role": "user", "content": text}] for text in texts]


def our_step(method, folder, chats, optim={}):
    """A function that makes one of our training steps and returns its line for the log."""
    config = continual.make_config({
        "model": folder, "out_dir": folder, "method": method, "prompts_per_step": P, "group_size": G, "max_new_tokens": T,
        "max_prompt_tokens": PROMPT, "device": "cpu", "tasks": [{"name": "words", "path": "none", "verifier": "exact"}],
        "sdpo": {"teacher": "frozen", "alpha": 0.5}, "optim": optim,
    })
    model, tokenizer = continual.load_model(folder, config, "cpu"), continual.load_tokenizer(config)
    examples = [measures.Example(str(i), chat, "") for i, chat in enumerate(chats)]
    task, turn = measures.Task(config.tasks[0], examples, [], {}), itertools.cycle((1.0, 0.0))
    continual.verify = lambda *_: measures.Verdict(next(turn), "", "", True)     # the reward that TRL gets too
    player = continual.Player(model, config)
    optimizer, teacher, reference = continual.begin_stage(model, player, config, "cpu")
    stage, count = (model, player, tokenizer, task, teacher, reference, optimizer, config, 1), itertools.count()
    return lambda: continual.train_step(*stage, next(count))


class InTurn(TrainerCallback):
    """Times a step of TRL, then one of ours; the first `warmup` pairs don't count."""

    def __init__(self, ours, warmup):
        self.ours, self.left, self.seconds = ours, warmup, []

    def on_train_begin(self, *_, **__):
        self.start = time.perf_counter()

    def on_step_end(self, *_, **__):
        middle = time.perf_counter()
        line = self.ours()
        end = time.perf_counter()
        assert line["length"] == T and line["updates"] == 1 and line.get("targets", line["mixed"]) == 1, line
        if self.left == 0:
            self.seconds.append((middle - self.start, end - middle))
        self.left = max(0, self.left - 1)
        self.start = time.perf_counter()


def trl_trainer(method, folder, chats, steps, callback, options):
    """TRL's trainer at its leanest: nothing logged, saved or recomputed; the whole step is one batch."""
    from trl import GRPOConfig, GRPOTrainer
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

    common = dict(
        output_dir=folder, max_steps=steps, use_cpu=True, bf16=False, seed=0, report_to="none", logging_strategy="no",
        save_strategy="no", disable_tqdm=True, dataloader_num_workers=0, dataloader_pin_memory=False, gradient_checkpointing=False,
        per_device_train_batch_size=P * G, gradient_accumulation_steps=1, num_iterations=1, num_generations=G,
        max_completion_length=T, temperature=1.0, top_p=1.0, top_k=0, beta=0.0, scale_rewards="none", loss_type="dapo",
        epsilon_high=0.28, learning_rate=1e-6, lr_scheduler_type="constant", weight_decay=0.01, max_grad_norm=1.0,
    )
    if method == "sdpo":
        common |= dict(
            teacher_model_kind="base", distillation_mode="full_logits", distillation_alpha=0.5, reprompt_template=REPROMPT,
            solution_template=SOLUTION.replace("demonstration", "successful_previous_attempt"),
            feedback_template=FEEDBACK.replace("feedback}", "feedback_raw}"), diagnostics_warning_interval=0,
        )
    kind, settings = (GRPOTrainer, GRPOConfig) if method == "grpo" else (SDPOTrainer, SDPOConfig)

    def reward(completion_ids, **_):
        assert len(completion_ids) == P * G and all(len(ids) == T for ids in completion_ids)
        return [1.0, 0.0] * (P * G // 2)

    return kind(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), reward_funcs=reward,
        args=settings(**common | options), train_dataset=Dataset.from_dict({"prompt": chats}),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"), callbacks=[callback],
    )


def main(argv=None):
    """Print tokens per second of both sides and their ratio. Returns the exit code: 0, or 2 without TRL."""
    parser = argparse.ArgumentParser(description="Our training step against TRL's, step by step in turn.")
    parser.add_argument("--steps", type=int, default=15, help="pairs of steps that count, after 3 that don't")
    options = parser.parse_args(argv)
    try:
        import trl
    except ImportError:
        print("TRL isn't installed here; the head of this file says how to make an environment that has it", file=sys.stderr)
        return 2
    logging.disable(logging.WARNING)
    print(f"{P} prompts of {PROMPT} tokens x {G} samples of {T} tokens, {WORDS} words, hidden 128, 2 layers; float32, CPU, "
          f"{torch.get_num_threads()} threads; TRL {trl.__version__}; response tokens, each generated and trained, a second")
    for method in ("grpo", "sdpo"):
        with tempfile.TemporaryDirectory() as folder:
            chats = make_base(folder)
            callback = InTurn(our_step(method, folder, chats), warmup=3)
            trl_trainer(method, folder, chats, options.steps + 3, callback, {}).train()
        theirs, ours = ([P * G * T / s for s in side] for side in zip(*callback.seconds))
        ratios = sorted(o / t for o, t in zip(ours, theirs))
        print(f"{method}   TRL {statistics.median(theirs):7.0f}   ours {statistics.median(ours):7.0f}   ratio "
              f"{statistics.median(ratios):.2f}   (pairs {ratios[0]:.2f} to {ratios[-1]:.2f})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
