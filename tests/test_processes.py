"""Several processes: two on the CPU must do what one does, to 1e-5 in float32."""

import contextlib
import io
import json
import os
import shutil
import sys

import pytest
import torch
import yaml

import continual
from continual import main, run
from test_continual import ROOT, SHORT, _fail_at, log, tiny, weights

# A learning rate at which AdamW, which divides by tiny gradients, doesn't blow 1e-8 up beyond 1e-5.
VARIANTS = [
    {"name": "grpo", "set": {"method": "grpo", "optim.updates_per_step": 2, "grpo.kl_coef": 0.1}},
    {"name": "ema", "set": {"method": "sdpo", "sdpo.teacher": "ema", "sdpo.mask_ratio": 0.2, "optim.micro_batch_tokens": 300}},
    {"name": "cut", "set": {"method": "sdpo", "sdpo.teacher": "restart", "sdpo.every": 2}},
]
# As on GPUs: bfloat16, layers made again in the backward pass, a teacher from another folder; too coarse for 1e-5.
COARSE = {"name": "coarse", "set": {
    "method": "sdpo", "sdpo.teacher": "trust_region", "sdpo.init_from": str(ROOT / "configs/tiny/base"), "sdpo.init_mix": 0.5,
    "optim.compute_dtype": "bfloat16", "optim.gradient_checkpointing": True, "tasks.0.steps": 1, "tasks.1.steps": 1}}


def settings(tmp_path, name):
    config = tiny(tmp_path, "lr=1e-4", "keep_checkpoints=20", f"out_dir={tmp_path / name}")
    config.variants = [continual.Variant(**v) for v in VARIANTS]
    return config


def torchrun(tmp_path):
    """`continual.py` in two processes on the settings of this file, into the folder "two"; one process has begun the last."""
    begun = settings(tmp_path, "two")
    begun.variants = begun.variants[2:]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()):
        patch.setattr(continual, "train_step", _fail_at(continual.train_step, 5))
        with pytest.raises(KeyError):                                      # one process gets through four of six steps
            run(begun, say=lambda text: None)
    file = tmp_path / "two.yaml"
    tree = yaml.safe_load((tmp_path / "config.yaml").read_text()) | {"variants": [*VARIANTS, COARSE]}
    file.write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", ROOT / "continual.py"]
    plain = [s for s in SHORT if not s.startswith("variants")] + ["lr=1e-4", "keep_checkpoints=20", f"out_dir={tmp_path / 'two'}"]
    return [*command, "--config", file, *plain]


BESIDE = {"runs": torchrun}


