import math
import subprocess
import sys
from dataclasses import replace

import pytest

from modpo.credit import Assignment, assign, recipe, recipes
from modpo.credit.shaping import Overlong
from modpo.errors import ConfigError, MetricError
from modpo.records import Rollout
from tests.credit_rollouts import call, rollout

# Rewards 1, 0, 0, 0; the right trajectory called "act" three times, the last one nothing trainable.
ROLLOUTS = [
    rollout(1.0, "plan", "act", "act", "act"),
    rollout(0.0, "plan", "act", sample=1),
    rollout(0.0, "plan", "act", sample=2),
    rollout(0.0, call("plan", adapter=None), sample=3),
]
BOTH = {"plan", "act"}


def by_place(assignment: Assignment) -> dict[tuple[int, int], float]:
    return {(one.member.rollout, one.member.call): one.advantage for one in assignment.credited}


def test_importing_credit_does_not_import_torch() -> None:
    code = "import sys, modpo.credit; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_recipes_are_complete() -> None:
    names = {"mmgrpo", "flow_grpo", "dr_mas", "mmgrpo_dr", "mmgrpo_rloo", "dapo", "gspo", "cispo"}
    assert names <= set(recipes())
    for name, made in recipes().items():
        assert made == recipe(name)
        assert made.name == name
        assert "arXiv" in made.source
        assert made.summary.endswith(".")


def test_changing_the_table_changes_no_recipe() -> None:
    recipes().clear()
    assert recipe("mmgrpo").clip_high == 0.2


def test_options_change_one_recipe_only() -> None:
    changed = recipe("dapo", clip_high=0.3, shaping={"max_tokens": 256, "buffer_tokens": 64}, kl=0.001)
    assert (changed.clip_high, changed.kl, changed.shaping) == (0.3, 0.001, Overlong(max_tokens=256, buffer_tokens=64))
    assert recipe("dapo").clip_high == 0.28
    assert recipe("dapo", shaping=None).shaping is None


def test_mistakes_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown recipe 'mmgpro'.*did you mean 'mmgrpo'"):
        recipe("mmgpro")
    with pytest.raises(ConfigError, match=r"unknown option 'clip_hi' for recipe 'gspo'.*did you mean 'clip_high'"):
        recipe("gspo", clip_hi=1)
    with pytest.raises(ConfigError, match="unknown option 'name'"):
        recipe("gspo", name="mine")
    with pytest.raises(ConfigError, match=r"option 'kl' of Recipe.*got 0"):
        recipe("mmgrpo", kl=0)
    with pytest.raises(ConfigError, match=r"'grouping'.*'mmgrpo', 'module', 'flow'"):
        recipe("mmgrpo", grouping="flows")


def test_mmgrpo_compares_kth_calls() -> None:
    assignment = assign(recipe("mmgrpo"), ROLLOUTS, BOTH)
    up = 2 / math.sqrt(3)  # of 1, 0, 0: mean 1/3, sd = sqrt((4/9 + 1/9 + 1/9) / 2) = 1/sqrt(3)
    given = by_place(assignment)
    assert given == pytest.approx(
        {
            (0, 0): up,
            (1, 0): -up / 2,
            (2, 0): -up / 2,
            (0, 1): up,
            (1, 1): -up / 2,
            (2, 1): -up / 2,
            (0, 2): 0,
            (0, 3): 0,
        },
        abs=1e-5,
    )
    assert assignment.silent == 2
    assert assignment.left_out == {"frozen": 1}
    assert [len(group.members) for group in assignment.groups] == [3, 3, 1, 1]


def test_flow_grpo_normalises_over_trajectories_and_broadcasts() -> None:
    assignment = assign(recipe("flow_grpo"), ROLLOUTS, BOTH)
    expected = {(r, c): 1.5 if r == 0 else -0.5 for r, n in ((0, 4), (1, 2), (2, 2)) for c in range(n)}
    assert by_place(assignment) == pytest.approx(expected, abs=1e-5)
    assert assignment.silent == 0


def test_flow_grpo_over_calls_lets_long_trajectories_weigh_more() -> None:
    given = by_place(assign(recipe("flow_grpo", normalise_over="calls"), ROLLOUTS, BOTH))
    # eight rows: four of 1, four of 0; mean 1/2, sd = sqrt(2 / 7)
    assert given[0, 0] == pytest.approx(0.5 / math.sqrt(2 / 7), abs=1e-5)
    assert given[1, 0] == pytest.approx(-0.5 / math.sqrt(2 / 7), abs=1e-5)


