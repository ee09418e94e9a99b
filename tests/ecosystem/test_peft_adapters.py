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
