import dspy
import pytest

from modpo import Policy
from modpo.errors import PolicyError
from modpo.lm.binding import bind, bound
from modpo.lm.versions import adapter_folder, find_run, find_version
from tests.scripted import kept_run


class Three(dspy.Module):
    def __init__(self):
        super().__init__()
        self.plan = dspy.Predict("question -> plan")
        self.act = dspy.ChainOfThought("plan -> answer")
        self.judge = dspy.Predict("answer -> ok: bool")

    def forward(self, question):
        return self.judge(answer=self.act(plan=self.plan(question=question).plan).answer)


def frozen():
    return dspy.LM("openai/gpt-nowhere", api_key="none")


def program(policy, **options):
    made = Three()
    made.set_lm(policy.lm(**options))
    return made


def test_each_module_has_its_adapter_by_its_path():
    policy = Policy("x/tiny")
    found = bind(program(policy, max_tokens=40))
    assert found.policy is policy
    assert found.adapters == {name: name for name in ("plan", "act.predict", "judge")}
    assert found.names == ("act.predict", "judge", "plan")
    assert (found.starts, found.max_tokens) == ({}, 40)


def test_modules_of_other_lms_are_frozen():
    made = program(Policy("x/tiny"))
    made.act.set_lm(frozen())
    assert set(bind(made).adapters) == {"plan", "judge"}


def test_a_mapping_trains_what_it_names_and_shares_adapters():
    found = bind(program(Policy("x/tiny", adapters={"plan": "one", "judge": "one"})))
    assert found.adapters == {"plan": "one", "judge": "one"}
    assert found.names == ("one",)


def test_the_longest_answer_allowed_is_that_of_the_trained_modules():
    policy = Policy("x/tiny", adapters={"plan": "p", "judge": "j"})
    made = program(policy, max_tokens=20)
    made.judge.set_lm(policy.lm(max_tokens=30))
    made.act.set_lm(policy.lm(max_tokens=500))  # answers with the bare base
    assert bind(made).max_tokens == 30


def test_an_lm_set_for_all_of_dspy_counts():
    policy = Policy("x/tiny")
    with dspy.context(lm=policy.lm()):
        assert set(bind(Three()).adapters) == {"plan", "act.predict", "judge"}


def test_a_named_adapter_goes_before_the_policys():
    policy = Policy("x/tiny")
    made = program(policy)
    made.plan.set_lm(policy.lm(adapter="mine"))
    assert bind(made).adapters["plan"] == "mine"


def test_training_goes_on_from_the_version_a_program_answers_with(tmp_path):
    run = kept_run(tmp_path, "earlier", ("plan", 3))
    policy = Policy("x/tiny")
    made = program(policy)
    made.plan.set_lm(policy.lm(adapter="plan", version=3, run=run))
    made.judge.set_lm(policy.lm(adapter="judge", version=0))
    assert bind(made).starts == {"plan": adapter_folder(tmp_path / "earlier", "plan", 3)}


def test_modules_that_share_an_adapter_must_start_from_one_version(tmp_path):
    run = kept_run(tmp_path, "earlier", ("shared", 1), ("shared", 2))
    policy = Policy("x/tiny", adapters="shared")
    made = program(policy, adapter="shared", version=1, run=run)
    assert set(bind(made).starts) == {"shared"}
    made.judge.set_lm(policy.lm(adapter="shared", version=2, run=run))
    with pytest.raises(PolicyError, match="'shared' start from different versions"):
        bind(made)
    made.judge.set_lm(policy.lm())  # one that was not trained is another start too
    with pytest.raises(PolicyError, match="'shared' start from different versions"):
        bind(made)


def test_no_policy_among_the_lms():
    made = Three()
    made.set_lm(frozen())
    with pytest.raises(PolicyError, match="nothing to train"):
        bind(made)


def test_two_policies():
    made = program(Policy("x/tiny"))
    made.plan.set_lm(Policy("x/tiny").lm())
    with pytest.raises(PolicyError, match="2 policies"):
        bind(made)


def test_a_mapping_that_names_no_module():
    with pytest.raises(PolicyError, match="module 'pln'; allowed: .*; did you mean 'plan'"):
        bind(program(Policy("x/tiny", adapters={"pln": "p"})))
    with pytest.raises(PolicyError, match="names none of the program's modules"):
        bind(program(Policy("x/tiny", adapters={})))


def test_a_bound_copy_answers_with_its_versions_and_the_program_stays(tmp_path):
    run = kept_run(tmp_path, "run", ("plan", 4), ("judge", 2))
    policy = Policy("x/tiny")
    made = program(policy)
    other = frozen()
    made.act.set_lm(other)
    before = made.plan.lm
    copy = bound(made, {"plan": "plan", "judge": "judge"}, {"plan": 4, "judge": 2}, tmp_path / "run")
    assert (copy.plan.lm.adapter, copy.plan.lm.version, copy.plan.lm.engine.run) == ("plan", 4, run)
    assert (copy.judge.lm.adapter, copy.judge.lm.version) == ("judge", 2)
    assert copy.act.predict.lm is other
    assert copy.plan.lm.policy is policy
    assert made.plan.lm is before
    assert (before.adapter, before.version) == (None, None)


def test_a_bound_copy_keeps_demos_and_request_options(tmp_path):
    policy = Policy("x/tiny")
    made = program(policy, temperature=0.5, max_tokens=33)
    made.plan.demos = [dspy.Example(question="q", plan="p").with_inputs("question")]
    copy = bound(made, {"plan": "plan"}, {"plan": 0}, tmp_path)
    assert copy.plan.demos == made.plan.demos
    assert copy.plan.lm.kwargs["temperature"] == 0.5
    assert copy.plan.lm.kwargs["max_tokens"] == 33
    assert copy.plan.lm.engine.run == str(tmp_path.resolve())


def test_a_run_folder_that_moved_is_found_under_the_runs_folder(tmp_path, monkeypatch):
    kept_run(tmp_path / "new", "run", ("plan", 1))
    monkeypatch.setenv("MODPO_RUNS", str(tmp_path / "new"))
    saved = str(tmp_path / "old" / "run")
    assert find_run(saved) == tmp_path / "new" / "run"
    assert find_version(saved, "plan", 1) == adapter_folder(tmp_path / "new" / "run", "plan", 1)


def test_versions_that_are_gone_are_named(tmp_path):
    run = kept_run(tmp_path, "run", ("plan", 1))
    assert find_version(None, None, 3) is find_version(None, "plan", 0) is find_version(None, "plan", None) is None
    with pytest.raises(PolicyError, match="give run= too"):
        find_version(None, "plan", 1)
    with pytest.raises(PolicyError, match="plan@v2 is not in"):
        find_version(run, "plan", 2)
    with pytest.raises(PolicyError, match="put it there, or set MODPO_RUNS"):
        find_run(str(tmp_path / "gone"))


@pytest.mark.parametrize("name", ["..", ".", "a/b", "react.tools['x']", ".hidden", "plan", "ä b"])
def test_every_adapter_name_is_a_folder_of_its_own_inside_the_run(name, tmp_path):
    folder = adapter_folder(tmp_path, name, 2)
    assert folder.resolve().parent.parent == (tmp_path / "adapters").resolve()
    assert folder.name == "v2"
