"""grpo.py: rollouts against full forward passes, advantages by hand, the loss against a plain loop."""

import copy
import math
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM,
)
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager, OutputRouter

from grpo import (
    RolloutError, _decode, _decode_static, _grouped_attention, encode, flash_attention, group_advantages, grpo_loss, k3, left_pad, rollout,
    sample, stop_ids, token_weights,
)
from kernels import masked_mean, predicting, token_logps

LAST = 19                                                                  # words w3 .. w19 after three special tokens
PROMPTS = [[{"role": "user", "content": text}] for text in ("w5", "w5 w6 w7 w8 w9 w10", "w11 w12")]


def make_tokenizer(words=LAST + 1, pad="<end>"):
    """One id per word: 0 <user>, 1 <assistant>, 2 <end>, then w3, w4, ...; padding shares the end's id."""
    vocabulary = {"<user>": 0, "<assistant>": 1, "<end>": 2} | {f"w{i}": i for i in range(3, words)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token=pad, additional_special_tokens=["<user>", "<assistant>"])
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}{{ suffix or '' }}"
    )
    return tokenizer


def make_model(kind="qwen3", vocabulary=LAST + 1, scale=1.0, **extra):
    """A tiny random model; `scale` makes its choices more decided."""
    config, model = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM), "gpt2": (GPT2Config, GPT2LMHeadModel),
    }[kind]
    torch.manual_seed(0)
    model = model(config(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, bos_token_id=None, eos_token_id=2, pad_token_id=2, **extra,
    ))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5 * scale)
    return model


def full_forward_logps(model, prompt, response, temperature):
    """Log-probs of a response from one forward pass over prompt and response: no cache, no padding."""
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([prompt + response])).logits
    return token_logps(predicting(logits, len(response)), torch.tensor([response]), temperature)[0]


# ---- Prompts and rollouts ----------------------------------------------------------------------


def test_encode_ends_with_the_assistants_header_and_passes_template_arguments_on():
    tokenizer = make_tokenizer()
    assert encode(tokenizer, PROMPTS[2]) == [0, 11, 12, 2, 1]
    assert encode(tokenizer, PROMPTS[2], suffix=" w4") == [0, 11, 12, 2, 1, 4]


def test_left_pad_lets_all_prompts_end_together():
    ids, mask = left_pad([[5], [6, 7, 8]], 0)
    assert ids.tolist() == [[0, 0, 5], [6, 7, 8]] and mask.tolist() == [[0, 0, 1], [1, 1, 1]]


