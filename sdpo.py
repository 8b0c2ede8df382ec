"""SDPO: the policy teaches itself, having seen what its student has not.

A response y to a prompt x is judged twice by (nearly) the same model: once as the student, given x,
and once as the teacher, given x with something privileged inserted: a successful sibling, which is
another response to x (the demonstration), or the verifier's feedback. Where the two disagree about
the next token y_i, the student moves towards the teacher:

    s_i = pi_student(. | x, y_<i)            t_i = pi_teacher(. | x + demonstration, y_<i)

    loss = sum_i  w_i D_alpha(s_i, t_i) / number of such tokens in the optimizer step
    w_i  = min( pi_student(y_i) / pi_old(y_i), is_clip ),  a constant for the gradient

over the response tokens of those samples that have a target, which is such an insertion; pi_old is the
student that sampled y, and D_alpha is `kernels.token_kl`. GRPO (grpo.py) gives a response one number,
this gives each token a distribution: denser supervision, and *Denser != Better* shows what that costs in
a sequence of tasks. Who the teacher is decides it:

    frozen        a copy of the student at the start of the stage             (the paper's SDPO_0)
    ema           teacher <- (1 - rate) teacher + rate student, every update  (SDPO_5%: rate 0.05)
    restart       frozen, copied anew every `every` updates                   (StableSDPO)
    trust_region  teacher logits = lerp(frozen logits, student logits, rate)
    live          the student itself

Where we differ from the official code: truncation shortens the demonstration or the feedback only
(there the right end of the whole prompt goes, and with it the assistant's header); a batch without
any target gives a loss of 0 that still reaches the parameters.

    python sdpo.py           a student prompt, its teacher prompt, and the divergence of each token
"""

import copy
import json
import os
import re
import sys

import torch

from kernels import predicting, token_kl


# ------------------------------------------------------------------------------------------------
# Who has something to learn from: demonstrations
# ------------------------------------------------------------------------------------------------


def select_demonstrations(rewards, groups, threshold=0.5, exclude_self=True):
    """For each sample the index of its demonstration: the first success of its group, or None.

    Args:
        rewards: N floats; NaN (not scored) is no success. groups: N group ids.
        threshold: a reward of at least this is a success.
        exclude_self: a sample is no demonstration for itself, so a group's only success has none.
    Returns:
        list of N indices or None.
    >>> select_demonstrations([1, 0, 0], ["a", "a", "b"])
    [None, 0, None]
    """
    groups = groups.tolist() if torch.is_tensor(groups) else list(groups)  # tensors hash by identity
    ### BEGIN SOLUTION T10
    rewards = list(map(float, rewards))
    successes = {}
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if reward >= threshold:
            successes.setdefault(group, []).append(i)
    return [
        next((j for j in successes.get(group, ()) if not (exclude_self and j == i)), None)
        for i, group in enumerate(groups)
    ]
    ### END SOLUTION


def strip_thinking(text):
    """The visible answer: without <think>...</think>, without what precedes a stray </think> (the
    chat template may have opened the block), and nothing of a block that never closed.

    >>> strip_thinking("plan</think> B"), strip_thinking("<think>x</think>B"), strip_thinking("<think>x")
    ('B', 'B', '')
    """
    # Up to the last </think> every block closes, so that the pattern never searches in vain: one pass over the text.
    head, end, tail = text.rpartition("</think>")
    text = re.sub(r"<think>.*?</think>", "", head + end, flags=re.DOTALL) + tail
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()


# ------------------------------------------------------------------------------------------------
# What the teacher sees
# ------------------------------------------------------------------------------------------------

# The official templates (SDPO-CL, verl/trainer/config/actor/actor.yaml). One str.format call fills
# each, so braces in a problem, in JSON or in code are never read as placeholders.
REPROMPT = "{prompt}{solution}{feedback}\n\nCorrectly solve the original question."
SOLUTION = "\nCorrect solution:\n\n{demonstration}"
FEEDBACK = "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback}"


