"""The mixed example's parts that need no vLLM: its frozen model and what it is shown."""

from types import ModuleType

import pytest

from modpo.errors import ConfigError
from modpo.programs import demo
from tests.examples import load_example
from tests.loopback import serving


@pytest.fixture(scope="module")
def mixed() -> ModuleType:
    return load_example("mixed")


def chat(path, body):
    """Answers as a judge who accepts everything."""
    if body is None:
        return 200, {"data": [{"id": "judge"}]}
    message = {"role": "assistant", "content": "<ok>\nyes\n</ok>"}
    return 200, {
        "id": "1", "object": "chat.completion", "created": 0, "model": body["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13},
    }  # fmt: skip


def test_the_verifier_asks_the_first_model_of_the_frozen_server(mixed):
    task = demo.task()
    verifier = task.program.verifier
    verifier.demos = mixed.demonstrations(task.traces["verifier"])
    assert [shown.ok for shown in verifier.demos] == ["no", "yes", "yes", "yes"]
    with serving(chat) as url:
        verifier.lm = mixed.frozen_lm(url, "")
        assert verifier.lm.model == "openai/judge"
        assert verifier(question="q", plan="p", expression="1 * 2").ok == "yes"


@pytest.mark.parametrize("listed", [(404, {}), (200, {"data": []}), (200, {})])
def test_a_server_that_lists_no_model_is_said(mixed, listed):
    with serving(lambda path, body: listed) as url:
        with pytest.raises(ConfigError, match="no list of models at .*name a model"):
            mixed.frozen_lm(url, "")


def test_a_server_that_is_not_there_is_said(mixed):
    with pytest.raises(ConfigError, match="no list of models at http://127.0.0.1:9"):
        mixed.frozen_lm("http://127.0.0.1:9", "")


def test_the_task_trains_two_modules_and_asks_a_frozen_third(mixed):
    with serving(chat) as url:
        task = mixed.mixed_task(seed=1, url="http://127.0.0.1:9", frozen_url=url)
    assert set(task.traces) == {"planner", "executor"}
    assert len(task.testset) == mixed.TEST
    assert task.settings == mixed.SETTINGS
    assert task.program.verifier.lm.model == "openai/judge"
    assert task.program.planner.lm is task.program.executor.lm
