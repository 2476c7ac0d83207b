import json

import pytest

import modpo
from modpo.cli import app
from modpo.errors import ConfigError, SamplerError
from modpo.preflight import examine, preflight
from tests.tiny import save_tiny
from tests.vllm_double import Double, running


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("base"))


def checked(base, folder, **faults):
    with running(Double(**faults)) as server:
        policy = modpo.Policy(base, dtype="float32", sampler=modpo.VLLM(url=server.url))
        try:
            return preflight(policy, folder)
        finally:
            policy.sampler.close()


def test_the_local_sampler_agrees(base, tmp_path):
    policy = modpo.Policy(base, dtype="float32")
    report = preflight(policy, tmp_path)
    assert report.agree
    report.require()
    measured = {check.name: check.k3 for check in report.checks if check.k3 is not None}
    assert set(measured) == {"base", "temperature", "adapter", "second adapter", "swap"}
    assert max(measured.values()) < 1e-6
    assert len(report.worst) == 8


def test_a_sound_server_agrees(base, tmp_path):
    report = checked(base, tmp_path)
    assert report.agree
    assert {check.name for check in report.checks} >= {"chat template", "end of text"}


@pytest.mark.parametrize(
    ("faults", "failing", "cause"),
    [
        ({"model_seed": 1}, "base", "another base model"),
        ({"fault": "ignores adapters"}, "adapter", "the adapter is ignored"),
        ({"fault": "raw logprobs"}, "temperature", "--logprobs-mode processed_logprobs"),
        ({"fault": "stale"}, "swap", "the old version still answers"),
        ({"fault": "other template"}, "chat template", "renders messages into other tokens"),
        ({"fault": "runs on"}, "end of text", "goes on after an end-of-text token"),
    ],
)
def test_a_broken_server_is_named(base, tmp_path, faults, failing, cause):
    report = checked(base, tmp_path, **faults)
    assert not report.agree
    assert failing in {check.name for check in report.checks if not check.ok}
    with pytest.raises(SamplerError, match=cause):
        report.require()


def test_the_doctor_says_what_holds(base, capsys):
    with running(Double()) as server:
        found = examine("vllm", base, url=server.url)
    assert (found["sampler"], found["agree"], found["url"]) == ("vllm", True, server.url)
    assert [check["ok"] for check in found["checks"]] == [True] * 7
    with pytest.raises(ConfigError, match="did you mean 'vllm'"):
        examine("vlm", base)


def test_the_doctor_on_the_command_line(base, capsys):
    with running(Double(fault="ignores adapters")) as server:
        with pytest.raises(SystemExit) as left:
            app(["doctor", "--sampler", "vllm", "--url", server.url, "--base", base, "--json"])
    assert left.value.code == 2
    found = json.loads(capsys.readouterr().out)
    assert not found["agree"]
    with pytest.raises(SystemExit) as left:
        app(["doctor", "--base", base])
    assert left.value.code == 0
    assert "they agree" in capsys.readouterr().out
