"""Drift, the signs of collapse, the figures, and grids of variants."""

import itertools
import json
import os
import signal
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import yaml
from test_continual import ROOT, TINY, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

import eval as measures
from continual import ConfigError, ask, claim_shared, load_config, main, planned, run
from eval import compare, embed, load_runs, matrix_drift, mmd, principal_mask, repeated_ngrams, report, response_drift, saved_answers, spectrum, weight_drift


def normals(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- Drift on matrices -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 7), (20, 6), (6, 20)])
@pytest.mark.parametrize("rows", [4, 8192])
def test_spectrum_is_that_of_the_singular_value_decomposition(shape, rows):
    W = normals(*shape)
    s, U = spectrum(W, 3, rows)
    left, values, _ = torch.linalg.svd(W.double(), full_matrices=False)
    torch.testing.assert_close(s, values)
    torch.testing.assert_close(U @ U.T, left[:, :3] @ left[:, :3].T)           # the same subspace, whatever its basis


def test_small_singular_values_survive_the_squaring():
    """1e-6 of the largest: its square is below float32's precision, not below float64's."""
    turn, _ = torch.linalg.qr(normals(4, 4).double())
    W = (turn * torch.tensor([1.0, 0.5, 1e-3, 1e-6])) @ turn.T
    assert spectrum(W.float().double(), 2)[0][3].item() == pytest.approx(1e-6, rel=0.1)


def test_a_rank_one_matrix_keeps_its_mask_and_its_zeros():
    """u v^T with one large entry in u and two in v: of 20 entries, the two largest are known."""
    u, v = torch.tensor([1.0, 10.0, 1.0, 1.0]), torch.tensor([1.0, 7.0, 1.0, 9.0, 1.0])
    W = torch.outer(u, v)
    s, U = spectrum(W, 3)
    assert s[0].item() == pytest.approx(103**0.5 * 133**0.5, rel=1e-6) and s[1:].max() < 1e-3
    assert principal_mask(W, U, 0.1).nonzero().tolist() == [[1, 1], [1, 3]]


def test_mask_overlap_of_a_known_swap():
    """Ten large entries on the diagonal of 10 x 10; one of them trades places with a small one."""
    W = torch.diag(torch.arange(11.0, 21.0))
    V = W.clone()
    V[0, 0], V[0, 1] = 0.0, 30.0                                               # 10 are kept of 10: one leaves, one comes
    assert matrix_drift(W, V, k=10)["mask_overlap"] == pytest.approx(0.9)


def test_models_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"weight has the shapes \(5, 6\) and \(5, 7\)"):
        weight_drift(torch.nn.Linear(6, 5), torch.nn.Linear(7, 5))


def test_a_tied_head_counts_once_wherever_it_is_written(tmp_path):
    """A folder may hold the head beside the embedding that it is tied to; the module names that matrix once."""
    from safetensors.torch import load_file, save_file

    model = AutoModelForCausalLM.from_pretrained(ROOT / "configs/tiny/base")
    (tmp_path / "model").mkdir()
    tensors = load_file(ROOT / "configs/tiny/base/model.safetensors")
    assert model.config.tie_word_embeddings and "lm_head.weight" not in tensors
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model/model.safetensors")
    drift = weight_drift(tmp_path / "model", model)
    assert drift == weight_drift(ROOT / "configs/tiny/base", model) and "lm_head.weight" not in drift


