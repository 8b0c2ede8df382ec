"""--plan: what a run needs and costs. The small model's figures are worked out by hand, below."""

import json
import re
import socket
from pathlib import Path

import pytest
import torch
import yaml

import continual
from continual import load_config, main, make_config, model_shape, plan, plan_memory, plan_seconds, plan_work

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"

# 100 words, H = 8, I = 16, two layers, two heads and one key head of 4, one matrix for embedding and head:
#   a layer   q 8x8 + k 8x4 + v 8x4 + o 8x8 = 192, q and k norms 4 + 4, three products 8x16 = 384, two norms 8 + 8: 600
#   all       2 x 600 + 100x8 + the last norm 8 = 2,008, of which no layer's 808
SMALL = {"model_type": "qwen3", "vocab_size": 100, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": True}


@pytest.fixture
def small(tmp_path):
    """A config of 4 prompts of 6 tokens x 2 responses of 10; tests of 5 prompts x 3 responses of 20, one prompt at once."""
    (tmp_path / "model").mkdir()

    def make(method="grpo", shape=SMALL, **settings):
        (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
        optim = {"compute_dtype": "bfloat16", "gradient_checkpointing": True, "micro_batch_tokens": 32, "chunk": 4}
        tree = {
            "model": str(tmp_path / "model"), "out_dir": str(tmp_path / "run"), "method": method,
            "prompts_per_step": 4, "group_size": 2, "max_prompt_tokens": 6, "max_new_tokens": 10,
            "optim": optim | settings.pop("optim", {}),
            "sdpo": {"max_teacher_tokens": 12} | settings.pop("sdpo", {}),
            "eval": {"samples": 3, "batch_size": 4, "max_new_tokens": 20},
            "tasks": [{"name": "t", "path": "none.jsonl", "verifier": "math", "test_limit": 5}],
        }
        return make_config(tree | settings)

    return make


def rounded(numbers):
    return {key: round(value) for key, value in numbers.items()}


def test_shape(small, tmp_path):
    s = model_shape(small(), tmp_path)
    assert (s.N, s.used, s.layer, s.root, s.L, s.V, s.H, s.I, s.q, s.kv) == (2008, 2008, 600, 808, 2, 100, 8, 16, 8, 4)
    s = model_shape(small(shape=SMALL | {"tie_word_embeddings": False}), tmp_path)
    assert (s.N, s.used, s.root) == (2808, 2008, 1608)           # a token is looked up in the embedding, not multiplied with it


def test_memory_on_two_gpus(small, tmp_path):
    """1,004 parameters on each. 2 of 4 prompts: 4 rows of 16 tokens, each with 2 x 2 layers x 4 = 16 numbers in the cache."""
    c = small()
    parts, phases = plan_memory(model_shape(c, tmp_path), c, 2)
    assert rounded(parts) == {
        "weights": 4016, "optimizer": 8032, "teacher": 0, "rollout replica": 4016, "gradients": 4016,
        "layer inputs": 1024,                                    # 2 layers x 32 tokens x 8 x 2 bytes
        "one layer": 15616,                                      # 32 x (16x8 + 10x(8 + 4) + 8x16  +  6x8 + 4x16) = 32 x 488
        "loss kernel": 6400,                                     # 2 x 4 x 100 x 4  +  100 x 8 x 4
        "gathered": 2816,                                        # (600 + 808) x 2
        "AdamW's temporaries": 4016, "cache": 2048,              # 4 x 16 x 16 x 2
        "evaluation's cache": 2496,                              # 3 x 26 x 16 x 2
    }
    always = 4016 + 8032 + 4016
    assert rounded(phases) == {
        "rollout": always + 2048 + 9600, "training": always + 4016 + 1024 + 15616 + 6400 + 2816, "update": always + 2 * 4016,
        "evaluation": 4016 + 4016 + 2496 + 7200,
    }


def test_memory_on_one_gpu(small, tmp_path):
    """Autocast: the stream between layers is float32, a layer 32 x (26x8 + 10x12 + 8x16 + 48 + 64), and all weights are cast."""
    c = small()
    parts, _ = plan_memory(model_shape(c, tmp_path), c, 1)
    assert [parts[k] for k in ("weights", "layer inputs", "one layer", "gathered", "cache")] == [8032, 2048, 18176, 4016, 4096]
    c = small(optim={"compute_dtype": "float32", "gradient_checkpointing": False})
    parts, _ = plan_memory(model_shape(c, tmp_path), c, 1)       # sampled from its own weights; a layer keeps 640 bytes a token
    assert [parts[k] for k in ("rollout replica", "layer inputs", "gathered", "cache")] == [0, 2 * 32 * 640, 0, 8192]
    c = small(max_new_tokens=94)                                 # one row of 100 tokens is over the budget of 32
    parts, _ = plan_memory(model_shape(c, tmp_path), c, 1)
    assert parts["layer inputs"] == 2 * 100 * 8 * 4
    c = small("sft", tasks=[{"name": "t", "path": "none.jsonl", "verifier": "math", "reference": "{r}"}])
    assert plan_memory(model_shape(c, tmp_path), c, 1)[0]["cache"] == 0


@pytest.mark.parametrize("method, settings, bytes_a_parameter", [
    ("grpo", {}, 0), ("grpo", {"grpo": {"kl_coef": 0.1}}, 2), ("sdpo", {"sdpo": {"teacher": "live"}}, 0), ("sdpo", {}, 2),
    ("sdpo", {"sdpo": {"teacher": "restart"}}, 2), ("sdpo", {"sdpo": {"teacher": "ema"}}, 4),
    ("sdpo", {"optim": {"compute_dtype": "float32"}}, 4),
])
def test_memory_of_the_teacher(small, tmp_path, method, settings, bytes_a_parameter):
    c = small(method, **settings)
    assert plan_memory(model_shape(c, tmp_path), c, 4)[0]["teacher"] == bytes_a_parameter * 502


def test_rows_at_once_are_whole_groups(small):
    for size, rows in ((0, 8), (1, 2), (5, 4), (100, 8)):
        assert continual.plan_rows(small(rollout={"batch_size": size}), 1)[0] == rows
    assert continual.plan_rows(small(rollout={"batch_size": 100}), 2) == (4, 3, 5)


def test_work(small, tmp_path):
    """forward(n) = 2 x 2008 n + 2 x 2 x 8 n^2: of 6 tokens 25,248, of 16 72,448, of 22 103,840, of 26 126,048."""
    c = small("sdpo")
    work, lengths = plan_work(model_shape(c, tmp_path), c, 2, 1)
    assert lengths == (8, 6, 10)
    assert work == {
        "rollout": (4 * 25248 + 8 * (72448 - 25248), 10 * 2 * (2008 + 4 * 11 * 16)),       # 10 steps, 4 rows, mean length 11
        "old log-probs": (8 * 72448, 0), "training": (8 * 4 * 72448, 0),
        "teacher": (8 * 103840, 0),                              # 12 tokens of prompt, as max_teacher_tokens has it, and 10
        "evaluation": (5 * 25248 + 15 * (126048 - 25248), 50 * 2 * (2008 + 3 * 16 * 16)),  # 15 x 20 / 2 GPUs / 3 rows
    }
    assert plan_work(model_shape(c, tmp_path), c, 2, 0.25)[1] == (8, 2, 3)


def test_work_of_the_other_methods(small, tmp_path):
    def flops(*args, gpus=1, **settings):
        c = small(*args, **settings)
        return {part: x for part, (x, _) in plan_work(model_shape(c, tmp_path), c, gpus, 1)[0].items()}

    assert flops()["teacher"] == 0
    assert flops(grpo={"kl_coef": 0.1})["teacher"] == 8 * 72448
    plain = {"optim": {"compute_dtype": "float32", "gradient_checkpointing": False}}
    assert flops(**plain)["training"] == 8 * 3 * 72448 and flops(**plain)["old log-probs"] == 0
    assert flops(**plain, gpus=2)["old log-probs"] == 8 * 72448  # a shard's rollouts come from a replica
    sft = flops("sft", tasks=[{"name": "t", "path": "none.jsonl", "verifier": "math", "reference": "{r}"}])
    assert (sft["rollout"], sft["old log-probs"], sft["training"], sft["teacher"]) == (0, 0, 4 * 4 * 72448, 0)


def test_seconds():
    """An L4 at the assumed shares: 0.4 x 121 = 48.4 TFLOP/s, 0.5 x 300 = 150 GB/s. The slower of the two counts."""
    work = {"rollout": (48.4e12, 450e9), "old log-probs": (96.8e12, 0), "training": (484e12, 0), "teacher": (48.4e12, 0),
            "evaluation": (968e12, 150e9)}
    assert plan_seconds(work, "L4", 1) == pytest.approx((3, 2 + 10 + 1, 20))
    assert plan_seconds(work, "L4", 2) == pytest.approx((3, 6.5, 10))            # FLOPs are all GPUs', bytes each one's


@pytest.mark.parametrize("method, dtype", [("grpo", "bfloat16"), ("sdpo", "float32")])
def test_training_allocates_what_the_plan_says(tmp_path, method, dtype):
    """A second update of a small model, its allocations added up: gradients, layers, kernel, casts."""
    from torch.profiler import ProfilerActivity, profile
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape = Qwen3Config(vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=6, num_attention_heads=4,
                        num_key_value_heads=2, head_dim=32, tie_word_embeddings=True)
    shape.save_pretrained(tmp_path / "model")
    p, T, N = 64, 192, 8
    c = make_config({
        "model": str(tmp_path / "model"), "out_dir": "none", "method": method, "max_prompt_tokens": p, "max_new_tokens": T,
        "prompts_per_step": 4, "group_size": 2, "sdpo": {"max_teacher_tokens": p},
        "optim": {"micro_batch_tokens": 4 * (p + T), "chunk": 64, "compute_dtype": dtype, "gradient_checkpointing": True},
        "tasks": [{"name": "t", "path": "none.jsonl", "verifier": "math"}],
    })
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape).float()
    model.activation_checkpointing_enable({"use_reentrant": False})
    optimizer, teacher, reference = continual.begin_stage(model, continual.Player(model, c), c, "cpu")
    batch = continual.Batch(
        [[1] * p] * N, torch.randint(256, (N, T)), torch.ones(N, T, dtype=torch.bool), [True] * N, torch.full((N, T), -5.0), None,
        torch.randn(N), [[1] * p] * N)
    update = lambda: continual.update(model, teacher, reference, optimizer, batch, c, 0)         # noqa: E731
    update()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        update()
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["name"] == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    parts, phases = plan_memory(model_shape(c, tmp_path), c, 1)
    planned = phases["training"] - sum(parts[k] for k in ("weights", "optimizer", "teacher", "rollout replica"))
    assert planned == pytest.approx(peak, rel=0.15)


# ---- the command -------------------------------------------------------------------------------


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def planned(name, *args):
    lines = []
    plan(load_config(CONFIGS / f"{name}.yaml"), CONFIGS, *args, say=lambda text: lines.extend(text.splitlines()))
    return lines


@pytest.mark.parametrize("name, cards, parameters", [
    ("qwen3-4b", [("H200", 1), ("H100-80GB", 4)], 4_022_468_096), ("qwen3-0.6b", [("RTX4090", 1), ("L4", 1)], 596_049_920)])
def test_the_big_configs_fit_and_their_headers_quote_the_plan(no_network, name, cards, parameters):
    lines = [line for card in cards for line in planned(name, *card)]
    assert f"Qwen/{name.title().replace('b', 'B')}: {parameters:,} parameters" in lines
    text = (CONFIGS / f"{name}.yaml").read_text()
    for card, _ in cards:
        verdict = next(line for line in lines if line.startswith(card))
        assert f"--card {card}" in text
        assert verdict.count("fits") == len(load_config(CONFIGS / f"{name}.yaml").variants) and "doesn't" not in verdict
    quoted = re.findall(r"^#   ((?:  |GB on|H\d|RTX|L4).*)", text, re.M)
    assert len(quoted) >= 15 and [line for line in quoted if line not in lines] == []


def test_what_does_not_fit_is_said(no_network):
    lines = planned("qwen3-4b")
    verdicts = {line.split(":")[0]: line for line in lines if re.match(r"\S+: at most", line)}
    assert list(verdicts) == list(continual.CARDS)
    assert verdicts["H200"].count(" fits") == 5 and verdicts["RTX4090"].count("doesn't fit") == 5
    assert sum(line.startswith("  mean: s") for line in lines) == 1              # no times where nothing fits
    assert [line for line in planned("qwen3-4b", "H200", 2) if line.startswith("  weights")][0].split()[1] == "8.04"


@pytest.mark.parametrize("options, message", [
    (["--card", "H300"], "--card: 'H300' isn't known; it must be one of H200, H100-80GB"),
    (["--gpus", "0"], "--gpus: 0 isn't allowed"),
    (["--gpus", "3"], "--gpus: 3 isn't allowed; prompts_per_step must be a multiple of it times optim.updates_per_step"),
    (["model=./none"], "model: there is no folder './none'"),
])
def test_bad_plans_stop_with_one_line(no_network, capsys, options, message):
    assert main(["--config", str(CONFIGS / "qwen3-0.6b.yaml"), "--plan", *options]) == 2
    out, error = capsys.readouterr()
    assert error.startswith("error: ") and message in error and len(error.splitlines()) == 1 and out == ""


def test_a_card_without_a_plan_is_refused(capsys):
    assert main(["--config", str(CONFIGS / "qwen3-0.6b.yaml"), "--card", "L4"]) == 2
    assert capsys.readouterr().err == "error: --card and --gpus belong to --plan; torchrun says on how many a run goes\n"


def test_a_plan_loads_nothing_and_leaves_nothing(small, tmp_path, no_network, capsys, monkeypatch):
    """The model has no weights, the task no file; afterwards no file is new, here or in the run's folder."""
    small()
    tree = {"model": str(tmp_path / "model"), "out_dir": str(tmp_path / "run"), "prompts_per_step": 4,
            "tasks": [{"name": "t", "path": "none.jsonl", "verifier": "math"}]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["--config", "config.yaml", "--plan", "--card", "L4"]) == 0
    assert sorted(tmp_path.rglob("*")) == before
    out = capsys.readouterr().out
    assert "2,008 parameters" in out and "L4: at most 21.6 GB" in out and "40% of a card's dense bfloat16" in out


def test_a_grid_multiplies_the_hours(small, capsys):
    """Of one variant: steps and tests as often as there are runs, the base's evaluation once."""
    c, hours = small(stage_steps=10**14), []
    c.variants = [continual.Variant("a")]
    for c.grid in ({}, {"seed": [0, 1], "lr": [1e-5, 2e-5, 3e-5]}):
        continual.plan(c, CONFIGS, "L4")
        hours.append(float(re.search(r"longest: h, steps \+ tests \((\d+)\)", capsys.readouterr().out)[1]))
    assert hours[0] > 1000 and hours[1] == pytest.approx(6 * hours[0], rel=1e-3)


def test_the_hub_is_asked_for_a_shape_last_and_nothing_is_kept(small, tmp_path, monkeypatch):
    c, asked = small(), []
    local = continual.AutoConfig.from_pretrained(c.model)

    def from_pretrained(name, **options):
        asked.append((name, options))
        if options.get("local_files_only"):
            raise OSError("not here")
        assert Path(options["cache_dir"]).is_dir()
        return local

    monkeypatch.setattr(continual.AutoConfig, "from_pretrained", from_pretrained)
    c.model = "someone/something"
    assert model_shape(c, CONFIGS).N == 2008
    assert [name for name, _ in asked] == ["someone/something"] * 2 and not Path(asked[1][1]["cache_dir"]).exists()


def test_the_official_hyperparameters():
    """The settings of the paper's scripts, and the variants' own."""
    config = load_config(CONFIGS / "qwen3-4b.yaml")
    assert [v.name for v in config.variants] == ["grpo", "sdpo-frozen", "sdpo-ema", "sdpo-cot", "sdpo-restart"]
    made = {v.name: continual.variant_config(config, v) for v in config.variants}
    for name, c in made.items():
        o, g, s, e = c.optim, c.grpo, c.sdpo, c.eval
        assert (c.prompts_per_step, c.group_size, c.max_prompt_tokens, c.max_new_tokens) == (32, 8, 2048, 8192)
        assert (c.method, c.lr, o.updates_per_step) == (("grpo", 1e-6, 4) if name == "grpo" else ("sdpo", 1e-5, 1))
        assert (o.beta1, o.beta2, o.weight_decay, o.grad_clip) == (0.9, 0.999, 0.01, 1.0)
        assert (o.warmup_steps, o.schedule) == (10, "constant")
        assert (g.scale_by_std, g.kl_coef, g.aggregation) == (False, 0, "token_mean")
        assert (g.clip_low, g.clip_high, g.dual_clip) == (0.2, 0.28, 3.0)
        assert (s.alpha, s.topk, s.tail, s.is_clip, s.max_teacher_tokens, s.threshold) == (0.5, 100, True, 2.0, 10240, 0.5)
        assert (s.exclude_self, s.use_feedback, s.mask_ratio, s.sampled_token) == (True, False, 0, False)
        assert (c.rollout.temperature, c.rollout.importance_cap) == (1.0, 2.0)
        assert c.rollout.chat_template == {"enable_thinking": False}
        assert (e.samples, e.temperature, e.top_p, e.top_k, e.max_new_tokens) == (16, 0.6, 0.95, 0, None)
        assert [t.steps or c.stage_steps for t in c.tasks] == [50, 50, 50, 20] and c.save_every == 10
    kinds = {name: (c.sdpo.teacher, c.sdpo.keep_thinking) for name, c in made.items() if name != "grpo"}
    assert kinds == {"sdpo-frozen": ("frozen", False), "sdpo-ema": ("ema", False), "sdpo-cot": ("frozen", True),
                     "sdpo-restart": ("restart", False)}
    assert made["sdpo-ema"].sdpo.rate == 0.05
