"""sdpo.py: who demonstrates to whom, what the teacher reads, who the teacher is, and the loss, all by hand."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kernels import fused_token_kl, token_kl
from sdpo import (
    Teacher, drop_tokens, sdpo_loss, select_demonstrations, strip_thinking, teacher_messages, teacher_prompt, teacher_prompts,
)

NAN = math.nan
HEADER = -1                                                                # the toy encoding's assistant header


def encode(messages):
    """A toy chat template with one id per character: easy to count, and easy to read back."""
    return [ord(c) for m in messages for c in m["role"][0] + m["content"]] + [HEADER]


def read(ids):
    assert ids[-1] == HEADER                                               # wherever a prompt is read, its header is there
    return "".join(map(chr, ids[:-1]))


def chat(question, system=None):
    return ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": question}]


# ---- Demonstrations ----------------------------------------------------------------------------


@pytest.mark.parametrize("rewards, groups, options, right", [
    ([1, 1, 0, 1], "aaaa", {}, [1, 0, 0, 0]),                              # the first other success
    ([1, 1, 0], "aaa", {"exclude_self": False}, [0, 0, 0]),
    ([1, 0, 0, 1], "abab", {}, [None, 3, 0, None]),                        # groups needn't lie together
    ([0.5, 0.4, NAN], "aaa", {}, [None, 0, 0]),                            # the threshold itself is a success
    ([0.5, 0.9, 0.0], "aaa", {"threshold": 0.6}, [1, None, 1]),
    ([NAN, NAN], "aa", {"threshold": -1.0}, [None, None]),                 # not scored is no success
    ([], "", {}, []),
])
def test_demonstration_is_the_first_success_of_the_group(rewards, groups, options, right):
    assert select_demonstrations(rewards, groups, **options) == right
    assert select_demonstrations(torch.tensor(rewards), list(groups), **options) == right


def test_demonstrations_accept_group_ids_in_a_tensor():
    """A tensor's elements hash by identity: no two would be of one group, silently."""
    assert select_demonstrations([1.0, 0.0, 0.0], torch.tensor([7, 7, 8])) == [None, 0, None]


def test_sdpo_02_only_success_of_a_group_has_no_demonstration():
    """Nor does a group borrow from another; feedback can stand in."""
    rewards, groups = [1.0, 0.0, 0.0, 0.0, 0.0], ["g1", "g1", "g1", "g2", "g2"]
    assert select_demonstrations(rewards, groups, 1.0, True) == [None, 0, 0, None, None]
    assert select_demonstrations(rewards, groups, 1.0, False) == [0, 0, 0, None, None]

    def mask(**options):                                                   # groups of 3 and 2, one call for each
        feedback = [None, None, None, None, "Wrong output on test 2"]
        return [
            int(prompt is not None) for rows, size in ((slice(0, 3), 3), (slice(3, 5), 2))
            for prompt in teacher_prompts(
                encode, [chat("Q")], ["yes", "no", "no", "no", "no"][rows], rewards[rows], feedback[rows], size,
                threshold=1.0, use_feedback=True, **options)
        ]

    assert mask() == [0, 1, 1, 0, 1]
    assert mask(exclude_self=False) == [1, 1, 1, 0, 1]


@pytest.mark.parametrize("text, visible", [
    ("plan one\n</think>\n\nThe answer is B", "The answer is B"),          # the chat template had opened the block
    ("<think>\nplan\n</think>\n\nThe answer is B", "The answer is B"),
    ("<think>\nnever finished", ""),
    ("The answer is B", "The answer is B"),
])
def test_roll_04_thinking_is_stripped_where_only_half_of_its_tags_is_seen(text, visible):
    assert strip_thinking(text) == visible


@pytest.mark.parametrize("text, visible", [
    ("<think>a</think>B<think>c</think> C", "B C"), ("a</think>b</think>C", "C"), ("B <think>c", "B"), ("", ""),
    ("<think>a<think>b</think>C", "C"), ("a</think>B <think>c</think>C", "B C"), ("1 < 2 and 3 > 2", "1 < 2 and 3 > 2"),
])
def test_thinking_is_stripped_from_mixed_and_broken_tags(text, visible):
    assert strip_thinking(text) == visible


