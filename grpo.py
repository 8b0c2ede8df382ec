"""GRPO: sample a group of answers to each prompt, and push towards those that beat their siblings.

For each of P prompts the policy samples G responses (N = P G in all, T tokens long at most); a verifier
gives each a reward r. Then, with mean and std taken inside the group of the G siblings, pi_old the policy
that sampled, and rho_t = exp(log pi(y_t) - log pi_old(y_t)) per token,

    advantage   A     = r - mean(r)                      [ / (std(r) + eps)  if scale_by_std ]
    token loss  l_t   = -min( rho_t A, clip(rho_t, 1 - low, 1 + high) A )
                        and, where A < 0, at most -c A                               (dual clip)
                        + kl_coef (exp(d_t) - d_t - 1),  d_t = log pi_ref - log pi   (k3)
    loss        token_mean:     sum over all response tokens / their number in the optimizer step
                sequence_mean:  mean over each response's tokens, then over the responses

No value network, one number of supervision per response. It is the baseline of *Denser != Better*,
which asks whether SDPO's supervision of every token (sdpo.py) is worth having in a long run of tasks.

Where we differ from the official configuration: nothing in the loss; advantages aren't divided by
the std there either (as in Dr. GRPO). A reward of NaN means "not scored": it takes no part in the
group's statistics and its advantage is 0.

    python grpo.py           one group becomes advantages, and advantages become a gradient
    python grpo.py --bench   tokens per second of the three rollout engines and of model.generate
"""

import argparse
import contextlib
import functools
import logging
import os
import sys
import time
from dataclasses import dataclass

import torch

from kernels import masked_mean, token_logps


# ------------------------------------------------------------------------------------------------
# Prompts
# ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def control_tokens(tokenizer):
    """The texts that a tokenizer reads as its own signs, such as <|im_end|>."""
    return [t.content for t in getattr(tokenizer, "added_tokens_decoder", {}).values() if t.special and len(t.content) > 1]


def encode(tokenizer, messages, **template):
    """Token ids of a chat, ending where the assistant's answer begins.

    Only the template ends a turn: where a row or a response spells such a sign, a space is put in.

    Args:
        messages: [{"role": ..., "content": ...}, ...]. template: extra arguments of the tokenizer's
            chat template, such as enable_thinking=False.
    Returns:
        list of ids.
    """
    for sign in control_tokens(tokenizer):
        if any(sign in m["content"] for m in messages):
            messages = [m | {"content": m["content"].replace(sign, f"{sign[0]} {sign[1:]}")} for m in messages]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **template
    )


def left_pad(sequences, pad_id, device=None):
    """Lists of ids -> ids (N, L) and mask (N, L), padded on the left so that all end together."""
    length = max(map(len, sequences))
    ids = torch.tensor([[pad_id] * (length - len(s)) + list(s) for s in sequences], device=device)
    mask = torch.tensor([[0] * (length - len(s)) + [1] * len(s) for s in sequences], device=device)
    return ids, mask


# ------------------------------------------------------------------------------------------------
# Rollouts: G sampled responses to each of P prompts
# ------------------------------------------------------------------------------------------------


class RolloutError(RuntimeError):
    """Responses that didn't come, told in one line. They aren't counted as empty answers: that would teach nonsense."""


@dataclass
class Rollouts:
    """N = P * G sampled responses; row i answers prompt i // G."""

    prompts: list                  # P lists of prompt ids
    response_ids: torch.Tensor     # (N, T) sampled ids, padded on the right
    mask: torch.Tensor             # (N, T) bool: sampled tokens, the end token among them
    logps: torch.Tensor | None     # (N, T) log-probs at the sampling temperature, before cuts, 0 in the padding; see `rollout`
    truncated: torch.Tensor        # (N,) bool: ran into max_new_tokens before an end token
    texts: list                    # N decoded responses, without special tokens

    def __len__(self):
        return len(self.texts)


def stop_ids(model, tokenizer):
    """The ids that end a response: the tokenizer's end token and the model's own list."""
    own = model.generation_config.eos_token_id
    own = own if isinstance(own, list) else [own]
    return sorted({i for i in [tokenizer.eos_token_id, *own] if i is not None})