def teacher_messages(
    messages, demonstration=None, feedback=None, *, template=REPROMPT, solution_template=SOLUTION, feedback_template=FEEDBACK
):
    """The same chat, with the last user message rewritten to hold demonstration and feedback.

    Args:
        messages: [{"role", "content"}, ...] with at least one user message; not changed.
        demonstration, feedback: texts; None or blank leaves them out. With neither, the chat
            returns as it is.
        template: {prompt}, {solution}, {feedback}; solution_template: {demonstration};
            feedback_template: {feedback}.
    Returns:
        a new list of messages.
    Raises:
        ValueError: no user message.
    """
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=None)
    if last is None:
        raise ValueError("teacher_messages: the chat has no user message")
    ### BEGIN SOLUTION T11
    solution = solution_template.format(demonstration=demonstration) if (demonstration or "").strip() else ""
    remark = feedback_template.format(feedback=feedback) if (feedback or "").strip() else ""
    messages = [dict(m) for m in messages]
    if solution or remark:
        prompt = messages[last]["content"]
        messages[last]["content"] = template.format(prompt=prompt, solution=solution, feedback=remark)
    return messages
    ### END SOLUTION


def teacher_prompt(encode, messages, demonstration, feedback, max_tokens, **templates):
    """Token ids of the teacher's prompt, at most `max_tokens`: the inserted text alone is shortened.

    Args:
        encode: messages -> ids, ending with the assistant's header. templates: of `teacher_messages`.
    Returns:
        list of ids, or None where not one character of the insertion fits.
    """
    # Stripped, so that even one character is something to see.
    demonstration, feedback = (demonstration or "").strip(), (feedback or "").strip()

    def cut(n):
        return encode(teacher_messages(messages, demonstration[:n], feedback[:n], **templates))

    fits, fails, best = 0, max(len(demonstration), len(feedback)) + 1, None
    if len(whole := cut(fails)) <= max_tokens:
        return whole
    while fails - fits > 1:                                                # bisect over characters
        middle = (fits + fails) // 2
        if len(ids := cut(middle)) <= max_tokens:
            fits, best = middle, ids
        else:
            fails = middle
    return best


