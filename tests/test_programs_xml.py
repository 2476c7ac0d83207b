import dspy
from dspy.utils import DummyLM

from modpo.programs.xml import XMLPredict


def test_the_form_of_the_answer_is_said_once_and_parsed():
    lm = DummyLM([{"plan": "spider 8"}], adapter=dspy.XMLAdapter())
    with dspy.context(lm=lm):
        assert XMLPredict("question -> plan")(question="A spider?").plan == "spider 8"
    system, user = lm.history[-1]["messages"]
    assert "<plan>" in system["content"]
    assert user["content"] == "<question>\nA spider?\n</question>"
