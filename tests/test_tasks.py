"""The assignment's visible tests: small numbers that can be checked with a pencil, and properties.

Each test names its task and its points (grading.py). A task's tests need earlier tasks at most.
Nothing of the five modules is imported up here: they arrive as fixtures, inside a test's time limit.

    python -m pytest -q tests/test_tasks.py -m T1
"""

import math

import pytest
from torch import bfloat16, eye, float32, full, nn, no_grad, ones, tensor, zeros

from grading import same

INF, NAN = math.inf, math.nan


# ---- T1: masked mean ---------------------------------------------------------------------------


@pytest.mark.task("T1", points=1)
def test_masked_mean_over_everything(kernels):
    """(1 + 2 + 4) / 3. The mean of the rows' means would be (1.5 + 4) / 2."""
    x, mask = tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]]), tensor([[1, 1, 0], [1, 0, 0]])
    same("masked mean over everything", kernels.masked_mean(x, mask), 7 / 3)


@pytest.mark.task("T1", points=1)
def test_masked_mean_along_an_axis(kernels):
    x, mask = tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]]), tensor([[True, True, False], [True, False, False]])
    same("masked mean of each row", kernels.masked_mean(x, mask, dim=-1), [1.5, 4.0])
    same("masked mean of each column", kernels.masked_mean(x, mask, dim=0), [2.5, 2.0, 0.0])


@pytest.mark.task("T1", points=1)
def test_masked_mean_does_not_look_into_the_padding(kernels):
    """inf * 0 is NaN: multiplying by the mask isn't enough, in the value or in the gradient."""
    for poison in (INF, NAN):
        x = tensor([2.0, poison, 4.0], requires_grad=True)
        mean = kernels.masked_mean(x, tensor([1, 0, 1]))
        mean.backward()
        same(f"masked mean beside {poison}", mean, 3.0)
        same(f"gradient of the masked mean beside {poison}", x.grad, [0.5, 0.0, 0.5])


@pytest.mark.task("T1", points=1)
def test_masked_mean_of_nothing_is_zero(kernels):
    """Not 0 / 0, and still connected to x."""
    x = ones(2, 2, requires_grad=True)
    mean = kernels.masked_mean(x, zeros(2, 2), dim=-1)
    mean.sum().backward()
    same("masked mean of an empty mask", mean, [0.0, 0.0])
    same("its gradient", x.grad, [[0.0, 0.0], [0.0, 0.0]])


# ---- T2: token log-probs -----------------------------------------------------------------------


@pytest.mark.task("T2", points=1)
def test_logps_of_a_quarter_and_three_quarters(kernels):
    """Logits 0 and log 3 are probabilities 1/4 and 3/4, and so are 5 and 5 + log 3."""
    logits = tensor([[[0.0, math.log(3)], [0.0, math.log(3)]], [[5.0, 5 + math.log(3)], [math.log(3), 0.0]]])
    logps = kernels.token_logps(logits, tensor([[1, 0], [0, 0]]))
    same("token log-probs", logps, [[math.log(3 / 4), math.log(1 / 4)], [math.log(1 / 4), math.log(3 / 4)]])


@pytest.mark.task("T2", points=1)
def test_logps_at_a_temperature(kernels):
    """Temperature 1/2 squares the odds: 1/4 and 3/4 become 1/10 and 9/10."""
    logits = tensor([[0.0, math.log(3)]])
    same("log-prob at temperature 1/2", kernels.token_logps(logits, tensor([1]), 0.5), [math.log(0.9)])
    same("log-prob at temperature 2", kernels.token_logps(logits, tensor([0]), 2.0), [-math.log(1 + math.sqrt(3))])


@pytest.mark.task("T2", points=1)
def test_logps_of_large_logits_are_finite(kernels):
    """exp(1000) is infinite, but no exponential of 1000 is needed."""
    logits = tensor([[1000.0, 0.0], [1000.0, 0.0]])
    same("log-probs of large logits", kernels.token_logps(logits, tensor([0, 1])), [0.0, -1000.0])


@pytest.mark.task("T2", points=1)
def test_logps_of_bfloat16_are_made_in_float32(kernels):
    """512 equal words: log(1/512). bfloat16 has three digits, and would miss it."""
    logps = kernels.token_logps(zeros(1, 512, dtype=bfloat16), tensor([7]))
    same("log-prob from bfloat16 logits", logps, [-math.log(512)])
    same("its type", logps.dtype == float32, True)