@pytest.fixture(scope="module")
def runs(beside):
    """The same variants: in one process, and in two, which find the third one begun by a single process.

    Returns:
        their folder, and the two processes' outcome.
    """
    tmp_path, done = beside(torchrun)
    assert done.returncode == 0, done.stderr[-3000:]
    config = settings(tmp_path, "one")
    config.variants.append(continual.Variant(**COARSE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continual, "report", lambda folder, again: folder)
        run(config, say=lambda text: None)
    return tmp_path, done


def assert_close_runs(one, two):
    for a, b in zip(log(one), log(two), strict=True):
        for line in (a, b):                                                # only where a copy samples, of the same weights here
            assert line.pop("rollout_weight", 1.0) == pytest.approx(1.0, abs=1e-5)
        assert a.pop("task") == b.pop("task")
        assert a == pytest.approx(b, abs=1e-5, rel=1e-5)
    assert json.loads((one / "matrix.json").read_text()) == json.loads((two / "matrix.json").read_text())
    for stage in ("stage-1-math", "stage-2-science"):
        first, second = weights(one / stage), weights(two / stage)
        assert first.keys() == second.keys()
        for key in first:
            torch.testing.assert_close(first[key], second[key], atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", [v["name"] for v in VARIANTS])
def test_two_processes_give_the_losses_weights_and_matrix_of_one(runs, variant):
    tmp_path, _ = runs
    moved = weights(tmp_path / "one" / variant / "stage-2-science")
    base = weights(ROOT / "configs" / "tiny" / "base")
    assert max((moved[k] - base[k]).abs().max() for k in base) > 1e-4      # there is something to compare
    assert_close_runs(tmp_path / "one" / variant, tmp_path / "two" / variant)


def test_two_processes_in_bfloat16_stay_near_one(runs):
    """The first step is of the same weights: its numbers agree to bfloat16's three digits. Later ones may sample otherwise."""
    one, two = (log(runs[0] / name / "coarse") for name in ("one", "two"))
    assert [line["step"] for line in one] == [line["step"] for line in two]
    assert all(line["updates"] == 1 and 0.9 < line["rollout_weight"] < 1.1 for line in one + two)
    for key in ("divergence", "loss", "grad_norm", "entropy"):
        assert one[0][key] == pytest.approx(two[0][key], rel=0.1, abs=1e-4), key
    saved = weights(runs[0] / "two" / "coarse" / "stage-2-science")
    assert all(w.dtype == torch.float32 for w in saved.values())


def test_the_first_process_alone_speaks_and_writes(runs):
    tmp_path, done = runs
    assert done.stdout.count("cut: continues from 002-000001") == 1 and done.stdout.count("report: ") == 1
    assert (tmp_path / "two" / "report.md").exists()
    answers = (tmp_path / "two" / "ema" / "answers" / "stage-2-math.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in answers[1:]] == [
        json.loads(line)["id"] for line in (tmp_path / "one" / "ema" / "answers" / "stage-2-math.jsonl").read_text().splitlines()[1:]]


def test_one_process_goes_on_from_the_checkpoint_of_two(runs):
    tmp_path, _ = runs
    folder = tmp_path / "back"
    shutil.copytree(tmp_path / "two" / "ema", folder)
    for place in continual.checkpoints(folder):
        if place.name > "001-000002":
            shutil.rmtree(place)
    for name in ("matrix.json", "stage-2-science"):
        (shutil.rmtree if (folder / name).is_dir() else os.remove)(folder / name)
    config = continual.variant_config(settings(tmp_path, "two"), continual.Variant(**VARIANTS[1]))
    config.out_dir = str(folder)
    run(config, say=lambda text: None)
    assert_close_runs(tmp_path / "one" / "ema", folder)


def test_prompts_that_do_not_divide_are_refused_in_one_line(tmp_path, monkeypatch, capsys):
    tiny(tmp_path)
    monkeypatch.setattr(continual, "rank", lambda: (0, 2))
    variants = "variants=[{name: a, set: {method: sft}}, {name: b, set: {method: grpo, optim.updates_per_step: 2}}]"
    assert main(["--config", str(tmp_path / "config.yaml"), "prompts_per_step=6", variants, f"out_dir={tmp_path / 'run'}"]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path / 'config.yaml'}: variant b: prompts_per_step: 6 isn't allowed with 2 processes; it must be a multiple "
        "of optim.updates_per_step times their number, 4\n")


def test_another_copy_that_samples_is_weighed_by_a_capped_importance(tmp_path):
    """Sampled with log-probs that are 0.5 too low and, for one token, 2 too low: weights e^0.5, and the cap."""
    config = tiny(tmp_path, "method=grpo")
    tokenizer = continual.load_tokenizer(config)
    model = continual.load_model(config.model, config, "cpu")
    ids = [continual.encode(tokenizer, [{"role": "user", "content": "What is 3 + 4 ?"}])] * 2
    responses = torch.randint(5, 40, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    batch = continual.Batch(ids, responses, mask, [True] * 2)
    right = [model(input_ids=torch.tensor([p + r.tolist()])).logits[0, len(p) - 1 : -1].log_softmax(-1).gather(-1, r[:, None])[:, 0]
             for p, r in zip(ids, responses)]
    right = torch.stack(right).detach() * mask
    batch.old_logps = right - 0.5
    batch.old_logps[1, 2] -= 1.5
    continual.recompute_logps(model, batch, config, tokenizer.pad_token_id)
    torch.testing.assert_close(batch.old_logps, right, atol=1e-5, rtol=0)
    expected = torch.full((2, 6), 0.5).exp()
    expected[1, 2] = 2.0                                                   # e^2 is over the cap
    expected[0, 4:] = 1.0                                                  # padding
    torch.testing.assert_close(batch.importance, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", ["grpo", "sdpo"])
def test_the_importance_of_samples_scales_each_tokens_loss(tmp_path, method):
    config = tiny(tmp_path, f"method={method}", "sdpo.is_clip=null", "grpo.dual_clip=null")
    tokenizer, model = continual.load_tokenizer(config), continual.load_model(config.model, config, "cpu")
    player = continual.Player(model, config)
    task = continual.load_tasks(config, tokenizer, say=lambda text: None)[0]
    _, teacher, reference = continual.begin_stage(model, player, config, "cpu")
    batch, _ = continual.collect(model, player, tokenizer, task, task.train[:4], config)
    rows = [i for i, signal in enumerate(batch.signal) if signal]
    losses = []
    for importance in (None, torch.full_like(batch.old_logps, 1.5)):
        batch.importance = importance
        losses.append(continual.micro_loss(model, teacher, reference, batch, rows, 100, config, tokenizer.pad_token_id)[0].item())
    assert abs(losses[0]) > 1e-5 and losses[1] == pytest.approx(1.5 * losses[0], rel=1e-4)


@pytest.mark.parametrize("method", ["grpo", "sdpo"])
def test_bfloat16_products_sample_from_a_bfloat16_copy_and_log_the_weight(tmp_path, method):
    config = tiny(tmp_path, f"method={method}", "optim.compute_dtype=bfloat16", tasks=1)
    config.tasks[0].steps = 1
    run(config, say=lambda text: None)
    line = log(tmp_path / "run")[0]
    assert 0.9 < line["rollout_weight"] < 1.1 and line["rollout_weight"] != 1
    assert all(w.dtype == torch.float32 for w in weights(tmp_path / "run" / "stage-1-math").values())


def test_main_is_quiet_in_all_processes_but_the_first(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert main(["--config", str(ROOT / "configs" / "tiny.yaml"), "lr=0"]) == 2
    assert capsys.readouterr().err == ""