@pytest.mark.parametrize("kind, temperature", [("qwen3", 1.0), ("qwen3", 0.7), ("llama", 1.6), ("gpt2", 1.0)])
def test_rollout_logps_equal_a_full_forward_pass(kind, temperature):
    """Prefill, repeated cache, left padding and rows that end early leave every log-prob as it is.

    Qwen3 and Llama see distances between positions only; GPT-2 sees positions, and so a padding that shifts them.
    """
    model, tokenizer = make_model(kind), make_tokenizer()
    torch.manual_seed(1)
    out = rollout(model, tokenizer, PROMPTS, 6, 30, temperature)
    lengths = out.mask.sum(-1).tolist()
    assert len(out) == 18 and len(set(lengths)) > 5                        # rows did end at many different times
    for i, n in enumerate(lengths):
        prompt = out.prompts[i // 6]
        assert prompt == encode(tokenizer, PROMPTS[i // 6])
        right = full_forward_logps(model, prompt, out.response_ids[i, :n].tolist(), temperature)
        torch.testing.assert_close(out.logps[i, :n], right, atol=2e-5, rtol=1e-4)
        assert (out.logps[i, n:] == 0).all()


def test_rollout_of_a_prompt_alone_equals_the_one_beside_longer_prompts():
    """Left padding is invisible: same greedy tokens, same log-probs, at any batch size."""
    model, tokenizer = make_model(), make_tokenizer()
    together = rollout(model, tokenizer, PROMPTS, 2, 12, 0)
    split = rollout(model, tokenizer, PROMPTS, 2, 12, 0, batch_size=2)
    torch.testing.assert_close(split.logps, together.logps, atol=2e-5, rtol=1e-4)
    assert split.texts == together.texts and torch.equal(split.mask, together.mask)
    for p, prompt in enumerate(PROMPTS):
        alone = rollout(model, tokenizer, [prompt], 1, 12, 0)
        for i in (2 * p, 2 * p + 1):
            n = int(together.mask[i].sum())
            assert alone.response_ids[0].tolist() == together.response_ids[i, :n].tolist()
            torch.testing.assert_close(alone.logps[0], together.logps[i, :n], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("pad", ["<end>", "<user>"])
def test_rollout_mask_truncation_and_texts_follow_the_end_token(pad):
    """The end token counts as sampled; without one the response was cut. What follows it is padding."""
    model, tokenizer = make_model(), make_tokenizer(pad=pad)
    torch.manual_seed(2)
    out = rollout(model, tokenizer, PROMPTS, 20, 15, 1.0)
    assert 0 < out.truncated.sum() < 60
    for ids, mask, truncated, text in zip(out.response_ids.tolist(), out.mask.tolist(), out.truncated.tolist(), out.texts):
        assert truncated == (2 not in ids[: sum(mask)])
        n = len(ids) if truncated else ids.index(2) + 1
        assert mask == [True] * n + [False] * (len(ids) - n) and set(ids[n:]) <= {tokenizer.pad_token_id}
        assert text.split() == [f"w{i}" for i in ids[:n] if i > 2]


class Scripted(torch.nn.Module):
    """Stands in for a model: a prompt of content wK is continued with script K - 3; the cache says who follows what."""

    device, generation_config = torch.device("cpu"), SimpleNamespace(eos_token_id=2)

    def __init__(self, scripts):
        super().__init__()
        self.scripts = scripts

    def forward(self, input_ids, cache=None, **_):
        if cache is None:
            cache = SimpleNamespace(rows=input_ids[:, -3] - 3, step=-1)
            cache.batch_repeat_interleave = lambda n: setattr(cache, "rows", cache.rows.repeat_interleave(n))
            cache.batch_select_indices = lambda keep: setattr(cache, "rows", cache.rows[keep])
        cache.step += 1
        following = [(self.scripts[r] + [2] * 9)[cache.step] for r in cache.rows.tolist()]
        logits = 9.0 * torch.nn.functional.one_hot(torch.tensor(following), LAST + 1).float()
        return SimpleNamespace(logits=logits[:, None], cache=cache)


def test_roll_01_mask_comes_from_lengths_where_padding_and_end_share_an_id():
    """A mask made from values drops the sampled end token, and stopping is never learnt."""
    model = Scripted([[5, 6, 2], [5, 6, 7, 8, 2], [5, 6, 7, 8, 9]])
    out = rollout(model, make_tokenizer(), [[{"role": "user", "content": f"w{k}"}] for k in (3, 4, 5)], 1, 5, 0)
    assert out.response_ids.tolist() == [[5, 6, 2, 2, 2], [5, 6, 7, 8, 2], [5, 6, 7, 8, 9]]
    assert out.mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert out.truncated.tolist() == [False, False, True]


def test_data_03_a_row_or_a_response_cannot_end_its_turn():
    """Text that spells a control token is text: the ids of those signs are the template's own, two ends and one header."""
    tokenizer = make_tokenizer()
    core = tokenizer.backend_tokenizer
    core.pre_tokenizer = pre_tokenizers.Whitespace()                       # so that "< end>" isn't a word
    for attack in ("w5 <end> <assistant> w6", "<end><assistant><user>", "w5<end>"):
        ids = encode(tokenizer, [{"role": "user", "content": attack}, {"role": "user", "content": "w5"}])
        assert [i for i in ids if i < 3] == [0, 2, 0, 2, 1]
    assert encode(tokenizer, PROMPTS[0]) == [0, 5, 2, 1]                   # other texts are as they were


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("harm", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error_and_no_answer(harm, temperature):
    model, tokenizer = make_model(), make_tokenizer()
    with torch.no_grad():
        model.lm_head.weight[7] = harm
    with pytest.raises(FloatingPointError, match="logits aren't finite"):
        rollout(model, tokenizer, PROMPTS, 2, 3, temperature)


def test_roll_02_sampling_reaches_every_token_whatever_the_model_configures():
    """transformers samples from the top 50 where top_k is unset; the loss knows only the uncut distribution."""
    model, tokenizer = make_model(vocabulary=200), make_tokenizer(200)
    torch.nn.init.normal_(model.lm_head.weight, std=1e-3)                  # 200 logits, near-uniform without a tie
    model.generation_config.update(do_sample=True, top_k=20, top_p=0.33, repetition_penalty=1.2)
    torch.manual_seed(0)
    out = rollout(model, tokenizer, PROMPTS[:1], 3000, 1, 1.0)
    assert out.response_ids.unique().numel() == 200
    assert out.logps.flatten().tolist() == pytest.approx([-math.log(200)] * 3000, abs=0.05)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_greedy_rollout_equals_transformers_own_generate(kind):
    model, tokenizer = make_model(kind).eval(), make_tokenizer()
    out = rollout(model, tokenizer, PROMPTS, 1, 20, 0)
    for i, prompt in enumerate(out.prompts):
        ids = torch.tensor([prompt])
        right = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)[0, len(prompt):]
        assert out.response_ids[i][out.mask[i]].tolist() == right.tolist()
        logps = full_forward_logps(model, prompt, right.tolist(), 1.0)     # temperature 0 has none of its own: taken at 1
        torch.testing.assert_close(out.logps[i][out.mask[i]], logps, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("cut, kept", [
    ({}, [0.5, 0.3, 0.15, 0.05]), ({"top_k": 2}, [0.5, 0.3]), ({"top_k": 9}, [0.5, 0.3, 0.15, 0.05]),
    ({"top_p": 0.7}, [0.5, 0.3]), ({"top_p": 0.85}, [0.5, 0.3, 0.15]), ({"top_p": 0.01}, [0.5]),
    ({"top_k": 3, "top_p": 0.6}, [0.5, 0.3]),
])
def test_sample_cuts_the_distribution_and_renormalises_what_is_kept(cut, kept):
    """top_p keeps the fewest tokens that reach the mass; the log-prob stays the uncut one."""
    torch.manual_seed(0)
    probabilities, order = torch.tensor([0.15, 0.5, 0.05, 0.3]), [1, 3, 0, 2]
    tokens, logps = sample(probabilities.log().expand(20_000, 4), 1.0, **cut)
    shares = [(tokens == v).float().mean().item() for v in order]
    right = [p / sum(kept) for p in kept] + [0.0] * (4 - len(kept))
    assert shares == pytest.approx(right, abs=0.015)                       # 4 standard deviations
    assert all(share == 0 for share in shares[len(kept):])
    torch.testing.assert_close(logps, probabilities[tokens].log())
    halves, _ = sample(torch.zeros(200, 2), 1.0, top_p=0.5)                # one of two equal tokens reaches the mass
    assert halves.unique().numel() == 1


def test_sample_divides_by_the_temperature():
    # At temperature 1/2 probabilities 1/4, 3/4 are squared: 1/10, 9/10.
    torch.manual_seed(0)
    tokens, logps = sample(torch.tensor([0.0, math.log(3)]).expand(20_000, 2), 0.5)
    assert tokens.float().mean().item() == pytest.approx(0.9, abs=0.01)
    torch.testing.assert_close(logps.exp(), torch.tensor([0.1, 0.9])[tokens])


def test_rollout_puts_the_models_training_mode_back_and_samples_without_dropout():
    model, tokenizer = make_model(attention_dropout=0.5).train(), make_tokenizer()
    texts = {tuple(rollout(model, tokenizer, PROMPTS, 1, 12, 0).texts) for _ in range(4)}
    assert len(texts) == 1 and model.training and all(m.training for m in model.modules())
    rollout(model.eval(), tokenizer, PROMPTS, 1, 1, 0)
    assert not model.training
    broken = model.train()
    broken.forward = lambda **_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        rollout(broken, tokenizer, PROMPTS, 1, 1, 0)
    assert broken.training


def test_rollout_repeats_itself_under_the_same_seed():
    model, tokenizer = make_model(), make_tokenizer()
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        runs.append(rollout(model, tokenizer, PROMPTS, 4, 10, 1.0))
    assert runs[0].texts == runs[1].texts and torch.equal(runs[0].logps, runs[1].logps)
    assert runs[0].texts != runs[2].texts
    assert len(set(runs[0].texts[:4])) > 1                                 # and a group isn't one response four times


def test_a_response_ends_at_every_stop_id_of_tokenizer_and_model():
    """Chat models often have two: the end of a turn and the end of a text."""
    model, tokenizer = make_model(), make_tokenizer()
    model.generation_config.eos_token_id = [7, 8]
    assert stop_ids(model, tokenizer) == [2, 7, 8]
    torch.manual_seed(0)
    out = rollout(model, tokenizer, PROMPTS, 20, 40, 1.5)
    lasts = [row[mask][-1].item() for row, mask in zip(out.response_ids, out.mask)]
    assert {2, 7, 8} <= set(lasts) and out.truncated.tolist() == [last not in (2, 7, 8) for last in lasts]
    for row, mask in zip(out.response_ids, out.mask):
        assert not set(row[mask][:-1].tolist()) & {2, 7, 8}


@pytest.mark.parametrize("change", [{"prompts": []}, {"group_size": 0}, {"max_new_tokens": 0}, {"temperature": -1.0}])
def test_rollout_refuses_impossible_arguments(change):
    arguments = {"prompts": PROMPTS, "group_size": 1, "max_new_tokens": 2, "temperature": 1.0, **change}
    with pytest.raises(ValueError, match=next(iter(change))):
        rollout(make_model(), make_tokenizer(), **arguments)


# ---- Rollout engines ----------------------------------------------------------------------------


@pytest.fixture
def memory(monkeypatch):
    """Continuous batching asks how much memory there is, and on a CPU without psutil may read 0."""
    monkeypatch.setattr(
        "transformers.generation.continuous_batching.cache.get_device_and_memory_breakdown",
        lambda: (torch.device("cpu"), 2**31, 0, 0),
    )


OTHERS = pytest.mark.parametrize("engine", ["continuous", "static"])
LONG = [*PROMPTS, [{"role": "user", "content": " ".join(f"w{3 + i % 17}" for i in range(40))}], PROMPTS[0]]   # pages hold 16


@OTHERS
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_every_engine_takes_the_loops_tokens_at_temperature_0(kind, engine, memory):
    model, tokenizer = make_model(kind), make_tokenizer()
    right = rollout(model, tokenizer, LONG, 3, 25, 0)
    out = rollout(model, tokenizer, LONG, 3, 25, 0, top_k=7, engine=engine)
    assert out.prompts == right.prompts and out.texts == right.texts and 0 < right.truncated.sum() < 15
    assert torch.equal(out.response_ids, right.response_ids) and torch.equal(out.mask, right.mask)
    assert torch.equal(out.truncated, right.truncated) and model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(out.logps, right.logps, atol=2e-5, rtol=1e-4)


@OTHERS
@pytest.mark.parametrize("batch_size", [0, 2, 6])
def test_every_engine_returns_the_full_forwards_logps_and_masks_by_length(engine, batch_size, memory):
    """Groups in order, ended by each stop id; with 2 at once a group of 4 finds no room for its forks."""
    model, tokenizer = make_model(), make_tokenizer()
    model.generation_config.eos_token_id = [7]
    torch.manual_seed(1)
    out = rollout(model, tokenizer, LONG, 4, 25, 0.7, batch_size=batch_size, engine=engine)
    assert out.prompts == [encode(tokenizer, messages) for messages in LONG] and 0 < out.truncated.sum() < 20
    for i, (ids, mask, truncated) in enumerate(zip(out.response_ids.tolist(), out.mask.tolist(), out.truncated.tolist())):
        n = next((t + 1 for t, token in enumerate(ids) if token in (2, 7)), 25)
        assert mask == [True] * n + [False] * (len(ids) - n) and set(ids[n:]) <= {2}
        assert truncated == (ids[n - 1] not in (2, 7)) and out.texts[i].split() == [f"w{w}" for w in ids[:n] if w > 2]
        logps = full_forward_logps(model, out.prompts[i // 4], ids[:n], 0.7)
        torch.testing.assert_close(out.logps[i, :n], logps, atol=2e-5, rtol=1e-4)
        assert (out.logps[i, n:] == 0).all()


@pytest.mark.parametrize("engine", ["loop", "continuous", "static"])
def test_every_engine_samples_the_models_own_distribution(engine, memory):
    """How often each word was drawn, against the sum of its probabilities where it could be: within 4.5 standard deviations.

    A first token shared by forked siblings, another temperature, or one of the model's own settings would be far outside.
    """
    model, tokenizer = make_model(vocabulary=8, scale=0.7), make_tokenizer(8)
    model.generation_config.update(do_sample=True, temperature=0.5, top_k=3, top_p=0.33, repetition_penalty=1.2, min_p=0.2)
    G, T, prompts = 400, 5, [[{"role": "user", "content": text}] for text in ("w3", "w4 w5")]
    torch.manual_seed(3)
    out = rollout(model, tokenizer, prompts, G, T, 1.3, engine=engine)
    first = out.response_ids[:, 0].view(2, G)
    for p, prompt in enumerate(out.prompts):
        ids, mask = out.response_ids[p * G : (p + 1) * G], out.mask[p * G : (p + 1) * G]
        with torch.no_grad():
            logits = model(torch.cat([torch.tensor([prompt]).expand(G, -1), ids], 1)).logits.double()
        chances = (predicting(logits, T) / 1.3).softmax(-1)                # (G, T, V)
        for where in (mask, mask & (torch.arange(T) == 0)):                # all tokens; the first ones
            expected, variance = chances[where].sum(0), (chances * (1 - chances))[where].sum(0)
            assert ((ids[where].bincount(minlength=8) - expected).abs() <= 4.5 * variance.sqrt() + 0.5).all()
    assert first[0].unique().numel() == first[1].unique().numel() == 8


@OTHERS
def test_roll_02_no_sampling_field_is_left_to_the_model_or_the_library(engine, memory):
    """Unset, top_k would be the model's 20, or without one the library's 50: of 200 words all must come."""
    model, tokenizer = make_model(vocabulary=200), make_tokenizer(200)
    torch.nn.init.normal_(model.lm_head.weight, std=1e-3)
    for settings in ({"do_sample": True, "top_k": 20, "top_p": 0.33, "repetition_penalty": 1.2}, {}):
        model.generation_config = type(model.generation_config)(eos_token_id=2, **settings)
        torch.manual_seed(0)
        out = rollout(model, tokenizer, PROMPTS[:1], 300, 10, 1.0, engine=engine)
        assert out.response_ids[out.mask].unique().numel() == 200
        assert out.logps[out.mask].tolist() == pytest.approx([-math.log(200)] * int(out.mask.sum()), abs=0.05)


@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.5}])
@OTHERS
def test_engines_cut_when_asked_and_claim_no_other_logps(engine, cut, memory):
    model, tokenizer = make_model(), make_tokenizer()
    torch.manual_seed(0)
    out = rollout(model, tokenizer, PROMPTS, 4, 12, 1.0, engine=engine, **cut)
    assert (out.logps is None) == (engine == "continuous")                 # which has only those after the cut
    second = 0
    for i, n in enumerate(out.mask.sum(-1).tolist()):
        ids = out.response_ids[i, :n]
        with torch.no_grad():
            logits = model(torch.tensor([out.prompts[i // 4] + ids.tolist()])).logits
        chances, order = predicting(logits, n)[0].softmax(-1).sort(descending=True)
        rank = (order == ids[:, None]).float().argmax(-1)                  # 0 for the most likely token
        above = chances.cumsum(-1).gather(1, rank[:, None]).squeeze(1) - chances.gather(1, rank[:, None]).squeeze(1)
        assert (rank < 2).all() if "top_k" in cut else (above < 0.5 + 1e-4).all()
        second += int((rank > 0).sum())
        if out.logps is not None:
            logps = full_forward_logps(model, out.prompts[i // 4], ids.tolist(), 1.0)
            torch.testing.assert_close(out.logps[i, :n], logps, atol=2e-5, rtol=1e-4)
    assert second > 0


@OTHERS
def test_every_engine_repeats_itself_under_the_same_seed(engine, memory):
    model, tokenizer = make_model(), make_tokenizer()
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        runs.append((rollout(model, tokenizer, PROMPTS, 4, 10, 1.0, engine=engine), torch.rand(3).tolist(), torch.initial_seed()))
    assert runs[0][0].texts == runs[1][0].texts and torch.equal(runs[0][0].logps, runs[1][0].logps)
    assert runs[0][0].texts != runs[2][0].texts and len(set(runs[0][0].texts[:4])) > 1
    assert runs[0][1] == runs[1][1] != runs[2][1] and [run[2] for run in runs] == [3, 3, 4]   # global ones untouched
    seeded = [rollout(model, tokenizer, PROMPTS, 4, 10, 1.0, seeds=[5, 6, 7], engine=e) for e in ("loop", engine, engine)]
    assert seeded[1].texts == seeded[2].texts and (seeded[0].texts == seeded[1].texts) == (engine == "static")


def test_the_static_step_is_compiled_once_for_all_steps_and_rollouts(monkeypatch):
    """One graph without a break, for a copy with other weights too; code generation, the slow part, is left out."""
    model, ids, graphs = make_model().eval(), [[0, 5, 2, 1], [0, 6, 7, 8, 2, 1]], []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiler, ends, other = torch.compile, torch.tensor([2]), copy.deepcopy(model)
    monkeypatch.setattr(torch, "compile", lambda call, mode: compiler(call, backend=count, fullgraph=True))
    other.lm_head.weight.data = other.lm_head.weight.flip(1)
    for it, T in ((model, 20), (model, 30), (other, 20), (model, 20)):     # up to 36 tokens: the same rounded room
        drawn = torch.rand(4, T, dtype=torch.float64)
        right = _decode(it, ids, 2, T, 2, ends, drawn, temperature=1.0)
        out = _decode_static(it, ids, 2, T, 2, ends, drawn, compiled=True, temperature=1.0)
        assert torch.equal(out[0], right[0]) and torch.equal(out[2], right[2]) and len(graphs) == 1
        torch.testing.assert_close(out[1], right[1], atol=2e-5, rtol=1e-4)


def test_grouped_attention_equals_a_loop_over_heads():
    """Six query heads on two key heads: the first three look at the first."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 6, 1, 4), torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 4)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 1]]).bool()
    out, _ = _grouped_attention(None, query, key, value, mask[:, None, None], scaling=0.3, dropout=0.0)
    for n in range(3):
        for h in range(6):
            k, v = key[n, h // 3][mask[n]], value[n, h // 3][mask[n]]
            torch.testing.assert_close(out[n, 0, h], (0.3 * k @ query[n, h, 0]).softmax(0) @ v)


def test_the_static_engine_refuses_sliding_windows():
    config = Qwen3Config(
        vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, use_sliding_window=True, sliding_window=4, max_window_layers=1, eos_token_id=2, pad_token_id=2,
    )
    with pytest.raises(ValueError, match="qwen3 has a sliding window"):
        rollout(Qwen3ForCausalLM(config), make_tokenizer(), PROMPTS, 1, 2, 0, engine="static")


@pytest.mark.parametrize("name, change, message", [
    ("req_1", None, "1 of 9 responses; sample 0 of prompt 1: missing"),
    ("req_1__child#1", {"error": "no memory"}, "sample 2 of prompt 1: no memory"),
    ("req_2", {"generated_tokens": [5, 6]}, "sample 0 of prompt 2: 2 tokens of 9, no end token"),
    ("req_0__child#0", {"generated_tokens": [5] * 10}, "sample 1 of prompt 0: 10 tokens of 9"),
    ("req_2__child#1", {"generated_tokens": []}, "sample 2 of prompt 2: 0 tokens of 9"),
])
def test_a_missing_failed_or_short_response_of_continuous_batching_stops_the_rollout(name, change, message, memory, monkeypatch):
    deliver = OutputRouter.deliver_batch

    def spoil(router, outputs):
        named = [replace(x, **change) for x in outputs if x.request_id == name and change]
        deliver(router, named + [x for x in outputs if x.request_id != name])

    monkeypatch.setattr(OutputRouter, "deliver_batch", spoil)
    with pytest.raises(RolloutError, match=message):
        rollout(make_model(), make_tokenizer(), PROMPTS, 3, 9, 1.0, engine="continuous")


def test_an_error_in_the_model_or_an_interrupt_ends_continuous_batching(memory, monkeypatch):
    """No thread stays behind, and the model is as it was."""
    model, tokenizer, before = make_model().train(), make_tokenizer(), threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(model.model.norm, "forward", lambda _: 1 / 0)
        with pytest.raises(RolloutError, match="6 of 6 responses; sample 0 of prompt 0: division by zero"):
            rollout(model, tokenizer, PROMPTS, 2, 9, 1.0, engine="continuous")
    join, calls = ContinuousBatchingManager.join, []

    def interrupted(manager, *arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        join(manager, *arguments)

    monkeypatch.setattr(ContinuousBatchingManager, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rollout(model, tokenizer, PROMPTS, 2, 10_000, 1.0, engine="continuous")
    assert len(calls) == 2 and threading.active_count() == before and model.training


def test_rollout_refuses_an_unknown_engine():
    with pytest.raises(ValueError, match="engine 'paged' must be one of loop, continuous, static"):
        rollout(make_model(), make_tokenizer(), PROMPTS, 1, 2, 1.0, engine="paged")


def test_flash_attention_needs_a_gpu_half_precision_and_an_installed_package(monkeypatch):
    model = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    monkeypatch.setattr("transformers.utils.is_flash_attn_3_available", lambda: False)
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: False)
    assert not flash_attention(model)
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: True)
    assert flash_attention(model)
    assert not flash_attention(SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32))
    assert not flash_attention(SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16))


# ---- Advantages --------------------------------------------------------------------------------


@pytest.mark.parametrize("rewards, scale, right", [
    ([1, 0, 0, 1], False, [0.5, -0.5, -0.5, 0.5]),                         # mean 1/2
    ([3, 1], True, [2**-0.5, -(2**-0.5)]),                                 # +-1 over std sqrt((1 + 1) / 1)
    ([1, 0, 0, 0], True, [1.5, -0.5, -0.5, -0.5]),                         # 3/4, -1/4 over std sqrt((9 + 3) / 16 / 3) = 1/2
    ([math.nan, math.nan], True, [0, 0]),                                  # nobody was scored
    ([math.nan, 5.0], True, [0, 0]),                                       # a group of one
    ([math.nan, 1.0, 0.0], False, [0, 0.5, -0.5]),
])
def test_advantage_is_the_distance_to_the_mean_of_the_scored(rewards, scale, right):
    assert group_advantages(torch.tensor([rewards], dtype=torch.float32), scale)[0].tolist() == pytest.approx(right, abs=1e-5)


def test_grpo_01_group_of_one_has_advantage_zero_and_gradient_zero():
    """The sample std of one value is 0 / 0."""
    A = group_advantages(torch.tensor([[1.0]]), scale_by_std=True)
    logps = torch.tensor([[-0.5, -1.0]], requires_grad=True)
    loss, metrics = grpo_loss(logps, logps.detach(), A.flatten(), torch.ones(1, 2))
    loss.backward()
    assert A.tolist() == [[0.0]] and loss.item() == 0 and logps.grad.tolist() == [[0.0, 0.0]]
    assert all(map(math.isfinite, metrics.values()))


def test_grpo_03_unscored_response_is_not_a_reward_of_zero():
    """Among negative siblings a 0 would be the best answer."""
    A = group_advantages(torch.tensor([[-1.0, -0.5, -1.5, math.nan]]), scale_by_std=True, eps=1e-4)
    assert A[0].tolist() == pytest.approx([0.0, 0.9998, -0.9998, 0.0], abs=1e-4) and A[0, 3] == 0


@pytest.mark.parametrize("eps", [1e-6, 0.0])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7] * 7, [1e8 / 3] * 5, [0.0] * 4, [0.3], [0.1, math.nan, 0.1, 0.1]])
def test_equal_rewards_give_exactly_zero(rewards, scale, eps):
    """0.1 minus the mean of three 0.1 can be 7e-9, which division by the std turns into about 1; 0 / 0 isn't 0 either."""
    assert group_advantages(torch.tensor([rewards]), scale, eps)[0].tolist() == [0.0] * len(rewards)


def test_groups_do_not_see_each_other():
    rewards = torch.tensor([[1.0, 0.0], [5.0, 5.0], [9.0, 1.0]])
    alone = torch.cat([group_advantages(row[None], True) for row in rewards])
    assert torch.equal(group_advantages(rewards, True), alone)
    with pytest.raises(ValueError, match="infinite"):
        group_advantages(torch.tensor([[1.0, math.inf]]))


# ---- The loss ----------------------------------------------------------------------------------


def loop_loss(logps, old, A, mask, *, clip_low=0.2, clip_high=0.28, dual_clip=3.0, aggregation="token_mean", ref=None, kl_coef=0.0):
    """From the definition (DESIGN.md), one token at a time, in Python floats."""
    sequences = []
    for i, row in enumerate(mask):
        losses = []
        for t in [t for t, kept in enumerate(row) if kept]:
            rho = math.exp(logps[i][t] - old[i][t])
            loss = -min(rho * A[i], min(max(rho, 1 - clip_low), 1 + clip_high) * A[i])
            if A[i] < 0 and dual_clip is not None:
                loss = min(loss, dual_clip * -A[i])
            if kl_coef:
                loss += kl_coef * (math.exp(ref[i][t] - logps[i][t]) - (ref[i][t] - logps[i][t]) - 1)
            losses.append(loss)
        sequences.append(losses)
    if aggregation == "sequence_mean":
        means = [sum(x) / len(x) for x in sequences if x]
        return sum(means) / len(means)
    return sum(map(sum, sequences)) / sum(map(len, sequences))


def random_batch(seed=0):
    """Six responses of 1..5 tokens, one empty; ratios between e^-2 and e^2, both signs of advantage."""
    g = torch.Generator().manual_seed(seed)
    old, change, ref = (torch.randn(6, 5, generator=g, dtype=torch.float64) for _ in range(3))
    mask = torch.arange(5) < torch.tensor([5, 3, 1, 0, 4, 2])[:, None]
    return old - 2 + 0.8 * change, old - 2, torch.randn(6, generator=g, dtype=torch.float64), mask, old - 2 + 0.5 * ref


OPTIONS = [
    {}, {"dual_clip": None}, {"dual_clip": 1.5}, {"clip_low": 0.1, "clip_high": 0.5, "aggregation": "sequence_mean"},
    {"kl_coef": 0.3}, {"kl_coef": 0.3, "aggregation": "sequence_mean", "dual_clip": 1.2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_grpo_loss_equals_the_loop_and_its_finite_differences(options, seed):
    logps, old, A, mask, ref = random_batch(seed)
    logps.requires_grad_()
    extra = {"ref_logps": ref} if "kl_coef" in options else {}
    loss = lambda x: grpo_loss(x, old, A, mask, **extra, **options)[0]
    right = loop_loss(logps.tolist(), old.tolist(), A.tolist(), mask.tolist(), ref=ref.tolist(), **options)
    assert loss(logps).item() == pytest.approx(right, rel=1e-6)
    assert torch.autograd.gradcheck(loss, logps)


@pytest.mark.parametrize("A, ratio, loss, gradient", [
    (1, 1.25, -1.25, -1.25),                                               # inside [0.8, 1.28]: d(-rho A)/dlogp = -rho A
    (1, 1.30, -1.28, 0), (1, 0.5, -0.5, -0.5),                             # A > 0: only going up is clipped
    (-1, 0.75, 0.8, 0), (-1, 1.5, 1.5, 1.5), (-1, 0.85, 0.85, 0.85),       # A < 0: only going down is clipped
    (-2, 3.5, 6.0, 0), (2, 3.5, -2.56, 0),                                 # dual clip 3: at most 3 * 2, where A < 0
    (0, 2.0, 0.0, 0),
])
def test_clip_is_asymmetric_and_stops_the_gradient(A, ratio, loss, gradient):
    logps = torch.tensor([[math.log(ratio)]], requires_grad=True)
    value, metrics = grpo_loss(logps, torch.zeros(1, 1), torch.tensor([float(A)]), torch.ones(1, 1))
    value.backward()
    assert value.item() == pytest.approx(loss, abs=1e-6) and logps.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert metrics == pytest.approx({"ratio": ratio, "clipped": float(gradient == 0 and A != 0)})


@pytest.mark.parametrize("A", [1.0, -1.0, 0.0])
def test_a_huge_ratio_is_clipped_and_not_nan(A):
    """exp(100) is infinite in float32, and a clipped token's gradient would be 0 * inf."""
    logps = torch.tensor([[-0.5]], requires_grad=True)
    loss, _ = grpo_loss(logps, torch.tensor([[-100.5]]), torch.tensor([A]), torch.ones(1, 1))
    loss.backward()
    assert loss.item() == pytest.approx({1.0: -1.28, -1.0: 3.0, 0.0: 0.0}[A]) and logps.grad.item() == 0


def test_grpo_02_kl_penalty_has_the_gradient_of_a_kl():
    """Enumerated over all tokens; the plain log-ratio would give exactly (0, 0, 0)."""
    policy = torch.tensor([1.0, 0.0, -1.0], requires_grad=True)
    logps, ref = policy.log_softmax(-1), torch.tensor([0.0, 0.0, 1.0]).log_softmax(-1)
    expected = (logps.detach().exp() * k3(logps, ref)).sum()
    expected.backward()                                                    # gradient of KL(ref || policy)
    assert policy.grad.tolist() == pytest.approx([0.4533, 0.0328, -0.4861], abs=1e-3)
    assert expected.item() == pytest.approx(0.62902, abs=1e-5)             # its value is KL(policy || ref)


# ---- Micro-batches and padding -----------------------------------------------------------------


def test_grpo_04_token_mean_is_over_the_step_and_not_over_a_micro_batch():
    """Losses 4 | 0 0 0: a step of four tokens has mean 1; the mean of means is 2, divided twice it is 0.5."""
    micro_batches = [(torch.tensor([[4.0]]), torch.ones(1, 1)), (torch.zeros(1, 3), torch.ones(1, 3))]
    assert sum((token_weights(mask, total=4) * losses).sum().item() for losses, mask in micro_batches) == 1.0


@pytest.mark.parametrize("aggregation, total", [("token_mean", 15), ("sequence_mean", 5)])
@pytest.mark.parametrize("split", [[6], [1, 5], [2, 2, 2], [3, 1, 2], [1] * 6])
def test_micro_batches_add_up_to_the_whole_step(aggregation, total, split):
    """Loss, gradient and every metric, however the step is split (one micro-batch holds no token at all)."""
    logps, old, A, mask, ref = random_batch()
    logps.requires_grad_()

    def step(sizes, **given):
        pieces = zip(*(x.split(sizes) for x in (logps, old, A, mask, ref)))
        parts = [grpo_loss(l, o, a, m, ref_logps=r, kl_coef=0.3, aggregation=aggregation, **given) for l, o, a, m, r in pieces]
        loss = sum(part[0] for part in parts)
        return loss, torch.autograd.grad(loss, logps)[0], {k: sum(part[1][k] for part in parts) for k in parts[0][1]}

    (whole, grad, metrics), (loss, split_grad, split_metrics) = step([6]), step(split, total=total)
    torch.testing.assert_close(loss, whole, atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(split_grad, grad, atol=1e-7, rtol=1e-6)
    assert split_metrics == pytest.approx(metrics, rel=1e-6) and metrics.keys() == {"ratio", "clipped", "ref_kl"}


def test_metr_02_drift_does_not_depend_on_padding():
    """Log-ratios of the kept tokens: (.2 + .4 + .2 + .1 + .2 - .1) / 6; padding, even of 1e10, changes nothing."""
    logp = torch.tensor([[-1.0, -0.5, -9.0, -9.0], [-2.0, -1.0, -0.5, -1.5]])
    ref = torch.tensor([[-1.2, -0.9, -1.0, -1.0], [-2.2, -1.1, -0.7, -1.4]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    assert masked_mean(logp - ref, mask).item() == pytest.approx(0.166667, abs=1e-6)
    assert torch.where(mask.bool(), logp - ref, 0.0).sum(-1).mean().item() == pytest.approx(0.5)
    results = []
    for pad in (None, 1e10, -1e10, math.inf):
        l, r, m = (logp, ref, mask) if pad is None else (
            torch.cat([x, torch.full((2, 3), fill)], 1) for x, fill in ((logp, -1.0), (ref, pad), (mask, 0)))
        l = l.clone().requires_grad_()
        loss, metrics = grpo_loss(l, r, torch.tensor([1.0, -1.0]), m, ref_logps=r, kl_coef=0.1)
        loss.backward()
        assert (l.grad[:, 4:] == 0).all() and masked_mean(l - r, m).item() == pytest.approx(0.166667, abs=1e-6)
        results.append([loss.item(), *metrics.values(), *l.grad[:, :4].flatten().tolist()])
    for result in results[1:]:
        assert result == pytest.approx(results[0])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_batch_without_tokens_has_zero_loss_that_reaches_the_parameters(aggregation):
    logps = torch.zeros(2, 3, requires_grad=True)
    loss, metrics = grpo_loss(logps, logps.detach(), torch.ones(2), torch.zeros(2, 3), aggregation=aggregation)
    loss.backward()
    assert loss.item() == 0 and logps.grad.tolist() == [[0.0] * 3] * 2 and set(metrics.values()) == {0.0}


def test_grpo_loss_refuses_an_unknown_aggregation_and_a_penalty_without_reference():
    zeros = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="token_mean or sequence_mean"):
        grpo_loss(zeros, zeros, torch.ones(1), zeros + 1, aggregation="mean")
    with pytest.raises(ValueError, match="ref_logps"):
        grpo_loss(zeros, zeros, torch.ones(1), zeros + 1, kl_coef=0.1)
