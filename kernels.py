"""Token kernels: what a language model says about each token, and how far two models disagree.

Everything downstream is built from three numbers per token. Let z be the logits at one position,
p = softmax(z) the distribution over the next token, and y the token that was sampled:

    log-prob     log p(y)  = z_y - logsumexp(z)
    entropy      H(p)      = logsumexp(z) - sum_v p_v z_v
    divergence   D_alpha(s, t) between a student s and a teacher t:
                 alpha = 0       KL(t || s)                                  (forward KL)
                 alpha = 1       KL(s || t)                                  (reverse KL)
                 0 < alpha < 1   (1 - alpha) KL(s || m) + alpha KL(t || m),  m = (1 - alpha) s + alpha t

alpha = 0.5 is the Jensen-Shannon divergence, the paper's choice. The family jumps at its ends: as
alpha goes to 0 the mixed form goes to 0, while alpha = 0 itself is a full KL.

Shapes: the vocabulary has V words (a token is a word in its place), a hidden state H numbers, `...` is
any number of leading axes; where tokens are visited in chunks, they stand in one row of N.

Everything here is plain PyTorch on plain tensors, in float32 (or float64 if the input is), whatever
the logits' type: in bfloat16 a softmax over 512 equal logits sums to 0.988, and a divergence computed
from it can be negative. Two functions take hidden states instead of logits and visit the tokens in
chunks, since at T = 8192 tokens and V = 151,936 words one float32 copy of the logits is 5 GB and a
divergence makes a dozen of them: `fused_token_kl` makes its gradient in the forward pass, where the
logits are; `fused_token_logps`, whose loss isn't known there, makes the logits once more in backward.

Where we differ from the official code: the mass outside the top k is a logsumexp over the
complement; there it is log(1 - sum of the kept), which loses up to 4 nats in small tails.

In all five files a line of three hashes only marks what an assignment takes out (see README.md).

    python kernels.py        compares the plain and the fused form of both losses: time, memory, error
"""

import argparse
import functools
import math
import os
import time
import warnings
from types import SimpleNamespace

import torch
import torch.nn.functional as F


# ------------------------------------------------------------------------------------------------
# Masks and the one-token shift
# ------------------------------------------------------------------------------------------------


def masked_mean(x, mask, dim=None):
    """Mean of `x` where `mask` is 1; over everything, or along `dim`.

    Masked entries are replaced before the sum, so an infinity in the padding can't leak in
    (inf * 0 is NaN). An empty mask gives 0 that still carries a gradient of 0.

    Args:
        x: any shape. mask: same shape, 0/1 or bool. dim: axis to reduce, None for all.
    Returns:
        scalar, or `x`'s shape without `dim`.
    >>> masked_mean(torch.tensor([1., 2., 9.]), torch.tensor([1, 1, 0])).item()
    1.5
    """
    ### BEGIN SOLUTION T1
    mask = mask.bool()
    x = torch.where(mask, x, torch.zeros_like(x))
    total, count = (x.sum(), mask.sum()) if dim is None else (x.sum(dim), mask.sum(dim))
    return total / count.clamp(min=1)
    ### END SOLUTION


def predicting(x, length):
    """The positions of `x` (N, L, ...) that predict the last `length` tokens: (N, length, ...).

    A causal model's state at position i predicts token i + 1. This is the project's only one-token
    shift; wherever hidden states or logits meet tokens elsewhere, they are already aligned.
    """
    if not 0 < length < x.shape[1]:
        raise ValueError(f"predicting: length {length} must leave a state before each of its tokens, of {x.shape[1]}")
    return x[:, -length - 1 : -1]


# ------------------------------------------------------------------------------------------------
# One distribution: log-probability and entropy
# ------------------------------------------------------------------------------------------------


def _wide(dtype):
    """float32 at least: half types are widened, float64 stays (the gradient checks use it)."""
    return torch.promote_types(dtype, torch.float32)


def _upcast(x):
    return x.to(_wide(x.dtype))