def test_a_model_whose_drift_cannot_be_measured_is_refused_before_training(tmp_path, monkeypatch):
    config = tiny(tmp_path, "eval.probe_every=1")
    monkeypatch.setattr("continual.paired_matrices", lambda before, after: weight_drift(torch.nn.Linear(2, 2), torch.nn.Bilinear(2, 2, 2)))
    with pytest.raises(ConfigError, match="eval.probe_every: 1 isn't allowed with model .*: weight_drift: the matrices of the models differ: weight"):
        run(config)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_two_folders_are_compared_matrix_by_matrix(tmp_path, capsys):
    from safetensors.torch import save_file

    W = torch.diag(torch.tensor([4.0, 3.0]))
    for name, matrix in (("a", W), ("b", 1.1 * W)):
        (tmp_path / name).mkdir()
        save_file({"layer.weight": matrix, "norm.weight": torch.ones(2)}, tmp_path / name / "model.safetensors")
    header, layer, mean = compare(tmp_path / "a", tmp_path / "b").splitlines()
    assert layer.split()[0] == "layer.weight" and mean.split()[0] == "mean" and layer.split()[1:] == mean.split()[1:]
    assert dict(zip(header.split(), map(float, layer.split()[1:])))["spectral_shift"] == pytest.approx(0.1)
    assert measures.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert measures.main([str(tmp_path / "a"), str(tmp_path / "missing")]) == 2
    assert capsys.readouterr().err == f"error: there is no folder {tmp_path / 'missing'}\n"


