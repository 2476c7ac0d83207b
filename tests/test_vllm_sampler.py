import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

import modpo
from modpo.errors import ConfigError, PromptTooLongError, SamplerError
from modpo.lm.sampler import SampleRequest
from modpo.lm.versions import adapter_folder
from modpo.lm.vllm.client import Client
from modpo.lm.vllm.sampler import VLLMSampler
from modpo.train.checkpoint import write_folder
from tests.oracle import random_ids
from tests.tiny import EOS, save_tiny, tiny_tokenizer
from tests.vllm_double import BASE, Double, running

PROMPT = random_ids(12, 3)


@pytest.fixture
def sampler():
    """Makes samplers for a server, and closes them."""
    made = []

    def make(server, **options):
        settings = modpo.VLLM(**{"url": server.url, **options})
        about = {"model": "unused", "dtype": "float32", "lora_rank": 16}
        made.append(VLLMSampler(settings, tokenizer=tiny_tokenizer(), ends=frozenset({EOS}), **about))
        return made[-1]

    yield make
    for each in made:
        each.close()


def ask(**changes):
    return SampleRequest(**{"prompt_ids": PROMPT, "max_tokens": 5, "seed": 7, **changes})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with three versions of a random adapter."""
    root = tmp_path_factory.mktemp("run")
    trainer = modpo.Policy(save_tiny(root / "base"), dtype="float32").trainer(("planner",))
    for version in (1, 2, 3):
        trainer.adapter("planner").scatter(version, 0.1)
        write_folder(adapter_folder(root, "planner", version), lambda work: trainer.save("planner", "base", work))
    return root


def planner(run, version, **changes):
    return ask(adapter="planner", version=version, folder=adapter_folder(run, "planner", version), **changes)


def test_ids_go_in_and_ids_with_logprobs_come_out(sampler):
    with running(Double()) as server:
        found = sampler(server).sample(ask(stop=("x",), temperature=0.7))
        (_, body), *_ = server.log
        local = server.sampler.sample(ask(stop=("x",), temperature=0.7))
    assert found.ids == local.ids
    assert found.logprobs == pytest.approx(local.logprobs)
    assert (found.finish, found.text) == (local.finish, local.text)
    assert body["model"] == BASE
    assert body["prompt"] == list(PROMPT)
    assert (body["seed"], body["temperature"], body["max_tokens"]) == (7, 0.7, 5)
    assert body["stop"] == ["x"]
    assert body["stop_token_ids"] == [EOS]
    assert body["include_stop_str_in_output"]
    assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)


def test_each_version_answers_under_a_name_of_its_own_and_the_old_one_goes(sampler, run):
    with running(Double()) as server:
        vllm = sampler(server)
        answers = []
        for version in (1, 2):
            vllm.prepare({f"planner@v{version}": adapter_folder(run, "planner", version)})
            answers.append(vllm.sample(planner(run, version)))
            (held,) = server.adapters
            assert held.startswith(f"planner@v{version}-")
        assert answers[0].logprobs != answers[1].logprobs
        for version, answer in zip((1, 2), answers, strict=True):
            assert server.sampler.sample(planner(run, version)).logprobs == pytest.approx(answer.logprobs)


def test_two_runs_may_both_have_a_first_version(sampler, run, tmp_path):
    other = adapter_folder(tmp_path, "planner", 1)
    other.parent.mkdir(parents=True)
    other.symlink_to(adapter_folder(run, "planner", 3))
    with running(Double()) as server:
        vllm = sampler(server)
        mine, theirs = vllm.sample(planner(run, 1)), vllm.sample(ask(adapter="planner", version=1, folder=other))
        assert len(server.adapters) == 2
    assert mine.logprobs != theirs.logprobs


def test_more_adapters_than_slots_work(sampler, run):
    with running(Double()) as server:
        vllm = sampler(server, max_loras=2)
        requests = [planner(run, version, seed=seed) for seed in range(6) for version in (1, 2, 3)]
        with ThreadPoolExecutor(len(requests)) as pool:
            found = list(pool.map(vllm.sample, requests))
        assert server.most_adapters == 2
        for request, completion in zip(requests, found, strict=True):
            assert server.sampler.sample(request).ids == completion.ids


@pytest.mark.parametrize(
    ("fault", "options", "message"),
    [
        ("full cache", {}, "key-value cache is full"),
        ("slow", {"timeout_s": 0.2}, "did not answer /v1/completions within 0.2 s"),
        ("no ids", {}, "return_token_ids"),
    ],
)
def test_what_is_wrong_with_a_server_is_said(sampler, fault, options, message):
    with running(Double(fault=fault)) as server:
        with pytest.raises(SamplerError, match=message):
            sampler(server, **options).sample(ask())
        assert len([path for path, _ in server.log if path == "/v1/completions"]) == 1  # no second sample


def test_a_prompt_too_long_for_the_server_is_data(sampler):
    with running(Double(context=14)) as server:
        with pytest.raises(PromptTooLongError, match="maximum context length is 14"):
            sampler(server).sample(ask())


def test_an_adapter_that_the_server_cannot_read_is_named(sampler, tmp_path):
    folder = tmp_path / "adapters" / "planner" / "v1"
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    with running(Double()) as server:
        with pytest.raises(SamplerError, match="does not load .*No adapter found.*under the same path"):
            sampler(server).sample(ask(adapter="planner", version=1, folder=folder))


def test_a_server_that_is_not_there_is_said_before_work(sampler, tmp_path):
    with pytest.raises(SamplerError, match="no vLLM server answers at http://127.0.0.1:9"):
        sampler(Double(), url="http://127.0.0.1:9").open()


def test_a_server_that_died_is_told_apart_and_not_asked_again(sampler):
    with running(Double()) as server:
        vllm = sampler(server)
        vllm.sample(ask())
    with pytest.raises(SamplerError, match="is gone .*resume the run"):
        vllm.sample(ask())


class Dropping(BaseHTTPRequestHandler):
    """Reads a request and hangs up without an answer."""

    seen = 0

    def do_POST(self):
        type(self).seen += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        self.close_connection = True

    def log_message(self, *_):
        pass


def test_a_request_that_may_have_been_sampled_is_not_sent_again():
    server = HTTPServer(("127.0.0.1", 0), Dropping)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        client = Client(f"http://127.0.0.1:{server.server_address[1]}")
        with pytest.raises(SamplerError, match="is gone"):
            client.complete({"prompt": [1]})
        client.close()
        assert Dropping.seen == 1
    finally:
        server.shutdown()
        server.server_close()


def test_something_else_at_that_url_is_said(sampler):
    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>" if self.path != "/health" else json.dumps({}).encode())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        double = Double()
        double.url = f"http://127.0.0.1:{server.server_address[1]}"
        with pytest.raises(SamplerError, match="no vLLM server: '<html>' is not JSON"):
            sampler(double).open()
    finally:
        server.shutdown()
        server.server_close()


def test_settings_that_cannot_work_are_refused_before_work(tmp_path):
    policy = modpo.Policy(save_tiny(tmp_path), sampler=modpo.VLLM(python=tmp_path / "no" / "python"))
    with pytest.raises(ConfigError, match="make vllm-cpu"):
        policy.sampler.open()
    with pytest.raises(ConfigError, match="allowed: 'local', 'vllm'"):
        modpo.Policy(str(tmp_path), sampler="sglang")
