"""PEFT's adapters with gates: a sum of gated parts is never merged into one weight, and to_dense can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ConversionError

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
from dropconnectpp.integrations.peft import with_gated_layers  # noqa: E402

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def with_adapters() -> Any:
    widths = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=12, **widths))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return adapted


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("which", ["*lora_A*", "*lora_B*", "*base_layer", "*"])
@pytest.mark.parametrize("method", ["merge_and_unload", "merge_adapter"])
def test_a_merge_of_gated_parts_is_refused_and_changes_nothing(which: str, method: str) -> None:
    model = dcpp.convert(with_adapters(), include=which, example_input={"input_ids": IDS}).eval()
    before, state = logits(model), {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ConversionError, match=r"cannot be merged.* to_dense\(model\)"):
        getattr(model, method)()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(logits(model), before)
    merged = dcpp.to_dense(model).merge_and_unload()
    torch.testing.assert_close(logits(merged), before, rtol=1e-4, atol=1e-6)


def test_adapters_beside_gates_are_merged_and_saved(tmp_path: Path) -> None:
    model = dcpp.convert(with_adapters(), include="*o_proj").eval()
    before = logits(model)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
    torch.testing.assert_close(logits(model.merge_and_unload()), before, rtol=1e-4, atol=1e-6)


def test_gated_adapters_are_not_saved_without_their_gates(tmp_path: Path) -> None:
    model = dcpp.convert(with_adapters(), include="*lora_*").eval()
    with pytest.raises(ConversionError, match="save_pretrained of a converted"):
        model.save_pretrained(tmp_path)
    dcpp.to_dense(model).save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()


# ------------------------------------------------------------------------------ adapters on converted layers


def gated(kind: str = "dropconnect++") -> Any:
    widths = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=12, **widths))
    return dcpp.convert(model, kind=kind, example_input={"input_ids": IDS})


def config(**options: Any) -> Any:
    return peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, **options)


@pytest.mark.parametrize("kind", ["dropconnect++", "dropconnect"])
def test_adapters_train_on_layers_that_keep_their_gates(kind: str) -> None:
    model = peft.get_peft_model(gated(kind), with_gated_layers(config())).train()
    start = logits(model.eval())
    assert torch.equal(start, logits(model.base_model.model))
    with dcpp.sampling(model):
        assert not torch.equal(logits(model), logits(model))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):  # one of the two factors starts at zero
        optimizer.zero_grad()
        model(input_ids=IDS).logits.square().mean().backward()
        optimizer.step()
    trained = {name for name, value in model.named_parameters() if value.grad is not None}
    assert len(trained) == 4
    assert all(".lora_" in name for name in trained)
    assert not torch.equal(logits(model), start)
    dense = dcpp.to_dense(model)
    torch.testing.assert_close(logits(dense), logits(model))
    torch.testing.assert_close(logits(dense.merge_and_unload()), logits(model), rtol=1e-4, atol=1e-6)


def test_adapters_on_gated_layers_do_not_merge_and_are_saved(tmp_path: Path) -> None:
    model = peft.get_peft_model(gated(), with_gated_layers(config())).eval()
    before = logits(model)
    for method in ("merge_and_unload", "merge_adapter"):
        with pytest.raises(ConversionError, match=r"DropConnectPPLinear cannot be merged.*to_dense\(model\)"):
            getattr(model, method)()
    assert torch.equal(logits(model), before)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_what_reads_a_gated_weight_is_an_error() -> None:
    with pytest.raises(dcpp.DropConnectError, match="DoRA reads the layer's weight"):
        with_gated_layers(config(use_dora=True))
    with pytest.raises(dcpp.DropConnectError, match=r"takes a peft\.LoraConfig, got a dict"):
        with_gated_layers({})
    sizes = {"vocab_size": 12, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    model = dcpp.convert(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens)))
    before = model(IDS[:, :4]).logits.shape
    with pytest.raises(ConversionError, match="PEFT cannot adapt a Conv1D whose parameters have gates"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    assert model(IDS[:, :4]).logits.shape == before


def test_adapters_may_be_there_before_the_gates_of_what_they_adapt() -> None:
    sizes = {"vocab_size": 12, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    plain = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    adapted = peft.get_peft_model(plain, peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    model = dcpp.convert(adapted, include="*base_layer", example_input={"input_ids": IDS}).eval()
    dense = dcpp.to_dense(model)
    torch.testing.assert_close(logits(dense), logits(model))
    with pytest.raises(ConversionError, match="cannot be merged"):
        model.merge_and_unload()
    torch.testing.assert_close(logits(dense.merge_and_unload()), logits(model), rtol=1e-4, atol=1e-6)