# ---- T3: entropy -------------------------------------------------------------------------------


@pytest.mark.task("T3", points=1)
def test_entropy_of_a_quarter_and_three_quarters(kernels):
    """(1/4) log 4 + (3/4) log(4/3), and log 2 for two equal words."""
    entropy = kernels.token_entropy(tensor([[0.0, math.log(3)], [3.0, 3.0]]))
    same("entropy", entropy, [math.log(4) / 4 + 3 * math.log(4 / 3) / 4, math.log(2)])


@pytest.mark.task("T3", points=1)
def test_entropy_at_its_extremes(kernels):
    """log V for V equal words, whatever their logit; 0 where one word has everything."""
    same("entropy of eight equal words", kernels.token_entropy(full((8,), 7.0)), math.log(8))
    same("entropy of a certain word", kernels.token_entropy(tensor([60.0, -60.0])), 0.0)


@pytest.mark.task("T3", points=1)
def test_entropy_of_bfloat16_is_made_in_float32(kernels):
    same("entropy from bfloat16 logits", kernels.token_entropy(zeros(1, 512, dtype=bfloat16)), [math.log(512)])


# ---- T4: forward and reverse KL ----------------------------------------------------------------

# Student (1/2, 1/2), teacher (3/4, 1/4).
HALVES, QUARTERS = [0.0, 0.0], [math.log(3), 0.0]


@pytest.mark.task("T4", points=1)
def test_alpha_0_is_the_forward_kl(kernels):
    """KL(t || s) = (3/4) log(3/2) + (1/4) log(1/2) = 0.130812; three words: by the same sum, 1.002104."""
    same("forward KL", kernels.token_kl(tensor([HALVES, QUARTERS]), tensor([QUARTERS, QUARTERS]), 0), [0.1308120, 0.0])
    student, teacher = tensor([0.7, 0.2, 0.1]).log(), tensor([0.1, 0.3, 0.6]).log()
    same("forward KL of three words", kernels.token_kl(student, teacher, 0), 1.0021042)


@pytest.mark.task("T4", points=1)
def test_alpha_1_is_the_reverse_kl(kernels):
    """KL(s || t) = (1/2) log(2/3) + (1/2) log 2 = 0.143841; three words: 1.101868."""
    same("reverse KL", kernels.token_kl(tensor([HALVES, QUARTERS]), tensor([QUARTERS, QUARTERS]), 1), [0.1438410, 0.0])
    student, teacher = tensor([0.7, 0.2, 0.1]).log(), tensor([0.1, 0.3, 0.6]).log()
    same("reverse KL of three words", kernels.token_kl(student, teacher, 1), 1.1018681)


@pytest.mark.task("T4", points=1)
def test_gradients_of_both_kls(kernels):
    """In the student's logits: s - t for the forward KL, s (log(s/t) - KL) for the reverse one."""
    for alpha, right in ((0, [-0.25, 0.25]), (1, [-0.2746531, 0.2746531])):
        student = tensor(HALVES, requires_grad=True)
        kernels.token_kl(student, tensor(QUARTERS), alpha).backward()
        same(f"gradient at alpha {alpha}", student.grad, right)


@pytest.mark.task("T4", points=1)
def test_kls_of_very_unlike_distributions_are_finite(kernels):
    """A word of probability e^-120 is 0 in float32, its logarithm is not: nearly all mass pays 120 nats."""
    student, teacher = tensor([60.0, -60.0]), tensor([-60.0, 60.0])
    for alpha in (0, 1):
        same(f"KL at alpha {alpha} of two certain words", kernels.token_kl(student, teacher, alpha), 120.0)


# ---- T5: generalised Jensen-Shannon divergence -------------------------------------------------


@pytest.mark.task("T5", points=1)
def test_jensen_shannon_by_hand(kernels):
    """The mixture of (1/2, 1/2) and (3/4, 1/4) is (5/8, 3/8):
    (1/2)[(1/2) log(4/5) + (1/2) log(4/3)] + (1/2)[(3/4) log(6/5) + (1/4) log(2/3)] = 0.033822.
    Its gradient is (1/8) log(3/5) in the first logit, the opposite in the second."""
    student = tensor([HALVES], requires_grad=True)
    divergence = kernels.token_kl(student, tensor([QUARTERS]), 0.5)
    divergence.sum().backward()
    same("Jensen-Shannon divergence", divergence, [0.0338221])
    same("its gradient", student.grad, [[-0.0638532, 0.0638532]])


