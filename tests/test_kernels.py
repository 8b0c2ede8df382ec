"""kernels.py against hand-computed values, finite differences, and loops over math.exp and math.log.

The reference below is written from the definitions (DESIGN.md), in plain Python floats, one token
at a time. It shares no line and no library function with the code that it judges.
"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import (
    _divergence_core, fused_token_kl, fused_token_logps, masked_mean, predicting, sampled_kl, token_entropy, token_kl, token_logps,
)

ALPHAS = [0, 0.3, 0.5, 1]
SUPPORTS = [(None, True), (3, True), (3, False)]                           # topk, tail


# ---- The reference: plain Python, float64 ------------------------------------------------------


def softmax(z):
    e = [math.exp(x - max(z)) for x in z]
    return [x / math.fsum(e) for x in e]


def kl(p, q):
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q) if a > 0)


def reference_kl(student, teacher, alpha, topk=None, tail=True):
    """D_alpha of one token from two lists of logits."""
    s, t = softmax(student), softmax(teacher)
    if topk is not None and topk < len(s):
        order = sorted(range(len(s)), key=lambda v: -s[v])
        kept, rest = order[:topk], order[topk:]
        buckets = lambda p: [p[v] for v in kept] + ([math.fsum(p[v] for v in rest)] if tail else [])
        s, t = ([x / math.fsum(buckets(p)) for x in buckets(p)] for p in (s, t))
    if alpha in (0, 1):
        return kl(t, s) if alpha == 0 else kl(s, t)
    m = [(1 - alpha) * a + alpha * b for a, b in zip(s, t)]
    return (1 - alpha) * kl(s, m) + alpha * kl(t, m)


def project(h, W):
    return [sum(a * b for a, b in zip(h, row)) for row in W]


def reference_fused(
    h, W, teacher_h, teacher_W, weights, tokens, old, at, *,
    alpha, topk=None, tail=True, temperature=1.0, sampled=False, is_clip=None, teacher_mix=0.0,
):
    """Loss and per-token (divergence, log-prob, entropy); what is constant for the gradient is taken at `at`."""
    loss, logged = 0.0, []
    for i, y in enumerate(tokens):
        z, z_at = ([x / temperature for x in project(hidden[i], head)] for hidden, head in ((h, W), at))
        teacher = [x / temperature for x in project(teacher_h[i], teacher_W)]
        teacher = [(1 - teacher_mix) * a + teacher_mix * b for a, b in zip(teacher, z_at)]
        logp, logp_at, logp_teacher = (math.log(softmax(x)[y]) for x in (z, z_at, teacher))
        if sampled:                                                        # value: log-ratio; gradient: ratio grad logp
            D = (logp_at - logp_teacher) * (1 + logp - logp_at)
        else:
            D = reference_kl(z, teacher, alpha, topk, tail)
        importance = 1.0 if is_clip is None else min(math.exp(logp_at - old[i]), is_clip)
        loss += weights[i] * importance * D
        logged.append((D, logp, -sum(p * math.log(p) for p in softmax(z))))
    return loss, logged


def normals(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- Means and the shift -----------------------------------------------------------------------


def test_masked_mean_over_everything_and_along_an_axis():
    x, mask = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert masked_mean(x, mask).item() == pytest.approx(7 / 3)             # (1 + 2 + 4) / 3
    assert masked_mean(x, mask, dim=-1).tolist() == [1.5, 4.0]             # (1 + 2) / 2, 4 / 1
    assert masked_mean(x, mask, dim=0).tolist() == [2.5, 2.0, 0.0]         # (1 + 4) / 2, 2 / 1, nothing


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_masked_mean_of_nothing_is_zero_with_zero_gradient(dim):
    """Not NaN (0 / 0), and connected: a distributed run needs a gradient from every rank."""
    x = torch.ones(2, 3, requires_grad=True)
    mean = masked_mean(x, torch.zeros(2, 3), dim)
    mean.sum().backward()
    assert mean.abs().sum() == 0 and x.grad.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_masked_mean_ignores_what_stands_in_the_padding(poison):
    """inf * 0 is NaN, so multiplying by the mask isn't enough, in the value or in the gradient."""
    x = torch.tensor([2.0, poison], requires_grad=True)
    mean = masked_mean(x, torch.tensor([1, 0]))
    mean.backward()
    assert mean.item() == 2.0 and x.grad.tolist() == [1.0, 0.0]


