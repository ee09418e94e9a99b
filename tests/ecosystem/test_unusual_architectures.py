"""Architectures whose parents read their children's weights, or whose weights are no linear layers: right, or named."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.conversion.hosting import Host
from dropconnectpp.layers.base import masked_layers

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
SMALL: dict[str, Any] = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 1}
HEADS: dict[str, Any] = {"intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}


def jamba() -> Any:
    return transformers.JambaConfig(
        **(SMALL | HEADS | {"num_hidden_layers": 2}), num_experts=2, mamba_d_state=4, use_mamba_kernels=False,
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
    )  # fmt: skip


def qwen3_next() -> Any:
    return transformers.Qwen3NextConfig(
        **(SMALL | HEADS | {"num_hidden_layers": 2}), head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=4, linear_value_head_dim=4, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
        shared_expert_intermediate_size=8, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip


def wavlm() -> Any:
    return transformers.WavLMConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8),
        conv_stride=(2, 2), conv_kernel=(3, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )  # fmt: skip


MODELS: dict[str, Any] = {
    "MambaForCausalLM": lambda: transformers.MambaConfig(**SMALL, state_size=4),
    "Mamba2ForCausalLM": lambda: transformers.Mamba2Config(
        **SMALL, num_heads=4, head_dim=8, n_groups=1, state_size=4, chunk_size=4
    ),
    "FalconMambaForCausalLM": lambda: transformers.FalconMambaConfig(**SMALL, state_size=4),
    "JambaForCausalLM": jamba,
    "Qwen3NextForCausalLM": qwen3_next,
    "WavLMModel": wavlm,
    "GPT2LMHeadModel": lambda: transformers.GPT2Config(vocab_size=12, n_embd=16, n_layer=1, n_head=2, n_positions=8),
    "MixtralForCausalLM": lambda: transformers.MixtralConfig(**SMALL, **HEADS, num_local_experts=2),
}


def made(name: str) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kernels that this machine lacks
        model = getattr(transformers, name)(MODELS[name]())
    return model, {"input_values": torch.randn(1, 200)} if name == "WavLMModel" else {"input_ids": IDS}


def first(output: Any) -> Tensor:
    return output.logits if "logits" in output else output.last_hidden_state


@pytest.mark.parametrize("name", MODELS)
def test_every_gate_is_used_and_to_dense_is_the_same_network(name: str) -> None:
    model, inputs = made(name)
    extra = {"parameters": "*.experts.*_proj"} if name in ("MixtralForCausalLM", "JambaForCausalLM") else {}
    converted = dcpp.convert(model, example_input=inputs, **extra).eval()
    reads = [module for module in converted.modules() if isinstance(module, Host)]
    assert reads
    with torch.no_grad():
        for layer in masked_layers(converted).values():
            layer.weight_logit.normal_()
        dense = dcpp.to_dense(converted)
        torch.testing.assert_close(first(dense(**inputs)), first(converted(**inputs)), rtol=1e-4, atol=1e-5)
        with dcpp.sampling(converted, torch.Generator().manual_seed(0)):
            drawn = first(converted(**inputs))
        folded = dcpp.to_dense(converted, "sample", generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(first(folded(**inputs)), drawn, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["MambaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM"])
def test_gates_get_a_gradient_of_the_likelihood(name: str) -> None:
    model, inputs = made(name)
    converted = dcpp.convert(model, example_input=inputs).train()
    first(converted(**inputs)).square().sum().backward()
    assert all(layer.weight_logit.grad is not None for layer in masked_layers(converted).values())


def test_a_gated_table_is_not_resized() -> None:
    model = dcpp.convert(made("GPT2LMHeadModel")[0], include="transformer.wte")
    assert isinstance(model.transformer.wte, nn.Embedding)
    with pytest.raises(dcpp.DropConnectError, match="embeddings of GPT2LMHeadModel have gates"):
        model.resize_token_embeddings(15)