@pytest.mark.task("T5", points=1)
def test_both_weights_follow_alpha(kernels):
    """Student (.7, .2, .1), teacher (.1, .3, .6), the sums written out for three alphas."""
    student, teacher = tensor([0.7, 0.2, 0.1]).log(), tensor([0.1, 0.3, 0.6]).log()
    for alpha, right in ((0.1, 0.0864965), (0.3, 0.1939841), (0.9, 0.0926739)):
        same(f"divergence at alpha {alpha}", kernels.token_kl(student, teacher, alpha), right)
        same(f"mirrored at alpha {alpha}", kernels.token_kl(teacher, student, 1 - alpha), right)


@pytest.mark.task("T5", points=1)
def test_divergence_between_the_ends_is_bounded_and_jumps_there(kernels):
    """Never above log 2, where a KL has no bound; near an end it is near 0, at the end a full KL."""
    student, teacher = tensor([60.0, -60.0]), tensor([-60.0, 60.0])
    same("Jensen-Shannon divergence of two certain words", kernels.token_kl(student, teacher, 0.5), math.log(2))
    for alpha, end in ((1e-4, 0), (1 - 1e-4, 1)):
        same(f"below 0.01 at alpha {alpha}", bool(0 <= kernels.token_kl(student, teacher, alpha) < 0.01), True)
        same(f"a full KL at alpha {end}", kernels.token_kl(student, teacher, end), 120.0)


# ---- T6: top-k with a tail bucket --------------------------------------------------------------

# k = 2 keeps the student's two likeliest words: buckets (.5, .3, .2) and (.1, .2, .7).
FOUR_S, FOUR_T = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)], [math.log(p) for p in (0.1, 0.2, 0.3, 0.4)]


@pytest.mark.task("T6", points=1)
def test_rest_of_both_distributions_is_one_bucket(kernels):
    """Forward KL of the buckets: .1 log(.1/.5) + .2 log(.2/.3) + .7 log(.7/.2) = 0.634897."""
    for alpha, right in ((0, 0.6348973), (0.5, 0.1513581), (1, 0.6758059)):
        same(f"top 2 and a tail, alpha {alpha}", kernels.token_kl(tensor([FOUR_S]), tensor([FOUR_T]), alpha, topk=2), [right])


@pytest.mark.task("T6", points=1)
def test_without_a_tail_the_kept_words_are_renormalised(kernels):
    """(.5, .3) / .8 and (.1, .2) / .3: forward KL (1/3) log(8/15) + (2/3) log(16/9) = 0.174040."""
    for alpha, right in ((0, 0.1740399), (0.5, 0.0432402), (1, 0.1771189)):
        got = kernels.token_kl(tensor([FOUR_S]), tensor([FOUR_T]), alpha, topk=2, tail=False)
        same(f"top 2 without a tail, alpha {alpha}", got, [right])


@pytest.mark.task("T6", points=1)
def test_words_are_found_wherever_they_stand(kernels):
    """The same words in another order, two rows at once; and merging words loses information."""
    student, teacher = tensor([FOUR_S, FOUR_S[::-1]]), tensor([FOUR_T, FOUR_T[::-1]])
    same("top 2 in two orders", kernels.token_kl(student, teacher, 0, topk=2), [0.6348973, 0.6348973])
    one, three, full = (kernels.token_kl(student, teacher, 0, topk=k)[0] for k in (1, 3, 4))
    same("all four words: no tail is left", full, 0.7976840)
    same("fewer buckets, less divergence", bool(one < 0.6348973 <= three <= full), True)


@pytest.mark.task("T6", points=1)
def test_small_tails_keep_their_precision(kernels):
    """Two words of logit 22 and eight of 0 leave a tail of 4 e^-22, of which log(1 - kept) knows nothing. Nearly all
    of the teacher's mass lies there, and pays log(1 / (4 e^-22))."""
    student = tensor([22.0, 22.0] + [0.0] * 8, requires_grad=True)
    divergence = kernels.token_kl(student, tensor([-22.0, -22.0] + [0.0] * 8), 0, topk=2)
    divergence.backward()
    same("divergence in the tail", divergence, 22 - math.log(4))
    same("its gradient: s - t, shared in the tail", student.grad, [0.5, 0.5] + [-0.125] * 8)


# ---- T7: group advantages ----------------------------------------------------------------------