def token_logps(logits, tokens, temperature=1.0):
    """Log-probability of each token under softmax(logits / temperature).

    Args:
        logits: (..., V), aligned: logits[i] predicts tokens[i] (see `predicting`).
        tokens: (...) integer ids. temperature: > 0, the one that the tokens were sampled at.
    Returns:
        (...) in nats, float32 or float64.
    >>> token_logps(torch.tensor([[0., 0.]]), torch.tensor([1])).exp().item()
    0.5
    """
    if temperature <= 0:
        raise ValueError(f"token_logps: temperature {temperature} must be above 0")
    ### BEGIN SOLUTION T2
    logits = _upcast(logits) / temperature                                # (..., V)
    chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)          # (...)
    return chosen - logits.logsumexp(-1)
    ### END SOLUTION


def token_entropy(logits):
    """Entropy in nats of softmax(logits): (..., V) -> (...). Divide by the temperature first.

    >>> round(token_entropy(torch.zeros(4)).item(), 4)  # log 4
    1.3863
    """
    ### BEGIN SOLUTION T3
    logits = _upcast(logits)
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
    ### END SOLUTION


# ------------------------------------------------------------------------------------------------
# Two distributions: the token divergence
# ------------------------------------------------------------------------------------------------


def _divergence(s, t, alpha):
    """D_alpha between log-distributions s and t, (..., K) -> (...): the header's equation, its two ends first."""
    ### BEGIN SOLUTION T4
    if alpha == 0:
        return (t.exp() * (t - s)).sum(-1)                                # KL(t || s)
    if alpha == 1:
        return (s.exp() * (s - t)).sum(-1)                                # KL(s || t)
    ### END SOLUTION
    ### BEGIN SOLUTION T5
    m = torch.logaddexp(s + math.log(1 - alpha), t + math.log(alpha))     # log of the mixture
    return (1 - alpha) * (s.exp() * (s - m)).sum(-1) + alpha * (t.exp() * (t - m)).sum(-1)
    ### END SOLUTION


def _buckets(s, t, index, tail):
    """Keep the words at `index` of both distributions; the rest becomes one bucket, or is dropped.

    Args:
        s, t: log-distributions (..., V). index: (..., k), 1 <= k < V.
    Returns:
        two log-distributions (..., k + 1) with a tail bucket, or (..., k) renormalised without.
    """
    ### BEGIN SOLUTION T6
    s_top, t_top = s.gather(-1, index), t.gather(-1, index)
    if not tail:
        return s_top.log_softmax(-1), t_top.log_softmax(-1)
    # The complement itself is summed: 1 - sum(kept) would round to 0 or below for a peaked model.
    s_rest = s.scatter(-1, index, -math.inf).logsumexp(-1, keepdim=True)  # (..., 1)
    t_rest = t.scatter(-1, index, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([s_top, s_rest], -1), torch.cat([t_top, t_rest], -1)
    ### END SOLUTION


def _check_divergence(name, alpha, topk, vocabulary):
    if not 0 <= alpha <= 1:
        raise ValueError(f"{name}: alpha {alpha} must lie in [0, 1]")
    if topk is not None and not 1 <= topk <= vocabulary:
        raise ValueError(f"{name}: topk {topk} must lie in 1..{vocabulary} (the vocabulary)")


def token_kl(student_logits, teacher_logits, alpha, topk=None, tail=True):
    """Divergence D_alpha of each token between student and teacher; no gradient to the teacher.

    Args:
        student_logits, teacher_logits: (..., V), finite, already divided by the temperature.
        alpha: 0 is KL(t || s), 1 is KL(s || t), between them the mixture form. The ends are not
            the limits of the middle: D_alpha goes to 0 as alpha does, D_0 is a full KL.
        topk: compare only on the student's k most likely tokens; None or V is the full vocabulary.
        tail: with topk, keep the rest as one bucket (True) or renormalise without it (False).
    Returns:
        (...) in nats, >= 0 up to rounding.
    Raises:
        ValueError: alpha outside [0, 1], topk outside 1..V, or shapes that differ.
    Source: SDPO (arXiv 2601.20802), whose code has this family; Denser != Better uses alpha = 0.5.
    >>> student, teacher = torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0])
    >>> round(token_kl(student, teacher, alpha=0).item(), 4)  # .7311 log(.7311/.5) + .2689 log(.2689/.5)
    0.1109
    """
    vocabulary = student_logits.shape[-1]
    _check_divergence("token_kl", alpha, topk, vocabulary)
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"token_kl: student {tuple(student_logits.shape)} and teacher "
            f"{tuple(teacher_logits.shape)} logits must have one shape"
        )
    s = _upcast(student_logits).log_softmax(-1)                           # (..., V)
    t = _upcast(teacher_logits.detach()).log_softmax(-1)                  # (..., V)
    if topk is not None and topk < vocabulary:
        index = s.detach().topk(topk, dim=-1).indices                     # (..., k): the student's, constants
        s, t = _buckets(s, t, index, tail)
    return _divergence(s, t, alpha)


