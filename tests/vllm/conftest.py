"""A real vLLM server over a tiny model; without the server's own environment these tests are skipped."""

import httpx
import pytest

import modpo
from modpo.lm.vllm.process import VENV
from tests.e2e.model import CONTEXT, make_base, policy
from tests.vllm_double import ROOT

PYTHON = ROOT / VENV / "bin" / "python"
HEADS = (2, 1)  # 32 wide each: the least that vLLM's attention on CPUs takes
SLOTS = 2


def pytest_collection_modifyitems(items):
    if not PYTHON.exists():
        absent = pytest.mark.skip(reason="no environment for a vLLM server; `make test-vllm` makes it and runs these")
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(absent)


def server_settings(*args, **options):
    """Of a server to start: small, and without compilation, which takes longer than all these tests."""
    ours = ("--enforce-eager", "--max-model-len", str(CONTEXT), "--max-num-seqs", "16", *args)
    return modpo.VLLM(**{"python": PYTHON, "args": ours, "max_loras": SLOTS, **options})


def cache_hits(url):
    """Prompt tokens that the server has found in its prefix cache."""
    lines = httpx.get(url + "/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))


@pytest.fixture(scope="session")
def narrow_base(tmp_path_factory):
    """Folder of the end-to-end tests' base model, in a shape that vLLM serves."""
    return make_base(tmp_path_factory.mktemp("base") / "tiny", heads=HEADS)


@pytest.fixture(scope="session")
def server(narrow_base, tmp_path_factory):
    """URL of a server that all these tests share."""
    owner = policy(narrow_base, sampler=server_settings())
    try:
        owner.sampler.open(tmp_path_factory.mktemp("server"), print)
        yield owner.sampler.url
    finally:
        owner.sampler.close()


@pytest.fixture
def attached(narrow_base, server):
    """A policy that samples from the shared server."""
    made = policy(narrow_base, sampler=modpo.VLLM(url=server, max_loras=SLOTS))
    yield made
    made.sampler.close()