@pytest.mark.task("T7", points=1)
def test_advantage_is_the_distance_to_the_groups_mean(grpo):
    """Means 1/2 and 1/4; a group doesn't see its neighbour."""
    advantages = grpo.group_advantages(tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]]))
    same("advantages", advantages, [[0.5, -0.5, -0.5, 0.5], [-0.25, -0.25, 0.75, -0.25]])


@pytest.mark.task("T7", points=1)
def test_advantage_over_the_sample_std(grpo):
    """Sum of squares 1 over n - 1 = 3: std 1 / sqrt(3). eps is added to the std, outside the root."""
    rewards = tensor([[1.0, 0.0, 0.0, 1.0]])
    for eps in (0.0, 0.1):
        a = 0.5 / (1 / math.sqrt(3) + eps)
        same(f"scaled advantages, eps {eps}", grpo.group_advantages(rewards, True, eps), [[a, -a, -a, a]])


@pytest.mark.task("T7", points=1)
def test_group_without_contrast_has_advantages_of_exactly_zero(grpo):
    """In float32 the mean of seven rewards of 0.7 isn't 0.7; divided by a tiny std, the rest would be a signal."""
    for rewards in ([0.7] * 7, [0.7], [1.0, 1.0]):
        for scale in (False, True):
            advantages = grpo.group_advantages(tensor([rewards]), scale, 0.0)
            same(f"advantages of {rewards}", advantages, [[0.0] * len(rewards)], atol=0)


@pytest.mark.task("T7", points=1)
def test_unscored_response_is_left_out(grpo):
    """The scored two have mean -2. As a reward of 0, the unscored one would be the best of the group."""
    same("advantages beside NaN", grpo.group_advantages(tensor([[NAN, -1.0, -3.0]])), [[0.0, 1.0, -1.0]])
    a = 1 / math.sqrt(2)                                         # squares 1 + 1 over n - 1 = 1
    same("scaled advantages beside NaN", grpo.group_advantages(tensor([[NAN, -1.0, -3.0]]), True, 0.0), [[0.0, a, -a]])


# ---- T8: clipped policy loss -------------------------------------------------------------------


def one_token(grpo, ratio, A, **options):
    """Loss and gradient of a single token whose probability grew by `ratio`."""
    logp = tensor([[math.log(ratio)]], requires_grad=True)
    loss, metrics = grpo.grpo_loss(logp, tensor([[0.0]]), tensor([A]), tensor([[1]]), **options)
    loss.backward()
    return loss, logp.grad, metrics


@pytest.mark.task("T8", points=1)
def test_loss_at_ratio_one_is_minus_the_advantage(grpo):
    """Every token counts alike: -(1 + 1 - 1/2) / 3. Each gradient is -A / 3."""
    logps = tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    loss, _ = grpo.grpo_loss(logps, logps.detach(), tensor([1.0, -0.5]), tensor([[1, 1], [1, 0]]))
    loss.backward()
    same("loss at ratio 1", loss, -0.5)
    same("its gradient", logps.grad, [[-1 / 3, -1 / 3], [1 / 6, 0.0]])


@pytest.mark.task("T8", points=1)
def test_clip_is_asymmetric_and_stops_the_gradient(grpo):
    """Range [0.8, 1.28]. A good token gains nothing above it, a bad one nothing below it."""
    for ratio, A, right, gradient in (
        (1.1, 1.0, -1.1, -1.1), (1.5, 1.0, -1.28, 0.0), (0.5, 1.0, -0.5, -0.5),
        (0.9, -1.0, 0.9, 0.9), (0.5, -1.0, 0.8, 0.0), (1.5, -1.0, 1.5, 1.5),
    ):
        loss, grad, metrics = one_token(grpo, ratio, A)
        same(f"loss at ratio {ratio}, advantage {A}", loss, right)
        same(f"gradient at ratio {ratio}, advantage {A}", grad, [[gradient]])
        same(f"share clipped at ratio {ratio}, advantage {A}", metrics["clipped"], float(gradient == 0))
        same(f"mean ratio at ratio {ratio}", metrics["ratio"], ratio)


@pytest.mark.task("T8", points=1)
def test_dual_clip_bounds_the_loss_of_a_bad_token(grpo):
    """Where A < 0 the loss is at most c |A|, here 3 * 2; without a dual clip it is 5 * 2."""
    for options, right, gradient in (({}, 6.0, 0.0), ({"dual_clip": None}, 10.0, 10.0)):
        loss, grad, metrics = one_token(grpo, 5.0, -2.0, **options)
        same(f"loss at ratio 5, {options}", loss, right)
        same(f"gradient at ratio 5, {options}", grad, [[gradient]])
        same(f"share clipped, {options}", metrics["clipped"], float(gradient == 0))
    same("a good token has no such bound", one_token(grpo, 5.0, 2.0, clip_high=9.0)[0], -10.0)


