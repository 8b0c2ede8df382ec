"""The assignment's hidden tests: each task against a loop over plain Python floats, on random numbers.

The loops are written from the equations in the modules' headers, one number at a time; they share no
function with what they judge. TASK_SEED in the environment chooses the numbers. Students don't get this
file, and what they are told of a failure here is an error's class.
"""

import math
import os
import random

import pytest
from torch import float64, nn, no_grad, tensor

from grading import same

SEED = os.environ.get("TASK_SEED", "0")


def rng(name):
    return random.Random(f"{SEED}/{name}")


def grid(r, rows, columns, low=-3.0, high=3.0):
    return [[r.uniform(low, high) for _ in range(columns)] for _ in range(rows)]


def ragged_mask(r, rows, columns):
    """Rows of different lengths, the first full and the last one token long."""
    lengths = [columns, *(r.randint(1, columns) for _ in range(rows - 2)), 1]
    return [[int(j < n) for j in range(columns)] for n in lengths]


def double(x):
    return tensor(x, dtype=float64)


def softmax(z):
    e = [math.exp(x) for x in z]
    return [x / math.fsum(e) for x in e]


def kl(p, q):
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q))


# ---- kernels.py --------------------------------------------------------------------------------


@pytest.mark.task("T1", points=2, hidden=True)
def test_masked_mean_equals_a_loop(kernels):
    r = rng("masked mean")
    x, mask = grid(r, 4, 5), [[r.randint(0, 1) for _ in range(5)] for _ in range(4)]
    mask[1] = [0] * 5
    kept = [[a for a, m in zip(*pair) if m] for pair in zip(x, mask)]
    columns = [[x[i][j] for i in range(4) if mask[i][j]] for j in range(5)]
    mean = lambda values: math.fsum(values) / len(values) if values else 0.0
    same("masked mean", kernels.masked_mean(double(x), tensor(mask)), mean([a for row in kept for a in row]))
    same("masked mean of rows", kernels.masked_mean(double(x), tensor(mask), dim=1), [mean(row) for row in kept])
    same("masked mean of columns", kernels.masked_mean(double(x), tensor(mask), dim=0), [mean(c) for c in columns])


@pytest.mark.task("T2", points=2, hidden=True)
def test_logps_equal_a_loop(kernels):
    r = rng("log-probs")
    z, y, temperature = grid(r, 6, 7), [r.randrange(7) for _ in range(6)], r.uniform(0.4, 0.8)
    for T in (1.0, temperature, 1 / temperature):
        right = [math.log(softmax([a / T for a in row])[token]) for row, token in zip(z, y)]
        same("log-probs", kernels.token_logps(double(z), tensor(y), T), right)
        same("log-probs of more axes", kernels.token_logps(double([z, z]), tensor([y, y]), T), [right, right])


@pytest.mark.task("T3", points=2, hidden=True)
def test_entropy_equals_a_loop(kernels):
    z = grid(rng("entropy"), 6, 7)
    right = [-math.fsum(p * math.log(p) for p in softmax(row)) for row in z]
    same("entropy", kernels.token_entropy(double(z)), right)
    same("entropy of more axes", kernels.token_entropy(double([z, z])), [right, right])


def divergence(s, t, alpha):
    """D_alpha of two lists of probabilities."""
    if alpha in (0, 1):
        return kl(t, s) if alpha == 0 else kl(s, t)
    m = [(1 - alpha) * a + alpha * b for a, b in zip(s, t)]
    return (1 - alpha) * kl(s, m) + alpha * kl(t, m)


def slopes(value, z, step=1e-5):
    """Finite differences of value(z), z a list of lists."""
    def at(i, j, d):
        return value([[x + d * ((i, j) == (k, n)) for n, x in enumerate(row)] for k, row in enumerate(z)])
    return [[(at(i, j, step) - at(i, j, -step)) / (2 * step) for j in range(len(z[0]))] for i in range(len(z))]


def check_divergence(kernels, name, alphas, reference, **options):
    """Values and gradients of token_kl against reference(student probabilities, teacher probabilities, alpha)."""
    r = rng(name)
    z_s, z_t = grid(r, 3, 6), grid(r, 3, 6)
    for alpha in alphas:
        value = lambda z: [reference(softmax(a), softmax(b), alpha) for a, b in zip(z, z_t)]
        student = double(z_s).requires_grad_()
        got = kernels.token_kl(student, double(z_t), alpha, **options)
        got.sum().backward()
        same(f"{name} at alpha {alpha}", got, value(z_s))
        same(f"{name}'s gradient at alpha {alpha}", student.grad, slopes(lambda z: math.fsum(value(z)), z_s))