def test_dr_mas_normalises_over_all_calls_of_a_module() -> None:
    given = by_place(assign(recipe("dr_mas"), ROLLOUTS, BOTH))
    # "act": 1, 1, 1, 0, 0; mean 3/5, sd = sqrt((3 * 4/25 + 2 * 9/25) / 4) = sqrt(0.3)
    assert [given[0, c] for c in (1, 2, 3)] == pytest.approx([0.4 / math.sqrt(0.3)] * 3, abs=1e-5)
    assert given[1, 1] == pytest.approx(-0.6 / math.sqrt(0.3), abs=1e-5)
    assert given[0, 0] == pytest.approx(2 / math.sqrt(3), abs=1e-5)


def test_the_baseline_is_the_recipe_s() -> None:
    assert by_place(assign(recipe("mmgrpo_dr"), ROLLOUTS, BOTH))[0, 0] == pytest.approx(2 / 3)
    assert by_place(assign(recipe("mmgrpo_rloo"), ROLLOUTS, BOTH))[0, 0] == pytest.approx(1)
    assert by_place(assign(recipe("mmgrpo", ddof=0), ROLLOUTS, BOTH))[0, 0] == pytest.approx(math.sqrt(2), abs=1e-5)


def test_a_module_that_one_rollout_never_called_keeps_its_group_of_the_others() -> None:
    rollouts = [rollout(1.0, "act"), rollout(0.0), rollout(0.5, "act")]
    given = by_place(assign(recipe("mmgrpo_dr"), rollouts, {"act"}))
    assert given == {(0, 0): 0.25, (2, 0): -0.25}


def test_dapo_drops_silent_groups_and_punishes_length() -> None:
    rollouts = [rollout(1.0, call("a", 0, 4)), rollout(1.0, call("a", 0, 4)), rollout(0.5, "b"), rollout(0.0, "b")]
    made = recipe("dapo", shaping={"max_tokens": 4, "buffer_tokens": 2, "penalty": 0.5})
    assignment = assign(made, rollouts, {"a", "b"})
    assert set(by_place(assignment)) == {(2, 0), (3, 0)}
    assert assignment.left_out == {"silent group": 2}
    assert assignment.silent == 1
    assert assignment.groups[0].rewards == (0.5, 0.5)


def test_a_raw_singleton_is_not_dropped() -> None:
    made = recipe("dapo", singleton="raw")
    assert by_place(assign(made, [rollout(0.7, "a")], {"a"})) == {(0, 0): 0.7}


def test_a_group_with_one_call_that_is_too_old_is_left_out_whole() -> None:
    old, new = replace(call("a"), version=1), replace(call("a"), version=3)
    rollouts = [rollout(1.0, new), rollout(0.0, old), rollout(1.0, new, example=1), rollout(0.0, new, example=1)]
    assignment = assign(recipe("mmgrpo"), rollouts, {"a"}, lambda each: each.version == 1)
    assert set(by_place(assignment)) == {(2, 0), (3, 0)}
    assert assignment.left_out == {"stale group": 2}


def test_what_is_left_out_is_counted() -> None:
    calls = (call("a"), call("a", 1, adapter=None), call("a", 2, tokens=0), call("b"))
    assignment = assign(recipe("mmgrpo"), [rollout(1.0, *calls)], {"a"})
    assert assignment.left_out == {"frozen": 1, "no tokens": 1, "not trained": 1}
    assert len(assignment.credited) == 1


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_trainable_call_is_credited_once_or_counted(name: str) -> None:
    rollouts = [*ROLLOUTS, *(rollout(0.4, "plan", "act", example=1, sample=sample) for sample in range(4))]
    rollouts = [replace(one, turn_states=("start",)) for one in rollouts]  # a frozen opener's prompts are not kept
    assignment = assign(recipe(name), rollouts, BOTH)
    total = sum(len(one.calls) for one in rollouts)
    members = [one.member for one in assignment.credited]
    assert len(set(members)) == len(members)
    assert len(members) + sum(assignment.left_out.values()) == total


def test_no_rollouts_and_no_modules_are_nothing_to_learn_from() -> None:
    assert assign(recipe("mmgrpo"), [], BOTH) == Assignment((), (), 0, {})
    assert assign(recipe("flow_grpo"), [rollout(1.0, "a"), rollout(0.0, "a")], set()).credited == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_names_the_example(bad: float) -> None:
    untrained: Rollout = rollout(bad, example=12, sample=3)
    with pytest.raises(MetricError, match="example 12, rollout 3"):
        assign(recipe("mmgrpo"), [*ROLLOUTS, untrained], BOTH)