def test_predicting_takes_the_positions_before_the_last_tokens():
    """Position i predicts token i + 1: tokens 3 and 4 are predicted at positions 2 and 3."""
    x = torch.arange(5).expand(2, 5)
    assert predicting(x, 2).tolist() == [[2, 3]] * 2
    assert predicting(x.unsqueeze(-1), 4).shape == (2, 4, 1)
    for length in (0, 5):                                                  # nothing predicts the first token
        with pytest.raises(ValueError, match="length"):
            predicting(x, length)


# ---- Log-probability and entropy ---------------------------------------------------------------


def test_token_logps_by_hand_at_two_temperatures():
    # logits log 1, log 3: probabilities 1/4, 3/4; at temperature 1/2 they are squared: 1/10, 9/10.
    logits, tokens = torch.tensor([[0.0, math.log(3)]]), torch.tensor([1])
    assert token_logps(logits, tokens).exp().item() == pytest.approx(0.75)
    assert token_logps(logits, tokens, 0.5).exp().item() == pytest.approx(0.9)
    with pytest.raises(ValueError, match="temperature"):
        token_logps(logits, tokens, 0.0)


def test_token_entropy_by_hand_and_at_its_extremes():
    # probabilities 1/4, 3/4: (1/4) log 4 + (3/4) log(4/3) = 0.346574 + 0.215762
    assert token_entropy(torch.tensor([0.0, math.log(3)])).item() == pytest.approx(0.562335, abs=1e-6)
    assert token_entropy(torch.full((8,), 7.0)).item() == pytest.approx(math.log(8))
    assert token_entropy(torch.tensor([60.0, -60.0])).item() == pytest.approx(0, abs=1e-6)


def test_logps_and_entropy_of_bfloat16_are_computed_in_float32():
    """In bfloat16 the log of 1/512 and the sum of 512 probabilities are off by a percent."""
    logits = torch.zeros(1, 512, dtype=torch.bfloat16)
    for value in (-token_logps(logits, torch.tensor([3])), token_entropy(logits)):
        assert value.dtype == torch.float32 and value.item() == pytest.approx(math.log(512), abs=1e-5)


# ---- The token divergence ----------------------------------------------------------------------


@pytest.mark.parametrize("alpha, right", [(0, 1.002104), (0.1, 0.086497), (0.5, 0.230645), (0.9, 0.092674), (1, 1.101868)])
def test_kern_01_divergence_between_its_ends(alpha, right):
    """Which KL stands at which end, and which distribution gets which weight."""
    student, teacher = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.1, 0.3, 0.6]).log()
    assert token_kl(student, teacher, alpha).item() == pytest.approx(right, abs=2e-6)
    assert token_kl(student, student, alpha).item() == pytest.approx(0, abs=1e-7)


def test_kern_01_divergence_jumps_at_its_ends():
    """The limit of the mixture form is 0 on both sides; the ends themselves are full KLs."""
    student, teacher = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.1, 0.3, 0.6]).log()
    for end, near in ((0, 1e-4), (1, 1 - 1e-4)):
        assert token_kl(student, teacher, near) < 1e-3 < 1 < token_kl(student, teacher, end)