def sampled_kl(logps, teacher_logps):
    """Reverse KL from the sampled token alone: log s(y) - log t(y), unbiased for KL(s || t).

    Its own derivative would be grad log s(y), whose mean over samples is zero: it teaches nothing.
    The gradient of the expectation is E[(log s(y) - log t(y)) grad log s(y)], so that is what
    flows back, while the value stays the log-ratio.

    Args:
        logps, teacher_logps: (...) log-probabilities of the same sampled tokens.
    Returns:
        (...) in nats; single values may be negative, their mean estimates the KL.
    """
    ratio = (logps - teacher_logps).detach()
    return ratio + ratio * (logps - logps.detach())


# ------------------------------------------------------------------------------------------------
# From hidden states, in chunks: no logits are kept
# ------------------------------------------------------------------------------------------------

# `fused_token_kl` and `fused_token_logps` are the two doors; what precedes them is one chunk's way. Of n of the N tokens,
#
#     z  = h W^T                  the logits of student and teacher, (n, V)                          _project
#     dz = w dD/dz                their loss and its derivative, by a formula, in z's own place      _divergence_core
#     dH = dz W,  dW += dz^T h    the gradients, which are all that is kept, (n, H) and (V, H)       _HeadGradient
#
# and the next chunk's logits take the place of these. `fused_token_kl` knows each token's weight w in the loss, so it does
# all that in the forward pass, and backward only multiplies by the loss's own gradient.


def _compute_dtype(x):
    """The type of matrix products here: autocast's where it is on, else the tensor's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _matmul(a, b, out, add=False):
    """out = a @ b, or out += a @ b; `out` is float32 even where a and b are half precision.

    On CUDA such a product keeps its float32 sums; on a CPU they are rounded to half precision first
    (a few percent of a gradient in bfloat16).
    """
    if a.dtype == out.dtype:
        out.addmm_(a, b, beta=int(add))
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=int(add), out=out)
    else:
        out.copy_(out + a @ b if add else a @ b)


def _project(hidden, weight, bias, out):
    """(n, H) -> logits (n, V) in `out`, over whatever stood there."""
    some = len(weight) if hidden.is_cuda else 512                          # words at once: a CPU's cache likes fewer
    for i in range(0, len(weight), some):
        _matmul(hidden, weight[i : i + some].t(), out[:, i : i + some])
    if bias is not None:
        out += bias


class _HeadGradient:
    """Gradients of hidden states, weight and bias, as far as each is wanted, gathered chunk by chunk from the logits'."""

    def __init__(self, wants, hidden, weight, bias):
        make = torch.empty_like if len(hidden) else torch.zeros_like       # the first chunk overwrites
        self.dH = make(hidden) if wants[0] else None                       # (N, H)
        self.dW = make(weight, dtype=_wide(weight.dtype)) if wants[1] else None            # (V, H): a sum, so in float32
        self.db = torch.zeros_like(bias, dtype=_wide(bias.dtype)) if wants[2] else None    # (V,)

    def add(self, start, dz, hidden, weight):
        """dz (n, V) of the tokens from `start` on, with their hidden states (n, H)."""
        dz = dz.to(weight.dtype)
        if self.dH is not None:
            self.dH[start : start + len(dz)] = dz @ weight
        if self.dW is not None:
            _matmul(dz.t(), hidden, self.dW, add=start > 0)
        if self.db is not None:
            self.db += dz.sum(0, dtype=self.db.dtype)


def _exp(x):
    """e^x. TorchInductor stores an exp that is used twice in a buffer of its own; an exp2 it makes again, which is faster."""
    return torch.exp2(x * (1 / math.log(2)))