@pytest.mark.task("T4", points=2, hidden=True)
def test_both_kls_equal_a_loop(kernels):
    check_divergence(kernels, "KL", (0, 1), divergence)


@pytest.mark.task("T5", points=2, hidden=True)
def test_mixture_form_equals_a_loop(kernels):
    r = rng("alphas")
    check_divergence(kernels, "mixture form", (0.5, r.uniform(0.05, 0.45), r.uniform(0.55, 0.95)), divergence)


def top(p, s, k, tail):
    """The student's k likeliest words of a distribution p, and the rest in one bucket or left out."""
    order = sorted(range(len(s)), key=lambda v: -s[v])
    kept = [p[v] for v in order[:k]] + ([math.fsum(p[v] for v in order[k:])] if tail else [])
    return [x / math.fsum(kept) for x in kept]


@pytest.mark.task("T6", points=2, hidden=True)
def test_top_k_equals_a_loop(kernels):
    for k in (1, 3, 5):
        for tail in (True, False):
            if k > 1 or tail:                                    # one word alone is certain in both
                reference = lambda s, t, alpha: divergence(top(s, s, k, tail), top(t, s, k, tail), alpha)
                check_divergence(kernels, f"top {k}, tail {tail}", (0, 0.3, 1), reference, topk=k, tail=tail)


# ---- grpo.py -----------------------------------------------------------------------------------


@pytest.mark.task("T7", points=2, hidden=True)
def test_advantages_equal_a_loop(grpo):
    r = rng("advantages")
    rewards = grid(r, 4, 6, -1.0, 1.0)
    rewards[1] = [rewards[1][0]] * 6
    rewards[2][r.randrange(6)] = math.nan

    def loop(scale, eps):
        out = []
        for group in rewards:
            scored = [x for x in group if not math.isnan(x)]
            mean = math.fsum(scored) / len(scored)
            std = math.sqrt(math.fsum((x - mean) ** 2 for x in scored) / (len(scored) - 1))
            flat = min(scored) == max(scored)
            out.append([0.0 if flat or math.isnan(x) else (x - mean) / (std + eps if scale else 1.0) for x in group])
        return out

    for scale, eps in ((False, 1e-6), (True, 1e-6), (True, r.uniform(0.1, 0.5))):
        same("advantages", grpo.group_advantages(double(rewards), scale, eps), loop(scale, eps))


def policy_loss(logps, old, A, mask, low, high, dual, ref=None, kl_coef=0.0):
    """The loss of grpo.py's header, a token at a time; and the share of tokens whose gradient is cut."""
    total, count, cut = 0.0, sum(map(sum, mask)), 0
    for i, row in enumerate(mask):
        for j, m in enumerate(row):
            if m:
                rho = math.exp(logps[i][j] - old[i][j])
                clipped = min(max(rho, 1 - low), 1 + high)
                loss, stopped = -min(rho * A[i], clipped * A[i]), clipped * A[i] < rho * A[i]
                if A[i] < 0 and loss > -dual * A[i]:
                    loss, stopped = -dual * A[i], True
                cut += stopped
                if kl_coef:
                    d = ref[i][j] - logps[i][j]
                    loss += kl_coef * (math.exp(d) - d - 1)
                total += loss
    return total / count, cut / count


def check_policy_loss(grpo, name, **penalty):
    r = rng(name)
    N, T, low, high, dual = 6, 5, r.uniform(0.05, 0.3), r.uniform(0.35, 0.6), r.uniform(1.5, 2.5)
    logps, mask = grid(r, N, T, -2.0, 0.0), ragged_mask(r, N, T)
    old = [[x - r.uniform(-1.5, 1.5) for x in row] for row in logps]
    A = [r.choice((-1, 1)) * r.uniform(0.5, 1.5) for _ in range(N)]
    ref = [[x - r.uniform(-1.0, 1.0) for x in row] for row in logps]
    now = double(logps).requires_grad_()
    options = penalty | ({"ref_logps": double(ref)} if penalty else {}) | {"clip_low": low, "clip_high": high, "dual_clip": dual}
    loss, metrics = grpo.grpo_loss(now, double(old), double(A), tensor(mask), **options)
    loss.backward()
    value = lambda z: policy_loss(z, old, A, mask, low, high, dual, ref, **penalty)
    right, cut = value(logps)
    same(f"{name}", loss, right)
    same(f"{name}: gradient", now.grad, slopes(lambda z: value(z)[0], logps))
    same(f"{name}: share clipped", metrics["clipped"], cut)


