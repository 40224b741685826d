"""A tiny routed model, tokenizer and dataset, and a trainer around them; used by the tests of the trainer."""

import torch
from datasets import Dataset
from peft import get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed

import elastic_peft  # noqa: F401  registers the ELASTIC method before anything else asks PEFT for it
from elastic_peft import ElasticConfig, ElasticSFTConfig, ElasticSFTTrainer


T_VALUES = {"qa": 0.3, "code": 1.0}
GENERATION_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ 'a : ' + m.content + ' <eos> ' }}"
    "{% endgeneration %}{% else %}{{ 'u : ' + m.content + ' ' }}{% endif %}{% endfor %}"
)


def tokenizer():
    words = ["<pad>", "<eos>", "<unk>", "u", "a", ":"] + [f"w{i}" for i in range(100)]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=GENERATION_TEMPLATE,
    )


def elastic_config(**kwargs):
    return ElasticConfig(**{"t_values": T_VALUES, "sink_size": 2, "window_size": 4, "pool_size": 4, **kwargs})


def base_model():
    set_seed(0)
    config = LlamaConfig(
        vocab_size=106,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.3,  # large enough that both modes give visibly different outputs
    )
    return LlamaForCausalLM(config)


def routed_model(**kwargs):
    """A model whose routers are opinionated enough for both modes to occur."""
    model = get_peft_model(base_model(), elastic_config(**kwargs))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name.endswith("weight"):
                parameter.copy_(2 * torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)
    return model


def rows(count=8, *, tasks=("qa", "code"), seed=0):
    """Prompt-completion rows of differing lengths, all longer than sink + window."""
    generator = torch.Generator().manual_seed(seed)

    def words(number):
        return " ".join(f"w{i}" for i in torch.randint(100, (number,), generator=generator).tolist())

    return [
        {
            "prompt": words(9 + 3 * (i % 4)) + " ",
            "completion": words(3 + i % 3),
            "task": tasks[i % len(tasks)],
        }
        for i in range(count)
    ]


def dataset(count=8, **kwargs):
    return Dataset.from_list(rows(count, **kwargs))


def arguments(output_dir, **kwargs):
    defaults = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 2,
        "max_length": 64,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
        "calibration_batches": 2,
        "warmup_steps": 0,
        "disable_tqdm": True,
    }
    return ElasticSFTConfig(**{**defaults, **kwargs})


def trainer(output_dir, *, model=None, train_dataset=None, eval_dataset=None, peft_config=None, **kwargs):
    return ElasticSFTTrainer(
        routed_model() if model is None else model,
        arguments(output_dir, **kwargs),
        train_dataset=dataset() if train_dataset is None else train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def router_weights(model):
    """Every trainable tensor, by name."""
    return {
        name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad
    }


class GradientRecorder(TrainerCallback):
    """Keeps the routers' gradients of every optimizer step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


def first_gradients(output_dir, **kwargs):
    """Gradients of the first optimizer step, and the metrics logged for it."""
    recorder = GradientRecorder()
    trainer_ = trainer(output_dir, max_grad_norm=1e9, **{"max_steps": 1, **kwargs})
    trainer_.add_callback(recorder)
    trainer_.train()
    return recorder.steps[0], trainer_.state.log_history[0]


def routing_metrics(log):
    """The metrics of one log entry that training routers adds."""
    names = ("lm_loss", "sparsity_loss", "temperature", "msr/", "lambda1/", "lambda2/")
    return {name: value for name, value in log.items() if name.startswith(names)}