@contextlib.contextmanager
def evaluating(model):
    """Dropout off and no gradients inside the block; the model's mode is put back after it."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def sample(logits, temperature, top_p=1.0, top_k=0, drawn=None):
    """One token for each row and its log-prob at this temperature, before top-p or top-k cut.

    Args:
        logits: (N, V). temperature: 0 takes the most likely token (log-probs then at 1).
        drawn: (N, 1) float64 in [0, 1), the random number of each row; None draws them.
    Returns:
        tokens (N,), log-probs (N,).
    """
    logits = logits.float() / (temperature or 1.0)
    if not temperature:
        tokens = logits.argmax(-1)
        return tokens, token_logps(logits, tokens)
    kept = logits
    if top_k:
        floor = kept.topk(min(top_k, kept.shape[-1])).values[:, -1:]
        kept = kept.masked_fill(kept < floor, -torch.inf)
    if top_p < 1:
        probabilities, order = kept.softmax(-1).sort(descending=True)
        outside = probabilities.cumsum(-1) - probabilities >= top_p        # the mass above it suffices
        kept = kept.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    # Inverse of the distribution function: one random number a row, where multinomial draws one a word
    # (half of a small model's time on a CPU). The first word whose cumulated mass exceeds it is taken.
    mass = kept.softmax(-1).cumsum(-1, dtype=torch.float64)                # (N, V)
    drawn = torch.rand(len(mass), 1, dtype=torch.float64, device=mass.device) if drawn is None else drawn
    tokens = torch.searchsorted(mass, drawn * mass[:, -1:], right=True).squeeze(-1).clamp(max=mass.shape[-1] - 1)
    return tokens, token_logps(logits, tokens)


@torch.no_grad()
def _decode(model, prompts, group_size, max_new_tokens, pad_id, ends, drawn, **sampling):
    """Prefill each prompt once, repeat its cache for the group, then sample token by token.

    Rows that have ended are dropped from the cache, so the last long response doesn't pay for all.

    Args:
        prompts: P lists of ids. ends: ids that end a response. drawn, sampling: see `sample`; drawn is (N, T), T =
            max_new_tokens.
    Returns:
        ids (N, T), their log-probs (N, T), lengths (N,).
    """
    ids, mask = left_pad(prompts, pad_id, model.device)                    # (P, L)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    cache = out.cache
    cache.batch_repeat_interleave(group_size)
    logits = out.logits[:, -1].repeat_interleave(group_size, 0)            # (N, V)
    mask, position = mask.repeat_interleave(group_size, 0), positions[:, -1:].repeat_interleave(group_size, 0)

    N = len(logits)
    response = ids.new_full((N, max_new_tokens), pad_id)                   # (N, T)
    logps, lengths = logits.new_zeros(N, max_new_tokens, dtype=torch.float32), ids.new_full((N,), max_new_tokens)
    rows = torch.arange(N, device=ids.device)                              # the rows still in the cache
    running = torch.ones(N, dtype=torch.bool, device=ids.device)           # ... that haven't ended
    for t in range(max_new_tokens):
        tokens, logp = sample(logits, drawn=drawn[rows, t, None], **sampling)   # (rows,)
        live = rows[running]
        response[live, t], logps[live, t] = tokens[running], logp[running]
        ended = running & torch.isin(tokens, ends)
        lengths[rows[ended]] = t + 1
        running = running & ~ended
        if t + 1 == max_new_tokens or not running.any():
            break
        if running.sum() <= 0.75 * len(rows):
            keep = running.nonzero().squeeze(-1)
            cache.batch_select_indices(keep)
            rows, tokens, mask, position, running = (x[keep] for x in (rows, tokens, mask, position, running))
        mask, position = torch.cat([mask, mask.new_ones(len(mask), 1)], 1), position + 1
        logits = model(
            input_ids=tokens[:, None], attention_mask=mask, position_ids=position, cache=cache, use_cache=True
        ).logits[:, -1]
    return response, logps, lengths


def rollout(
    model, tokenizer, prompts, group_size, max_new_tokens, temperature, *,
    top_p=1.0, top_k=0, batch_size=0, template=None, seeds=None, engine="loop",
):
    """Sample `group_size` responses to each prompt.

    A prompt's random numbers come from its own seed, so its responses don't depend on what else is
    in the batch, or on which of several processes samples them.

    The mask comes from lengths, never from token values: where padding and end token share an id,
    the sampled end token still counts, and stopping is learnt.

    Args:
        model: causal language model of transformers. tokenizer: one with a chat template.
        prompts: P chats (lists of messages). max_new_tokens: the longest response, T at most.
        temperature: > 0, or 0 for the most likely token. top_p, top_k: 1 and 0 for no cut, which
            training needs: the loss knows only the uncut distribution.
        batch_size: responses sampled at once (whole groups, at least one), 0 for all. template: see `encode`.
        seeds: P ints; None draws them from torch's global generator.
        engine: "loop", which is `_decode`; or one of the appendix: "static", for the same responses, or "continuous",
            which has one seed for all, taken from the first.
    Returns:
        Rollouts, N = P * group_size; logps is None where the engine has none.
    Raises:
        ValueError: no prompts, a group or response of no length, a temperature below 0, another engine.
        FloatingPointError: the model's logits aren't finite.
        RolloutError: a response of continuous batching is missing, failed or too short, or there is no room for any.
    """
    if engine not in ENGINES:
        raise ValueError(f"rollout: engine {engine!r} must be one of {', '.join(ENGINES)}")
    if not prompts or group_size < 1 or max_new_tokens < 1 or temperature < 0:
        raise ValueError(
            f"rollout: {len(prompts)} prompts, group_size {group_size}, max_new_tokens {max_new_tokens}, "
            f"temperature {temperature}: the first three must be at least 1, the last at least 0"
        )
    ids = [encode(tokenizer, messages, **(template or {})) for messages in prompts]
    stops = stop_ids(model, tokenizer)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stops[0]
    ends = torch.tensor(stops, device=model.device)
    at_once = max(1, batch_size // group_size) if batch_size else len(ids)
    seeds = torch.randint(2**62, (len(ids),)).tolist() if seeds is None else seeds
    drawn = torch.cat([                                                    # (N, T)
        torch.rand(group_size, max_new_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in seeds
    ]).to(model.device)
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    if engine == "continuous":                                             # one queue, where an ended response makes room
        at_once, sampling["at_once"] = len(ids), batch_size
    with evaluating(model):
        parts = [
            ENGINES[engine](
                model, ids[i : i + at_once], group_size, max_new_tokens, pad_id, ends,
                drawn[i * group_size : (i + at_once) * group_size], **sampling,
            )
            for i in range(0, len(ids), at_once)
        ]
    response, logps, lengths = (None if x[0] is None else torch.cat(x) for x in zip(*parts))
    if logps is not None and not logps.isfinite().all():                   # 0 in the padding
        raise FloatingPointError("the model's logits aren't finite while it samples")
    T = int(lengths.max())
    response, logps = response[:, :T], None if logps is None else logps[:, :T]
    mask = torch.arange(T, device=lengths.device) < lengths[:, None]       # (N, T)
    last = response.gather(1, lengths[:, None] - 1).squeeze(1)
    texts = [
        tokenizer.decode(row[:n], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for row, n in zip(response.tolist(), lengths.tolist())
    ]
    return Rollouts(ids, response, mask, logps, ~torch.isin(last, ends), texts)


# ------------------------------------------------------------------------------------------------
# Advantages: a response against its siblings
# ------------------------------------------------------------------------------------------------


def group_advantages(rewards, scale_by_std=False, eps=1e-6):
    """A = r - mean(group), divided by the group's (std + eps) if `scale_by_std`.

    A group of one, or of equal rewards, gets exactly 0. NaN rewards stay out of mean and std and
    get 0: counting "not scored" as a reward of 0 would make it the best of a group of negatives.

    Args:
        rewards: (P, G) floats. scale_by_std: divide by the sample std (n - 1). eps: added to it.
    Returns:
        (P, G).
    Raises:
        ValueError: an infinite reward.
    >>> group_advantages(torch.tensor([[1., 0., 0., 1.]])).tolist()
    [[0.5, -0.5, -0.5, 0.5]]
    """
    rewards = rewards if rewards.is_floating_point() else rewards.float()
    if rewards.isinf().any():
        raise ValueError("group_advantages: a reward is infinite")
    ### BEGIN SOLUTION T7
    scored = ~rewards.isnan()                                              # (P, G)
    mean = masked_mean(rewards, scored, dim=-1).unsqueeze(-1)              # (P, 1)
    centred = torch.where(scored, rewards - mean, torch.zeros_like(rewards))
    if scale_by_std:
        freedom = (scored.sum(-1, keepdim=True) - 1).clamp(min=1)
        centred = centred / ((centred.square().sum(-1, keepdim=True) / freedom).sqrt() + eps)
    # Equal rewards: said exactly, since r - mean can round to 1e-8, and with eps = 0 it is 0 / 0.
    low = rewards.masked_fill(~scored, torch.inf).amin(-1, keepdim=True)
    high = rewards.masked_fill(~scored, -torch.inf).amax(-1, keepdim=True)
    return centred.masked_fill((high <= low) | ~scored, 0.0)
    ### END SOLUTION


# ------------------------------------------------------------------------------------------------
# The loss
# ------------------------------------------------------------------------------------------------


def token_weights(mask, aggregation="token_mean", total=None):
    """How much each token counts, such that a loss is sum(weights * token losses).

    The denominator belongs to the whole optimizer step: with `total` given, the losses of its
    micro-batches add up to the loss of the step, however it is split.

    Args:
        mask: (N, T). aggregation: "token_mean" or "sequence_mean".
        total: response tokens (token_mean) or responses (sequence_mean) of the whole step;
            None takes this batch's.
    Returns:
        (N, T) float32.
    Raises:
        ValueError: another aggregation.
    """
    mask = mask.float()
    if aggregation == "token_mean":
        return mask / max(1.0, float(mask.sum() if total is None else total))
    if aggregation == "sequence_mean":
        lengths = mask.sum(-1, keepdim=True)                               # (N, 1)
        return mask / lengths.clamp(min=1) / max(1.0, float((lengths > 0).sum() if total is None else total))
    raise ValueError(f"aggregation {aggregation!r} must be token_mean or sequence_mean")


# exp(20) is far beyond any clip and exp(89) is inf in float32, where 0 * inf would poison every weight.
MAX_LOG_RATIO = 20.0


def k3(logps, ref_logps):
    """Schulman's estimate of KL(policy || reference), >= 0: exp(d) - d - 1, d = log ref - log policy. (...) -> (...).

    The plain log-ratio has the right mean but a gradient of mean zero: as a penalty it does nothing.
    """
    ### BEGIN SOLUTION T9
    d = (ref_logps - logps).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d.exp() - d - 1
    ### END SOLUTION


def grpo_loss(
    logps, old_logps, advantages, mask, *,
    clip_low=0.2, clip_high=0.28, dual_clip=3.0, aggregation="token_mean",
    ref_logps=None, kl_coef=0.0, importance=None, total=None,
):
    """The clipped policy loss of the header.

    Args:
        logps: (N, T) of the policy, with gradient. old_logps: (N, T) at sampling time.
        advantages: (N,), one for each response. mask: (N, T), 1 on response tokens.
        clip_low, clip_high: the ratio's range is [1 - low, 1 + high]. dual_clip: c, or None.
        aggregation, total: see `token_weights`.
        ref_logps, kl_coef: (N, T) of the reference, and the k3 penalty's weight (0: none).
        importance: (N, T), constant factors on the tokens' losses, for samples of a slightly different policy.
    Returns:
        loss (scalar), and a dict of floats that also add up over micro-batches: ratio, clipped
        (share of tokens whose gradient the clip cut), ref_kl.
    Raises:
        ValueError: kl_coef without ref_logps, an unknown aggregation.
    Source: DeepSeekMath (arXiv 2402.03300); asymmetric clip, DAPO (2503.14476); dual clip, 1912.09729.
    """
    if kl_coef and ref_logps is None:
        raise ValueError("grpo_loss: kl_coef needs ref_logps")
    weights = token_weights(mask, aggregation, total)                      # (N, T)
    mask, A = mask.bool(), advantages.unsqueeze(-1)                        # (N, T), (N, 1)
    # All (N, T): `ratio`; `losses`, before the penalty; `cut`, which is true where a clip stops the gradient.
    ### BEGIN SOLUTION T8
    # Masked before exp: whatever stands in the padding, its ratio is 1.
    log_ratio = (logps - old_logps).masked_fill(~mask, 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()           # (N, T)
    plain = -ratio * A
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * A
    losses = torch.maximum(plain, clipped)
    cut = clipped > plain
    if dual_clip is not None:
        bound = -dual_clip * A                                             # positive where A < 0
        cut = cut | ((A < 0) & (losses > bound))
        losses = torch.where(A < 0, torch.minimum(losses, bound), losses)
    ### END SOLUTION
    if importance is not None:
        losses = losses * importance
    metrics = {"ratio": (weights * ratio).sum().item(), "clipped": (weights * cut).sum().item()}
    if kl_coef:
        penalty = k3(logps.masked_fill(~mask, 0.0), ref_logps.masked_fill(~mask, 0.0))
        losses = losses + kl_coef * penalty
        metrics["ref_kl"] = (weights * penalty).sum().item()
    return (weights * losses).sum(), metrics


# ------------------------------------------------------------------------------------------------
# Appendix: two engines for a GPU. Nothing that follows needs them; `_decode` is the one to read
# ------------------------------------------------------------------------------------------------


def _grouped_attention(module, query, key, value, attention_mask, scaling=None, **_):
    """Query heads (n, heads, 1, d) that share a key head become its rows: no key is repeated, where transformers' own does it."""
    rows = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    out = torch.nn.functional.scaled_dot_product_attention(rows, key, value, attention_mask, scale=scaling)
    return out.reshape(len(query), 1, -1, out.shape[-1]), None


