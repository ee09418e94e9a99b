"""Fine-tune a language model on text made on the spot, end with a tenth of its weights, save it with its gates."""

import random
import tempfile

import transformers

import dropconnectpp as dcpp
from dropconnectpp.integrations.transformers import DropConnectTrainer, from_pretrained, save_pretrained

SUBJECTS, VERBS, TURNS = ["film", "book", "meal", "play"], ["was", "seemed", "felt"], ["not", "very", "rather"]
GOOD, BAD = ["good", "fine", "great", "lovely"], ["bad", "poor", "awful", "dull"]
WORDS = ["[pad]", *SUBJECTS, *VERBS, *TURNS, *GOOD, *BAD]


def reviews(count: int, seed: int) -> list[dict[str, object]]:
    """Sentences such as "meal was not bad", and whether they praise."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        words = [draw.choice(part) for part in (SUBJECTS, VERBS, TURNS, GOOD + BAD)]
        praise = (words[-1] in GOOD) != (words[2] == "not")
        rows.append({"input_ids": [WORDS.index(word) for word in words], "labels": int(praise)})
    return rows


with tempfile.TemporaryDirectory() as folder:
    transformers.set_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=len(WORDS), initializer_range=0.3, hidden_dropout_prob=0.0, **shape)
    options = {"per_device_train_batch_size": 32, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    args = transformers.TrainingArguments(folder, num_train_epochs=20, learning_rate=1e-3, logging_steps=250, **options)
    model = transformers.BertForSequenceClassification(config)
    transformers.Trainer(model, args, train_dataset=reviews(600, seed=0)).train()  # stands for a pretrained model
    model = dcpp.convert(model, include="bert.encoder*", preset="sparse")
    trainer = DropConnectTrainer(model, args, train_dataset=reviews(1000, seed=1), keep=0.1)
    trainer.train()
    save_pretrained(model, folder)
    found = transformers.Trainer(from_pretrained(folder), args).predict(reviews(500, seed=2))
    right = (found.predictions.argmax(1) == found.label_ids).mean()
    print(f"{right:.1%} right, with {trainer.plan.share_kept:.0%} of the encoder's weights")
