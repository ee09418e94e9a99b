"""The Trainer maximises the ELBO whatever batch, accumulation and processes; folders and checkpoints keep the gates."""

from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError, FileFormatError, ShapeError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from dropconnectpp.integrations import model_outputs, pretrained  # noqa: E402
from dropconnectpp.integrations import transformers as hf  # noqa: E402

LABELS = 2


def bert(initializer_range: float = 0.02, **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        initializer_range=initializer_range,
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        num_labels=LABELS,
    )
    options = {"preset": "sparse", "include": "bert.*", **options}
    return dcpp.convert(transformers.BertForSequenceClassification(config), **options)


def data(count: int = 32) -> list[dict[str, Any]]:
    """Which of two words comes first."""
    return [{"input_ids": [3 + i % 2, 4 - i % 2, 7 + i % 5], "labels": i % 2} for i in range(count)]


def trainer(model: Any, folder: Any, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
    given: dict[str, Any] = {
        "max_steps": 6,
        "per_device_train_batch_size": 8,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    args = transformers.TrainingArguments(str(folder), **(given | (arguments or {})))
    return hf.DropConnectTrainer(model, args, **{"train_dataset": data(), **options})


def logits(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith("_logit")}


def nothing(output: Any, target: Tensor) -> Tensor:
    """A likelihood that says nothing: what moves the gates is the KL."""
    found: Tensor = output.logits.sum(1) * 0.0
    return found


# ------------------------------------------------------------------------------------------------- training


def test_a_training_learns_and_keeps_the_share_asked_for(tmp_path: Path) -> None:
    arguments = {"max_steps": 300, "learning_rate": 3e-3, "logging_steps": 50}
    own = trainer(bert(initializer_range=0.3), tmp_path, arguments, keep=0.3, eval_dataset=data())
    own.train()
    assert own.plan.phase == "fixed"
    assert own.plan.share_kept == pytest.approx(0.3, rel=0.15)
    assert own.evaluate()["eval_loss"] < 0.1 < math.log(2)
    logged = [line for line in own.state.log_history if "loss" in line]
    shares = [line["share_kept"] for line in logged]
    assert shares[0] > 0.5 > shares[-1] == own.plan.share_kept
    assert all({"kl", "kl_weight"} <= line.keys() for line in logged)
    dense = dcpp.to_dense(own.model).eval()
    batch = {"input_ids": torch.tensor([example["input_ids"] for example in data()])}
    own.model.eval()
    torch.testing.assert_close(dense(**batch).logits, own.model(**batch).logits)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("batch", [2, 8])
def test_the_kl_counts_once_whatever_the_batch_and_the_accumulation(
    tmp_path: Path, batch: int, accumulation: int
) -> None:
    model = bert(estimator="straight-through")
    before = logits(model)
    dcpp.kl_divergence(model).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if name in before}
    model.zero_grad()
    arguments = {
        "max_steps": 1,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
    }
    trainer(model, tmp_path, arguments, likelihood=nothing, logit_lr=0.5).train()
    for name, value in logits(model).items():
        torch.testing.assert_close(value, before[name] - 0.5 * gradients[name] / 32, rtol=1e-4, atol=1e-7)


def test_the_kl_rises_over_its_share_of_the_steps(tmp_path: Path) -> None:
    own = trainer(bert(), tmp_path, {"max_steps": 8, "logging_steps": 1}, kl_warmup=0.5)
    own.train()
    weights = [line["kl_weight"] for line in own.state.log_history if "loss" in line]
    assert weights == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_the_posterior_has_its_step_size_and_no_decay(tmp_path: Path) -> None:
    own = trainer(bert(), tmp_path, {"weight_decay": 0.1, "learning_rate": 1e-4}, logit_lr=0.02)
    groups = own.create_optimizer().param_groups
    posterior = {id(p) for name, p in own.model.named_parameters() if name.endswith("_logit")}
    for group in groups:
        inside = {id(p) in posterior for p in group["params"]}
        assert len(inside) == 1, "weights and log-odds are apart"
        assert group["lr"] == (0.02 if inside == {True} else 1e-4)
        assert inside == {False} or group["weight_decay"] == 0.0
    assert sum(len(group["params"]) for group in groups) == len(list(own.model.parameters()))


def test_real_values_are_fitted_with_noise_that_is_learned(tmp_path: Path) -> None:
    config = bert().config
    config.num_labels = 1
    model = dcpp.convert(transformers.BertForSequenceClassification(config), "bert.*", preset="sparse")
    rows = [{**example, "labels": 0.5 + i % 2} for i, example in enumerate(data())]
    own = trainer(model, tmp_path, {"max_steps": 150, "learning_rate": 3e-3}, train_dataset=rows, kl_warmup=1.0)
    own.train()
    assert own.elbo.log_likelihood.scale.item() < 0.7
    assert own.evaluate(rows)["eval_loss"] < 0.5 * math.log(2 * math.pi * math.e * 0.25)


# ---------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("plan", [False, True])
@pytest.mark.parametrize("estimator", ["bbvi", "straight-through"])
def test_a_resumed_training_ends_where_an_undisturbed_one_does(tmp_path: Path, estimator: str, plan: bool) -> None:
    options: dict[str, Any] = {"plan_options": {"price": 1.0, "fix_at": 0.6}} if plan else {"kl_warmup": 0.5}
    arguments = {"max_steps": 10, "save_strategy": "steps", "save_steps": 4, "learning_rate": 1e-3}
    whole = trainer(bert(estimator=estimator), tmp_path, arguments, **options)
    whole.train()
    for step in (4, 8):
        again = trainer(bert(estimator=estimator), tmp_path / "again", arguments, **options)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        for name, value in whole.elbo.state_dict().items():
            assert torch.equal(value, again.elbo.state_dict()[name]), name
    if estimator == "bbvi":
        assert any(bool(moment.any()) for moment in again.elbo.moments.buffers())


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    arguments = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer(bert(), tmp_path, arguments).train()
    longer = trainer(bert(), tmp_path, arguments | {"max_steps": 8}, plan_options={"price": 1.0})
    with pytest.raises(ArgumentError, match="plan is one of 4 steps, and this training has 8"):
        longer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    (tmp_path / "checkpoint-2" / hf.STATE).unlink()
    with pytest.raises(FileFormatError, match="cannot be resumed"):
        trainer(bert(), tmp_path, arguments).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_the_best_model_is_one_whose_connections_are_fixed(tmp_path: Path) -> None:
    arguments = {
        "max_steps": 20,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "best",
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "learning_rate": 1e-3,
    }
    own = trainer(bert(), tmp_path, arguments, plan_options={"price": 1.0, "fix_at": 0.5}, eval_dataset=data())
    own.train()
    assert own.state.best_global_step >= 10
    best = hf.from_pretrained(own.state.best_model_checkpoint)
    for name, value in own.model.state_dict().items():
        assert torch.equal(value, best.state_dict()[name]), name


def test_a_folder_keeps_the_gates(tmp_path: Path) -> None:
    model = dcpp.prune(bert(keep_probability=0.7), keep=0.4).eval()
    hf.save_pretrained(model, tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.json", pretrained.FILE]
    again = hf.from_pretrained(tmp_path / "model")
    batch = torch.tensor([example["input_ids"] for example in data()])
    assert torch.equal(again(batch).logits, model(batch).logits)
    assert isinstance(again.bert.pooler.dense, dcpp.DropConnectPPLinear)
    found = dcpp.predict(again, {"input_ids": batch})
    assert found.mutual_information.max() > 0
    with pytest.raises(OSError, match=r"model\.safetensors"):  # transformers' own does not read it as a plain model
        transformers.BertForSequenceClassification.from_pretrained(tmp_path / "model")


def test_a_folder_keeps_the_precision_and_tied_weights(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    model = dcpp.convert(transformers.GPT2LMHeadModel(config).to(torch.bfloat16), "lm_head").eval()
    hf.save_pretrained(model, tmp_path)
    again = hf.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    assert again.lm_head.weight is again.transformer.wte.weight
    x = torch.tensor([[1, 2, 3]])
    assert torch.equal(again(x).logits, model(x).logits)


def test_what_is_no_such_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"needs a model of transformers, got a Linear\. Use dropconnectpp\.save"):
        hf.save_pretrained(nn.Linear(2, 2), tmp_path)
    with pytest.raises(FileFormatError, match=r"has no dropconnectpp\.safetensors"):
        hf.from_pretrained(tmp_path)
    hf.save_pretrained(bert(), tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(described | {"architectures": ["MyOwn"]}))
    with pytest.raises(FileFormatError, match=r"names no model of transformers, but \['MyOwn'\]"):
        hf.from_pretrained(tmp_path)
    found = hf.from_pretrained(tmp_path, model_class=transformers.BertForSequenceClassification)
    assert isinstance(found.bert.pooler.dense, dcpp.DropConnectPPLinear)


def test_what_is_pushed_to_the_hub_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's client is replaced by one that copies folders; what it was told is compared."""
    calls: list[tuple[str, Any]] = []

    class Client:
        def __init__(self, token: str | None) -> None:
            calls.append(("token", token))

        def create_repo(self, repository: str, **options: Any) -> None:
            calls.append((repository, options))

        def upload_folder(self, *, repo_id: str, folder_path: str, **options: Any) -> str:
            os.rename(folder_path, tmp_path / "hub")
            os.mkdir(folder_path)
            calls.append((repo_id, options))
            return "commit"

    monkeypatch.setattr(pretrained.huggingface_hub, "HfApi", Client)
    monkeypatch.setattr(pretrained.huggingface_hub, "snapshot_download", lambda name, **options: tmp_path / "hub")
    model = bert().eval()
    assert hf.push_to_hub(model, "me/bert", private=True, token="t", commit_message="first") == "commit"
    assert calls == [
        ("token", "t"),
        ("me/bert", {"private": True, "exist_ok": True}),
        ("me/bert", {"commit_message": "first"}),
    ]
    x = torch.tensor([[1, 2, 3]])
    assert torch.equal(hf.from_pretrained("me/bert")(x).logits, model(x).logits)


# ---------------------------------------------------------------------------------------- several processes


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def two_processes(rank: int, folder: str, port: int, find_unused: bool) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    arguments: dict[str, Any] = {"ddp_backend": "gloo", "ddp_find_unused_parameters": find_unused}
    for name in ("bbvi", "straight-through"):
        options = {"learning_rate": 1e-3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
        own = trainer(bert(estimator=name), folder, {**arguments, **options}, logit_lr=0.05)
        own.train()
        found[name] = {key: value.clone() for key, value in own.model.state_dict().items()}
    model = bert(estimator="straight-through")
    step = {"max_steps": 1, "optim": "sgd", "lr_scheduler_type": "constant"}
    trainer(model, folder, {**arguments, **step}, likelihood=nothing, logit_lr=0.5).train()
    found["kl"] = logits(model)
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("find_unused", [True, False])
def test_two_processes_stay_together(tmp_path: Path, find_unused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else accelerate sets it, and warns
    arguments = (str(tmp_path), free_port(), find_unused)
    mp.start_processes(two_processes, arguments, nprocs=2, start_method="fork")  # a new one imports for seconds
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name in ("bbvi", "straight-through"):
        start = bert(estimator=name).state_dict()
        for key, value in first[name].items():
            assert torch.equal(value, second[name][key]), key
        moved = [key for key in start if key.endswith("_logit") and not torch.equal(first[name][key], start[key])]
        assert len(moved) == sum(key.endswith("_logit") for key in start)
    model = bert(estimator="straight-through")
    before = logits(model)
    dcpp.kl_divergence(model).backward()
    for name, parameter in model.named_parameters():
        if name in before:
            expected = before[name] - 0.5 * parameter.grad / 32
            torch.testing.assert_close(first["kl"][name], expected, rtol=1e-4, atol=1e-7)


# ---------------------------------------------------------------------------------------------- likelihoods


def test_tokens_are_summed_over_the_positions_that_count() -> None:
    output, target = torch.randn(2, 4, 5), torch.tensor([[1, -100, 3, 0], [-100, -100, 2, -100]])
    log_p = output.log_softmax(-1)
    by_hand = torch.stack([log_p[0, 0, 1] + log_p[0, 2, 3] + log_p[0, 3, 0], log_p[1, 2, 2]])
    torch.testing.assert_close(hf.tokens(output, target), by_hand)
    shifted = torch.stack([log_p[0, 1, 3] + log_p[0, 2, 0], log_p[1, 1, 2]])
    torch.testing.assert_close(hf.next_tokens(output, target), shifted)
    mean = hf.tokens.mean(output)
    torch.testing.assert_close(mean.sum(-1), torch.ones(2, 4))
    torch.testing.assert_close(hf.tokens.entropy(mean), -(mean * mean.log()).sum(-1))
    with pytest.raises(ShapeError, match=r"got \(2, 4, 5\) and \(2, 3\)"):
        hf.tokens(output, target[:, :3])


def test_spans_have_a_beginning_and_an_end() -> None:
    class Output:
        start_logits = torch.randn(3, 4)
        end_logits = torch.randn(3, 4)

    begin, end = Output.start_logits.log_softmax(1), Output.end_logits.log_softmax(1)
    by_hand = torch.stack([begin[0, 1] + end[0, 2], begin[1, 0], torch.tensor(0.0)])
    found = hf.spans(Output, (torch.tensor([1, 0, 7]), torch.tensor([2, -1, 9])))
    torch.testing.assert_close(found, by_hand)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("ForSequenceClassification", {}, "Categorical"),
        ("ForSequenceClassification", {"problem_type": "multi_label_classification"}, "Bernoulli"),
        ("ForSequenceClassification", {"num_labels": 1}, "LearnedNoise"),
        ("ForTokenClassification", {}, "Tokens"),
        ("ForMaskedLM", {}, "Tokens"),
        ("LMHeadModel", {}, "Tokens"),
        ("ForQuestionAnswering", {}, "Spans"),
        ("ForMultipleChoice", {}, "Categorical"),
    ],
)
def test_a_head_has_its_likelihood(kind: str, options: dict[str, Any], expected: str) -> None:
    config = bert().config
    config.is_decoder = kind == "LMHeadModel"
    for name, value in options.items():
        setattr(config, name, value)
    found = hf.likelihood_of(getattr(transformers, f"Bert{kind}")(config))
    assert type(found).__name__ == expected
    assert getattr(found, "shifted", False) == (kind == "LMHeadModel")


def test_an_unknown_head_needs_a_likelihood() -> None:
    with pytest.raises(ArgumentError, match="no likelihood is known for a Linear"):
        model_outputs.likelihood_of(nn.Linear(2, 2))


def test_what_does_not_work_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"does not work with label_smoothing_factor \(use likelihood=categorical"):
        trainer(bert(), tmp_path, {"label_smoothing_factor": 0.1})
    with pytest.raises(ArgumentError, match="give its warmup in plan_options"):
        trainer(bert(), tmp_path, keep=0.1, kl_warmup=0.1)
    with pytest.raises(ArgumentError, match="kl_warmup must be a share"):
        trainer(bert(), tmp_path, kl_warmup=2.0)
    with pytest.raises(ArgumentError, match="give num_data"):
        trainer(bert(), tmp_path, train_dataset=iter(data())).elbo  # noqa: B018
    with pytest.raises(ArgumentError, match="a batch has no labels"):
        trainer(bert(), tmp_path).compute_loss(nn.Identity(), {"input_ids": torch.zeros(1)})