@pytest.mark.task("T8", points=2, hidden=True)
def test_policy_loss_equals_a_loop(grpo):
    check_policy_loss(grpo, "clipped loss")


@pytest.mark.task("T9", points=2, hidden=True)
def test_policy_loss_with_penalty_equals_a_loop(grpo):
    r = rng("k3")
    policy, ref = grid(r, 1, 8, -4.0, 0.0)[0], grid(r, 1, 8, -4.0, 0.0)[0]
    same("k3", grpo.k3(double(policy), double(ref)), [math.exp(b - a) - (b - a) - 1 for a, b in zip(policy, ref)])
    check_policy_loss(grpo, "clipped loss with a penalty", kl_coef=r.uniform(0.1, 0.9))


# ---- sdpo.py -----------------------------------------------------------------------------------


@pytest.mark.task("T10", points=2, hidden=True)
def test_demonstrations_equal_a_loop(sdpo):
    r = rng("demonstrations")
    for _ in range(20):
        groups, rewards = [r.choice("abc") for _ in range(12)], [r.choice((0.0, 0.3, 0.6, 1.0, math.nan)) for _ in range(12)]
        threshold = r.choice((0.3, 0.6, 0.7))
        for exclude in (True, False):
            right = [None] * 12
            for i in range(12):
                for j in reversed(range(12)):
                    if groups[i] == groups[j] and rewards[j] >= threshold and not (exclude and i == j):
                        right[i] = j
            same("demonstrations", sdpo.select_demonstrations(rewards, groups, threshold, exclude), right)


@pytest.mark.task("T11", points=2, hidden=True)
def test_message_is_put_together_by_pieces(sdpo):
    r = rng("message")
    word = lambda: "".join(r.choice("abc{}% \n\\") for _ in range(6)) + "x"
    for _ in range(20):
        chat = [{"role": r.choice(("system", "user", "assistant")), "content": word()} for _ in range(4)]
        chat.insert(r.randrange(5), {"role": "user", "content": word()})
        before = [dict(m) for m in chat]
        demonstration, feedback = r.choice((None, word(), "\n")), r.choice((None, word(), " "))
        right = [dict(m) for m in chat]
        shown, heard = (bool(x and x.strip()) for x in (demonstration, feedback))
        for m in reversed(right):
            if m["role"] == "user":
                if shown or heard:
                    inserted = [f"D:{demonstration}" if shown else "", f"F:{feedback}" if heard else ""]
                    m["content"] = "<" + "|".join([m["content"], *inserted]) + ">"
                break
        got = sdpo.teacher_messages(chat, demonstration, feedback, template="<{prompt}|{solution}|{feedback}>",
                                    solution_template="D:{demonstration}", feedback_template="F:{feedback}")
        same("teacher's chat", got, right)
        same("student's chat", chat, before)


@pytest.mark.task("T12", points=2, hidden=True)
def test_teachers_equal_a_loop(sdpo):
    r = rng("teachers")
    rate, every, values = r.uniform(0.1, 0.4), r.randint(2, 4), [r.uniform(-1, 1) for _ in range(11)]
    for kind in ("frozen", "ema", "restart"):
        student = nn.Linear(1, 1, bias=False, dtype=float64)
        with no_grad():
            student.weight.fill_(values[0])
        teacher, mine = sdpo.Teacher(student, kind, rate=rate, every=every), values[0]
        for n, value in enumerate(values[1:], 1):
            with no_grad():
                student.weight.fill_(value)
            teacher.update(student)
            if kind == "ema":
                mine = (1 - rate) * mine + rate * value
            elif kind == "restart" and n % every == 0:
                mine = value
            same(f"{kind} teacher after {n} updates", teacher.model.weight.item(), mine)


