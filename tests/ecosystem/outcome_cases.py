"""The models of the table: a tiny one of each family with random weights, and a batch for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dropconnectpp.likelihoods import tensor_of

WORDS, WIDTH, LENGTH, BATCH = 24, 16, 6, 4
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Inputs]
    package: str | None = "transformers"

    def model(self) -> nn.Module:
        """The plain model, the same at each call."""
        if self.package is not None and find_spec(self.package) is None:
            pytest.skip(f"{self.package} is not installed")
        torch.manual_seed(0)
        return self.make().eval()

    def inputs(self) -> Inputs:
        """Its batch, the same at each call."""
        torch.manual_seed(1)
        return self.batch()


def per_example(output: Any, target: Tensor) -> Tensor:
    """A likelihood for whatever a model gives: real values beside the target, (B,)."""
    values = first_tensor(output).flatten(1)
    found: Tensor = -(values - target.view(-1, 1)).square().mean(1)
    return found


def first_tensor(output: Any) -> Tensor:
    """Logits, or what a model's output has in their place."""
    found = tensor_of(output)
    if isinstance(found, Tensor):
        return found
    if hasattr(found, "last_hidden_state"):
        hidden: Tensor = found.last_hidden_state
        return hidden
    first = found[0]
    assert isinstance(first, Tensor)
    return first


# ------------------------------------------------------------------------------------------ plain torch


class Recurrent(nn.Module):
    """An LSTM with a head."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.recurrent = kind(WIDTH, WIDTH, batch_first=True)  # type: ignore[call-arg]
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.recurrent(x)[0][:, -1])
        return found


class TiedAutoencoder(nn.Module):
    """A decoder that reads the encoder's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 4)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(torch.tanh(self.encoder(x)) @ self.encoder.weight)
        return found


def sequences() -> Inputs:
    return {"x": torch.randn(BATCH, LENGTH, WIDTH)}


def hidden() -> Inputs:
    return {"input": torch.randn(BATCH, LENGTH, WIDTH)}


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(WIDTH, 3))


def images() -> Inputs:
    return {"input": torch.randn(BATCH, 3, 12, 12)}


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 3),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 3))


# ----------------------------------------------------------------------------------------- transformers

SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def hugging(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """A model of transformers of this class and these sizes."""

    def make() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
        made.config.use_cache = False
        return made

    return make


def words() -> Inputs:
    return {"input_ids": torch.randint(3, WORDS, (BATCH, LENGTH))}


def pixels() -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, 8, 8)}


def both() -> Inputs:
    ids = torch.randint(3, WORDS, (BATCH, LENGTH))
    return {"input_ids": ids, "decoder_input_ids": ids}


def sounds() -> Inputs:
    return {"input_features": torch.randn(BATCH, 8, 20), "decoder_input_ids": torch.randint(3, WORDS, (BATCH, 3))}


GPT2 = {
    "vocab_size": WORDS,
    "n_positions": 16,
    "n_embd": WIDTH,
    "n_layer": 1,
    "n_head": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "state_size": 4,
    "time_step_rank": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KEYS = {"num_key_value_heads": 1}
DISTIL = {
    "vocab_size": WORDS,
    "dim": WIDTH,
    "hidden_dim": 32,
    "n_layers": 1,
    "n_heads": 2,
    "max_position_embeddings": 16,
}
T5 = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
VISION = {key: value for key, value in SMALL.items() if key.startswith(("hidden", "num", "inter"))} | {
    "image_size": 8,
    "patch_size": 4,
}
WHISPER = {
    "vocab_size": WORDS,
    "num_mel_bins": 8,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_source_positions": 10,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
OPT = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "ffn_dim": 32,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "word_embed_proj_dim": WIDTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CASES = [
    Case("nn.Linear", mlp, lambda: {"input": torch.randn(BATCH, WIDTH)}, None),
    Case("nn.Conv2d, BatchNorm", convolutions, images, None),
    Case("nn.TransformerEncoder", transformer, hidden, None),
    Case("nn.LSTM", lambda: Recurrent(nn.LSTM), sequences, None),
    Case("nn.GRU", lambda: Recurrent(nn.GRU), sequences, None),
    Case("tied autoencoder", TiedAutoencoder, lambda: {"x": torch.randn(BATCH, WIDTH)}, None),
    Case("BERT", hugging("BertForSequenceClassification", "BertConfig", **SMALL), words),
    Case("RoBERTa", hugging("RobertaForMaskedLM", "RobertaConfig", **SMALL), words),
    Case("DistilBERT", hugging("DistilBertForTokenClassification", "DistilBertConfig", **DISTIL), words),
    Case("GPT-2", hugging("GPT2LMHeadModel", "GPT2Config", **GPT2), words),
    Case("GPT-NeoX", hugging("GPTNeoXForCausalLM", "GPTNeoXConfig", **SMALL), words),
    Case("OPT", hugging("OPTForCausalLM", "OPTConfig", **OPT), words),
    Case("Llama", hugging("LlamaForCausalLM", "LlamaConfig", **SMALL, **KEYS), words),
    Case("Mistral", hugging("MistralForCausalLM", "MistralConfig", **SMALL, **KEYS), words),
    Case("Qwen2", hugging("Qwen2ForCausalLM", "Qwen2Config", **SMALL, **KEYS), words),
    Case("Gemma", hugging("GemmaForCausalLM", "GemmaConfig", **SMALL, **KEYS, head_dim=8), words),
    Case("Mixtral", hugging("MixtralForCausalLM", "MixtralConfig", **SMALL, **KEYS, **EXPERTS), words),
    Case("Mamba", hugging("MambaForCausalLM", "MambaConfig", **MAMBA), words),
    Case("T5", hugging("T5ForConditionalGeneration", "T5Config", **T5), both),
    Case("ViT", hugging("ViTForImageClassification", "ViTConfig", **VISION), pixels),
    Case("Whisper", hugging("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER), sounds),
]


class Alone(nn.Module):
    """A model as exporters want it: tensors in their order in, one tensor out."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names


class Alone1(Alone):
    """Of one input."""

    def forward(self, first: Tensor) -> Tensor:
        return first_tensor(self.model(**{self.names[0]: first}))


class Alone2(Alone):
    """Of two inputs."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return first_tensor(self.model(**{self.names[0]: first, self.names[1]: second}))


def alone(model: nn.Module, inputs: Inputs) -> Alone:
    """The model for exporters."""
    return (Alone1, Alone2)[len(inputs) - 1](model, tuple(inputs)).eval()
