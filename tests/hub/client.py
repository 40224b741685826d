"""What users run against the Hub. It runs in a process of its own: huggingface_hub reads `HF_ENDPOINT` on import."""

import os
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from conftest import build_base, build_config, split_heads
from huggingface_hub import ModelCard, hf_hub_download
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, set_seed

import elastic_peft
from elastic_peft import operators


BASE = "user/base"


def build_inputs():
    input_ids = torch.randint(3, 96, (2, 40), generator=torch.Generator().manual_seed(7))
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


def run(function, *args, **kwargs):
    """Calls `function` by its name here; an error comes back as one that every process can read."""
    try:
        return globals()[function](*args, **kwargs)
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def push_base():
    build_base().push_to_hub(BASE)


def build_model(seed=1, adapter_name="default"):
    set_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(BASE)
    model = get_peft_model(base, build_config(task_type="CAUSAL_LM"), adapter_name=adapter_name).eval()
    split_heads(model, adapter_name, build_inputs(), seed)
    return model


def logits(model):
    with torch.no_grad():
        return model(**build_inputs()).logits.numpy()


def push(repo_id, *, seed=1, adapter_name="default", with_routing=False, by_peft=False, **options):
    """Pushes an adapter; returns the commit and what the model computes."""
    model = build_model(seed, adapter_name)
    computed = logits(model)
    if with_routing:
        options["routing"] = elastic_peft.last_routing(model)
    commit = model.push_to_hub(repo_id) if by_peft else elastic_peft.push_to_hub(model, repo_id, **options)
    return commit.oid, computed


def push_lora(repo_id):
    lora = get_peft_model(build_base(), LoraConfig(target_modules=["q_proj"]))
    elastic_peft.push_to_hub(lora, repo_id)


def pull(loader, repo_id, **options):
    """What the model computes after its adapter was loaded from the Hub."""
    return logits(LOADERS[loader](repo_id, **options))


def pull_offline(loader, repo_id):
    """The same under `HF_HUB_OFFLINE=1`."""
    with mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
        return pull(loader, repo_id)


def by_peft_model(repo_id, **options):
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), repo_id, **options)


def by_load_adapter(repo_id, **options):
    model = build_model(seed=9, adapter_name="first")
    model.load_adapter(repo_id, "second", **options)
    model.set_adapter("second")
    return model.eval()


def by_auto_peft(repo_id, **options):
    return AutoPeftModelForCausalLM.from_pretrained(repo_id, **options).eval()


def by_auto_model(repo_id, **options):
    return AutoModelForCausalLM.from_pretrained(repo_id, **options)


LOADERS = {function.__name__: function for function in (by_peft_model, by_load_adapter, by_auto_peft, by_auto_model)}


def run_card(repo_id, **options):
    """What the model computes that the card's own lines of Python load."""
    card = ModelCard(Path(hf_hub_download(repo_id, "README.md", **options)).read_text(encoding="utf-8"))
    names = {}
    exec(card.text.split("```python\n")[1].split("```")[0], names)
    return logits(names["model"].eval())


@contextmanager
def operators_from(source):
    """Context in which the operators are loaded anew, under this value of the variable."""
    with mock.patch.dict(vars(operators)), mock.patch.dict(os.environ, {operators.VARIABLE: source}):
        for name in operators.OPERATORS:
            vars(operators).pop(name, None)
        yield


def load_operators(source, offline=False):
    """Where the operators come from, by their module and as a record says it."""
    with operators_from(source), mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", offline):
        return operators.router.__module__.split(".")[0], operators.describe("kernels")


def route_on(source):
    """What computed a prompt on fused kernels, its logits, and those of the reference."""
    with operators_from(source):
        model = build_model()
        expected = logits(model)
        with mock.patch("elastic_peft.mode_pairs.choose_implementation", return_value="triton"):
            computed = logits(model)
        return elastic_peft.last_routing(model).implementation, computed, expected
