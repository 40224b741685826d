"""A small tokenizer with a chat template, and local text to make prompts of."""

import re
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from elastic_peft.evaluation.ruler_prompt import Question, Sources


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PROSE = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")


def make_tokenizer(texts, vocab_size, chat_template=CHAT_TEMPLATE):
    trained = ByteLevelBPETokenizer()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    trained.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=special, show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, eos_token="<|end|>", pad_token="<|end|>", chat_template=chat_template
    )


@pytest.fixture(scope="session")
def tokenizer():
    """Knows words of the prose, and a dot between spaces as one token."""
    return make_tokenizer([PROSE, " ." * 1000], 800)


@pytest.fixture(scope="session")
def byte_tokenizer():
    """Two tokens for each dot that fills a prompt, and no chat template."""
    return make_tokenizer([], 259, chat_template=None)


@pytest.fixture(scope="session")
def joining_tokenizer():
    """Joins punctuation and the line ends after it, as the vocabularies of Llama 3 and Qwen do."""
    trained = Tokenizer(models.BPE())
    pieces = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pieces), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([PROSE, *(end * 500 for end in (" .", " .\n\n", ".\n\n", "\n\n"))], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=trained)


@pytest.fixture(scope="session")
def sources():
    """The prose and words of a licence, and questions about numbered doors."""
    words = sorted(set(re.findall(r"\b[a-z]{4,10}\b", PROSE)))
    single_hop = [
        Question(f"What is behind door {i}?", (f"thing{i}x",), (f"Door {i} hides thing{i}x.",)) for i in range(150)
    ]
    multi_hop = [
        Question(
            f"Who holds key {i}?", (f"person{i}x",), (f"Key {i} is on ring {i}r.", f"Ring {i}r is with person{i}x.")
        )
        for i in range(150)
    ]
    return Sources(PROSE, words, single_hop, multi_hop)
