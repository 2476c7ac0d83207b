"""The command line on a real task: one JSON object or tables, one-line errors, adapters that other tools read."""

import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from modpo.cli import app
from tests.e2e import cli
from tests.e2e.model import policy
from tests.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def compiled(base, tmp_path_factory):
    """A folder with a task, and what compiling it printed."""
    folder = tmp_path_factory.mktemp("cli")
    target = cli.write_task(folder, base, steps=2, deterministic=False, validate_every=1)
    printed = cli.modpo_json("compile", target, "--set", "seed=3", "--run", folder / "runs" / "first", cwd=folder)
    return folder, target, printed


def test_compile_prints_the_result(compiled):
    folder, _, printed = compiled
    assert printed["run"] == str(folder / "runs" / "first")
    assert printed["steps"] == 2
    assert 0 <= printed["before"] <= printed["warm"] <= 1
    assert len(printed["ci95_gain"]) == 2
    assert (folder / "runs" / "first" / "program.json").exists()


def test_runs_and_show(compiled):
    folder = compiled[0]
    listed = cli.modpo_json("runs", cwd=folder)["runs"]
    assert [Path(run["folder"]).name for run in listed] == ["first"]
    shown = cli.modpo("show", "first", cwd=folder).stdout
    assert "plan" in shown
    assert "solve" in shown
    modules = cli.modpo_json("show", "first", "--plot", "curve.png", cwd=folder)["modules"]
    assert {module["module"] for module in modules} == {"plan", "solve"}
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_eval_of_the_run_and_of_the_task(compiled):
    folder, target, printed = compiled
    after = cli.modpo_json("eval", "first", cwd=folder)
    assert after["score"] == printed["after"]
    assert after["n"] == 24
    before = cli.modpo_json("eval", target, "--limit", "24", cwd=folder)
    assert before["score"] == printed["before"]


def test_a_finished_run_gives_its_result_again(compiled):
    folder, _, printed = compiled
    again = cli.modpo_json("resume", "first", cwd=folder)
    assert {**again, "seconds": 0} == {**printed, "run": again["run"], "seconds": 0}


def test_exports_give_the_compiled_models_logits(compiled, base):
    folder, _, printed = compiled
    version = printed["versions"]["plan"] or 1
    more = () if printed["versions"]["plan"] else ("--version", "1")
    peft = cli.modpo_json("export", "first", "--out", "peft", *more, cwd=folder)["paths"]
    merged = cli.modpo_json("export", "first", "--out", "merged", "--merged", *more, cwd=folder)["paths"]
    assert [Path(path).name for path in peft] == [Path(path).name for path in merged] == ["plan", "solve"]
    ids = torch.tensor([tiny_tokenizer().encode("<q>\nb6\n</q>")])
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that is going away
        before = plain(ids).logits
        expected = _own_logits(base, folder / "runs" / "first" / "adapters" / "plan" / f"v{version}", ids)
        loaded = PeftModel.from_pretrained(plain, folder / "peft" / "plan")(ids).logits
        whole = AutoModelForCausalLM.from_pretrained(folder / "merged" / "plan", dtype=torch.float32)(ids).logits
    assert (expected - before).abs().max() > 0.05
    torch.testing.assert_close(loaded, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole, expected, rtol=0.1, atol=0.3)  # merged weights are kept in bf16
    assert (whole - expected).abs().mean() < (expected - before).abs().mean() / 2


def _own_logits(base, adapter, ids):
    sampler = policy(base).sampler
    sampler.weights.use(adapter)
    folded = {name: weight.detach().clone() for name, weight in sampler.weights.model.state_dict().items()}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.load_state_dict(folded)
    return model(ids).logits


def test_recipes():
    assert "mmgrpo" in cli.modpo_json("recipes")["recipes"]
    assert cli.modpo_json("recipes", "show", "flow_grpo")["name"] == "flow_grpo"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("compile", "nowhere.py:task"), "no such file: nowhere.py"),
        (("compile", "{target}", "--optimizer", "MMGRP"), "did you mean 'MMGRPO'"),
        (("compile", "{target}", "--set", "stepz=3"), "did you mean 'steps'"),
        (("compile", "{target}k"), "did you mean 'task'"),
        (("show", "frist"), "did you mean 'first'"),
        (("export", "first", "--out", "{folder}/gone", "--version", "77"), "v77 is not kept"),
    ],
)
def test_errors_are_one_line(compiled, arguments, said, capsys, monkeypatch):
    folder, target, _ = compiled
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as left:
        app([argument.format(target=target, folder=folder) for argument in arguments])
    assert left.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert said in errors[0]
    assert "Traceback" not in printed.err


def test_a_traceback_only_with_debug(compiled):
    done = cli.modpo("show", "frist", "--debug", code=2, cwd=compiled[0])
    assert "Traceback" in done.stderr
    assert "error: no run 'frist'" in done.stderr


def test_json_of_an_error_is_one_line_on_standard_error(compiled):
    done = cli.modpo("show", "frist", "--json", code=2, cwd=compiled[0])
    assert done.stdout == ""
    assert "did you mean 'first'" in cli.one_line(done)