# ---- What the teacher sees ---------------------------------------------------------------------


def test_teacher_reads_the_official_template():
    """SCHEMAS.md, section 5, written out."""
    right = (
        "What?\nCorrect solution:\n\nIt is B."
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\nnot A"
        "\n\nCorrectly solve the original question."
    )
    assert teacher_messages(chat("What?"), "It is B.", "not A")[-1]["content"] == right
    assert "feedback" not in teacher_messages(chat("What?"), "It is B.")[-1]["content"]
    assert "solution" not in teacher_messages(chat("What?"), None, "not A")[-1]["content"]


def test_teacher_chat_differs_in_the_last_user_message_only():
    messages = [
        {"role": "system", "content": "S"}, {"role": "user", "content": "Q1"},
        {"role": "assistant", "content": "A1"}, {"role": "user", "content": "Q2"}, {"role": "tool", "content": "T"},
    ]
    before = copy.deepcopy(messages)
    rewritten = teacher_messages(messages, "D")
    assert messages == before                                              # the student's own prompt stays as it was
    assert [i for i in range(5) if rewritten[i] != messages[i]] == [3] and rewritten[3]["content"].startswith("Q2")
    for nothing in (None, "", " \n"):
        assert teacher_messages(messages, nothing, nothing) == messages
    with pytest.raises(ValueError, match="user message"):
        teacher_messages(messages[:1], "D")


def test_data_03_braces_in_a_problem_a_solution_or_feedback_are_text():
    """Filling the templates one after another would read the problem's own {feedback} as a placeholder."""
    messages = teacher_messages(
        chat("Find \\boxed{x} with {feedback} set"), "d = {'a': 1}", "KeyError: {k}",
        template="{prompt}\n{solution}\n{feedback}", solution_template="{demonstration}", feedback_template="{feedback}",
    )
    assert messages[-1]["content"] == "Find \\boxed{x} with {feedback} set\nd = {'a': 1}\nKeyError: {k}"


def test_truncation_shortens_the_inserted_text_and_keeps_question_and_header():
    """The official code cuts the right end off, and with it the instruction and the assistant's header."""
    messages, demonstration, feedback = chat("What is it?", "Be brief."), "d" * 50, "f" * 20
    full = teacher_prompt(encode, messages, demonstration, feedback, 10_000)
    for limit in (len(full), len(full) - 1, len(full) - 30, len(full) - 67, len(full) - 68):
        ids = teacher_prompt(encode, messages, demonstration, feedback, limit)
        text = read(ids)
        assert text.startswith("sBe brief.uWhat is it?\nCorrect solution:\n\nd")
        assert text.endswith("\n\nCorrectly solve the original question.")
        assert limit - 1 <= len(ids) <= limit                              # 2 characters go at a time while both are long
    # One character of each is 68 fewer than all 70: below that nothing can be inserted, and there is no target.
    assert teacher_prompt(encode, messages, demonstration, feedback, len(full) - 69) is None


def test_truncation_to_blank_text_is_no_target():
    """Where only the demonstration's indentation would fit, the teacher would know nothing more than the student."""
    plain = len(encode(chat("Q")))
    assert teacher_prompt(encode, chat("Q"), "    return x", None, plain + 3) is None


