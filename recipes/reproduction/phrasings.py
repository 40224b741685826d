"""Other words for the instructions of the seven sets, so that routers cannot learn a set by its template."""

import random
import re
from dataclasses import replace

from reproduction.examples import Example, user_text
from transformers import PreTrainedTokenizerBase


#: First lines of prompts. None of these, nor of `CLOSINGS`, is a phrasing of the examples.
OPENINGS = {
    "sqa_foldoc": (
        "Computing terms and their explanations:",
        "What follows is part of a dictionary of computer science.",
        "Please read these entries about computers and networks.",
        "You get an excerpt of a reference work on computing.",
        "Notes on words that programmers use:",
        "I have a question about this encyclopedia of computing.",
    ),
    "sqa_pkg": (
        "Metadata of programs in a distribution:",
        "Please look at this extract of a package database.",
        "I paste some entries of a software catalogue.",
        "An archive holds these packages, among others.",
        "Control files of several packages:",
        "You are an assistant for a package manager; its index is this.",
    ),
    "niah_single": (
        "Somewhere in this text a special magic number is mentioned. Find it, I need it later.",
        "Read on carefully: one sentence below states a magic number that has nothing to do with the rest.",
        "Here is a long text with one odd remark about a magic number. Note the number down.",
        "This book excerpt has had a secret number put into it.",
        "Please go through this document and look out for a magic number.",
        "I hid a number in these pages and will want it back.",
    ),
    "mhop_wordnet": (
        "Each line states something about a word.",
        "Take these lines as a small knowledge base.",
        "You know only what these sentences say.",
        "Lexical relations and definitions, one a line:",
        "I collected notes about nouns:",
        "Use these entries of a thesaurus to answer me.",
    ),
    "summ_rfc": (
        "I have no time to read all of this. What is it about?",
        "The text of a standard follows; condense it.",
        "Please give me the gist of this specification.",
        "What are the main points of this paper?",
        "Shorten this document to a few sentences.",
        "An engineer needs an overview of this memo.",
    ),
    "code_stdlib": (
        "What comes after this piece of Python?",
        "Finish what I began to write in my editor.",
        "Autocomplete the module.",
        "Go on with this program.",
        "Add the missing end of this file.",
        "You are a code completion engine.",
    ),
    "icl_wordnet": (
        "Sort these words into classes as shown.",
        "Learn the labels from the pairs below, then label the last word.",
        "Words and their categories:",
        "Each item has a class; give the class of the last.",
        "I tag words with a category. Continue my tagging.",
        "Solved exercises first, then one for you.",
    ),
}
#: Last lines of prompts, with what the question is about; sets without one end in their own text.
CLOSINGS = {
    "sqa_foldoc": (
        'Explain "{}" as it is explained there.',
        'Now tell me: how does it define "{}"?',
        'What does "{}" stand for in this text?',
        'Quote the explanation of "{}".',
    ),
    "sqa_pkg": (
        'Tell me what "{}" is for, in its own words.',
        'Which description does "{}" have?',
        'I want to install "{}". What does its entry say it is?',
        'Find "{}" and repeat its summary.',
    ),
    "niah_single": (
        "Which number belonged to {}?",
        "Now give me the magic number for {}.",
        "{}: what was its special number?",
        "Do you remember the number that went with {}?",
    ),
    "mhop_wordnet": (
        "First find what {} is a kind of, then give me that thing's meaning.",
        "Name the meaning of the broader word of {}.",
        "{} is a kind of something. Define that something.",
        "How is the class that {} belongs to defined?",
    ),
    "summ_rfc": (
        "That was the text. The summary, please.",
        "In short?",
        "Write down what a reader must know.",
        "Give the overview.",
    ),
}
#: What a question is about, in the examples' own last lines.
SUBJECTS = {
    "sqa_foldoc": r'"(.+)"\?$',
    "sqa_pkg": r'"(.+)"\?$',
    "niah_single": r"for (.+) mentioned in the provided text\?$",
    "mhop_wordnet": r"that (.+) is a kind of\?$",
    "summ_rfc": r"()",
}
VARIANTS = 3


def vary(tokenizer: PreTrainedTokenizerBase, example: Example, draw: random.Random) -> Example:
    """The example with other words for its instructions; text, question and answer stay.

    Args:
        tokenizer: of the example.
        example: one of a set of `OPENINGS`.
        draw: chooses the words.
    """
    user = user_text(tokenizer, example)
    _, newline, rest = user.partition("\n")
    words = draw.choice(OPENINGS[example.set])
    if example.set in CLOSINGS:
        text, closing = rest.rsplit("\n", 1)
        subject = re.search(SUBJECTS[example.set], closing)
        if subject is None:
            raise ValueError(f"`example` must close as its set {example.set} does, got {closing!r}.")
        rest = f"{text}\n{draw.choice(CLOSINGS[example.set]).format(subject[1])}"
    prompt = tokenizer.decode(example.ids[: example.prompt_end])
    prompt = prompt.replace(user, f"{words}{newline}{rest}", 1)
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    return replace(example, ids=(*ids, *example.ids[example.prompt_end :]), prompt_end=len(ids))


def varied(
    tokenizer: PreTrainedTokenizerBase, examples: dict[str, list[Example]], seed: int
) -> dict[str, list[Example]]:
    """Each example as it is, and `VARIANTS` times in other words.

    Args:
        tokenizer: of the examples.
        examples: by set.
        seed: of the words.
    """
    draw = random.Random(seed)
    return {
        name: [*members, *(vary(tokenizer, example, draw) for _ in range(VARIANTS) for example in members)]
        for name, members in examples.items()
    }