@pytest.mark.parametrize("topk, tail", SUPPORTS + [(1, True), (6, True), (7, True), (7, False)])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_divergence_equals_the_loop_in_value_and_gradient(alpha, topk, tail):
    s, t = normals(5, 7, scale=2).requires_grad_(), normals(5, 7, seed=1, scale=2)
    right = [reference_kl(a, b, alpha, topk, tail) for a, b in zip(s.tolist(), t.tolist())]
    assert token_kl(s, t, alpha, topk, tail).tolist() == pytest.approx(right, rel=1e-9)
    assert torch.autograd.gradcheck(lambda x: token_kl(x, t, alpha, topk, tail), s)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_divergence_properties(alpha):
    """Never negative, mirrored when both roles and weights swap (0.5: symmetric), blind to constants."""
    s, t = normals(200, 9, scale=3), normals(200, 9, seed=1, scale=3)
    d = token_kl(s, t, alpha)
    assert d.min() > 1e-4
    torch.testing.assert_close(d, token_kl(t, s, 1 - alpha))
    torch.testing.assert_close(d, token_kl(s + 5, t - 3, alpha))
    assert 0 < alpha < 1 and d.max() <= math.log(2) or alpha in (0, 1) and d.max() > math.log(2)
    # Merging tokens into a bucket can only lose information, and fewer buckets lose more.
    fine, coarse = token_kl(s, t, alpha, topk=6), token_kl(s, t, alpha, topk=2)
    assert (coarse <= fine + 1e-12).all() and (fine <= d + 1e-12).all() and (coarse < d).any()


def test_kern_02_tail_bucket_with_everything_kept():
    """k = V leaves no tail: log(1 - 1) must not appear."""
    student = torch.tensor([0.0, 0.0], requires_grad=True)
    loss = token_kl(student, torch.tensor([1.0, 0.0]), 0.0, topk=2, tail=True)
    loss.backward()
    # t = (.7311, .2689), s = (.5, .5): loss .7311 log(.7311/.5) + .2689 log(.2689/.5), gradient s - t
    assert loss.item() == pytest.approx(0.110944, abs=1e-5)
    assert student.grad.tolist() == pytest.approx([-0.2311, 0.2311], abs=1e-4)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("tail", [True, False])
def test_kern_02_tail_bucket_is_finite_where_the_kept_mass_rounds_to_one(alpha, tail):
    rows = normals(2000, 8).float(), normals(2000, 8, seed=1).float(), 8
    peak = torch.zeros(1, 100).index_fill(1, torch.tensor([0]), 30.0)      # kept mass is exactly 1.0 in float32
    for s, t, k in (rows, (peak, peak.roll(1, 1), 2), (peak, peak, 2)):
        s = s.clone().requires_grad_()
        d = token_kl(s, t, alpha, k, tail)
        d.sum().backward()
        assert d.isfinite().all() and d.min() >= -1e-6 and s.grad.isfinite().all()


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("gap", [4, 8, 16, 22])
def test_small_tails_keep_their_precision_in_float32(gap, alpha):
    """Student tails from 1e-1 to 3e-9: log(1 - kept) is off by nats there, a sum over the rest isn't."""
    s, t = [float(gap), gap - 0.5] + [0.0] * 8, [1.0, 0.5] + [0.1 * v for v in range(8)]
    for student, teacher in ((s, t), (t, s)):
        value = token_kl(torch.tensor(student), torch.tensor(teacher), alpha, topk=2)
        assert value.item() == pytest.approx(reference_kl(student, teacher, alpha, 2), rel=1e-5)