def test_repeated_ngrams_by_hand():
    assert repeated_ngrams([1, 2, 3]) == 0.0                                   # shorter than 4
    assert repeated_ngrams([1] * 10) == pytest.approx(6 / 7)                   # 7 windows, one kind
    assert repeated_ngrams([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)   # 1234 2341 3412 4123 1234


# ---- In training and after it ------------------------------------------------------------------


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """A short run of two tasks and one set out of distribution, with a probe after each step; eight test prompts each."""
    folder = tmp_path_factory.mktemp("probed")
    ood = f"ood=[{{name: far, path: {TINY.parent}/tiny/math-large.jsonl, verifier: math, test_limit: 8}}]"
    config = tiny(folder, ood, "method=sdpo", "sdpo.teacher=ema", "sdpo.rate=0.5", "lr=2e-3", "stage_steps=2", "tasks.0.steps=2",
                  "tasks.1.steps=2", "eval.samples=2", "eval.probe_every=1")
    run(config)
    return folder / "run"


def test_probes_of_the_last_step_are_what_is_measured_after_the_stage(probed):
    """The same prompts, random numbers and weights: the same accuracy, similarity and drift."""
    lines = [json.loads(line) for line in (probed / "metrics.jsonl").read_text().splitlines()]
    drift, rows = json.loads((probed / "drift.json").read_text()), json.loads((probed / "matrix.json").read_text())["rows"]
    base = yaml.safe_load((probed / "config.yaml").read_text())["model"]
    for stage, task in ((1, "math"), (2, "science")):
        last = [line for line in lines if line["stage"] == stage][-1]
        weights = weight_drift(base, probed / f"stage-{stage}-{task}")["mean"]
        assert {k: last[k] for k in weights} == pytest.approx(weights, rel=1e-4, abs=1e-7)
        assert drift["stages"][stage - 1]["weights"] == pytest.approx(weights, rel=1e-6)
        assert last["test_accuracy"] == pytest.approx(rows[stage][stage - 1])
        similar = drift["stages"][stage - 1]["similarity"][task]
        assert len(similar) == 16 and last["similarity"] == pytest.approx(sum(similar) / 16, abs=1e-5)
    moved = [line["spectral_shift"] for line in lines]
    assert len(moved) == 4 and all(0 < x < 1 for x in moved) and moved[0] < moved[-1]


def test_evaluation_and_probes_sample_with_the_configs_engine(tmp_path, monkeypatch):
    config, asked = tiny(tmp_path, "rollout.engine=static"), []
    monkeypatch.setattr("continual.accuracy", lambda *args, **how: asked.append(how))
    for engine, device in (("static", "cpu"), ("auto", "cpu")):
        config.rollout.engine = engine
        ask(types.SimpleNamespace(device=torch.device(device)), None, types.SimpleNamespace(spec=config.tasks[0]), config)
    assert [how["engine"] for how in asked] == ["static", "loop"]


def test_the_teacher_is_asked_with_a_right_answer_of_the_base(probed):
    lines = [json.loads(line) for line in (probed / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert set(line["taught"]) == {"math", "science"} and all(0 <= x <= 1 for x in line["taught"].values())
        assert line["teacher_accuracy"] == line["taught"][line["task"]]
    assert lines[0]["taught"]["science"] > lines[0]["test_accuracy"]           # what it reads is better than what it knows


def test_drift_against_itself_is_none_and_prompts_are_kept(probed):
    drift = json.loads((probed / "drift.json").read_text())
    assert drift["sets"] == ["math", "science", "far"]
    assert all(drift["mmd"][i][i] == 0 for i in range(3)) and drift["mmd"][0][1] == pytest.approx(drift["mmd"][1][0])
    assert 0 < drift["mmd"][0][2] < drift["mmd"][0][1]                         # large sums are nearer to sums than minerals are
    base = yaml.safe_load((probed / "config.yaml").read_text())["model"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    clouds = []
    for name in ("science", "far"):
        _, records = saved_answers(next((probed / "answers").glob(f"base-0-*-{name}.jsonl")))
        assert len(records) == 8 and all("Put the" in r["prompt"] for r in records)
        clouds.append(embed(model, tokenizer, [r["prompt"] for r in records]))
    assert drift["mmd"][1][2] == pytest.approx(mmd(*clouds), rel=1e-4)


def test_response_drift_is_one_for_equal_answers_and_pairs_them():
    base = TINY.parent / "tiny" / "base"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    a, b = ["\\boxed{12}", "Action: get_time", ""], ["\\boxed{12}", "\\boxed{12}", ""]
    found = response_drift(model, tokenizer, a, b).tolist()
    assert found[0] == pytest.approx(1, abs=1e-6) == found[2] and found[1] < 0.99
    with torch.no_grad():                                                      # by hand: the mean of the last hidden states
        states = [model.base_model(input_ids=tokenizer(t, return_tensors="pt").input_ids).last_hidden_state[0].mean(0) for t in (a[1], b[1])]
    assert found[1] == pytest.approx(torch.cosine_similarity(*states, dim=0).item(), abs=1e-5)
    with pytest.raises(ValueError, match="3 responses before, 2 after"):
        response_drift(model, tokenizer, a, b[:2])


def test_a_model_that_is_gone_costs_the_drift_and_nothing_else(probed, tmp_path, capsys):
    """By `python eval.py RUN`."""
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(probed, folder)
    shutil.rmtree(folder / "stage-1-math")
    assert measures.main([str(folder)]) == 0 and capsys.readouterr().out == f"wrote {folder / 'report.md'}\n"
    text = (folder / "report.md").read_text()
    assert "Drift wasn't measured: " in text and "similarity" not in text and "accuracy.png" in text


# ---- Figures -----------------------------------------------------------------------------------


@pytest.fixture
def made_up(tmp_path):
    """A grid of three variants, two learning rates and two seeds whose numbers are chosen, not trained."""
    comparison = {}
    for i, (variant, lr, seed) in enumerate(itertools.product(("grpo", "frozen", "ema-5"), ("5e-4", "1e-3"), (0, 1))):
        name = f"{variant}-lr={lr}-seed={seed}"
        comparison[name] = {"variant": variant, "grid": {"lr": lr, "seed": seed}}
        place = tmp_path / name
        place.mkdir()
        up = 0.02 * i
        rows, ood = [[.4, .3], [.7 + up, .3], [.6, .8]], [[.5], [.5], [.4 + up]]
        (place / "matrix.json").write_text(json.dumps({"tasks": ["math", "code"], "rows": rows, "ood": {"tasks": ["far"], "rows": ood}}))
        (place / "metrics.jsonl").write_text("".join(json.dumps(
            {"stage": 1 + n // 4, "task": ("math", "code")[n // 4], "step": n % 4 + 1, "reward": 0.1 * n, "marks": 1, "spectral_shift": 0.01 * n}
            | ({"divergence": 0.1} if variant != "grpo" else {})) + "\n" for n in range(8)))
        cosines = {t: [1.0, 0.9, 0.8 - up] for t in ("math", "code", "far")}
        drift = {"sets": ["math", "code", "far"], "mmd": [[0, .6, .2], [.6, 0, .7], [.2, .7, 0]],
                 "stages": [{"weights": {"spectral_shift": 0.1}, "similarity": cosines}] * 2}
        (place / "drift.json").write_text(json.dumps(drift))
    (tmp_path / "comparison.json").write_text(json.dumps(comparison))
    return tmp_path


@pytest.fixture
def drawn(made_up, monkeypatch):
    """name -> figure, as they are when they are saved."""
    figures, finish = {}, measures._Canvas.finish

    def keep(canvas, figure, name):
        monkeypatch.setattr(canvas.plt, "close", lambda figure: None)
        finish(canvas, figure, name)
        figures[name] = figure

    monkeypatch.setattr(measures._Canvas, "finish", keep)
    report(made_up, again=False)
    yield figures
    monkeypatch.undo()
    import matplotlib.pyplot as plt

    plt.close("all")


def test_figures_have_their_panels_series_and_labels(drawn, made_up):
    assert list(drawn) == ["relative", "accuracy", "final", "drift", "similarity", "distance", "mmd", "steps"]
    grid = {"relative": (2, 2), "accuracy": (2, 2), "final": (2, 1), "drift": (1, 2), "similarity": (2, 2), "distance": (1, 2), "steps": (3, 2)}
    for name, (rows, columns) in grid.items():
        assert len(drawn[name].axes) == rows * columns, name
    for name in ("relative", "accuracy", "drift", "steps"):
        assert [t.get_text() for t in drawn[name].legends[0].get_texts()] == ["grpo", "frozen", "ema-5"], name
    relative = drawn["relative"].axes
    assert relative[0].get_title() == "lr 5e-4" and relative[1].get_title() == "lr 1e-3"
    assert "tasks" in relative[0].get_ylabel() and "(%)" in relative[0].get_ylabel() and relative[2].get_xlabel() == "tasks learnt"
    first = relative[0].lines[0]                                               # grpo at 5e-4: rows of i = 0 and 1, .35 at the start
    assert list(first.get_ydata()) == pytest.approx([0, 100 * ((.5 + .51) / 2 / .35 - 1), 100], abs=1e-6)
    assert relative[2].lines[0].get_ydata()[2] == pytest.approx(100 * (.41 / .5 - 1))
    assert "mean and range of 2 seeds" in drawn["relative"]._supylabel.get_text()
    assert drawn["steps"].axes[-1].get_xlabel() == "training step over the whole sequence"
    assert "nats" in drawn["steps"].axes[2].get_ylabel()                       # divergence, second row, of two variants
    assert [line.get_label() for line in drawn["steps"].axes[2].lines if not line.get_label().startswith("_")] == ["frozen", "ema-5"]
    assert len(drawn["distance"].axes[0].lines) == 2 * 3 + 1                   # points and quarters of each, and the zero
    assert len(drawn["mmd"].axes[0].texts) == 9
    for name in drawn:
        assert (made_up / f"{name}.png").stat().st_size > 5000


def test_no_legend_over_data_and_no_words_over_each_other(drawn):
    for name, figure in drawn.items():
        figure.canvas.draw()
        boxes = [ax.get_tightbbox() for ax in figure.axes]
        for legend in figure.legends:
            assert not any(legend.get_window_extent().overlaps(box) for box in boxes), name
        for a, b in itertools.combinations(boxes, 2):
            assert not a.padded(-2).overlaps(b.padded(-2)), name
        for ax in figure.axes:
            labels = [t.get_window_extent() for t in ax.get_xticklabels() if t.get_text() and t.get_rotation() == 0]
            assert not any(a.overlaps(b) for a, b in itertools.combinations(labels, 2)), name


def test_the_table_has_mean_and_range(made_up):
    text = report(made_up, again=False).read_text()
    row = next(line for line in text.splitlines() if line.startswith("| frozen | lr 5e-4 |"))
    assert "0.490 (0.480 to 0.500)" in row                                     # out of distribution: i = 4 and 5
    assert all(f"{name}.png" in text for name in ("relative", "drift", "similarity", "mmd"))


# ---- Grids of variants -------------------------------------------------------------------------


GRID = ["variants=[{name: a, set: {method: sft}}, {name: b, set: {method: sft, optim.weight_decay: 0.1}}]"]


def test_a_grid_multiplies_variants(tmp_path):
    config = tiny(tmp_path, *GRID, "grid={lr: [1e-4, 2e-4], seed: [0, 3]}")
    made = planned(config)
    assert [v.name for v, *_ in made] == [f"{n}-lr={lr}-seed={s}" for n in "ab" for lr in ("1e-4", "2e-4") for s in (0, 3)]
    variant, kind, values = made[-1]
    assert (kind, values) == ("b", {"lr": "2e-4", "seed": 3})
    assert variant.set == {"method": "sft", "optim.weight_decay": 0.1, "lr": "2e-4", "seed": 3}


@pytest.mark.parametrize("grid, words", [
    ("grid={lr: 1}", "grid: {'lr': 1} isn't allowed; each key needs a list of numbers or words"),
    ("grid={lr: []}", "grid: {'lr': []} isn't allowed"),
    ("grid={lrr: [1]}", "variant a-lrr=1: lrr: no such key; did you mean lr?"),
    ("grid={lr: [-1]}", "variant a-lr=-1: lr: -1.0 isn't allowed; it must be above 0"),
])
def test_a_wrong_grid_is_named(tmp_path, grid, words):
    with pytest.raises(ConfigError, match="config.yaml: ") as caught:
        tiny(tmp_path, *GRID, grid)
    assert words in str(caught.value)


def test_keys_of_a_grid_that_end_alike_keep_their_whole_names(tmp_path):
    made = planned(tiny(tmp_path, *GRID, "grid={rollout.temperature: [0.5, 1], eval.temperature: [0], seed: [3]}"))
    names = [f"a-rollout.temperature={t}-eval.temperature=0-seed=3" for t in (0.5, 1)]
    assert [v.name for v, *_ in made][:2] == names and len({v.name for v, *_ in made}) == len(made)
    with pytest.raises(ConfigError, match="'a-model=a/b' isn't allowed; names become folders"):
        tiny(tmp_path, *GRID, "grid={model: [a/b]}")


def test_variants_that_ask_their_base_otherwise_keep_its_answers_apart(tmp_path, monkeypatch):
    """Two of other lengths; the drift of the first is measured when the second has asked its own base."""
    monkeypatch.setattr("continual.report", lambda folder, **_: folder)
    config = tiny(tmp_path, "variants=[{name: short, set: {eval.max_new_tokens: 4}}, {name: long}]", "method=sft",
                  "tasks.0.steps=1", "tasks.1.steps=1")
    run(config)
    answers = {}
    for name, of in load_runs(tmp_path / "run").items():
        label = json.loads((of["place"] / "base.json").read_text())["answers"]
        answers[name] = [r["responses"] for r in saved_answers(tmp_path / "run" / "answers" / f"{label}-math.jsonl")[1]]
        assert measures.measure_drift(of)["sets"] == ["math", "science"]
    assert max(len(text) for texts in answers["short"] for text in texts) < max(len(text) for texts in answers["long"] for text in texts)


@pytest.mark.parametrize("file, old, new", [("comparison.json", "ema-5-lr=1e-3-seed=1", "../elsewhere"),
                                            ("grpo-lr=5e-4-seed=0/matrix.json", "code", "../../elsewhere")])
def test_a_run_that_points_out_of_its_folder_is_refused(made_up, file, old, new, capsys):
    path = made_up / file
    path.write_text(path.read_text().replace(old, new))
    assert measures.main([str(made_up)]) == 2
    kind = "task" if "matrix" in file else "folder in it"
    assert capsys.readouterr().err == f"error: {path}: {new!r} isn't the name of a {kind}\n"


def test_a_grid_needs_variants(tmp_path):
    with pytest.raises(ConfigError, match="grid: needs variants"):
        tiny(tmp_path, "grid={seed: [1]}")


@pytest.mark.parametrize("options, words", [
    (["--part", "3/2"], "--part 3/2"), (["--part", "x"], "--part x"), (["--jobs", "0"], "--jobs 0"), (["--jobs", "2"], "there are none"),
])
def test_wrong_parts_and_jobs_are_named(tmp_path, capsys, options, words):
    tiny(tmp_path)
    assert main(["--config", str(tmp_path / "config.yaml"), "variants=[]", *options]) == 2
    assert words in capsys.readouterr().err


def test_two_jobs_give_what_one_gives(tmp_path, monkeypatch, capsys):
    """Two seeds of one method: alone one after another, and in two processes; the report is of both."""
    (tmp_path / "one").mkdir()
    overrides = ["variants=[{name: a, set: {method: sft}}]", "grid={seed: [0, 1]}", "stage_steps=2", "tasks.0.steps=2", "tasks.1.steps=2"]
    config = tiny(tmp_path, *overrides, f"out_dir={tmp_path / 'one'}")
    arguments = ["--config", str(tmp_path / "config.yaml"), "--jobs", "2", *overrides,
                 "prompts_per_step=4", "group_size=4", "save_every=1", "eval.samples=1", f"out_dir={tmp_path / 'two'}"]
    over = threading.Event()

    def stop():
        while not over.wait(0.05) and not list((tmp_path / "two").glob("a-seed=*/checkpoints/*")):
            pass
        over.is_set() or os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor() as other:
        other.submit(stop)
        try:
            code = main(arguments)
        finally:
            over.set()
    assert code == 143
    assert "stopped by SIGTERM; the same command continues" in capsys.readouterr().err
    parts = [(tmp_path / "two" / f"part-{i}.log").read_text() for i in (1, 2)]
    assert any("stopped by SIGTERM; saved in" in text for text in parts) and not (tmp_path / "two" / "report.md").exists()
    assert main(arguments) == 0, capsys.readouterr().err
    monkeypatch.setattr("continual.report", lambda folder, **_: folder)
    alone = run(config)
    runs = load_runs(tmp_path / "two")
    assert {name: r["rows"] for name, r in runs.items()} == alone
    assert [r["seed"] for r in runs.values()] == [0, 1] and {r["variant"] for r in runs.values()} == {"a"}
    assert alone["a-seed=0"] != alone["a-seed=1"] and "mean and range of 2 seeds" in (tmp_path / "two" / "report.md").read_text()
    assert sorted(p.name[:7] for p in (tmp_path / "two").glob("base-*.json")) == ["base-0-", "base-1-"]


def test_parts_that_begin_together_note_one_config(tmp_path):
    """They write the same file; without a lock one takes the other's temporary away."""
    config = tiny(tmp_path)
    (tmp_path / "run").mkdir()
    with ThreadPoolExecutor(8) as parts:
        for done in [parts.submit(claim_shared, config, tmp_path / "run") for _ in range(200)]:
            done.result()
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"] == config.model


def test_the_findings_are_eight_methods_at_three_rates_with_three_seeds():
    config, usual = load_config(ROOT / "configs" / "tiny-findings.yaml"), load_config(TINY)
    made = planned(config)
    assert len(made) == 72 and len({(kind, grid["lr"], grid["seed"]) for _, kind, grid in made}) == 72
    assert [t.path for t in config.tasks + config.ood] == [t.path for t in usual.tasks + usual.ood]
    same = "stage_steps", "prompts_per_step", "group_size", "max_new_tokens", "optim", "eval"
    assert all(getattr(config, key) == getattr(usual, key) for key in same)