@pytest.mark.task("T8", points=1)
def test_padding_takes_no_part_in_the_loss(grpo):
    """Whatever stands there: the loss is -0.5 and its gradient finite."""
    for poison in (INF, NAN, 1e4):
        logps = tensor([[-1.0, poison]], requires_grad=True)
        loss, metrics = grpo.grpo_loss(logps, tensor([[-1.0, -1.0]]), tensor([0.5]), tensor([[1, 0]]))
        loss.backward()
        same(f"loss beside {poison} in the padding", loss, -0.5)
        same(f"gradient beside {poison} in the padding", logps.grad, [[-0.5, 0.0]])
        same(f"mean ratio beside {poison} in the padding", metrics["ratio"], 1.0)


@pytest.mark.task("T8", points=1)
def test_huge_ratio_gives_no_nan(grpo):
    """exp(200) is infinite in float32; clipped, its gradient must be 0, not 0 * inf."""
    for A, right in ((1.0, -1.28), (-1.0, 3.0)):
        logp = tensor([[0.0]], requires_grad=True)
        loss, _ = grpo.grpo_loss(logp, tensor([[-200.0]]), tensor([A]), tensor([[1]]))
        loss.backward()
        same(f"loss at a huge ratio, advantage {A}", loss, right)
        same(f"gradient at a huge ratio, advantage {A}", logp.grad, [[0.0]])


# ---- T9: k3 penalty ----------------------------------------------------------------------------


@pytest.mark.task("T9", points=1)
def test_k3_by_hand(grpo):
    """d = log(ref / policy): log 2 gives 2 - log 2 - 1, -log 2 gives 1/2 + log 2 - 1, 0 gives 0."""
    policy, ref = tensor([0.25, 0.5, 0.5]).log(), tensor([0.5, 0.25, 0.5]).log()
    same("k3", grpo.k3(policy, ref), [1 - math.log(2), math.log(2) - 0.5, 0.0])


@pytest.mark.task("T9", points=1)
def test_k3_pulls_the_policy_to_its_reference(grpo):
    """The derivative in log policy is 1 - exp(d): -1 where the policy is half its reference, 1/2 where it is twice."""
    policy = tensor([0.25, 0.5]).log().requires_grad_()
    grpo.k3(policy, tensor([0.5, 0.25]).log()).sum().backward()
    same("gradient of k3", policy.grad, [-1.0, 0.5])


@pytest.mark.task("T9", points=1)
def test_k3_of_far_policies_is_finite(grpo):
    """exp(200) is infinite in float32, hence a bound on d: a bound of 20 is exp(20) - 21."""
    same("k3 at d = 200", grpo.k3(tensor([-200.0]), tensor([0.0])), [math.exp(20) - 21])


@pytest.mark.task("T9", points=1)
def test_k3_in_the_loss(grpo):
    """With an advantage of 0 only the penalty is left: 0.1 (1 - log 2 + log 2 - 1/2) / 2."""
    policy, ref = tensor([[0.25, 0.5]]).log(), tensor([[0.5, 0.25]]).log()
    loss, metrics = grpo.grpo_loss(policy, policy, tensor([0.0]), tensor([[1, 1]]), ref_logps=ref, kl_coef=0.1)
    same("loss with a penalty", loss, 0.025)
    same("its ref_kl", metrics["ref_kl"], 0.25)


# ---- T10: choice of demonstrations -------------------------------------------------------------


@pytest.mark.task("T10", points=1)
def test_demonstration_is_the_first_other_success(sdpo):
    same("demonstrations", sdpo.select_demonstrations([1, 1, 0, 1], "aaaa"), [1, 0, 0, 0])
    same("demonstrations of the last", sdpo.select_demonstrations([0, 0, 1], "aaa"), [2, 2, None])


@pytest.mark.task("T10", points=1)
def test_demonstration_comes_from_the_own_group(sdpo):
    """Groups needn't lie together, and their ids may come in a tensor."""
    same("demonstrations of two groups", sdpo.select_demonstrations([1, 0, 0, 1], ["a", "b", "a", "b"]), [None, 3, 0, None])
    same("group without a success", sdpo.select_demonstrations(tensor([0.0, 1.0, 0.0]), tensor([7, 8, 7])), [None, None, None])