def prompts_of(texts, rewards, feedback=None, size=None, **options):
    chats = [chat(f"Q{p}") for p in range(len(texts) // (size or len(texts)))]
    return teacher_prompts(encode, chats, texts, rewards, feedback or [None] * len(texts), size or len(texts), **options)


def test_each_sample_gets_its_own_groups_question_and_demonstration():
    prompts = prompts_of(["one", "two", "three", "four"], [1, 0, 0, 1], size=2)
    assert prompts[0] is None and prompts[3] is None
    assert read(prompts[1]).startswith("uQ0\nCorrect solution:\n\none\n\n")
    assert read(prompts[2]).startswith("uQ1\nCorrect solution:\n\nfour\n\n")


@pytest.mark.parametrize("keep", [False, True])
def test_roll_04_demonstration_hides_the_reasoning_unless_it_is_kept(keep):
    prompts = prompts_of(["plan one\n</think>\n\nThe answer is B", "x"], [1, 0], keep_thinking=keep)
    assert ("plan one" in read(prompts[1])) == keep and "The answer is B" in read(prompts[1])


def test_demonstration_that_is_all_thinking_is_no_target():
    assert prompts_of(["<think>never finished", "x"], [1, 0]) == [None, None]


@pytest.mark.parametrize("options, right", [
    ({}, [None, "D", None]),                                               # off: a verifier's text isn't shown
    ({"use_feedback": True}, ["F", "D", None]),                            # only where there is no demonstration
    ({"use_feedback": True, "feedback_with_demonstration": True}, ["F", "DF", None]),
])
def test_feedback_is_used_as_configured(options, right):
    texts, feedback = ["DEMO", "x", "y"], ["FEED 0", "FEED 1", " "]
    prompts = prompts_of(texts[:2], [1, 0], feedback[:2], **options) + prompts_of(texts[2:], [0], feedback[2:], **options)
    assert [p and "".join(c for c, word in (("D", "DEMO"), ("F", "FEED")) if word in read(p)) for p in prompts] == right


def test_teacher_prompts_pass_templates_and_the_length_on():
    options = dict(template="{solution}|{prompt}", solution_template="[{demonstration}]")
    assert read(prompts_of(["abc", "x"], [1, 0], **options)[1]) == "u[abc]|Q0"
    # u [ ] | Q 0 and the header are 7 ids: room for one of three characters
    assert read(prompts_of(["abc", "x"], [1, 0], max_tokens=8, **options)[1]) == "u[a]|Q0"
    assert prompts_of(["abc", "x"], [1, 0], max_tokens=7, **options)[1] is None


# ---- Who the teacher is ------------------------------------------------------------------------


def head(W):
    return SimpleNamespace(weight=W)                                       # an output projection without bias


class Model(torch.nn.Module):
    """Two weights, all equal to `value`, and dropout to show the mode."""

    def __init__(self, value, dtype=torch.float32):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), value, dtype=dtype))
        self.dropout = torch.nn.Dropout(0.5)


def set_to(model, value):
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def history(kind, students, **options):
    """The teacher's weight after each update, with a student that takes the given values (first: at the start)."""
    student = Model(students[0])
    teacher = Teacher(student, kind, **options)
    values = []
    for value in students[1:]:
        teacher.update(set_to(student, value))
        values.append(teacher.model.weight[0].item())
    return values


def test_sdpo_01_ema_teacher_moves_by_the_rate_and_keeps_the_rest():
    """Swapped, it would keep 5% and stand at 0.05 after one step."""
    values = history("ema", [1.0] + [0.0] * 10, rate=0.05)
    assert values[0] == pytest.approx(0.95) and values[9] == pytest.approx(0.598737, abs=1e-6)


@pytest.mark.parametrize("kind, options, right", [
    ("frozen", {}, [1, 1, 1, 1, 1]), ("trust_region", {"rate": 0.5}, [1, 1, 1, 1, 1]),
    ("restart", {"every": 2}, [1, 3, 3, 5, 5]),                            # copied after updates 2 and 4
    ("restart", {"every": 1}, [2, 3, 4, 5, 6]), ("ema", {"rate": 1.0}, [2, 3, 4, 5, 6]), ("ema", {"rate": 0.0}, [1] * 5),
    ("live", {}, [2, 3, 4, 5, 6]),
])
def test_teacher_follows_its_kinds_schedule(kind, options, right):
    assert history(kind, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], **options) == right


def test_live_teacher_is_the_student_and_the_others_share_nothing_with_it():
    student = Model(1.0)
    assert Teacher(student, "live").model is student
    for kind in ("frozen", "ema", "restart", "trust_region"):
        assert Teacher(student, kind).model.weight.data_ptr() != student.weight.data_ptr()


@pytest.mark.parametrize("mix, right", [(0.0, 1.0), (0.25, 2.0), (1.0, 5.0)])
def test_teacher_can_start_from_another_model(mix, right):
    # (1 - mix) * 1 + mix * 5
    student, other = Model(1.0), Model(5.0)
    assert Teacher(student, "frozen", init=other, init_mix=mix).model.weight.tolist() == [right] * 2
    assert student.weight.tolist() == [1.0] * 2 and other.weight.tolist() == [5.0] * 2