def teacher_prompts(
    encode, chats, texts, rewards, feedback, group_size, *,
    threshold=0.5, exclude_self=True, use_feedback=False, feedback_with_demonstration=False,
    keep_thinking=False, max_tokens=10240, **templates,
):
    """One teacher prompt for each of N = P * group_size samples, None where it has no target.

    A sample has a target if a sibling succeeded, or if it has feedback and feedback is used.

    Args:
        encode: see `teacher_prompt`. chats: P lists of messages. texts, rewards, feedback: N each.
        threshold, exclude_self: see `select_demonstrations`.
        use_feedback: insert the verifier's text; beside a demonstration too, if
            feedback_with_demonstration.
        keep_thinking: leave the demonstration's reasoning in (the paper's CoT variant).
    Returns:
        list of N lists of ids, or None.
    """
    groups = [i // group_size for i in range(len(texts))]
    chosen = select_demonstrations(rewards, groups, threshold, exclude_self)
    prompts = []
    for i, j in enumerate(chosen):
        demonstration = None if j is None else texts[j] if keep_thinking else strip_thinking(texts[j])
        remark = feedback[i] if use_feedback and (feedback_with_demonstration or not demonstration) else None
        if not (demonstration or "").strip() and not (remark or "").strip():
            prompts.append(None)
        else:
            prompts.append(teacher_prompt(encode, chats[groups[i]], demonstration, remark, max_tokens, **templates))
    return prompts


# ------------------------------------------------------------------------------------------------
# Who the teacher is
# ------------------------------------------------------------------------------------------------


class Teacher:
    """The teacher's weights, one of five kinds (see the header).

    Args:
        student: the policy at the start of the stage.
        kind: frozen, ema, restart, trust_region, live.
        rate: ema: the student's share in each update; trust_region: the student's share in the logits.
        every: restart: updates between two copies.
        init: a model of the same shape to start from instead of the student. init_mix: its share in
            the start, (1 - init_mix) student + init_mix init.
        copied: how a model is copied, where that takes more than a deepcopy (a sharded one).
    Raises:
        ValueError: an unknown kind, or init with a live teacher.
    """

    KINDS = ("frozen", "ema", "restart", "trust_region", "live")

    def __init__(self, student, kind, rate=0.05, every=20, init=None, init_mix=1.0, copied=copy.deepcopy):
        if kind not in self.KINDS:
            raise ValueError(f"teacher {kind!r} must be one of {', '.join(self.KINDS)}")
        if kind == "live" and init is not None:
            raise ValueError("a live teacher is the student itself and can't start from another model")
        self.kind, self.rate, self.every, self.updates = kind, rate, every, 0
        if kind == "live":
            self.model = student
            return
        self.model = copied(student).eval().requires_grad_(False)
        if kind == "ema" and next(student.parameters()).dtype in (torch.bfloat16, torch.float16):
            self.model.float()                                             # else a slow teacher's updates round to nothing
        if init is not None:
            self._move(init, init_mix)

    @property
    def mix(self):
        """The student's share in the teacher's logits: `kernels.fused_token_kl`'s teacher_mix."""
        return self.rate if self.kind == "trust_region" else 0.0

    @torch.no_grad()
    def _move(self, source, share):
        """Each parameter becomes (1 - share) of its own value + share of the source's, in place."""
        ### BEGIN SOLUTION T12
        for mine, other in zip(self.model.parameters(), source.parameters(), strict=True):
            mine.lerp_(other.to(mine), share)                              # exact at 0 and at 1
        ### END SOLUTION

    def update(self, student):
        """Follow the student as the kind says (see the header); call it after every optimizer step."""
        ### BEGIN SOLUTION T12
        self.updates += 1
        if self.kind == "ema":
            self._move(student, self.rate)
        elif self.kind == "restart" and self.updates % self.every == 0:
            self._move(student, 1.0)
        ### END SOLUTION


# ------------------------------------------------------------------------------------------------
# The loss
# ------------------------------------------------------------------------------------------------


def drop_tokens(mask, ratio, seeds):
    """Take a random share `ratio` of the tokens out of a mask (N, T); a row's seed alone decides on its tokens."""
    if not ratio:
        return mask.bool()
    drawn = [torch.rand(mask.shape[1], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return mask.bool() & (torch.stack(drawn).to(mask.device) >= ratio)


def sdpo_loss(divergence, logps, old_logps, mask, is_clip=2.0, total=None):
    """Importance-weighted mean divergence over the tokens that have a target.

    The plain form: training takes the same number from `kernels.fused_token_kl`, which never keeps
    the logits that `divergence` needs, and the log's numbers from here. A test holds them equal.

    Args:
        divergence: (N, T) of `token_kl` or `sampled_kl`, with gradient.
        logps, old_logps: (N, T) log-probs of the sampled tokens, now and at sampling time.
        mask: (N, T), 1 on response tokens of samples with a target.
        is_clip: the importance weight's cap; None leaves the weight out.
        total: such tokens in the whole optimizer step; None takes this batch's.
    Returns:
        loss (scalar; 0 with a gradient of 0 where nothing has a target), and a dict of floats that
        also add up over micro-batches: divergence (unweighted mean), importance (mean weight).
    Source: SDPO (arXiv 2601.20802); the importance weight is its code's is_clip.
    >>> d = torch.tensor([[0.2, 0.4, 9.0]], requires_grad=True)
    >>> zero = torch.zeros(1, 3)
    >>> loss, metrics = sdpo_loss(d, zero, zero, torch.tensor([[1, 1, 0]]))
    >>> round(loss.item(), 4)
    0.3
    """
    mask = mask.bool()
    ### BEGIN SOLUTION T13
    weights = mask.float() / max(1.0, float(mask.sum() if total is None else total))
    importance = (logps - old_logps).detach().masked_fill(~mask, 0.0).exp()
    importance = torch.ones_like(importance) if is_clip is None else importance.clamp(max=is_clip)
    divergence = divergence.masked_fill(~mask, 0.0)
    loss = (weights * importance * divergence).sum()
    ### END SOLUTION
    metrics = {
        "divergence": (weights * divergence.detach()).sum().item(),
        "importance": (weights * importance).sum().item(),
    }
    return loss, metrics


# ------------------------------------------------------------------------------------------------
# python sdpo.py: one response, judged twice
# ------------------------------------------------------------------------------------------------


RED, GREEN, ROW = 31, 32, 0.05                                             # ANSI colours; nats in a row of the drawing


def main():
    """Show a student's prompt, its teacher's prompt, and their divergence at each response token."""
    from pathlib import Path

    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    base = Path(__file__).parent / "configs" / "tiny" / "base"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    rows = map(json.loads, (base.parent / "math-train.jsonl").read_text().splitlines())

    # A question whose answer stands nowhere but behind "=" and in the box, to put a wrong one there.
    def fits(answer, prompt, reference):
        return len(answer) == 2 and answer not in prompt and reference.count(answer) == 2

    example = next(r for r in rows if fits(r["answer"], r["prompt"], r["reference"]))
    chat, right = [{"role": "user", "content": example["prompt"]}], example["reference"]
    wrong = right.replace(example["answer"], str(int(example["answer"]) + 10))
    seen = teacher_messages(chat, right)
    asked, taught = chat[-1]["content"].splitlines(), seen[-1]["content"].splitlines()
    lines = [f"    {line}" if i < len(asked) else _colour(GREEN, f"  + {line}".rstrip()) for i, line in enumerate(taught)]
    print("The student is asked\n", *(f"    {line}" for line in asked), sep="\n")
    print("\nand answered, wrongly,\n", f"    {wrong}", sep="\n")
    print("\nA sibling was right, so the teacher, the same model, is asked (+ marks what was inserted)\n", *lines, sep="\n")
    response = tokenizer.encode(wrong, add_special_tokens=False) + [tokenizer.eos_token_id]
    logits = []
    for messages in (chat, seen):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            out = model(input_ids=torch.tensor([prompt + response])).logits    # (1, L, V)
        logits.append(predicting(out, len(response))[0])                       # (T, V)
    divergence = token_kl(*logits, alpha=0.5)                                  # (T,)
    print(f"\nBoth read that answer, token by token. Under each token hangs their divergence, a row for {ROW} nats.\n")
    words = [tokenizer.decode([token]).strip() or "_" for token in response]
    _draw(words, divergence.tolist())
    print(f"\nThe five largest:\n\n{'token':<12}{'student':>9}{'teacher':>9}{'D (nats)':>10}")
    s, t = (z.softmax(-1) for z in logits)                                     # (T, V)
    for i in sorted(divergence.topk(5).indices.tolist()):
        token = response[i]
        print(f"{words[i]:<12}{s[i, token].item():>9.3f}{t[i, token].item():>9.3f}{divergence[i].item():>10.4f}")
    share = divergence.topk(3).values.sum() / divergence.sum()
    print(f"\nloss: the mean of all, {divergence.mean().item():.4f}; the three largest are {100 * share.item():.0f}% of it.")
    print("Where the two agree there is nothing to learn. GRPO would give every token of this answer the same")
    print("negative advantage.")


def _colour(code, text):
    """Coloured where a terminal reads and NO_COLOR isn't set (no-color.org); else the text as it is."""
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text


def _draw(words, values):
    """The words in a line, and under each a column of # as long as its value."""
    rows = [round(value / ROW) for value in values]
    print("    " + " ".join(_colour(RED, word) if n else word for word, n in zip(words, rows)))
    for row in range(max(rows)):
        line = " ".join(("#" if n > row else " ") * len(word) for word, n in zip(words, rows))
        print("    " + _colour(RED, line.rstrip()))


if __name__ == "__main__":
    main()
