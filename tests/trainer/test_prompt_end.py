"""The prompt that a router may pool ends before the first token that the loss supervises."""

import pytest
from datasets import Dataset
from trainer.tiny import rows, tokenizer, trainer


CHATS = [
    [
        {"role": "user", "content": "w1 w2 w3 w4 w5"},
        {"role": "assistant", "content": "w6 w7"},
        {"role": "user", "content": "w8"},
        {"role": "assistant", "content": "w9"},
    ],
    [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w6 w7 w8"}],
]
LAYOUTS = pytest.mark.parametrize(
    "layout",
    [{}, {"padding_free": True, "max_length": None}, {"packing": True, "max_length": 64}],
    ids=["padded", "padding-free", "packed"],
)


def prompt_ends(run):
    """By example index, as the model will be given them."""
    found = {}
    for batch in run.get_train_dataloader():
        found |= dict(zip(batch["example_id"].tolist(), batch["prompt_end"].tolist(), strict=True))
    return found


@LAYOUTS
def test_completion_only_loss(tmp_path, layout):
    examples = rows(4)
    run = trainer(tmp_path, train_dataset=Dataset.from_list(examples), **layout)
    expected = {index: len(row["prompt"].split()) for index, row in enumerate(examples)}
    assert prompt_ends(run) == expected


@LAYOUTS
def test_assistant_only_loss_ends_before_the_first_answer(tmp_path, layout):
    examples = Dataset.from_list([{"messages": chat, "task": "qa"} for chat in CHATS])
    run = trainer(tmp_path, train_dataset=examples, assistant_only_loss=True, **layout)
    expected = {index: len(f"u : {chat[0]['content']}".split()) for index, chat in enumerate(CHATS)}
    assert prompt_ends(run) == expected


@LAYOUTS
def test_text_without_a_masked_prompt_is_pooled_whole(tmp_path, layout):
    texts = ["w1 w2 w3 w4", "w5 w6"]
    run = trainer(tmp_path, train_dataset=Dataset.from_dict({"text": texts}), **layout)
    assert prompt_ends(run) == {
        index: len(tokenizer()(text + " <eos>")["input_ids"]) for index, text in enumerate(texts)
    }


@LAYOUTS
def test_answers_do_not_change_the_routing(tmp_path, layout):
    msr = []
    for answer in ("w1 w2 w3 w4", "w50 w60 w70 w80"):
        examples = [{**row, "completion": answer} for row in rows(4)]
        run = trainer(tmp_path, train_dataset=Dataset.from_list(examples), max_steps=1, **layout)
        run.train()
        log = run.state.log_history[0]
        msr.append([log["msr/qa"], log["msr/code"]])
    assert msr[0] == msr[1]
