"""The house: five files, imports along the arrows, documented names, nothing at import."""

import ast
import doctest
import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ARROWS = {
    "kernels": set(), "grpo": {"kernels"}, "sdpo": {"kernels"}, "eval": {"kernels", "grpo"},
    "continual": {"kernels", "grpo", "sdpo", "eval"},
}


def tree(module):
    return ast.parse((ROOT / f"{module}.py").read_text())


def test_five_modules_and_no_other():
    assert {p.stem for p in ROOT.glob("*.py")} == set(ARROWS)


@pytest.mark.parametrize("module", ARROWS)
def test_imports_follow_the_arrows(module):
    imported = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            imported |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported & set(ARROWS) <= ARROWS[module]
    installed = {"torch", "transformers", "datasets", "tqdm", "yaml", "safetensors", "math_verify", "matplotlib"}
    if module == "kernels":
        installed = {"torch", "liger_kernel"}                    # the latter is a peer in its benchmark, if it is there
    assert imported - set(ARROWS) - set(sys.stdlib_module_names) <= installed


@pytest.mark.parametrize("module", ARROWS)
def test_public_functions_say_what_they_do(module):
    assert ast.get_docstring(tree(module))
    for node in tree(module).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            long = node.end_lineno - node.lineno > 6
            assert ast.get_docstring(node) or not long or node.name.endswith("Config"), node.name


@pytest.mark.parametrize("module", ARROWS)
def test_doctests(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.failed == 0 and (result.attempted > 0 or module == "continual")


def test_the_one_token_shift_is_in_one_place():
    """`kernels.predicting`; no other module slices logits or states by one token."""
    shift = re.compile(r"\[:, ?:-1\]|\[:, 1:\]|\[\.\.\., ?:-1, ?:\]")
    assert [m for m in set(ARROWS) - {"kernels"} if shift.search((ROOT / f"{m}.py").read_text())] == []


def test_a_model_runs_with_the_root_on_the_path():
    """transformers looks for a package named kernels: ours, which it finds here, must not get in its way."""
    import importlib.util

    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    assert Path(importlib.util.find_spec("kernels").origin) == ROOT / "kernels.py"
    config = Qwen3Config(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1, head_dim=8)
    model = AutoModelForCausalLM.from_config(config)
    assert model(input_ids=torch.arange(5)[None]).logits.shape == (1, 5, 50)
    assert model.generate(torch.arange(5)[None], max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (1, 7)


def test_public_names():
    """Assignments and users rely on these."""
    surface = {
        "kernels": "masked_mean token_logps token_entropy token_kl fused_token_kl",
        "grpo": "rollout group_advantages grpo_loss",
        "sdpo": "select_demonstrations strip_thinking teacher_messages Teacher sdpo_loss",
        "eval": "load_task verify accuracy continual_metrics pass_at_k weight_drift response_drift mmd",
        "continual": "load_config run main",
    }
    for module, names in surface.items():
        loaded = importlib.import_module(module)
        assert [n for n in names.split() if not hasattr(loaded, n)] == []


@pytest.mark.parametrize("module", ARROWS)
def test_nothing_foreign_is_unpickled_or_run(module):
    """Weights are safetensors, configurations safe YAML; the sandbox's own exec is in the process that has nothing."""
    text = (ROOT / f"{module}.py").read_text()
    forbidden = r"\bpickle\.|\btorch\.load\(|yaml\.(load|unsafe_load|full_load)\(|\bos\.system\(|\bshell=True|(?<![\w.])eval\("
    assert re.findall(forbidden, text) == []
    assert module == "eval" or not re.search(r"(?<![\w.])exec\(", text)