def _cooled(z, temperature):
    """z / temperature. Not divided by 1, as TorchInductor guards a quotient's softmax against overflow, which takes time."""
    return z if temperature == 1 else z / temperature


def _gradient(s, t, alpha, topk, tail):
    """D_alpha of log-distributions s, t (n, V), and its derivative in the student's logits (n, V).

    Let S, T be what is compared: all words, or k words and a tail; p = exp S, q = exp T, and M the log of
    the mixture (1 - alpha) p + alpha q. The derivative of D in S, as if its entries were free, is

        R = -q  (alpha = 0)      p (S - T)  (alpha = 1)      (1 - alpha) p (S - M)  (between)

    up to a multiple of p, which drops out below: the masses p sum to 1, so the derivative in a bucket's
    logit is G = R - p sum(R). A word has its bucket's G to itself, or in the tail its share
    exp(s_v) / p_tail of it. (D is `_divergence`, written out since it shares its terms with R.)
    """
    index = None if topk is None else s.topk(topk, dim=-1).indices         # (n, k)
    S, T = (s, t) if topk is None else _buckets(s, t, index, tail)
    p, q = _exp(S), _exp(T)
    if alpha == 0:
        D, R = (q * (T - S)).sum(-1), -q
    elif alpha == 1:
        R = p * (S - T)
        D = R.sum(-1)
    else:
        # Cheaper than logaddexp, and as exact: where both p and q underflow, so do their terms.
        M = ((1 - alpha) * p + alpha * q).clamp(min=1e-38).log()
        R = (1 - alpha) * p * (S - M)
        D = R.sum(-1) + alpha * (q * (T - M)).sum(-1)
    G = R - p * R.sum(-1, keepdim=True)
    if topk is None:
        return D, G
    if not tail:
        return D, torch.zeros_like(s).scatter(-1, index, G)
    return D, (_exp(s - S[:, -1:]) * G[:, -1:]).scatter(-1, index, G[:, :-1])


@functools.lru_cache(maxsize=None)
def _divergence_core(alpha, topk, tail, sampled, temperature, is_clip, teacher_mix, compiled):
    """The work on one chunk of logits, with its constants closed over; compiled once for all lengths."""

    def core(z, z_teacher, tokens, weights, old_logps):                    # (n, V), (n, V), (n,), (n,), (n,)
        """z becomes the loss's derivative in it; returns loss, divergence, log-prob, entropy: (n,) each."""
        scaled, scaled_teacher = _cooled(z, temperature), _cooled(z_teacher, temperature)
        if teacher_mix:
            scaled_teacher = scaled_teacher.lerp(scaled, teacher_mix)
        s, t = scaled.log_softmax(-1), scaled_teacher.log_softmax(-1)
        y = tokens.unsqueeze(-1)
        logps, entropy = s.gather(-1, y).squeeze(-1), -(_exp(s) * s).sum(-1)
        if sampled:
            D = logps - t.gather(-1, y).squeeze(-1)
            G = D.unsqueeze(-1) * torch.zeros_like(s).scatter(-1, y, 1.0).sub(_exp(s))
        else:
            D, G = _gradient(s, t, alpha, topk, tail)
        if is_clip is not None:
            weights = weights * (logps - old_logps).exp().clamp(max=is_clip)
        z.copy_(G * (weights / temperature).unsqueeze(-1))
        return weights * D, D, logps, entropy

    return _compile(core) if compiled else core


def _compile(function):
    """`function` compiled for fixed shapes; where that fails, itself, and a warning once."""
    ready, tried = torch.compile(function, dynamic=False), False

    def attempt(*chunk):
        nonlocal ready, tried
        if tried:
            return ready(*chunk)
        tried = True
        try:
            return ready(*chunk)
        except torch.OutOfMemoryError:
            raise
        except Exception as e:  # no compiler here, or one that fails: its errors have no common base
            warnings.warn(f"token kernel: torch.compile failed ({type(e).__name__}); going on without it", stacklevel=2)
            ready = function
            return function(*chunk)

    return attempt


