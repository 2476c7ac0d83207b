"""AgentFlow's loop with scripted answers: what each role sees, what a turn costs, what ends it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import dspy
import pytest
from dspy.utils import DummyLM

from modpo.errors import TaskError
from modpo.lm.policy_lm import PolicyLM
from modpo.lm.recorder import Recorder, stamp_paths
from modpo.programs import AgentFlow
from tests.scripted import ScriptedPolicy, asked_fields, chat_answer


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def shout(text: str) -> str:
    """Write in capitals."""
    return text.upper()


def fail(text: str) -> str:
    """Fail."""
    raise OSError(f"no {text}")


PLANS = {"context": "none", "sub_goal": "sum", "tool": "add"}
STOP = {"analysis": "fine", "verdict": "stop"}
GO_ON = {"analysis": "not yet", "verdict": "continue"}


class Script:
    """Answers by role, call after call; the last answer of a role stays. A string is sent as it is."""

    def __init__(self, **answers):
        given = {"planner": [PLANS], "executor": [{"command": '{"a": 2, "b": 3}'}], "verifier": [STOP]}
        self.answers = {**given, "generator": [{"answer": "5"}], **answers}
        self.prompts = {role: [] for role in self.answers}

    def __call__(self, request, prompt):
        role = request.adapter
        seen = self.prompts[role]
        seen.append(prompt)
        answer = self.answers[role][min(len(seen), len(self.answers[role])) - 1]
        return answer if isinstance(answer, str) else chat_answer(**answer)


def answering(program, answer):
    """The program, with a policy that answers so."""
    program.set_lm(PolicyLM(ScriptedPolicy(answer)))
    stamp_paths(program)
    return program


def played(script, question="2 and 3?", tools=(add, shout, fail), **options):
    """The prediction and the calls made, in order."""
    program = answering(AgentFlow(tools, **options), script)
    recorder = Recorder()
    with recorder.active():
        prediction = program(question=question)
    return prediction, [call.module for call in sorted(recorder.calls(), key=lambda call: call.position)]


def test_plan_execute_verify_generate():
    script = Script()
    prediction, modules = played(script)
    assert modules == ["planner", "executor", "verifier", "generator"]
    assert (prediction.answer, prediction.stopped) == ("5", "verifier")
    (turn,) = prediction.turns
    assert (turn["tool"], turn["command"], turn["result"], turn["error"]) == ("add", '{"a": 2, "b": 3}', "5", False)
    assert prediction.memory == '1. sum; add: {"a": 2, "b": 3} -> 5'
    (seen,) = script.prompts["executor"]
    assert "add(a: integer, b: integer) -> integer: Add two numbers." in seen
    assert "shout(" not in seen  # the executor sees the chosen tool alone
    (seen,) = script.prompts["planner"]
    assert "shout(text: string) -> string: Write in capitals." in seen
    assert "(empty)" in seen
    assert prediction.memory in script.prompts["verifier"][0]
    assert prediction.memory in script.prompts["generator"][0]


def test_the_last_turn_is_not_verified():
    prediction, modules = played(Script(verifier=[GO_ON]), max_turns=2)
    assert modules == ["planner", "executor", "verifier", "planner", "executor", "generator"]
    assert prediction.stopped == "turns"
    assert [turn["turn"] for turn in prediction.turns] == [1, 2]


def test_an_unknown_tool_costs_the_turn_and_is_seen_by_the_next():
    script = Script(planner=[{**PLANS, "tool": "adder"}, {**PLANS, "tool": " Add "}], verifier=[GO_ON])
    prediction, modules = played(script, max_turns=2)
    assert modules == ["planner", "verifier", "planner", "executor", "generator"]
    assert [turn["error"] for turn in prediction.turns] == [True, False]
    assert "1. sum; adder -> error: no such tool; there are add, shout, fail" in script.prompts["planner"][1]


def test_a_plan_that_cannot_be_read_costs_the_turn():
    script = Script(planner=["I would rather not", PLANS], verifier=[GO_ON, STOP])
    prediction, modules = played(script, max_turns=3)
    assert modules == ["planner", "verifier", "planner", "executor", "verifier", "generator"]
    assert prediction.memory.splitlines()[0] == "1. error: the plan could not be read"


def test_a_command_that_cannot_be_read_or_does_not_fit_costs_the_turn():
    script = Script(executor=["hm", {"command": '{"a": 2}'}, {"command": "2 3"}], verifier=[GO_ON])
    prediction, _ = played(script, max_turns=3)
    assert [turn["error"] for turn in prediction.turns] == [True, True, True]
    first, second, third = prediction.memory.splitlines()
    assert first == "1. sum; add -> error: the command could not be read"
    assert "'b' is missing; inputs: a: integer, b: integer" in second
    assert "takes a JSON object, not '2 3'" in third


def test_a_command_of_several_lines_is_read_whole():
    script = Script(planner=[{**PLANS, "tool": "shout"}], executor=[{"command": "one\n\ntwo\n  three"}])
    prediction, _ = played(script)
    assert prediction.turns[0]["result"] == "ONE\n\nTWO\n  THREE"


def test_a_tool_that_fails_is_an_observation():
    prediction, _ = played(Script(planner=[{**PLANS, "tool": "fail"}], executor=[{"command": "luck"}]))
    assert prediction.memory == "1. sum; fail: luck -> error: OSError: no luck"


def test_a_verdict_that_cannot_be_read_goes_on_and_is_noted():
    odd = Script(verifier=["???", {"analysis": "", "verdict": "perhaps"}, STOP])
    prediction, modules = played(odd, max_turns=4)
    assert modules.count("planner") == 3
    notes = [turn["note"] for turn in prediction.turns]
    assert notes == ["the verdict could not be read", "the verdict was neither stop nor continue", ""]
    assert notes[0] in odd.prompts["planner"][1]


def test_an_answer_that_cannot_be_read_fails_the_rollout():
    with pytest.raises(dspy.utils.exceptions.AdapterParseError):
        played(Script(generator=["nothing to see"]))


def test_a_long_result_is_cut_with_a_mark_and_recorded():
    def flood(n: int) -> str:
        """Give many letters."""
        return "x" * n

    script = Script(planner=[{**PLANS, "tool": "flood"}], executor=[{"command": "100000"}])
    prediction, _ = played(script, tools=[flood], result_tokens=40, memory_tokens=200)
    (turn,) = prediction.turns
    assert turn["cut"]
    assert turn["result"].endswith(" … [cut]")
    assert len(turn["result"].encode()) <= 40  # the scripted tokenizer has a token per byte
    assert set(turn["result"].removesuffix(" … [cut]")) == {"x"}
    assert turn["result"] in prediction.memory


def test_old_turns_are_condensed_and_then_left_out():
    script = Script(verifier=[GO_ON])
    prediction, _ = played(script, max_turns=5, memory_tokens=110, result_tokens=40)
    # whole entries have 34 bytes, condensed ones 11; the mark of left-out ones 22
    assert prediction.memory.splitlines() == [
        "1. add -> 5",
        "2. add -> 5",
        "3. add -> 5",
        '4. sum; add: {"a": 2, "b": 3} -> 5',
        '5. sum; add: {"a": 2, "b": 3} -> 5',
    ]
    assert (prediction.condensed, prediction.left_out, len(prediction.turns)) == (3, 0, 5)
    prediction, _ = played(Script(verifier=[GO_ON]), max_turns=5, memory_tokens=60, result_tokens=40)
    assert prediction.memory.splitlines() == ["(turns 1 to 4 left out)", '5. sum; add: {"a": 2, "b": 3} -> 5']
    assert (prediction.condensed, prediction.left_out, len(prediction.turns)) == (0, 4, 5)


def test_time_is_looked_at_within_a_turn():
    def slow(text: str) -> str:
        """Take long."""
        time.sleep(5)
        return text

    script = Script(planner=[{**PLANS, "tool": "slow"}], executor=[{"command": "x"}])
    started = time.monotonic()
    prediction, modules = played(script, tools=[slow], max_seconds=0.5, max_turns=4)
    assert time.monotonic() - started < 4
    assert modules == ["planner", "executor", "generator"]  # no time to verify
    assert prediction.stopped == "time"
    assert "slow gave no answer within" in prediction.memory


def test_tokens_are_looked_at_within_a_turn():
    def spent(limit):
        prediction, modules = played(Script(verifier=[GO_ON]), max_turns=9, max_tokens=limit)
        return prediction.stopped, modules

    assert spent(1) == ("tokens", ["planner", "generator"])
    _, endless = spent(10**9)
    assert endless.count("planner") == 9
    stopped, modules = spent(5000)
    assert stopped == "tokens"
    assert 1 < len(modules) < len(endless)


def test_a_plan_that_nothing_was_left_to_follow_is_a_turn():
    """So that a metric which scores each of `turns` scores as many as the planner opened."""
    for limit in range(1, 8001, 400):
        prediction, modules = played(Script(verifier=[GO_ON]), max_turns=9, max_tokens=limit)
        assert (prediction.stopped, len(prediction.turns)) == ("tokens", modules.count("planner"))
        if modules[-2] == "planner":
            assert prediction.memory.endswith("sum; add -> error: no tokens left")
        if modules[-2] == "executor" and prediction.turns[-1]["error"]:
            assert prediction.turns[-1]["command"] == '{"a": 2, "b": 3}'


def test_who_counts_tokens_outside_sees_those_inside():
    program = answering(AgentFlow([add], max_tokens=10**6), Script())
    with dspy.track_usage() as outer:
        program(question="2 and 3?")
    (entries,) = outer.usage_data.values()
    assert len(entries) == 4


def test_nothing_of_one_question_is_seen_in_another():
    """Two questions at a time through one instance, step by step."""
    meet = threading.Barrier(2, timeout=30)

    def answer(request, prompt):
        mine, other = ("magenta", "indigo") if "ask magenta" in prompt else ("indigo", "magenta")
        assert other not in prompt.replace(f"ask {mine}", "")
        meet.wait()
        fixed = {"tool": "shout", "verdict": "continue"}
        return chat_answer(**{name: fixed.get(name, mine) for name in asked_fields(prompt)})

    program = answering(AgentFlow([shout], max_turns=3), answer)
    with ThreadPoolExecutor(2) as pool:
        magenta, indigo = pool.map(lambda colour: program(question=f"ask {colour}"), ("magenta", "indigo"))
    assert [turn["result"] for turn in magenta.turns] == ["MAGENTA"] * 3
    assert [turn["result"] for turn in indigo.turns] == ["INDIGO"] * 3


def test_each_role_may_have_another_lm_and_its_own_settings():
    program, policy = AgentFlow([add]), ScriptedPolicy(Script())
    stamp_paths(program)
    program.planner.set_lm(PolicyLM(policy, temperature=0.0))
    program.executor.set_lm(PolicyLM(policy, temperature=0.7))
    program.verifier.set_lm(DummyLM([STOP]))
    program.generator.set_lm(DummyLM([{"answer": "five"}]))
    assert program(question="2 and 3?").answer == "five"
    assert [request.temperature for request in policy.sampler.requests] == [0.0, 0.7]


def test_a_role_may_have_fewer_fields_and_other_words():
    class Choose(dspy.Signature):
        """Which tool?"""

        question: str = dspy.InputField()
        memory: str = dspy.InputField()
        tool: str = dspy.OutputField()

    script = Script(planner=[{"tool": "add"}], generator=[{"reply": "five", "sure": "yes"}])
    roles = {"planner": Choose, "generator": dspy.Signature("question, memory -> reply, sure")}
    prediction, _ = played(script, roles=roles)
    assert (prediction.reply, prediction.sure) == ("five", "yes")
    assert prediction.memory == '1. add: {"a": 2, "b": 3} -> 5'


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("no role 'planer'.*did you mean 'planner'", {"roles": {"planer": dspy.Signature("question -> tool")}}),
        ("the planner is not given 'query'", {"roles": {"planner": dspy.Signature("query -> tool")}}),
        ("needs the output 'command'; it has text", {"roles": {"executor": dspy.Signature("tool -> text")}}),
        ("two tools are called 'add'", {"tools": [add, add]}),
        ("at least one tool", {"tools": []}),
        ("tools are function; give a list", {"tools": add}),
        ("tools are str; give a list", {"tools": "add"}),
        ("max_turns=0", {"max_turns": 0}),
        ("a result must fit into the memory", {"memory_tokens": 10, "result_tokens": 11}),
    ],
)
def test_mistakes_are_refused_before_any_call(message, options):
    with pytest.raises(TaskError, match=message):
        AgentFlow(**{"tools": [add], **options})


def test_copies_share_the_tools_and_nothing_else():
    program = AgentFlow([add])
    copied = program.deepcopy()
    assert copied.tools["add"] is program.tools["add"]
    assert copied.planner is not program.planner
    assert [name for name, _ in copied.named_predictors()] == ["planner", "executor", "verifier", "generator"]