@torch.no_grad()
def _decode_static(model, prompts, group_size, max_new_tokens, pad_id, ends, drawn, *, compiled=None, **sampling):
    """As `_decode`, in a cache of fixed size: every step has the same shapes, so one compiled step (a CUDA graph) serves all.

    Ended rows stay in it, and its free end is read, masked. compiled: None for CUDA only; on a CPU it takes longer than it saves.
    """
    from transformers import AttentionInterface, StaticCache

    AttentionInterface.register("grouped", _grouped_attention)
    ids, mask = left_pad(prompts, pad_id, model.device)                    # (P, L)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    if any(out.cache.is_sliding):
        raise ValueError(f"rollout: engine static needs full attention, but {model.config.model_type} has a sliding window")
    L, N, T = ids.shape[1], len(ids) * group_size, max_new_tokens
    room = -(-(L + T) // 256) * 256                                        # S: rounded, so that few shapes are compiled
    cache = StaticCache(config=model.config, max_cache_len=room)
    for i, layer in enumerate(out.cache.layers):
        cache.update(layer.keys.repeat_interleave(group_size, 0), layer.values.repeat_interleave(group_size, 0), i)
    logits, position = (x[:, -1].repeat_interleave(group_size, 0) for x in (out.logits, positions))
    del out, layer                                                         # the prompts' first cache
    seen = torch.zeros(N, 1, 1, room, dtype=torch.bool, device=ids.device)
    seen[..., :L] = mask.bool().repeat_interleave(group_size, 0)[:, None, None]
    response, lengths = ids.new_full((N, T), pad_id), ids.new_zeros(N)
    logps, running = logits.new_zeros(N, T, dtype=torch.float32), torch.ones_like(lengths, dtype=torch.bool)
    # Compiled anew each time, which finds the first time's code; kept on the model, a copy of it would run the original.
    compiled = model.device.type == "cuda" if compiled is None else compiled
    step = torch.compile(model.__call__, mode="reduce-overhead") if compiled else model
    own = model.config._attn_implementation
    model.set_attn_implementation("grouped")
    try:
        for t in range(T):
            tokens, logp = sample(logits, drawn=drawn[:, t, None], **sampling)   # (N,)
            response[:, t], logps[:, t] = tokens.where(running, pad_id), logp.where(running, 0.0)
            lengths += running
            running &= ~torch.isin(tokens, ends)
            if t + 1 == T or not running.any():
                break
            seen[..., L + t], position = True, position + 1
            inputs = {"input_ids": tokens[:, None], "attention_mask": seen, "position_ids": position[:, None]}
            logits = step(**inputs, cache=cache, use_cache=True).logits[:, -1]
    finally:
        model.set_attn_implementation(own)
    return response, logps, lengths


def flash_attention(model):
    """Whether a flash attention package is installed that this model can use."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    able = model.device.type == "cuda" and model.dtype in (torch.bfloat16, torch.float16)
    return able and (is_flash_attn_2_available() or is_flash_attn_3_available())


@torch.no_grad()
def _decode_continuous(
    model, prompts, group_size, max_new_tokens, pad_id, ends, drawn, *, temperature, top_p=1.0, top_k=0, at_once=0
):
    """The same by transformers' continuous batching: a group shares its prompt's pages, and an ended response makes room.

    Its log-probs come after top-p and top-k, so there are none (None) with a cut. Without flash attention every
    response reads, masked, the cache of all others: right, but slow.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    N, T, flash, stops = len(prompts) * group_size, max_new_tokens, flash_attention(model), ends.tolist()
    if not temperature:                                                    # the most likely token survives every cut
        top_p, top_k = 1.0, 0
    rows, page = min(N, at_once or N), 256 if flash else 16
    pages = -(-(max(map(len, prompts)) + T) // page) + 1                   # of the longest response, and one begun
    # Nothing that bends the distribution is left to a default: the loss knows only the model's own.
    asked = GenerationConfig(
        do_sample=temperature > 0, temperature=temperature or 1.0, top_p=top_p, top_k=top_k or None, min_p=None, top_h=None,
        typical_p=1.0, epsilon_cutoff=0.0, eta_cutoff=0.0, repetition_penalty=1.0, no_repeat_ngram_size=0, num_beams=1,
        max_new_tokens=T, eos_token_id=stops or -1, pad_token_id=pad_id,
    )
    asked.num_return_sequences = group_size                                # its constructor refuses a greedy group
    # With flash attention the cache takes the memory that is free, and pages of 256 make its fast decoding possible.
    sizes = {"num_blocks": rows * pages, "max_batch_tokens": max(rows, 512), "max_blocks_per_request": 0}
    how = ContinuousBatchingConfig(
        page_size=page, max_requests_per_batch=rows, return_logprobs=True, seed=int(drawn[0, 0] * 2**31),
        auto_switch_to_flash=flash, **({"max_blocks_per_request": pages + pages % 2} if flash else sizes),
    )
    # It seeds the global generators, hence the fork. All requests are there before it starts: one seed, one result.
    with torch.random.fork_rng([model.device] * (model.device.type == "cuda")):
        manager = model.init_continuous_batching(asked, how)
        try:
            manager.warmup()
        except MemoryError as error:
            raise RolloutError(f"rollout: continuous batching: {error}; try a smaller batch_size, and psutil on a CPU") from None
        names = manager.add_requests(prompts, max_new_tokens=T)
        manager.start()
        try:
            manager.stop()                                                 # returns once none waits or runs
        except BaseException:
            manager.stop(hard_stop=True)
            raise
    found = {result.request_id: result for result in iter(manager.get_result, None)}
    forks = ["", *(f"__child#{i}" for i in range(group_size - 1))]
    results = _complete([found.get(name + fork) for name in names for fork in forks], group_size, T, stops)
    padded = lambda lists, fill: torch.tensor([x + [fill] * (T - len(x)) for x in lists], device=model.device)  # noqa: E731
    response, lengths = padded([r.generated_tokens for r in results], pad_id), [len(r.generated_tokens) for r in results]
    logps = None if top_p < 1 or top_k else padded([r.logprobs for r in results], 0.0)
    return response, logps, torch.tensor(lengths, device=model.device)


def _complete(results, group_size, T, stops):
    """The results, if all are there and ended, by an end token or at T tokens; else RolloutError."""
    faults = []
    for i, result in enumerate(results):
        tokens = result.generated_tokens if result else []
        if result is None or result.error or not tokens or len(tokens) > T or (len(tokens) < T and tokens[-1] not in stops):
            why = "missing" if result is None else result.error or f"{len(tokens)} tokens of {T}, no end token"
            faults.append(f"sample {i % group_size} of prompt {i // group_size}: {why}")
    if faults:
        raise RolloutError(f"rollout: continuous batching failed for {len(faults)} of {len(results)} responses; {faults[0]}")
    return results


ENGINES = {"loop": _decode, "continuous": _decode_continuous, "static": _decode_static}


# ------------------------------------------------------------------------------------------------
# python grpo.py: one group; --bench: rollouts against model.generate
# ------------------------------------------------------------------------------------------------


def show():
    """Follow one group of four answers from rewards to the gradient on each token's log-prob."""
    answers = ["7 + 5 = 12", "7 + 5 = 11", "7 + 5 = 12", "I think 13"]
    rewards = torch.tensor([[1.0, 0.0, 1.0, 0.0]])                         # (P=1, G=4)
    old = torch.log(torch.tensor([[0.5, 0.9], [0.5, 0.1], [0.5, 0.4], [0.2, 0.3]]))
    now = torch.log(torch.tensor([[0.5, 0.9], [0.5, 0.09], [0.5, 0.6], [0.2, 0.2]])).requires_grad_()
    mask = torch.ones(4, 2)
    advantages = group_advantages(rewards)
    loss, metrics = grpo_loss(now, old, advantages.flatten(), mask)
    loss.backward()
    print('Prompt: "What is 7 + 5?" A group of four answers; each one\'s advantage is its distance to the mean reward.\n')
    print(f"{'answer':<14}{'reward':>8}{'advantage':>11}")
    for text, reward, A in zip(answers, rewards[0].tolist(), advantages[0].tolist()):
        print(f"{text:<14}{reward:>8.0f}{A:>+11.2f}   {_bar(A)}")
    print("\nAfter an update two tokens of each are so many times as likely, and the loss pulls at their log-probs:\n")
    print(f"{'answer':<14}   ratio of each token   d loss / d logp")
    for text, ratio, grad in zip(answers, (now - old).exp().tolist(), now.grad.tolist()):
        print(f"{text:<14}   {ratio[0]:>8.2f}{ratio[1]:>8.2f}     {grad[0]:>8.3f}{grad[1]:>8.3f}")
    print(f"\nloss {loss.item():.4f}, share of tokens cut by the clip {metrics['clipped']:.3f}")
    print("A negative gradient raises the log-prob when we descend. The ratio 1.50 is above 1 + 0.28 with a")
    print("positive advantage, so that token is clipped: its gradient is 0. So is 0.67, below 1 - 0.2.")
    equal = group_advantages(torch.tensor([[1.0, 1.0, 1.0, 1.0]]))
    print(f"All four right, advantages {equal.tolist()[0]}: a group without a contrast teaches nothing.")


def _bar(advantage, width=10):
    """An advantage as a bar to the left (red) or right (green) of a line; colours where a terminal wants them."""
    length = round(width * min(1.0, abs(advantage)))
    left, right = ("#" * length, "") if advantage < 0 else ("", "#" * length)
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    paint = lambda code, text: f"\033[{code}m{text}\033[0m" if colours and text else text  # noqa: E731
    return f"{' ' * (width - len(left))}{paint(31, left)}|{paint(32, right)}"


def bench(device="cpu", layers=2, hidden=128, P=16, G=8, prompt=64, T=32, words=4096, rounds=7):
    """Tokens per second of each engine and of `model.generate`: random model, same prompts, T tokens each, paired rounds."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=words, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, head_dim=32,
        num_attention_heads=max(1, hidden // 32), num_key_value_heads=max(1, hidden // 64),
    )
    model = Qwen3ForCausalLM(shape).to(device).eval()
    ids = torch.randint(words, (P, prompt), device=device)
    fields = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=G, pad_token_id=0)
    fixed = GenerationConfig(max_new_tokens=T, min_new_tokens=T, eos_token_id=None, **fields)

    def ours(decode):                                                      # no end token, so every row has T tokens
        drawn, none = torch.rand(P * G, T, dtype=torch.float64, device=device), ids.new_empty(0)
        return lambda: decode(model, ids.tolist(), G, T, 0, none, drawn, temperature=1.0)[0]

    def generate():                                                        # without log-probs, which ours collect
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=fixed)[:, prompt:]

    runs = {f"engine {name}": ours(decode) for name, decode in ENGINES.items()} | {"model.generate": generate}
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)   # on a CPU it misses psutil, at every start
    for name in list(runs):                                                # the first round warms up
        try:
            assert runs[name]().shape == (P * G, T)
        except RolloutError as error:
            print(f"{name} left out: {error}")
            del runs[name]
    seconds = {name: [] for name in runs}
    for name, run in [*runs.items()] * rounds:
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds[name].append(time.perf_counter() - start)
    medians = {name: sorted(x)[len(x) // 2] for name, x in seconds.items()}
    print(f"{P} prompts of {prompt} tokens x {G} samples, {T} new tokens; {layers} layers, hidden {hidden}, {words} words; "
          f"{device}, {torch.get_num_threads()} threads")
    for name, x in medians.items():
        print(f"{name:<18}{P * G * T / x:>9.0f} tokens/s{medians['model.generate'] / x:>7.2f} times generate's")


def main(argv=None):
    """python grpo.py: one group; --bench: rollouts against model.generate."""
    parser = argparse.ArgumentParser(description="Show one group's advantages and gradients, or time rollouts.")
    parser.add_argument("--bench", action="store_true", help="tokens per second against model.generate")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args(argv)
    bench(options.device) if options.bench else show()


if __name__ == "__main__":
    main()