class _Chunks:
    """How N tokens are visited: `chunk` at once by matrix products, `block` at once by a core.

    A compiled core sees blocks of one length only, so that one graph serves every N: the last one
    reads past the end of its chunk, and what it makes there is dropped. On a CPU a block fits a cache.
    """

    def __init__(self, N, chunk, compiled, device):
        self.N, self.chunk, self.fill = N, chunk, compiled
        self.block = 16 if compiled and device.type == "cpu" else chunk
        self.rows = -(-min(chunk, N) // self.block) * self.block if compiled else min(chunk, N)   # whole blocks

    def buffer(self, weight, dtype):
        """Room for the logits of a chunk: (chunk, V), a few rows more where blocks don't divide it.

        On a CPU a gap of 48 numbers, which nothing reads, follows each row: rows a power of two apart share few sets of its
        cache, and the products take a tenth longer.
        """
        V, gap = len(weight), 48 if weight.device.type == "cpu" else 0
        return torch.empty(self.rows, V + gap, dtype=_wide(dtype), device=weight.device)[:, :V]

    def filled(self, *per_token):
        """(N,) tensors, with a block of zeros behind them for a last one that reads too far."""
        return [F.pad(x, (0, self.block)) if self.fill else x for x in per_token]

    def __iter__(self):
        """(start, length) of each chunk."""
        return ((i, min(self.chunk, self.N - i)) for i in range(0, self.N, self.chunk))

    def blocks(self, n):
        """(start, tokens that count, tokens to hand over) of each block in a chunk of n."""
        for j in range(0, n, self.block):
            kept = min(self.block, n - j)
            yield j, kept, self.block if self.fill else kept


class _FusedTokenKL(torch.autograd.Function):
    """The weighted sum of divergences; forward makes the gradients too, backward only scales them."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, weights, tokens, old_logps,
                core, chunks, dtype):
        gradient = _HeadGradient(ctx.needs_input_grad, hidden, weight, bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        hidden, weight, teacher_hidden, teacher_weight = (x.to(dtype) for x in (hidden, weight, teacher_hidden, teacher_weight))
        z, z_teacher = chunks.buffer(weight, dtype), chunks.buffer(weight, dtype)          # (chunk, V): all logits there are
        per_token, logged = chunks.filled(tokens, weights, old_logps), []
        for i, n in chunks:
            _project(hidden[i : i + n], weight, bias, z[:n])
            _project(teacher_hidden[i : i + n], teacher_weight, teacher_bias, z_teacher[:n])
            for j, kept, rows in chunks.blocks(n):
                numbers = core(z[j : j + rows], z_teacher[j : j + rows], *(x[i + j : i + j + rows] for x in per_token))
                logged.append([x[:kept] for x in numbers])
            gradient.add(i, z[:n], hidden[i : i + n], weight)                              # z is now dloss/dz
        ctx.save_for_backward(gradient.dH, gradient.dW, gradient.db)
        loss, *out = [torch.cat(x) for x in zip(*logged)] or [z.new_zeros(0) for _ in range(4)]
        ctx.mark_non_differentiable(*out)
        return loss.sum(), *out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, *_):
        scaled = [
            None if g is None else torch.mul(g, grad, out=torch.empty_like(g, dtype=dtype))
            for g, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        ]
        return *scaled, *[None] * 9


def fused_token_kl(
    student_hidden, student_head, teacher_hidden, teacher_head, weights, tokens, *,
    alpha, topk=None, temperature=1.0, chunk=1024,
    tail=True, sampled=False, old_logps=None, is_clip=None, teacher_mix=0.0, compiled=None,
):
    """Weighted sum of token divergences straight from hidden states, a chunk of tokens at a time.

        loss = sum_i  w_i min(exp(logp_i - old_i), is_clip) D_alpha(s_i, t_i)

    With the weights known beforehand, the gradient is made where the logits are: each chunk is projected
    once, gives dz (see `_gradient`), that gives dH = dz W and dW += dz^T h, and the next chunk takes its
    place. Nothing of size (N, V) is made, nothing is computed twice, and `chunk` doesn't change the result.

    Args:
        student_hidden, teacher_hidden: (N, H), the states that predict `tokens` (N,), sampled ids.
        student_head, teacher_head: the output projections: `weight` (V, H), perhaps `bias` (V,).
        weights: (N,) of each token, constants (mask over the batch's token count).
        alpha, topk, tail: as in `token_kl`. temperature: divides both logits.
        sampled: `sampled_kl` in the divergence's place (needs alpha = 1).
        old_logps, is_clip: (N,) log-probs at sampling time and the importance weight's cap (None: no weight).
        teacher_mix: teacher logits become lerp(teacher, student, teacher_mix) (trust region).
        compiled: use torch.compile; None: on CUDA.
    Returns:
        loss (scalar, with gradient), and detached (N,): divergence, log-prob, student entropy.
    Raises:
        ValueError: as `token_kl`; two vocabularies; temperature <= 0; sampled with another alpha;
            is_clip without old_logps.
    """
    vocabulary = student_head.weight.shape[0]
    _check_divergence("fused_token_kl", alpha, topk, vocabulary)
    if teacher_head.weight.shape[0] != vocabulary:
        raise ValueError(f"fused_token_kl: student and teacher have {vocabulary} and {teacher_head.weight.shape[0]} words")
    if temperature <= 0:
        raise ValueError(f"fused_token_kl: temperature {temperature} must be above 0")
    if sampled and alpha != 1:
        raise ValueError(f"fused_token_kl: the sampled token alone estimates KL(s || t): alpha must be 1, not {alpha}")
    if is_clip is not None and old_logps is None:
        raise ValueError("fused_token_kl: is_clip needs old_logps")
    compiled = student_hidden.is_cuda if compiled is None else compiled
    topk = None if topk == vocabulary else topk
    core = _divergence_core(alpha, topk, tail, sampled, temperature, is_clip, teacher_mix, compiled)
    dtype = _compute_dtype(student_hidden)
    with torch.autocast(student_hidden.device.type, enabled=False):
        return _FusedTokenKL.apply(
            student_hidden, student_head.weight, getattr(student_head, "bias", None),
            teacher_hidden, teacher_head.weight, getattr(teacher_head, "bias", None),
            weights, tokens, weights if old_logps is None else old_logps,
            core, _Chunks(len(tokens), chunk, compiled, tokens.device), dtype,
        )


@functools.lru_cache(maxsize=None)
def _logps_cores(temperature, compiled):
    """What a chunk of logits z (n, V) gives forward, and what its log-probs' gradient gives z backward."""

    def forward(z, tokens):
        s = _cooled(z, temperature).log_softmax(-1)
        return s.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), -(_exp(s) * s).sum(-1)

    def backward(z, tokens, grad):                                         # z becomes the loss's derivative in it
        s = _cooled(z, temperature).log_softmax(-1)                        # TorchInductor fails on softmax here (PyTorch 2.13)
        one_hot = torch.zeros_like(s).scatter(-1, tokens.unsqueeze(-1), 1.0)
        z.copy_((grad / temperature).unsqueeze(-1) * (one_hot - _exp(s)))  # d log p_y / dz = one_hot(y) - p

    return tuple(map(_compile, (forward, backward))) if compiled else (forward, backward)


class _FusedTokenLogps(torch.autograd.Function):
    """Log-probs and entropies; the loss isn't known in forward, so backward makes the logits once more."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, tokens, cores, chunks, dtype):
        ctx.save_for_backward(hidden, weight, bias, tokens)
        ctx.settings = cores[1], chunks, dtype
        hidden, weight, logged = hidden.to(dtype), weight.to(dtype), []
        z, (tokens,) = chunks.buffer(weight, dtype), chunks.filled(tokens)
        for i, n in chunks:
            _project(hidden[i : i + n], weight, bias, z[:n])
            for j, kept, rows in chunks.blocks(n):
                logged.append([x[:kept] for x in cores[0](z[j : j + rows], tokens[i + j : i + j + rows])])
        logps, entropy = [torch.cat(x) for x in zip(*logged)] or [z.new_zeros(0) for _ in range(2)]
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        (hidden, weight, bias, tokens), (core, chunks, dtype) = ctx.saved_tensors, ctx.settings
        gradient = _HeadGradient(ctx.needs_input_grad, hidden, weight, bias)
        h, W, per_token = hidden.to(dtype), weight.to(dtype), chunks.filled(tokens, grad)
        z = chunks.buffer(W, dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for i, n in chunks:
                _project(h[i : i + n], W, bias, z[:n])
                for j, _, rows in chunks.blocks(n):
                    core(z[j : j + rows], *(x[i + j : i + j + rows] for x in per_token))
                gradient.add(i, z[:n], h[i : i + n], W)                    # z is now dloss/dz
        dW, db = (None if g is None else g.to(x.dtype) for g, x in ((gradient.dW, weight), (gradient.db, bias)))
        return gradient.dH, dW, db, *[None] * 4


def fused_token_logps(hidden, head, tokens, *, temperature=1.0, chunk=1024, compiled=None):
    """Log-probs and entropies straight from hidden states, a chunk of tokens at a time.

    Args:
        hidden: (N, H), the states that predict `tokens`. head: `weight` (V, H), perhaps `bias`.
        tokens: (N,) ids. temperature: divides the logits. chunk: tokens projected at once.
        compiled: use torch.compile; None: on CUDA.
    Returns:
        log-probs (N,) with gradient, entropies (N,) without.
    Raises:
        ValueError: a temperature of 0 or less.
    """
    if temperature <= 0:
        raise ValueError(f"fused_token_logps: temperature {temperature} must be above 0")
    compiled = hidden.is_cuda if compiled is None else compiled
    dtype = _compute_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        return _FusedTokenLogps.apply(
            hidden, head.weight, getattr(head, "bias", None), tokens,
            _logps_cores(temperature, compiled), _Chunks(len(tokens), chunk, compiled, tokens.device), dtype,
        )


# ------------------------------------------------------------------------------------------------
# python kernels.py [--bench]: the forms of both losses side by side
# ------------------------------------------------------------------------------------------------


class _Problem:
    """Hidden states and heads with a spread of about 2 nats, a teacher near its student: as in training."""

    def __init__(self, N, V, H, device, dtype):
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(shape, generator=generator)      # noqa: E731
        student, weight = draw(N, H), 2 * draw(V, H) / H**0.5
        self.exact = student, weight, student + 0.1 * draw(N, H), weight
        self.tokens = torch.randint(V, (N,), generator=generator).to(device)
        self.weights = torch.full((N,), 1 / N, device=device)
        self.to = lambda dtype: [x.to(device, dtype, copy=True) for x in self.exact]
        self.h, self.W, self.h_t, self.W_t = self.to(dtype)
        self.leaves = self.h.requires_grad_(), self.W.requires_grad_()

    def gradients(self, form, dtype=None):
        """Of a form (h, W, h_t, W_t) -> loss; in another type, on tensors of its own."""
        h, W, *teacher = (self.h, self.W, self.h_t, self.W_t) if dtype is None else self.to(dtype)
        h, W = h.requires_grad_(), W.requires_grad_()
        return torch.autograd.grad(form(h, W, *teacher), [h, W])


def _divergence_forms(problem, alpha, chunk):
    """{name: form} of the mean divergence; the first is the definition."""
    weights, tokens = problem.weights, problem.tokens

    def plain(h, W, h_t, W_t):
        return (token_kl(F.linear(h, W), F.linear(h_t, W_t), alpha) * weights.to(h.dtype)).sum()

    def fused(h, W, h_t, W_t, compiled=False):
        heads = SimpleNamespace(weight=W), SimpleNamespace(weight=W_t)
        return fused_token_kl(h, heads[0], h_t, heads[1], weights, tokens, alpha=alpha, chunk=chunk, compiled=compiled)[0]

    forms = {"plain": plain, "plain, compiled": torch.compile(plain, dynamic=False),
             "fused": fused, "fused, compiled": functools.partial(fused, compiled=True)}
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        liger = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=alpha, compiled=True, chunk_size=chunk)
        forms["liger, compiled"] = lambda h, W, h_t, W_t: liger(h, W, h_t, W_t, tokens)
    except ImportError:
        pass
    return forms


def _logps_forms(problem, chunk):
    """{name: form} of the mean log-prob. PyTorch's gives that one number, ours each token's and its entropy."""
    tokens = problem.tokens

    def plain(h, W, *_):
        return -token_logps(F.linear(h, W), tokens).mean()

    def fused(h, W, *_, compiled=False):
        return -fused_token_logps(h, SimpleNamespace(weight=W), tokens, chunk=chunk, compiled=compiled)[0].mean()

    forms = {"plain": plain, "fused": fused, "fused, compiled": functools.partial(fused, compiled=True)}
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
        forms["torch's own"] = lambda h, W, *_: F.linear_cross_entropy(h, W, tokens, options=options)
    return forms


def _peak_bytes(run, device):
    """The most memory that `run` holds beyond what was there before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")                        # the profiler talks to stderr otherwise
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    peak = now = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def _table(title, problem, forms, products, device, rounds):
    """Print milliseconds, peak memory, ratios and gradient error of each form, medians of paired rounds.

    `products` runs the forms' matrix products alone: the floor.
    """
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    runs = {name: functools.partial(problem.gradients, form) for name, form in forms.items()} | {"matrix products": products}
    times, errors, exact = {name: [] for name in runs}, {}, problem.gradients(next(iter(forms.values())), torch.float64)
    for i in range(rounds + 1):                                            # the first round compiles
        for name, run in runs.items():
            sync()
            start = time.perf_counter()
            grads = run()
            sync()
            if i:
                times[name].append(time.perf_counter() - start)
            elif name in forms:
                errors[name] = max(((g - e).abs().max() / e.abs().max()).item() for g, e in zip(grads, exact))
    ms = {name: 1000 * sorted(t)[len(t) // 2] for name, t in times.items()}
    ours = ms.get("fused, compiled", ms["fused"])
    print(f"\n{title}\n{'form':<18}{'ms':>8}{'peak MB':>10}{'/ ours':>9}{'/ floor':>9}{'gradient error':>16}")
    for name, run in runs.items():
        error = f"{errors[name]:.1e}" if name in errors else ""
        ratios = f"{ms[name] / ours:>9.2f}{ms[name] / ms['matrix products']:>9.2f}"
        print(f"{name:<18}{ms[name]:>8.0f}{_peak_bytes(run, device) / 1e6:>10.1f}{ratios}{error:>16}")


def bench(N, V, H, alpha=0.5, chunk=128, device="cpu", dtype=torch.float32, rounds=9, only=None):
    """Both losses with their gradients, every form of them that is installed or named in `only`."""
    problem = _Problem(N, V, H, device, dtype)
    h, W, h_t, W_t = (x.detach() for x in (problem.h, problem.W, problem.h_t, problem.W_t))
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    about = f"N={N} tokens, V={V} words, H={H}, {str(dtype)[6:]}, chunk {chunk}, {where}"

    def products(teacher):
        z = h @ W.t()
        return (h_t @ W_t.t() if teacher else None), z @ W, z.t() @ h

    for title, forms, teacher in ((f"D_{alpha}", _divergence_forms(problem, alpha, chunk), True),
                                  ("log-probs", _logps_forms(problem, chunk), False)):
        forms = {name: form for name, form in forms.items() if only is None or name in only}
        _table(f"{title}, {about}", problem, forms, functools.partial(products, teacher), device, rounds)


def main(argv=None):
    """python kernels.py: a small comparison; --bench: the full one."""
    parser = argparse.ArgumentParser(description="Compare the forms of the token divergence and of the log-probs.")
    parser.add_argument("--bench", action="store_true", help="compiled forms and peers too; minutes")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sizes", nargs=3, type=int, metavar=("N", "V", "H"), action="append", help="problem sizes")
    options = parser.parse_args(argv)
    if not options.bench:
        bench(256, 16_384, 64, chunk=64, rounds=1, only=("plain", "fused"))
        print("\nThe same numbers. The fused form never keeps an (N, V) tensor: it makes the gradient where the logits are.")
        return
    cuda = options.device == "cuda"
    for N, V, H in options.sizes or ([(8192, 151_936, 2560)] if cuda else [(512, 32_768, 256), (2048, 32_768, 256)]):
        bench(N, V, H, chunk=1024 if cuda else 128, device=options.device, dtype=torch.bfloat16 if cuda else torch.float32)


if __name__ == "__main__":
    main()