@pytest.mark.task("T13", points=2, hidden=True)
def test_sdpo_loss_equals_a_loop(sdpo):
    r = rng("SDPO loss")
    N, T, cap = 5, 6, r.uniform(1.2, 2.5)
    d, logps, mask = grid(r, N, T, 0.0, 1.0), grid(r, N, T, -2.0, 0.0), ragged_mask(r, N, T)
    old = [[x - r.uniform(-1.5, 1.5) for x in row] for row in logps]
    tokens = [(i, j) for i in range(N) for j in range(T) if mask[i][j]]
    for is_clip in (cap, None):
        for total in (None, len(tokens) + 7):
            count = total or len(tokens)
            weight = lambda i, j: 1.0 if is_clip is None else min(math.exp(logps[i][j] - old[i][j]), is_clip)
            divergence, now = double(d).requires_grad_(), double(logps).requires_grad_()
            loss, metrics = sdpo.sdpo_loss(divergence, now, double(old), tensor(mask), is_clip, total)
            loss.backward()
            same("SDPO loss", loss, math.fsum(weight(i, j) * d[i][j] for i, j in tokens) / count)
            same("its gradient", divergence.grad, [[mask[i][j] * weight(i, j) / count for j in range(T)] for i in range(N)])
            same("its gradient through the weight", now.grad, None)
            same("mean importance", metrics["importance"], math.fsum(weight(i, j) for i, j in tokens) / count)


# ---- eval.py -----------------------------------------------------------------------------------


@pytest.mark.task("T14", points=2, hidden=True)
def test_matrix_numbers_equal_a_loop(evaluation):
    r = rng("matrix")
    for K in (2, 3, 5):
        R = [[r.random() for _ in range(K)] for _ in range(K + 1)]
        lost = learnt = 0.0
        for j in range(1, K):                                    # tasks counted from 1, as the stages are
            best = -1.0
            for i in range(1, K):
                best = R[i][j - 1] if R[i][j - 1] > best else best
            lost += best - R[K][j - 1]
            learnt += R[K][j - 1] - R[j][j - 1]
        got = evaluation.continual_metrics(R)
        same(f"forgetting over {K} tasks", got["forgetting"], lost / (K - 1))
        same(f"backward transfer over {K} tasks", got["backward_transfer"], learnt / (K - 1))


@pytest.mark.task("T15", points=2, hidden=True)
def test_angles_of_two_planes_equal_a_search(evaluation):
    """In the plane of two unit vectors each, the smallest angle is found by trying directions, a degree at a
    time and then finer; the largest from the area that one plane's unit square covers in the other."""
    r = rng("angles")
    dot = lambda a, b: math.fsum(x * y for x, y in zip(a, b))
    unit = lambda a: [x / math.sqrt(dot(a, a)) for x in a]

    def basis():
        a, b = unit([r.gauss(0, 1) for _ in range(4)]), [r.gauss(0, 1) for _ in range(4)]
        return a, unit([y - dot(a, b) * x for x, y in zip(a, b)])

    U, V = basis(), basis()
    M = [[dot(u, v) for v in V] for u in U]
    length = lambda angle: math.hypot(*(math.cos(angle) * M[0][j] + math.sin(angle) * M[1][j] for j in range(2)))
    best, step = max((math.radians(d) for d in range(180)), key=length), math.radians(1)
    while step > 1e-12:
        best, step = max((best - step, best, best + step), key=length), step / 2
    longest, area = length(best), abs(M[0][0] * M[1][1] - M[0][1] * M[1][0])
    right = [math.degrees(math.acos(longest)), math.degrees(math.acos(area / longest))]
    columns = lambda basis: double([list(row) for row in zip(*basis)])
    same("principal angles", evaluation.principal_angles(columns(U), columns(V)), right, rtol=1e-4)


@pytest.mark.task("T15", points=2, hidden=True)
def test_spectral_shift_of_known_spectra(evaluation):
    """Turned by random reflections from both sides, a matrix keeps the singular values that it was given."""
    r = rng("spectra")
    first, second = (sorted((r.uniform(1, 5) for _ in range(4)), reverse=True) for _ in range(2))

    def matrix(values):
        def reflection():
            v = [r.gauss(0, 1) for _ in range(4)]
            norm = math.fsum(x * x for x in v)
            return [[float(i == j) - 2 * v[i] * v[j] / norm for j in range(4)] for i in range(4)]
        P, Q = reflection(), reflection()
        return tensor([[math.fsum(P[i][n] * values[n] * Q[n][j] for n in range(4)) for j in range(4)] for i in range(4)])

    right = math.dist(first, second) / math.hypot(*first)
    same("spectral shift", evaluation.matrix_drift(matrix(first), matrix(second), k=2)["spectral_shift"], right, rtol=1e-4)
