"""A byte-level tokenizer with a chat template, trained on the text that the demo's examples are made of."""

import pytest
from demo_corpus import standard_library
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    trained = ByteLevelBPETokenizer()
    texts = (module.source for module in standard_library()[::20])
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    trained.train_from_iterator(texts, vocab_size=2000, special_tokens=special, show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, eos_token="<|end|>", pad_token="<|end|>", chat_template=CHAT_TEMPLATE
    )
