import json
import stat

import pytest
import torch

from modpo.errors import PolicyError
from modpo.lm.local import model as model_module
from modpo.lm.local.model import clone_sharing, default_device, fastest_dtype, load_base, machine_rates, matmul_rate
from tests.oracle import random_ids
from tests.tiny import EOS, KINDS, save_tiny, tiny_model, tiny_tokenizer


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Rates of a made-up machine; each measurement is noted, and the user's cache is elsewhere."""
    rates = {torch.float32: 90.0, torch.bfloat16: 15.0}
    taken = []
    monkeypatch.setattr(model_module, "user_cache_path", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(model_module, "matmul_rate", lambda dtype: taken.append(dtype) or rates[dtype])
    monkeypatch.setattr(model_module, "default_device", lambda: "cpu")
    return rates, taken, tmp_path / "cache" / "modpo" / "machine.json"


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_loaded_with_its_tokenizer_ends_and_context(kind, tmp_path):
    base = load_base(save_tiny(tmp_path, kind), "float32", "cpu")
    assert base.dtype == "float32"
    assert base.ends == {EOS}
    assert base.context_length == 2048
    assert base.tokenizer.encode("hi", add_special_tokens=False) == tiny_tokenizer().encode("hi")
    assert not base.model.training
    ids = torch.tensor([random_ids(9, 1)])
    with torch.no_grad():
        assert torch.equal(base.model(ids).logits, tiny_model(kind)(ids).logits)


def test_bf16_is_loaded_as_asked(tmp_path):
    base = load_base(save_tiny(tmp_path), "bfloat16", "cpu")
    assert {weight.dtype for weight in base.model.parameters()} == {torch.bfloat16}


def test_auto_takes_the_faster_and_says_which(measured, tmp_path):
    rates, _, _ = measured
    folder = save_tiny(tmp_path / "base")
    assert load_base(folder, "auto", None).dtype == "float32"
    rates[torch.bfloat16] = 2400.0
    measured[2].unlink()
    base = load_base(folder, "auto", None)
    assert base.dtype == "bfloat16"
    assert next(base.model.parameters()).dtype == torch.bfloat16


def test_every_end_of_the_generation_config_counts(tmp_path):
    folder = save_tiny(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_base(folder, "float32", "cpu").ends == {EOS, 7, 9}


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path):
    folder = save_tiny(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(PolicyError, match="no chat template; use an instruction-tuned model"):
        load_base(folder, "float32", "cpu")


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_folder_that_holds_no_model_is_one_readable_line(content, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(PolicyError, match=f"cannot load the base model '{tmp_path}'") as caught:
        load_base(str(tmp_path), "float32", "cpu")
    assert "\n" not in str(caught.value)


def test_weights_cut_short_are_one_readable_line(tmp_path):
    folder = save_tiny(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    base = load_base(folder, "float32", "cpu")
    with pytest.raises(PolicyError, match="cannot load the base model"):
        base.model  # noqa: B018 - the access reads the weights


def test_the_weights_are_read_when_first_needed(tmp_path, monkeypatch):
    base = load_base(save_tiny(tmp_path), "float32", "cpu")
    (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere")
    assert base.ends == {EOS}
    (tmp_path / "elsewhere").rename(tmp_path / "model.safetensors")
    assert base.model is base.model


def test_without_a_generation_config_the_models_own_end_counts(tmp_path):
    folder = save_tiny(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert load_base(folder, "float32", "cpu").ends == {EOS}


def test_rates_are_measured_once_and_kept(measured):
    _, taken, file = measured
    assert machine_rates() == machine_rates() == {"float32": 90.0, "bfloat16": 15.0}
    assert taken == [torch.float32, torch.bfloat16]
    assert list(json.loads(file.read_text()).values()) == [{"float32": 90.0, "bfloat16": 15.0}]


def test_another_machine_in_the_same_cache_is_measured_anew(measured, monkeypatch):
    rates, taken, file = measured
    machine_rates()
    rates[torch.bfloat16] = 2400.0
    monkeypatch.setattr(model_module, "_cpu", lambda: "a newer one amx")
    assert fastest_dtype() == "bfloat16"
    assert len(taken) == 4
    assert len(json.loads(file.read_text())) == 2
    monkeypatch.undo()


@pytest.mark.parametrize("content", ["", "{"])
def test_a_cache_written_by_half_is_measured_again(measured, content):
    _, taken, file = measured
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert fastest_dtype() == "float32"
    assert fastest_dtype() == "float32"
    assert len(taken) == 2


def test_a_cache_that_cannot_be_written_costs_the_measurement_only(measured):
    _, taken, file = measured
    file.parent.parent.mkdir()
    file.parent.write_text("a file where the folder should be")
    assert fastest_dtype() == "float32"
    assert fastest_dtype() == "float32"
    assert len(taken) == 4
    assert stat.S_ISREG(file.parent.stat().st_mode)


def test_a_gpu_takes_bf16_without_measuring(measured):
    assert fastest_dtype("cuda") == "bfloat16"
    assert measured[1] == []


def test_the_rate_of_a_product_is_positive():
    assert matmul_rate(torch.float32, seconds=0.01) > 0
    assert default_device() in ("cpu", "cuda")


def test_a_clone_shares_every_tensor_and_none_of_the_layers():
    model = tiny_model()
    clone = clone_sharing(model)
    for (name, weight), (other, same) in zip(model.named_parameters(), clone.named_parameters(), strict=True):
        assert name == other
        assert weight is same
    assert clone.lm_head.weight is clone.model.embed_tokens.weight
    clone.lm_head.weight = torch.nn.Parameter(torch.zeros(258, 48))
    clone.set_attn_implementation("eager")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config._attn_implementation == "sdpa"
