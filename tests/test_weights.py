import pytest
import torch

from modpo.config import LoRA
from modpo.errors import PolicyError, SamplerError
from modpo.lm.local import weights as weights_module
from modpo.lm.local.model import clone_sharing
from modpo.lm.local.weights import FoldedWeights
from modpo.train.trainer import Trainer
from tests.oracle import Oracle, random_ids, randomised, tiny_trainer
from tests.tiny import KINDS, tiny_model

IDS = random_ids(15, 1)


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0]


def saved(folder, kind="llama", seed=7, lora=None):
    """A saved adapter and the logits it should give."""
    trainer = tiny_trainer(kind, **({} if lora is None else {"lora": lora}))
    randomised(trainer.adapter("a"), seed)
    folder.mkdir()
    trainer.save("a", "base", folder)
    return folder, Oracle(kind, trainer.adapter("a")).logits(IDS).detach()


def close(left, right):
    return torch.allclose(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_folding_answers_with_the_adapter_and_leaves_the_originals_bit_for_bit(kind, tmp_path):
    model = tiny_model(kind)
    originals = {name: (weight, weight.clone()) for name, weight in model.named_parameters()}
    base = logits(model)
    folded = FoldedWeights(model)
    one, wanted_one = saved(tmp_path / "one", kind, seed=1)
    two, wanted_two = saved(tmp_path / "two", kind, seed=2)
    for folder, wanted in ((one, wanted_one), (two, wanted_two), (one, wanted_one)):
        folded.use(folder)
        assert close(logits(model), wanted)
        assert not close(logits(model), base)
    folded.use(None)
    assert torch.equal(logits(model), base)
    for name, weight in model.named_parameters():
        assert weight is originals[name][0]
        assert torch.equal(weight, originals[name][1])


def test_an_adapter_of_few_layers_does_not_leave_the_last_one_behind(tmp_path):
    model = tiny_model()
    folded = FoldedWeights(model)
    every, _ = saved(tmp_path / "every")
    few, wanted = saved(tmp_path / "few", lora=LoRA(rank=2, targets=("q_proj",)))
    folded.use(every)
    folded.use(few)
    assert close(logits(model), wanted)


def test_a_trainer_on_the_shared_tensors_does_not_notice(tmp_path):
    model = tiny_model()
    clone = clone_sharing(model)
    trainer = Trainer(model, LoRA(rank=3, alpha=6.0), ("a",))
    folder, wanted = saved(tmp_path / "v1")
    folded = FoldedWeights(clone)
    folded.use(folder)
    assert close(logits(clone), wanted)
    plain = dict(tiny_model().named_parameters())
    for name, weight in model.named_parameters():
        assert torch.equal(weight, plain[name.replace(".base.weight", ".weight")])
    assert len(trainer.wrapped) == 14


def test_folded_copies_are_kept_and_the_oldest_goes_first(tmp_path, monkeypatch):
    folded = FoldedWeights(tiny_model())
    folders = [saved(tmp_path / f"v{at}", seed=at)[0] for at in range(3)]
    reads = []
    plain = weights_module.load_factors
    monkeypatch.setattr(weights_module, "load_factors", lambda folder: reads.append(folder.name) or plain(folder))
    size = 4 * sum(layer.weight.numel() for name, layer in folded._layers.items() if name != "lm_head")
    monkeypatch.setattr(weights_module, "SCRATCH_BYTES", 2 * size)
    for at in (0, 1, 0, 2, 0, 1):  # 2 pushes 1 out, which was used before 0
        folded.use(folders[at])
    assert reads == ["v0", "v1", "v2", "v1"]


def test_one_copy_is_kept_however_small_the_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_module, "SCRATCH_BYTES", 0)
    model = tiny_model()
    folded = FoldedWeights(model)
    folder, wanted = saved(tmp_path / "v1")
    folded.use(folder)
    assert close(logits(model), wanted)
    assert list(folded._copies) == [folder]


def test_an_adapter_for_another_model_is_refused_and_the_base_stays(tmp_path):
    folder, _ = saved(tmp_path / "deep", "qwen3")  # has a third layer
    model = tiny_model()
    base = logits(model)
    with pytest.raises(SamplerError, match="the base model does not have"):
        FoldedWeights(model).use(folder)
    assert torch.equal(logits(model), base)


def test_a_missing_adapter_is_named(tmp_path):
    with pytest.raises(PolicyError, match="no readable adapter"):
        FoldedWeights(tiny_model()).use(tmp_path / "gone")


def test_bf16_weights_are_folded_in_fp32_and_rounded_once(tmp_path):
    model = tiny_model().bfloat16()
    folder, _ = saved(tmp_path / "v1")
    factors, scale = weights_module.load_factors(folder)
    name = "model.layers.0.self_attn.q_proj"
    before = model.get_submodule(name).weight
    down, up = factors[name]
    FoldedWeights(model).use(folder)
    found = model.get_submodule(name).weight
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, (before.float() + scale * up @ down).bfloat16(), rtol=1e-2, atol=1e-6)
    assert not found.requires_grad