def test_teacher_of_a_bfloat16_student_is_float32_and_does_not_lose_small_steps():
    """bfloat16 has 8 bits: 1 - 0.001 is 1 again. A hundred such steps must add up."""
    student = Model(1.0, torch.bfloat16)
    teacher = Teacher(student, "ema", rate=0.001)
    for _ in range(100):
        teacher.update(set_to(student, 0.0))
    assert teacher.model.weight.dtype == torch.float32 and student.weight.dtype == torch.bfloat16
    assert teacher.model.weight[0].item() == pytest.approx(0.999**100, rel=1e-5)


@pytest.mark.parametrize("kind", ["frozen", "ema", "restart", "trust_region"])
def test_teacher_is_in_evaluation_mode_without_gradient_and_leaves_the_student_alone(kind):
    student = Model(1.0).train()
    teacher = Teacher(student, kind, rate=0.5, every=1)
    teacher.update(student)
    assert not teacher.model.training and not any(p.requires_grad for p in teacher.model.parameters())
    assert student.training and student.dropout.training and student.weight.requires_grad


def test_teacher_refuses_unknown_kinds_and_a_live_one_with_another_start():
    with pytest.raises(ValueError, match="frozen, ema, restart, trust_region, live"):
        Teacher(Model(1.0), "slow")
    with pytest.raises(ValueError, match="live"):
        Teacher(Model(1.0), "live", init=Model(2.0))


@pytest.mark.parametrize("frozen, student", [([0.0, 0.0], [2.772589, 0.0]), ([50.0, 50.0], [-27.227411, -30.0])])
@pytest.mark.parametrize("mix, probabilities", [(0.5, [0.8, 0.2]), (0.0, [0.5, 0.5]), (1.0, [16 / 17, 1 / 17])])
def test_sdpo_03_trust_region_mixes_logits(frozen, student, mix, probabilities):
    """logits lerp to half of log 16 = log 4: 4 to 1. A mixture of probabilities would give 0.7206; shifts change nothing."""
    teacher = Teacher(Model(1.0), "trust_region", rate=mix)
    student = torch.tensor([student], requires_grad=True)
    weights, tokens = torch.ones(1), torch.zeros(1, dtype=torch.long)
    loss, *_ = fused_token_kl(
        student, head(torch.eye(2)), torch.tensor([frozen]), head(torch.eye(2)), weights, tokens, alpha=0, teacher_mix=teacher.mix
    )
    loss.backward()
    s = [16 / 17, 1 / 17]
    assert loss.item() == pytest.approx(sum(p * math.log(p / q) for p, q in zip(probabilities, s)), abs=2e-6)
    # d KL(t || s) / dz = s - t with t held constant: nothing flows through the teacher
    assert student.grad[0].tolist() == pytest.approx([q - p for p, q in zip(probabilities, s)], abs=2e-6)


def test_only_a_trust_region_teacher_mixes_logits():
    assert [Teacher(Model(1.0), kind, rate=0.3).mix for kind in Teacher.KINDS] == [0, 0, 0, 0.3, 0]


# ---- The loss ----------------------------------------------------------------------------------


def test_drop_tokens_takes_out_a_random_share_and_adds_none():
    mask = torch.tensor([1, 1, 1, 0]).repeat(4, 1250)                      # (4, 5000)
    assert torch.equal(drop_tokens(mask, 0.0, range(4)), mask.bool())
    kept = drop_tokens(mask, 0.3, range(4))
    assert not (kept & ~mask.bool()).any() and not torch.equal(kept[0], kept[1])
    assert kept.sum().item() / 15_000 == pytest.approx(0.7, abs=0.015)     # 4 standard deviations
    assert torch.equal(drop_tokens(mask[2:, :40], 0.3, [2, 3]), kept[2:, :40])     # whatever else is in the batch


