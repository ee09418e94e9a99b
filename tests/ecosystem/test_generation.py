"""One network writes a whole text under sampling; on request each token has one of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError
from dropconnectpp.layers.passes import current

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[3, 1, 4]])
TOKENS = 4


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    widths = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return dcpp.convert(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=12, **widths))).eval()


@pytest.fixture
def weights(model: Any) -> list[Tensor]:
    """What the head's gated weight was in each call: its outputs for a unit matrix say it."""
    seen: list[Tensor] = []

    def look(layer: nn.Module, arguments: Any, output: Tensor) -> None:
        if arguments[0].shape[-2] < 16:
            seen.append(layer(torch.eye(16)))

    model.lm_head.register_forward_hook(look)
    return seen


def generate(model: Any) -> None:
    model.generate(IDS, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None)


def distinct(weights: list[Tensor]) -> int:
    return len({tuple(weight.flatten().tolist()) for weight in weights})


@pytest.mark.parametrize(("per", "networks"), [("generation", 2), ("call", 2 * TOKENS), ("context", 1)])
def test_a_draw_lasts_as_long_as_asked(model: Any, weights: list[Tensor], per: Any, networks: int) -> None:
    with dcpp.sampling(model, torch.Generator().manual_seed(0), per=per):
        generate(model)
        generate(model)
    assert len(weights) == 2 * TOKENS
    assert distinct(weights) == networks
    assert current() == []


def test_without_sampling_the_mean_network_writes(model: Any, weights: list[Tensor]) -> None:
    generate(model)
    assert distinct(weights) == 1


def test_calls_after_a_generation_draw_again(model: Any, weights: list[Tensor]) -> None:
    with dcpp.sampling(model):
        generate(model)
        model(IDS)
        model(IDS)
    assert distinct(weights[:TOKENS]) == 1
    assert distinct(weights) == 3


def test_an_error_inside_leaves_nothing_behind(model: Any, weights: list[Tensor]) -> None:
    with dcpp.sampling(model):
        with pytest.raises(AttributeError):
            model.generate(IDS, max_new_tokens=1, logits_processor=[None])
        model(IDS)
        model(IDS)
    assert distinct(weights) >= 2
    assert current() == []


def test_the_dense_model_has_its_own_method_again(model: Any) -> None:
    assert "generate" in vars(model)
    assert "generate" not in vars(dcpp.to_dense(model))


def test_an_unknown_lifetime_is_an_error(model: Any) -> None:
    with pytest.raises(ArgumentError, match="per must be one of"), dcpp.sampling(model, per="token"):  # type: ignore[arg-type]
        pass
