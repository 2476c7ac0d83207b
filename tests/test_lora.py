import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from modpo.config import LoRA
from modpo.errors import PolicyError
from modpo.train.lora import (
    Adapter,
    LoRALinear,
    activated,
    load_adapter,
    load_factors,
    save_adapter,
    target_layers,
    unwrap,
    wrap,
)
from modpo.train.trainer import Trainer
from tests.oracle import SMALL, Oracle, cases, random_ids, tiny_trainer, token_weights
from tests.tiny import KINDS, save_tiny, tiny_model

# PEFT asks for a property that transformers has renamed
peft_loads = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")


def saved(folder, kind="llama", base="base"):
    folder.mkdir(parents=True, exist_ok=True)
    trainer = tiny_trainer(kind)
    trainer.save("a", base, folder)
    return trainer


def test_a_wrapped_layer_adds_the_active_adapter_only():
    layer = LoRALinear(nn.Linear(2, 2, bias=True))
    with torch.no_grad():
        layer.base.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        layer.base.bias.copy_(torch.tensor([0.5, 0.0]))
    x = torch.tensor([[[1.0, 1.0]]])
    assert layer(x).tolist() == [[[3.5, 7.0]]]
    # A x = 1 - 1 * 2 = -1; B A x = (-1, -3); scale 2
    layer.active = (torch.tensor([[1.0, -2.0]]), torch.tensor([[1.0], [3.0]]), 2.0)
    assert layer(x).tolist() == [[[1.5, 1.0]]]


def test_a_fresh_adapter_starts_a_in_its_bounds_and_b_at_zero():
    layers = target_layers(tiny_model(), SMALL)
    adapter = Adapter(layers, SMALL, seed=1)
    for name, layer in layers.items():
        down, up = (factor.detach() for factor in adapter.factors(name))
        assert down.shape == (3, layer.in_features)
        assert up.shape == (layer.out_features, 3)
        assert not up.any()
        assert down.abs().max() <= layer.in_features**-0.5
        assert down.std().item() == pytest.approx((layer.in_features * 3) ** -0.5, rel=0.2)  # uniform: bound / sqrt(3)
    again, other = Adapter(layers, SMALL, seed=1), Adapter(layers, SMALL, seed=2)
    assert all(map(torch.equal, adapter.parameters(), again.parameters()))
    assert not torch.equal(adapter.factors(name)[0], other.factors(name)[0])


def test_targets_are_all_but_the_head_or_those_named():
    model = tiny_model()
    every = target_layers(model, SMALL)
    assert len(every) == 14  # two layers of q k v o gate up down
    assert "lm_head" not in every
    named = target_layers(model, LoRA(targets=("v_proj", "down_proj")))
    assert sorted({name.rsplit(".", 1)[-1] for name in named}) == ["down_proj", "v_proj"]
    with pytest.raises(PolicyError, match="did you mean 'q_proj'"):
        target_layers(model, LoRA(targets=("q_prj",)))


def test_unwrap_puts_the_very_layers_back():
    model = tiny_model()
    layers = target_layers(model, SMALL)
    wrap(model, layers)
    unwrap(model)
    assert target_layers(model, SMALL) == layers


def test_an_adapter_is_active_within_its_block_even_when_that_fails():
    trainer = tiny_trainer()
    with pytest.raises(KeyError):
        with activated(trainer.wrapped, trainer.adapter("a")):
            assert all(layer.active for layer in trainer.wrapped.values())
            raise KeyError
    assert not any(layer.active for layer in trainer.wrapped.values())