@pytest.mark.parametrize("topk, tail", SUPPORTS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_extreme_logits_give_finite_values_and_gradients(alpha, topk, tail):
    """Logits of +-60 put e^-120 beside 1: below float32, so only logarithms can carry it."""
    s = torch.tensor([[60.0, -60.0, 0.0, 30.0, -30.0]], requires_grad=True)
    t = torch.tensor([[-60.0, 60.0, 0.0, -30.0, 30.0]])
    d = token_kl(s, t, alpha, topk, tail)
    d.backward()
    assert d.item() == pytest.approx(reference_kl(s.tolist()[0], t.tolist()[0], alpha, topk, tail), rel=1e-5)
    assert s.grad.isfinite().all()


def test_kern_04_bfloat16_divergence_of_equal_distributions_is_zero():
    """In bfloat16 512 equal probabilities sum to 0.988, and the KL comes out as -0.0115."""
    a, b = torch.zeros(512, dtype=torch.bfloat16), torch.zeros(512)
    for alpha in ALPHAS:
        assert token_kl(a, b, alpha).item() == pytest.approx(0, abs=1e-6)
        assert token_kl(b, a, alpha).item() == pytest.approx(0, abs=1e-6)
        s, t = normals(30).bfloat16(), normals(30, seed=1).bfloat16()      # exact numbers, of which float64 knows the answer
        assert token_kl(s, t, alpha, 3).item() == pytest.approx(reference_kl(s.tolist(), t.tolist(), alpha, 3), rel=1e-4)


def test_teacher_gets_no_gradient():
    s, t = normals(2, 5).requires_grad_(), normals(2, 5, seed=1).requires_grad_()
    token_kl(s, t, 0.5, topk=2).sum().backward()
    assert t.grad is None and s.grad.abs().sum() > 0


@pytest.mark.parametrize("change, named", [
    ({"alpha": -0.1}, "alpha"), ({"alpha": 1.1}, "alpha"), ({"alpha": math.nan}, "alpha"),
    ({"topk": 0}, "topk"), ({"topk": 6}, "topk"), ({"teacher_logits": torch.zeros(2, 4)}, "shape"),
    ({"teacher_logits": torch.zeros(5)}, "shape"),
])
def test_divergence_refuses_impossible_settings_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        token_kl(**{"student_logits": torch.zeros(2, 5), "teacher_logits": torch.zeros(2, 5), "alpha": 0.5, **change})


def test_sampled_kl_has_the_value_and_the_expected_gradient_of_reverse_kl():
    """Enumerated over all tokens: sum_y s(y) * estimate(y) is KL(s || t), and so is its gradient."""
    z, teacher = [1.0, 0.0, -1.0, 0.5], [0.0, 2.0, 0.5, -1.0]
    s, t = softmax(z), softmax(teacher)
    logits = torch.tensor(z, dtype=torch.float64, requires_grad=True)
    estimates = sampled_kl(logits.log_softmax(-1), torch.tensor(teacher, dtype=torch.float64).log_softmax(-1))
    expected = (torch.tensor(s, dtype=torch.float64) * estimates).sum()    # the sampling itself has no gradient
    expected.backward()
    assert estimates.tolist() == pytest.approx([math.log(a / b) for a, b in zip(s, t)])
    assert expected.item() == pytest.approx(kl(s, t))
    # d KL(s || t) / dz_v = s_v (log(s_v / t_v) - KL)
    assert logits.grad.tolist() == pytest.approx([a * (math.log(a / b) - kl(s, t)) for a, b in zip(s, t)])


# ------------------------------------------------------------------------------------------------
# From hidden states, in chunks
# ------------------------------------------------------------------------------------------------

N, H, V = 7, 3, 6                                                          # chunk 3: the last one holds one token
SETTINGS = [dict(alpha=a, topk=k, tail=tail) for a in ALPHAS for k, tail in SUPPORTS] + [
    dict(alpha=0.5, topk=6), dict(alpha=0, topk=6), dict(alpha=0.5, temperature=0.7), dict(alpha=0, topk=3, temperature=1.6), dict(alpha=0.5, is_clip=1.2),
    dict(alpha=0.5, teacher_mix=0.4), dict(alpha=1, sampled=True, temperature=0.7),
    dict(alpha=1, sampled=True, is_clip=1.2, teacher_mix=0.4, temperature=1.6),
    dict(alpha=0.3, topk=3, is_clip=0.9, teacher_mix=0.4, temperature=0.7),
]


def head(W, b=None):
    """An output projection, as torch.nn.Linear has it."""
    return SimpleNamespace(weight=W, bias=b)


def fused_inputs():
    weights = torch.tensor([0.1, 0.2, 0.0, 0.3, 0.1, 0.2, 0.1], dtype=torch.float64)
    tokens, old = torch.tensor([0, 5, 2, 2, 4, 1, 3]), normals(N, seed=5, scale=0.5) - math.log(V)
    return normals(N, H), normals(V, H, seed=1), normals(N, H, seed=2), normals(V, H, seed=3), weights, tokens, old


def run_fused(h, W, teacher_h, teacher_W, weights, tokens, old, **settings):
    return fused_token_kl(h, head(W), teacher_h, head(teacher_W), weights, tokens, old_logps=old, **settings)


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(f"{k}={v}" for k, v in s.items()))
def test_fused_equals_the_loop_and_its_finite_differences(settings, chunk):
    """Value, logs, and the gradients of hidden states and head, with constants held constant."""
    h, W, *others = fused_inputs()
    leaves = h.clone().requires_grad_(), W.clone().requires_grad_()
    loss, *logged = run_fused(*leaves, *others, chunk=chunk, **settings)
    loss.backward()
    at, rest = (h.tolist(), W.tolist()), [x.tolist() for x in others]
    right, right_logged = reference_fused(*at, *rest, at, **settings)
    assert loss.item() == pytest.approx(right, rel=1e-9)
    for ours, theirs in zip(logged, zip(*right_logged)):
        assert not ours.requires_grad and ours.tolist() == pytest.approx(list(theirs), rel=1e-9)
    for which, leaf in enumerate(leaves):
        for index in list(torch.cartesian_prod(*map(torch.arange, leaf.shape)))[::2]:
            sides = []
            for step in (1e-5, -1e-5):
                moved = [h.clone(), W.clone()]
                moved[which][tuple(index)] += step
                sides.append(reference_fused(*(x.tolist() for x in moved), *rest, at, **settings)[0])
            slope = (sides[0] - sides[1]) / 2e-5
            assert leaf.grad[tuple(index)].item() == pytest.approx(slope, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("chunk", [1, 3, 4, 10, 64])
@pytest.mark.parametrize("kept, right", [(10, 5.5), (8, 4.5)])
def test_kern_03_chunk_length_changes_no_result(chunk, kept, right):
    """Ten tokens whose divergences are 1..10: a mean of chunk means would give 6.17, their sum 18.5."""
    values = torch.arange(1, 11, dtype=torch.float64)
    # Two words, logits = hidden states. Student (1/2, 1/2); teacher gives word 0 e^-v / 2: log-ratio v.
    student = torch.zeros(10, 2, dtype=torch.float64, requires_grad=True)
    teacher = torch.stack([(-values).exp() / 2, 1 - (-values).exp() / 2], -1).log()
    weights = (torch.arange(10) < kept).double() / kept
    loss, divergence, *_ = fused_token_kl(
        student, head(torch.eye(2).double()), teacher, head(torch.eye(2).double()), weights, torch.zeros(10, dtype=torch.long),
        alpha=1, sampled=True, chunk=chunk,
    )
    loss.backward()
    assert loss.item() == pytest.approx(right) and divergence.tolist() == pytest.approx(values.tolist())
    # gradient: weight * v * d log s(0) = (1 - 1/2, -1/2)
    torch.testing.assert_close(student.grad, (weights * values)[:, None] * torch.tensor([0.5, -0.5], dtype=torch.float64))


def test_fused_with_a_tied_head_and_a_bias_reaches_every_parameter():
    """The output projection is often the embedding itself: both uses must add up in its gradient."""
    _, _, teacher_h, teacher_W, weights, tokens, _ = fused_inputs()

    def loss(E, b, fused):
        h = E[tokens.flip(0)].tanh()
        if fused:
            return fused_token_kl(h, head(E, b), teacher_h, head(teacher_W), weights, tokens, alpha=0.5, topk=3, chunk=3)[0]
        return (weights * token_kl(F.linear(h, E, b), F.linear(teacher_h, teacher_W), 0.5, 3)).sum()

    leaves = normals(V, H, seed=8).requires_grad_(), normals(V, seed=9).requires_grad_()
    for ours, plain in zip(*(torch.autograd.grad(loss(*leaves, fused), leaves) for fused in (True, False))):
        torch.testing.assert_close(ours, plain)
    assert torch.autograd.gradcheck(lambda E, b: loss(E, b, True), leaves)


def test_fused_with_no_tokens_is_a_zero_that_reaches_the_parameters():
    W = normals(V, H).requires_grad_()
    nothing, none = torch.zeros(0, H, dtype=torch.float64), torch.zeros(0, dtype=torch.long)
    loss, *logged = fused_token_kl(nothing, head(W), nothing, head(W), torch.zeros(0), none, alpha=0.5, topk=3)
    loss.backward()
    assert loss.item() == 0 and W.grad.abs().sum() == 0 and [len(x) for x in logged] == [0, 0, 0]


class Largest(TorchDispatchMode):
    """Watches every operation, forward and backward, for the largest tensor that it makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            self.elements = max(self.elements, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


@pytest.mark.parametrize("method", ["sdpo", "grpo", "plain"])
def test_fused_makes_no_tensor_of_all_logits_and_keeps_less_than_one(method):
    """What autograd keeps is smaller than one (N, V) tensor, and no operation makes more than a chunk of it."""
    tokens, words, chunk, kept = 64, 500, 16, {}
    h, W = normals(tokens, 2).requires_grad_(), normals(words, 2, seed=1).requires_grad_()
    others = 2 * h.detach(), head(W.detach()), torch.ones(tokens), torch.zeros(tokens, dtype=torch.long)

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            if method == "sdpo":
                loss = fused_token_kl(h, head(W), *others, alpha=0.5, chunk=chunk)[0]
            elif method == "grpo":
                loss = fused_token_logps(h, head(W), others[-1], chunk=chunk)[0].sum()
            else:                                                          # the plain form, to show that the count counts
                loss = token_kl(F.linear(h, W), F.linear(others[0], W), 0.5).sum()
        loss.backward()
    fused = method != "plain"
    assert (sum(kept.values()) < tokens * words) == fused
    rows = chunk if fused else tokens
    assert rows * words <= largest.elements <= rows * (words + 48)         # a CPU's rows of logits have a gap behind them


@pytest.mark.parametrize("settings", [dict(alpha=0.5), dict(alpha=0, topk=3, temperature=0.7, is_clip=1.2, teacher_mix=0.4)], ids=str)
def test_compiled_kernel_equals_the_eager_one(settings):
    """One graph for all lengths: the last chunk is filled up, and the filling must not show."""
    results = []
    for compiled in (False, True):
        h, W, *others = fused_inputs()
        leaves = h.requires_grad_(), W.requires_grad_()
        loss, *logged = run_fused(*leaves, *others, chunk=4, compiled=compiled, **settings)
        results.append([loss, *logged, *torch.autograd.grad(3 * loss, leaves)])
    for eager, fast in zip(*results):
        torch.testing.assert_close(fast, eager)


@pytest.mark.parametrize("topk", [None, 3])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_fused_passes_gradcheck_where_the_chunk_does_not_divide_the_tokens(alpha, topk):
    h, W, *others = fused_inputs()

    def loss(h, W):
        return run_fused(h, W, *others, alpha=alpha, topk=topk, chunk=3)[0]

    assert torch.autograd.gradcheck(loss, (h.requires_grad_(), W.requires_grad_()))


def test_one_compiled_graph_serves_seven_lengths_and_equals_the_loop():
    """Blocks of one length: neither a new N nor a short last block may compile again."""
    torch._dynamo.reset()
    _divergence_core.cache_clear()
    torch._dynamo.utils.counters.clear()
    for tokens in (1, 2, 15, 16, 17, 40, 64):
        h, t = normals(tokens, H), normals(tokens, H, seed=1)
        W, words = normals(V, H, seed=2), torch.arange(tokens) % V
        weights = torch.full((tokens,), 0.5, dtype=torch.float64)
        loss, *_ = fused_token_kl(h, head(W), t, head(W), weights, words, alpha=0.3, chunk=32, compiled=True)
        right = [0.5 * reference_kl(project(a, W.tolist()), project(b, W.tolist()), 0.3) for a, b in zip(h.tolist(), t.tolist())]
        assert loss.item() == pytest.approx(math.fsum(right), rel=1e-9)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def from_logits(z, teacher, weights, *, alpha, topk=None, compiled=False):
    """The fused divergence of given logits (an identity head) in float32, with their gradient."""
    z = torch.tensor(z, dtype=torch.float32, requires_grad=True)
    eye, n = head(torch.eye(z.shape[1])), len(z)
    loss, divergence, *_ = fused_token_kl(
        z, eye, torch.tensor(teacher, dtype=torch.float32), eye, torch.tensor(weights), torch.zeros(n, dtype=torch.long),
        alpha=alpha, topk=topk, chunk=2, compiled=compiled,
    )
    loss.backward()
    return loss, divergence, z.grad


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("alpha, topk", [(0, None), (0.5, None), (1, None), (0.5, 2)])
def test_fused_extremes_are_finite_and_right(alpha, topk, compiled):
    """Logits of +-60 against their opposites, equal distributions, and a row of weight 0 that says the most."""
    far, near = [60.0, -60.0, 0.0, 30.0, -30.0], [1.0, 0.5, 0.0, -0.5, 0.2]
    rows, teacher = [far, near, near, far], [far[::-1], near, near[::-1], [-x for x in far]]
    loss, divergence, grad = from_logits(rows, teacher, [0.25, 0.25, 0.5, 0.0], alpha=alpha, topk=topk, compiled=compiled)
    right = [reference_kl(s, t, alpha, topk) for s, t in zip(rows, teacher)]
    assert divergence.tolist() == pytest.approx(right, rel=1e-5, abs=1e-6)
    assert loss.item() == pytest.approx(0.25 * right[0] + 0.5 * right[2], rel=1e-5, abs=1e-6)
    assert grad.isfinite().all()
    assert grad[1].abs().max() < 1e-7 and grad[3].abs().max() == 0         # nothing to learn from an equal; nothing counts


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("gap", [4, 8, 16, 20])
def test_fused_tails_down_to_1e_8_keep_their_precision(gap, alpha):
    s, t = [float(gap), gap - 0.5] + [0.0] * 8, [1.0, 0.5] + [0.1 * v for v in range(8)]
    for student, teacher in ((s, t), (t, s)):
        _, divergence, _ = from_logits([student], [teacher], [1.0], alpha=alpha, topk=2)
        assert divergence.item() == pytest.approx(reference_kl(student, teacher, alpha, 2), rel=1e-5)


@pytest.mark.parametrize("kind", ["autocast", "bfloat16"])
def test_fused_in_bfloat16_stays_near_float64_and_keeps_the_weights_type(kind):
    """bfloat16 products, float32 everything else; float32 weights get float32 gradients under autocast."""
    h, W, teacher_h, teacher_W, weights, tokens, _ = fused_inputs()
    exact = [x.clone().requires_grad_() for x in (h, W)]
    right = fused_token_kl(exact[0], head(exact[1]), teacher_h, head(teacher_W), weights, tokens, alpha=0.5, chunk=3)[0]
    right.backward()
    dtype = torch.float32 if kind == "autocast" else torch.bfloat16
    h, W, teacher_h, teacher_W = (x.to(dtype) for x in (h, W, teacher_h, teacher_W))
    leaves = h.requires_grad_(), W.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
        loss, *logged = fused_token_kl(
            leaves[0], head(leaves[1]), teacher_h, head(teacher_W), weights.float(), tokens, alpha=0.5, chunk=3)
        logps, _ = fused_token_logps(leaves[0], head(leaves[1]), tokens, chunk=3)
    assert loss.dtype == torch.float32 and all(x.dtype == torch.float32 for x in (*logged, logps))
    assert loss.item() == pytest.approx(right.item(), rel=0.05)
    loss.backward()
    for ours, theirs in zip(leaves, exact):
        assert ours.grad.dtype == dtype
        assert (ours.grad - theirs.grad).norm() < 0.05 * theirs.grad.norm()


@pytest.mark.filterwarnings("error:token kernel")
@pytest.mark.parametrize("options", [
    {"alpha": 0}, {"alpha": 0.3}, {"alpha": 1}, {"alpha": 0.5, "topk": 3}, {"alpha": 0.5, "topk": 3, "tail": False},
    {"alpha": 1, "sampled": True}, {"alpha": 0.5, "teacher_mix": 0.3}], ids=str)
def test_every_core_compiles_at_a_vocabulary_of_a_thousand(options):
    """A core that the compiler refuses falls back with a warning; few words hide what fails with many."""
    draw = lambda *shape, seed: normals(*shape, seed=seed).float()
    h, W, teacher = draw(5, 4, seed=1), draw(1000, 4, seed=2), draw(5, 4, seed=3)
    tokens, weights, old = torch.arange(5) * 199, torch.full((5,), 0.2), torch.full((5,), -7.0)
    results = []
    for compiled in (False, True):
        x, w = h.clone().requires_grad_(), W.clone().requires_grad_()
        loss, *_ = fused_token_kl(x, head(w), teacher, head(W), weights, tokens, chunk=4, compiled=compiled,
                                  old_logps=old, is_clip=2.0, **options)
        logps, _ = fused_token_logps(x, head(w), tokens, temperature=0.8, chunk=4, compiled=compiled)
        results.append((loss, logps, *torch.autograd.grad(loss + logps @ weights, (x, w))))
    for eager, ours in zip(*results):
        torch.testing.assert_close(ours, eager)


def test_without_a_compiler_it_warns_once_and_goes_on(monkeypatch):
    def broken(function, **_):
        def call(*args):
            raise RuntimeError("no C++ compiler")
        return call

    monkeypatch.setattr(torch, "compile", broken)
    _divergence_core.cache_clear()
    with pytest.warns(UserWarning, match="torch.compile failed") as warned:
        losses = [run_fused(*fused_inputs(), alpha=0.5, chunk=3, compiled=compiled)[0].item() for compiled in (True, True, False)]
    _divergence_core.cache_clear()
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-12) and len(warned) == 1


def test_a_second_backward_gives_the_same_gradients_again():
    h, W, *others = fused_inputs()
    loss, *_ = run_fused(h.requires_grad_(), W, *others, alpha=0.5, chunk=3)
    first, second = (torch.autograd.grad(c * loss, h, retain_graph=True)[0] for c in (3, 6))
    torch.testing.assert_close(2 * first, second)


def test_fused_refuses_a_sampled_divergence_other_than_reverse_kl():
    with pytest.raises(ValueError, match="alpha"):
        run_fused(*fused_inputs(), alpha=0.5, sampled=True)


def test_fused_refuses_an_importance_cap_without_the_old_log_probs():
    """There is no importance weight without them; anything else put in their place is a silent error."""
    with pytest.raises(ValueError, match="old_logps"):
        run_fused(*fused_inputs()[:-1], None, alpha=0.5, is_clip=2.0)


@pytest.mark.parametrize("chunk, compiled", [(1, False), (3, False), (64, False), (4, True)])
def test_fused_token_logps_equal_the_plain_ones(chunk, compiled):
    h, W, *_, tokens, _ = fused_inputs()
    h, W = h.requires_grad_(), W.requires_grad_()
    ours, entropy = fused_token_logps(h, head(W), tokens, temperature=0.7, chunk=chunk, compiled=compiled)
    plain = token_logps(F.linear(h, W), tokens, 0.7)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(entropy, token_entropy(F.linear(h, W) / 0.7).detach())
    upstream = normals(N, seed=7)                                          # the loss's gradient on each log-prob
    for a, b in zip(torch.autograd.grad(ours @ upstream, (h, W)), torch.autograd.grad(plain @ upstream, (h, W))):
        torch.testing.assert_close(a, b)
    assert not entropy.requires_grad
