# SPDX-License-Identifier: Apache-2.0
"""A tokenizer and a data set small enough to be made at once, since torchtitan's wheel has none."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 512
_SPECIAL = ("<|bos|>", "<|eos|>")


def make_assets(folder: Path) -> Path:
    """Fill ``folder`` with ``tokenizer`` and ``data``, and return it."""
    texts = _texts(random.Random(0))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    for name in ("tokenizer", "data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    settings = {"bos_token": _SPECIAL[0], "eos_token": _SPECIAL[1]}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    lines = (json.dumps({"text": text}) for text in texts)
    (folder / "data" / "data.jsonl").write_text("\n".join(lines))
    return folder


def _texts(draw: random.Random) -> list[str]:
    """Sentences of made-up words, the earlier ones more frequent."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 7))) for _ in range(300)]
    weights = [1 / (index + 1) for index in range(len(words))]
    lengths = [draw.randint(60, 200) for _ in range(400)]
    return [" ".join(draw.choices(words, weights, k=length)) for length in lengths]