@peft_loads
@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_a_saved_adapter_and_gives_the_same_logits(kind, tmp_path):
    base = save_tiny(tmp_path / "base", kind)
    trainer = saved(tmp_path / "adapter", kind, base)
    ids = random_ids(20, 3)
    wanted = Oracle(kind, trainer.adapter("a")).logits(ids).detach()
    loaded = peft.PeftModel.from_pretrained(tiny_model(kind), tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(loaded(torch.tensor([ids])).logits[0], wanted, rtol=1e-4, atol=1e-4)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == base
    assert (config["r"], config["lora_alpha"]) == (3, 6.0)


@peft_loads
def test_an_adapter_of_a_few_layers_is_loaded_by_peft_on_those_layers_only(tmp_path):
    trainer = tiny_trainer(lora=LoRA(rank=2, alpha=2.0, targets=("q_proj",)))
    trainer.save("a", "base", tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny_model(), tmp_path)
    adapted = {n for n, m in loaded.named_modules() if isinstance(m, peft.tuners.lora.Linear)}
    assert adapted == {f"base_model.model.model.layers.{at}.self_attn.q_proj" for at in range(2)}


def test_saved_and_loaded_with_moments_training_goes_on_as_if_unbroken(tmp_path):
    rows = cases()["ragged"]
    weights = torch.cat(token_weights(rows))

    def step(trainer):
        trainer.update("a", rows, lambda logprobs, _: ((logprobs * weights).sum(), {}), learning_rate=1e-2)

    whole = tiny_trainer()
    step(whole)
    whole.save("a", "base", tmp_path)
    later = tiny_trainer(names=("x", "a"))
    later.load("a", tmp_path)
    reset = tiny_trainer()
    reset.load("a", tmp_path)
    reset.reset_moments("a")
    for trainer in (whole, later, reset):
        step(trainer)
    assert all(map(torch.equal, whole.adapter("a").parameters(), later.adapter("a").parameters()))
    assert not any(map(torch.equal, whole.adapter("a").parameters(), reset.adapter("a").parameters()))
    steps = [entry["step"].item() for entry in later.optimizers["a"].state.values()]
    assert set(steps) == {2.0}


def test_an_adapter_that_was_never_updated_is_saved_and_loaded_too(tmp_path):
    fresh = saved(tmp_path)
    loaded = Trainer(tiny_model(), SMALL, ("a",))
    loaded.load("a", tmp_path)
    assert all(map(torch.equal, fresh.adapter("a").parameters(), loaded.adapter("a").parameters()))
    assert not loaded.optimizers["a"].state


def test_an_adapter_from_elsewhere_starts_without_moments(tmp_path):
    trainer = saved(tmp_path)
    rows = cases()["ragged"]
    trainer.update("a", rows, lambda logprobs, _: (logprobs.sum(), {}), learning_rate=1e-2)
    (tmp_path / "optimizer.safetensors").unlink()
    trainer.load("a", tmp_path)
    assert not trainer.optimizers["a"].state


def test_factors_are_read_with_their_scale(tmp_path):
    trainer = saved(tmp_path)
    factors, scale = load_factors(tmp_path)
    assert scale == 2.0
    for path, pair in factors.items():
        assert all(map(torch.equal, pair, trainer.adapter("a").factors(path)))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoRA(rank=4, alpha=8.0), "has rank 3, this policy 4"),
        (LoRA(rank=3, alpha=3.0), r"alpha / rank = 2.0, this policy 1.0"),
        (LoRA(rank=3, alpha=6.0, targets=("q_proj",)), "acts on other layers"),
    ],
)
def test_an_adapter_of_another_shape_is_refused(lora, message, tmp_path):
    saved(tmp_path)
    trainer = Trainer(tiny_model(), lora, ("a",))
    before = [factor.clone() for factor in trainer.adapter("a").parameters()]
    with pytest.raises(PolicyError, match=message):
        load_adapter(trainer.adapter("a"), tmp_path)
    assert all(map(torch.equal, before, trainer.adapter("a").parameters()))


@pytest.mark.parametrize("spoilt", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("content", [None, "garbage"])
def test_an_unreadable_adapter_names_its_folder(spoilt, content, tmp_path):
    saved(tmp_path)
    file = tmp_path / spoilt
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(PolicyError, match=f"no readable adapter in {tmp_path}"):
        load_factors(tmp_path)


def test_other_tensors_than_factors_are_refused(tmp_path):
    saved(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({**load_file(file), "base_model.model.lm_head.weight": torch.zeros(1)}, file)
    with pytest.raises(PolicyError, match="no modules_to_save"):
        load_factors(tmp_path)


def test_saving_writes_only_the_two_files_of_peft(tmp_path):
    save_adapter(tiny_trainer().adapter("a"), "base", tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