@pytest.mark.parametrize("is_clip, importance", [(2.0, [0.5, 2, 1]), (10.0, [0.5, 4, 1]), (None, [1, 1, 1])])
def test_sdpo_loss_weighs_each_token_by_its_capped_importance(is_clip, importance):
    """Divergences 1, 2, 3 at ratios 1/2, 4, 1, then padding: with cap 2, (0.5 * 1 + 2 * 2 + 1 * 3) / 3 = 2.5."""
    divergence = torch.tensor([[1.0, 2.0, 3.0, 9.0]], requires_grad=True)
    logps = torch.tensor([[0.5, 4.0, 1.0, 7.0]]).log().requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0]])
    loss, metrics = sdpo_loss(divergence, logps, torch.zeros(1, 4), mask, is_clip)
    loss.backward()
    assert loss.item() == pytest.approx(sum(w * d for w, d in zip(importance, (1, 2, 3))) / 3)
    assert divergence.grad[0].tolist() == pytest.approx([w / 3 for w in importance] + [0])
    assert logps.grad is None                                              # the weight is a constant
    assert metrics == pytest.approx({"divergence": 2.0, "importance": sum(importance) / 3})


@pytest.mark.parametrize("split", [[3], [1, 2], [1, 1, 1]])
def test_sdpo_micro_batches_add_up_to_the_whole_step(split):
    """Loss, gradient and metrics; the middle micro-batch may hold no target at all."""
    divergence = torch.arange(1.0, 13.0).reshape(3, 4).requires_grad_()
    logps, mask = -torch.arange(12.0).reshape(3, 4) / 9, torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    old = logps.flip(0)
    pieces = zip(*(x.split(split) for x in (divergence, logps, old, mask)))
    parts = [sdpo_loss(*piece, total=6) for piece in pieces]
    whole, metrics = sdpo_loss(divergence, logps, old, mask)
    loss = sum(part[0] for part in parts)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(*(torch.autograd.grad(x, divergence)[0] for x in (loss, whole)))
    assert {k: sum(part[1][k] for part in parts) for k in metrics} == pytest.approx(metrics)


def test_sdpo_loss_does_not_depend_on_padding():
    """Whatever stands in padded columns, even infinities."""
    base = torch.tensor([[0.2, 0.4]]), torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]]), torch.ones(1, 2)
    right = sdpo_loss(*base)
    for poison in (math.inf, -math.inf, NAN, 1e10):
        padded = [torch.cat([x, torch.full((1, 3), fill)], 1) for x, fill in zip(base, (poison, 0.0, poison, 0.0))]
        padded[0].requires_grad_()
        loss, metrics = sdpo_loss(*padded)
        loss.backward()
        assert loss.item() == pytest.approx(right[0].item()) and metrics == pytest.approx(right[1])
        assert padded[0].grad[0, 2:].tolist() == [0.0] * 3 and padded[0].grad.isfinite().all()


def test_sdpo_04_batch_without_a_target_has_zero_loss_that_reaches_the_parameters():
    """A constant zero has no gradient at all, and a distributed reduction waits for it; 0 / 0 poisons the model."""
    param = torch.tensor([1.0, 1.0], requires_grad=True)
    loss, metrics = sdpo_loss((param * 3)[None], torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2))
    assert loss.item() == 0 and loss.requires_grad
    loss.backward()
    assert param.grad.tolist() == [0.0, 0.0] and set(metrics.values()) == {0.0}


def test_sdpo_loss_equals_the_fused_divergence_on_the_same_tokens():
    """Training takes the fused form, which weighs inside; both must mean the same loss."""
    torch.manual_seed(0)
    N, T, H, V = 3, 4, 5, 8
    h, teacher_h, W, teacher_W = torch.randn(N, T, H), torch.randn(N, T, H), torch.randn(V, H), torch.randn(V, H)
    tokens, old, mask = torch.randint(V, (N, T)), -2 * torch.rand(N, T) - 1, torch.rand(N, T) < 0.6
    W.requires_grad_()
    student = F.linear(h, W) / 0.7
    logps = student.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    plain, _ = sdpo_loss(token_kl(student, F.linear(teacher_h, teacher_W) / 0.7, 0.5, 3), logps, old, mask, is_clip=1.3)
    weights = torch.ones(int(mask.sum())) / mask.sum()
    fused, *_ = fused_token_kl(
        h[mask], head(W), teacher_h[mask], head(teacher_W), weights, tokens[mask],
        alpha=0.5, topk=3, temperature=0.7, chunk=2, old_logps=old[mask], is_clip=1.3,
    )
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(*(torch.autograd.grad(x, W)[0] for x in (fused, plain)))