@pytest.mark.task("T10", points=1)
def test_own_success_counts_if_allowed(sdpo):
    same("demonstrations, own ones too", sdpo.select_demonstrations([0, 1, 1], "aaa", exclude_self=False), [1, 1, 1])


@pytest.mark.task("T10", points=1)
def test_threshold_itself_is_a_success_and_nan_is_none(sdpo):
    same("rewards at the threshold", sdpo.select_demonstrations([0.5, 0.4, NAN], "aaa"), [None, 0, 0])
    same("a negative threshold", sdpo.select_demonstrations([NAN, -1.0, -3.0], "aaa", threshold=-2.0), [1, None, 1])


# ---- T11: the teacher's message ----------------------------------------------------------------


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.task("T11", points=1)
def test_teacher_reads_question_demonstration_and_feedback(sdpo):
    same("teacher's message", sdpo.teacher_messages([user("What?")], "It is B.", "not A"), [user(
        "What?\nCorrect solution:\n\nIt is B."
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\nnot A"
        "\n\nCorrectly solve the original question.")])


@pytest.mark.task("T11", points=1)
def test_only_the_last_user_message_is_rewritten(sdpo):
    """And the student's own chat stays as it was."""
    chat = [{"role": "system", "content": "S"}, user("Q1"), {"role": "assistant", "content": "A"}, user("Q2"),
            {"role": "assistant", "content": "prefill"}]
    before = [dict(message) for message in chat]
    after = sdpo.teacher_messages(chat, "D", template="{prompt}+{solution}", solution_template="{demonstration}")
    same("teacher's chat", after, [*before[:3], user("Q2+D"), before[4]])
    same("student's chat", chat, before)


@pytest.mark.task("T11", points=1)
def test_blank_insertions_are_left_out(sdpo):
    templates = {"template": "{prompt}{solution}{feedback}!", "solution_template": "[{demonstration}]",
                 "feedback_template": "<{feedback}>"}
    for demonstration, feedback, right in (
        ("D", None, "Q[D]!"), (None, "F", "Q<F>!"), (" \n", "F", "Q<F>!"), ("D", "", "Q[D]!"), (None, None, "Q"), ("", " ", "Q"),
    ):
        got = sdpo.teacher_messages([user("Q")], demonstration, feedback, **templates)
        same(f"message with {demonstration!r} and {feedback!r}", got, [user(right)])


@pytest.mark.task("T11", points=1)
def test_braces_in_any_text_are_only_text(sdpo):
    """Filled one after another, the question's own {feedback} would be taken for a place to fill."""
    got = sdpo.teacher_messages([user("Set {feedback}")], "d = {'a': 1} {prompt}", "KeyError: {k}",
                                template="{prompt}|{solution}|{feedback}", solution_template="{demonstration}",
                                feedback_template="{feedback}")
    same("message with braces", got, [user("Set {feedback}|d = {'a': 1} {prompt}|KeyError: {k}")])


# ---- T12: EMA and restart teacher --------------------------------------------------------------


class Two(nn.Module):
    """Two parameters, all of whose entries are `value`."""

    def __init__(self, value, dtype=float32):
        super().__init__()
        self.a, self.b = nn.Parameter(full((2,), value, dtype=dtype)), nn.Parameter(full((1,), value, dtype=dtype))


def set_to(model, value):
    with no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def followed(sdpo, kind, values, **options):
    """The teacher's three weights after each update, as the student takes `values`, the first at the start."""
    student = Two(values[0])
    teacher, history = sdpo.Teacher(student, kind, **options), []
    for value in values[1:]:
        teacher.update(set_to(student, value))
        history.append([*teacher.model.a.tolist(), *teacher.model.b.tolist()])
    return history


@pytest.mark.task("T12", points=1)
def test_ema_teacher_keeps_the_larger_part_of_itself(sdpo):
    """0.9 * 1 + 0.1 * 0, then 0.9 * 0.9: swapped, it would be 0.1 after one update."""
    same("EMA teacher", followed(sdpo, "ema", [1.0, 0.0, 0.0], rate=0.1), [[0.9] * 3, [0.81] * 3])


