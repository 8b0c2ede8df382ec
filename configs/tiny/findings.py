"""The paper's seven claims in the numbers of the tiny grid, as Markdown.

    python continual.py --config configs/tiny-findings.yaml --jobs 2
    python configs/tiny/findings.py runs/tiny-findings

A claim is a difference that should be above 0, taken seed by seed: the same seed has the same prompts in every method.
It "holds" at a learning rate if it is above 0 with every seed, "reversed" is below 0 with every seed, else it is "unclear".
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval import continual_metrics, load_runs  # noqa: E402


def mean(values):
    values = list(values)
    return sum(values) / len(values)


# ---- Numbers of one run ----------------------------------------------------------------------------------------------


def average(run):
    return mean(run["rows"][-1])


def out_of_distribution(run):
    return mean(run["ood"]["rows"][-1])


def early_reward(run):
    """Mean reward of the first 20 steps of each stage."""
    return mean(s["reward"] for s in run["steps"] if s["step"] <= 20)


def learnt(run):
    """Accuracy on each task right after its stage."""
    return mean(run["rows"][j + 1][j] for j in range(len(run["tasks"])))


def math_stage(run):
    return run["rows"][1][0]


def forgetting(run):
    return continual_metrics(run["rows"])["forgetting"]


def shift(run):
    return run["drift"]["stages"][-1]["weights"]["spectral_shift"]


def mask_loss(run):
    return 1 - run["drift"]["stages"][-1]["weights"]["mask_overlap"]


def unlike(run):
    """1 - cosine similarity of the last model's answers with the base's, over all sets."""
    return 1 - mean(x for values in run["drift"]["stages"][-1]["similarity"].values() for x in values)


def by_distance(run):
    """A stage's mean effect on the near, middle and far thirds of the other sets, by MMD between the prompts."""
    rows = [a + b for a, b in zip(run["rows"], run["ood"]["rows"])]
    K, n = len(rows) - 1, len(rows[0])
    points = sorted((run["drift"]["mmd"][i][j], rows[i + 1][j] - rows[i][j]) for i in range(K) for j in range(n) if i != j)
    return [mean(y for _, y in points[len(points) * k // 3 : len(points) * (k + 1) // 3]) for k in range(3)]


def dip(run):
    """By how much the effect at middle distance is below both others: above 0 for a dip in the middle alone."""
    near, middle, far = by_distance(run)
    return min(near, far) - middle


def teacher_loss(run):
    """What the teacher, shown a right answer, lost on the tasks between the first and the last probe."""
    probes = [s["taught"] for s in run["steps"] if s.get("taught")]
    return mean(probes[0].values()) - mean(probes[-1].values())


def marks(run):
    """The largest mean number of format marks in a response, over the steps."""
    return max(s["marks"] for s in run["steps"])


# ---- The claims ------------------------------------------------------------------------------------------------------

CLAIMS = [  # number, what should be above 0, and how to take it from {variant: run} of one seed
    ("1", "frozen learns faster: reward in a stage's first 20 steps, frozen - GRPO", lambda r: early_reward(r["frozen"]) - early_reward(r["grpo"])),
    ("2", "a stable teacher is better: final average, frozen - EMA 5%", lambda r: average(r["frozen"]) - average(r["ema-5"])),
    ("2", "the same after the math stage alone", lambda r: math_stage(r["frozen"]) - math_stage(r["ema-5"])),
    ("2", "restart-and-freeze is better: final average, restart - EMA 5%", lambda r: average(r["restart"]) - average(r["ema-5"])),
    ("3", "reasoning in demonstrations harms: right after each stage, frozen - frozen with reasoning",
     lambda r: learnt(r["frozen"]) - learnt(r["frozen-cot"])),
    ("3", "the same in the final average", lambda r: average(r["frozen"]) - average(r["frozen-cot"])),
    ("4", "SDPO harms most at middle distance: the lesser effect of near and far - at middle, frozen", lambda r: dip(r["frozen"])),
    ("5", "SDPO forgets more: forgetting, frozen - GRPO", lambda r: forgetting(r["frozen"]) - forgetting(r["grpo"])),
    ("5", "GRPO ends higher: final average, GRPO - frozen", lambda r: average(r["grpo"]) - average(r["frozen"])),
    ("5", "the same out of distribution", lambda r: out_of_distribution(r["grpo"]) - out_of_distribution(r["frozen"])),
    ("6", "SDPO's weights go further: spectral shift, frozen / GRPO - 1", lambda r: shift(r["frozen"]) / shift(r["grpo"]) - 1),
    ("6", "its large entries move more: lost principal mask, frozen / GRPO - 1", lambda r: mask_loss(r["frozen"]) / mask_loss(r["grpo"]) - 1),
    ("6", "its answers go further: 1 - similarity, frozen / GRPO - 1", lambda r: unlike(r["frozen"]) / unlike(r["grpo"]) - 1),
    ("7", "EMA 5% collapses: final average, GRPO - EMA 5%", lambda r: average(r["grpo"]) - average(r["ema-5"])),
    ("7", "its teacher decays: what it lost with a right answer before it, EMA 5% - frozen",
     lambda r: teacher_loss(r["ema-5"]) - teacher_loss(r["frozen"])),
    ("7", "the same against a restarted teacher, EMA 5% - restart", lambda r: teacher_loss(r["ema-5"]) - teacher_loss(r["restart"])),
    ("7", "format marks multiply: the most in a step, EMA 5% - GRPO", lambda r: marks(r["ema-5"]) - marks(r["grpo"])),
]

COLUMNS = {"math": lambda r: r["rows"][-1][0], "science": lambda r: r["rows"][-1][1], "tool": lambda r: r["rows"][-1][2],
           "code": lambda r: r["rows"][-1][3], "average": average, "gain": lambda r: continual_metrics(r["rows"])["gain"],
           "forgetting": forgetting, "OOD": out_of_distribution, "spectral shift": shift, "1 - similarity": unlike,
           "near": lambda r: by_distance(r)[0], "middle": lambda r: by_distance(r)[1], "far": lambda r: by_distance(r)[2],
           "teacher's loss": teacher_loss}


def spread(values, form="{:+.3f}"):
    return f"{form.format(mean(values))} ({form.format(min(values))} to {form.format(max(values))})"


def verdict(values):
    return "holds" if min(values) > 0 else "reversed" if max(values) < 0 else "unclear"


def main(folder):
    runs = load_runs(folder)
    for run in runs.values():
        run["drift"] = json.loads((run["place"] / "drift.json").read_text())
    settings = list(dict.fromkeys(run["setting"] for run in runs.values()))
    seeds = list(dict.fromkeys(run["seed"] for run in runs.values()))
    at = lambda setting, seed: {r["variant"]: r for r in runs.values() if (r["setting"], r["seed"]) == (setting, seed)}  # noqa: E731
    print("| claim | what should be above 0 | " + " | ".join(settings) + " |\n| --- | --- |" + " --- |" * len(settings))
    for number, words, difference in CLAIMS:
        cells = [[difference(at(setting, seed)) for seed in seeds] for setting in settings]
        print(f"| {number} | {words} | " + " | ".join(f"{verdict(c)}: {spread(c)}" for c in cells) + " |")
    print("\n| variant | setting | " + " | ".join(COLUMNS) + " |\n| --- | --- |" + " ---: |" * len(COLUMNS))
    for variant in dict.fromkeys(run["variant"] for run in runs.values()):
        for setting in settings:
            same = [at(setting, seed)[variant] for seed in seeds]
            print(f"| {variant} | {setting} | " + " | ".join(spread([f(r) for r in same], "{:.3f}") for f in COLUMNS.values()) + " |")


if __name__ == "__main__":
    main(sys.argv[1])
