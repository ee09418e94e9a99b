"""Hugging Face's models after convert: their own ways of saving, tying and resizing lose no gates, or say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ConversionError
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
WIDTHS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SIZES: dict[str, Any] = {"vocab_size": 12, "max_position_embeddings": 8, **WIDTHS}


def bert() -> Any:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))


def llama(tied: bool) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied))


def converted(model: nn.Module) -> Any:
    """With gates that all differ, in eval mode."""
    model = dcpp.convert(model, example_input={"input_ids": IDS}).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_logit"):
                parameter.normal_()
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_save_pretrained_of_gates_is_refused_and_of_the_dense_model_is_exact(tmp_path: Path) -> None:
    model = converted(bert())
    with pytest.raises(ConversionError, match=r"converted BertForSequenceClassification .* to_dense\(model\)"):
        model.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []
    dcpp.to_dense(model).save_pretrained(tmp_path)
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(again), logits(model))


def test_a_trainers_state_of_a_converted_model_is_saved_as_it_is(tmp_path: Path) -> None:
    model = converted(bert())
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    assert (tmp_path / "model.safetensors").exists()


def test_what_came_from_a_converted_model_may_be_saved_again(tmp_path: Path) -> None:
    model = dcpp.to_dense(converted(bert()))
    assert "save_pretrained" not in vars(model)
    model.bert.save_pretrained(tmp_path)


def test_a_dense_model_is_not_tied_again(tmp_path: Path) -> None:
    model = converted(llama(tied=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    dense = dcpp.to_dense(model)
    dense.tie_weights()
    torch.testing.assert_close(logits(dense), logits(model))
    assert model.config.tie_word_embeddings
    dense.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()), logits(model))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [15, 10])
def test_resizing_the_vocabulary_keeps_the_gates_of_its_words(tied: bool, size: int) -> None:
    model = converted(llama(tied))
    model = dcpp.prune(model, keep=0.5)
    before, pi, common = logits(model), model.lm_head.keep_probability(), min(size, 12)
    model.resize_token_embeddings(size, mean_resizing=False)
    head = model.lm_head
    assert isinstance(head, DropConnectPPLayer)
    assert (head.weight is model.model.embed_tokens.weight) is tied
    assert head.weight_logit.shape == head.weight_kept.shape == (size, 16)
    assert torch.equal(head.keep_probability()[:common], pi[:common])
    assert bool((head.keep_probability()[common:] == 0.5).all())
    torch.testing.assert_close(logits(model)[..., :common], before[..., :common])


def test_a_plain_models_resizing_is_its_own() -> None:
    model = converted(llama(tied=False))
    dense = dcpp.to_dense(model)
    dense.resize_token_embeddings(14, mean_resizing=False)
    assert dense.lm_head.weight.shape == (14, 16)