@pytest.mark.task("T12", points=1)
def test_restarted_teacher_is_copied_every_so_many_updates(sdpo):
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    history = followed(sdpo, "restart", values, every=3, rate=0.5)
    same("teacher restarted every 3", history, [[v] * 3 for v in (1.0, 1.0, 4.0, 4.0, 4.0, 7.0)])


@pytest.mark.task("T12", points=1)
def test_frozen_teachers_stay(sdpo):
    for kind in ("frozen", "trust_region"):
        same(f"{kind} teacher", followed(sdpo, kind, [1.0, 2.0, 3.0], rate=0.5, every=1), [[1.0] * 3] * 2)


@pytest.mark.task("T12", points=1)
def test_teacher_of_a_half_precision_student_loses_no_small_step(sdpo):
    """bfloat16 has 8 bits: 1 - 0.001 is 1 again. And the student is never touched."""
    student = Two(1.0, bfloat16)
    teacher = sdpo.Teacher(student, "ema", rate=0.001)
    for _ in range(100):
        teacher.update(set_to(student, 0.0))
    same("EMA teacher after 100 small steps", teacher.model.a.tolist(), [0.999**100] * 2)
    same("the student", [student.a.tolist(), student.a.requires_grad], [[0.0, 0.0], True])


# ---- T13: SDPO loss ----------------------------------------------------------------------------


def weighed(sdpo, divergence, ratios, mask, **options):
    """Loss, the gradients of divergence and log-probs, and metrics, where probabilities grew by `ratios`."""
    divergence = tensor(divergence, requires_grad=True)
    logps = tensor([[math.log(r) - 1 for r in row] for row in ratios], requires_grad=True)
    loss, metrics = sdpo.sdpo_loss(divergence, logps, full(logps.shape, -1.0), tensor(mask), **options)
    loss.backward()
    return loss, divergence.grad, logps.grad, metrics


@pytest.mark.task("T13", points=1)
def test_divergence_is_weighed_by_its_capped_importance(sdpo):
    """Weights 1.5 and min(4, 2): (1.5 * 0.2 + 2 * 0.4) / 2. The weight is a constant for the gradient."""
    loss, gradient, through_weight, metrics = weighed(sdpo, [[0.2, 0.4, 9.0]], [[1.5, 4.0, 1.0]], [[1, 1, 0]])
    same("SDPO loss", loss, 0.55)
    same("its gradient", gradient, [[0.75, 1.0, 0.0]])
    same("gradient through the weight", through_weight, None)
    same("mean divergence", metrics["divergence"], 0.3)
    same("mean importance", metrics["importance"], 1.75)


@pytest.mark.task("T13", points=1)
def test_every_token_counts_alike_over_the_whole_step(sdpo):
    """Rows of three and one: (1 + 2 + 3 + 8) / 4, not (2 + 8) / 2. With 10 tokens in the step: 14 / 10."""
    for options, right in (({}, 3.5), ({"total": 10}, 1.4)):
        loss, *_ = weighed(sdpo, [[1.0, 2.0, 3.0], [8.0, 5.0, 5.0]], [[1.0] * 3] * 2, [[1, 1, 1], [1, 0, 0]], **options)
        same(f"SDPO loss, {options}", loss, right)


@pytest.mark.task("T13", points=1)
def test_importance_can_be_left_out_or_capped_lower(sdpo):
    for cap, right in ((None, 0.3), (1.0, 0.3), (3.0, (1.5 * 0.2 + 3 * 0.4) / 2), (9.0, (1.5 * 0.2 + 4 * 0.4) / 2)):
        loss, *_ = weighed(sdpo, [[0.2, 0.4]], [[1.5, 4.0]], [[1, 1]], is_clip=cap)
        same(f"SDPO loss with cap {cap}", loss, right)


@pytest.mark.task("T13", points=1)
def test_tokens_without_a_target_take_no_part(sdpo):
    """Whatever stands there; and where none has a target, the loss is 0 with a gradient of 0."""
    for poison in (INF, NAN):
        loss, gradient, _, metrics = weighed(sdpo, [[0.2, poison]], [[1.0, 1.0]], [[1, 0]])
        same(f"SDPO loss beside {poison}", [loss.item(), metrics["divergence"]], [0.2, 0.2])
        same(f"its gradient beside {poison}", gradient, [[1.0, 0.0]])
    garbage = sdpo.sdpo_loss(tensor([[0.2, 0.1]]), tensor([[-1.0, INF]]), tensor([[-1.0, NAN]]), tensor([[1, 0]]))
    same("SDPO loss beside log-probs of padding", garbage[0], 0.2)
    loss, gradient, *_ = weighed(sdpo, [[0.2, 0.4]], [[1.0, 1.0]], [[0, 0]])
    same("SDPO loss without any target", [loss.item(), gradient.tolist()], [0.0, [[0.0, 0.0]]])


# ---- T14: forgetting and backward transfer -----------------------------------------------------

# Rows: base, then after each of three stages; columns: tasks.
MATRIX = [[0.9, 0.1, 0.2], [0.6, 0.3, 0.2], [0.8, 0.7, 0.1], [0.5, 0.9, 0.4]]


@pytest.mark.task("T14", points=1)
def test_forgetting_by_hand(evaluation):
    """Task 1: best of stages 1 and 2, 0.8, minus 0.5. Task 2: 0.7 - 0.9, a gain, counts below 0. The base's 0.9
    was never learnt here. Mean of 0.3 and -0.2."""
    same("forgetting", evaluation.continual_metrics(MATRIX)["forgetting"], 0.05)


@pytest.mark.task("T14", points=1)
def test_backward_transfer_by_hand(evaluation):
    """Task 1 was learnt to 0.6 and ends at 0.5; task 2 to 0.7, and ends at 0.9."""
    same("backward transfer", evaluation.continual_metrics(MATRIX)["backward_transfer"], 0.05)
    two = [[0.2, 0.1], [0.8, 0.1], [0.5, 0.7]]
    same("backward transfer of two tasks", evaluation.continual_metrics(two)["backward_transfer"], -0.3)


@pytest.mark.task("T14", points=1)
def test_one_stage_forgets_nothing(evaluation):
    """There is no earlier task; nor in a sequence of three of which only the first stage has ended."""
    for R in ([[0.2], [0.9]], MATRIX[:2]):
        metrics = evaluation.continual_metrics(R)
        same(f"{len(R) - 1} stage of {len(R[0])}", [metrics["forgetting"], metrics["backward_transfer"]], [0.0, 0.0])


# ---- T15: spectral shift and principal angles --------------------------------------------------


def turned(degrees, n=4):
    """The identity, with the plane of the first and last axis turned."""
    Q, angle = eye(n), math.radians(degrees)
    Q[0, 0] = Q[-1, -1] = math.cos(angle)
    Q[-1, 0], Q[0, -1] = math.sin(angle), -math.sin(angle)
    return Q


@pytest.mark.task("T15", points=1)
def test_principal_angles_of_a_known_turn(evaluation):
    """Span(e1, e2) against span(turned e1, e2): one direction is shared, the other turned."""
    for degrees in (30.0, 90.0, 0.0):
        angles = evaluation.principal_angles(eye(4)[:, :2], turned(degrees)[:, :2])
        same(f"principal angles of a turn by {degrees}", angles, [0.0, degrees], atol=1e-4)


@pytest.mark.task("T15", points=1)
def test_small_angles_are_not_lost(evaluation):
    """cos(0.001 degrees) is 1 in float32, but its sine isn't 0."""
    same("a small principal angle", evaluation.principal_angles(eye(4)[:, :1], turned(0.001)[:, :1]), [0.001], atol=1e-8)


@pytest.mark.task("T15", points=1)
def test_spectral_shift_by_hand(evaluation):
    """Singular values (4, 3) become (4, 1): |(0, -2)| / |(4, 3)| = 2 / 5. Nothing turns."""
    before, after = tensor([[4.0, 0.0], [0.0, 3.0]]), tensor([[4.0, 0.0], [0.0, -1.0]])
    drift = evaluation.matrix_drift(before, after, k=1)
    same("spectral shift", drift["spectral_shift"], 0.4)
    same("mean angle", drift["angle_mean"], 0.0, atol=1e-4)


@pytest.mark.task("T15", points=1)
def test_turned_matrix_keeps_its_spectrum(evaluation):
    """Turned from the left by 40 degrees, the left subspace of the two largest turns; turned from the right, it stays."""
    W = tensor([4.0, 3.0, 2.0, 1.0]).diag()
    for after, right in ((turned(40.0) @ W, [0.0, 20.0, 40.0]), (W @ turned(40.0), [0.0, 0.0, 0.0])):
        drift = evaluation.matrix_drift(W, after, k=2)
        got = [drift[key] for key in ("spectral_shift", "angle_mean", "angle_max")]
        same("shift, mean and largest angle", got, right, atol=1e-3)
