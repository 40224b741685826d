"""A tour of elastic_peft in cells: run it top to bottom, or cell by cell in an editor that knows `# %%`.

    python recipes/tour.py                                            # seconds on a CPU, a tiny random model
    python recipes/tour.py --model HuggingFaceTB/SmolLM2-135M-Instruct  # minutes on a CPU

Writes `out/tour/`: the adapter with its card, a picture and a page. One training step teaches nothing; what the
numbers show is how the parts work together.
"""

# %% Settings
import argparse
from pathlib import Path

import torch
from datasets import Dataset
from peft import PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)

import elastic_peft  # registers the ELASTIC method with PEFT
from elastic_peft import ElasticConfig, ElasticSFTConfig, ElasticSFTTrainer, report
from elastic_peft.card import render_card


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="base model, a folder or a repository; default a tiny random Llama")
parser.add_argument("--output-dir", type=Path, default=Path("out"))
settings, _ = parser.parse_known_args()  # a notebook's kernel has arguments of its own
folder = settings.output_dir / "tour"
folder.mkdir(parents=True, exist_ok=True)


# %% Data: each row's task names the sparsity that it is trained towards
FILLER = "The lamp is lit at dusk and put out at dawn. "


def example(index: int) -> dict[str, str]:
    """Every other row asks for a detail far behind; the rest for what the text repeats."""
    text = f"Key {index} opens the gate. " + FILLER * 24
    if index % 2:
        return {"task": "single_qa", "prompt": text + "Which key opens the gate? ", "completion": f"Key {index}"}
    return {"task": "summarization", "prompt": text + "In short: ", "completion": "A lamp burns at night."}


dataset = Dataset.from_list([example(index) for index in range(8)])


# %% A base model and its tokenizer
def load_base():
    """The frozen backbone: the same one at each call."""
    if settings.model is not None:
        return AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        initializer_range=0.2,  # large, so that both modes give visibly different outputs
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


if settings.model is None:
    words = sorted({word for row in dataset for word in f"{row['prompt']} {row['completion']}".split()})
    word_level = Tokenizer(WordLevel({word: index for index, word in enumerate(["<eos>", *words])}, unk_token="<eos>"))
    word_level.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_level, eos_token="<eos>", pad_token="<eos>")
else:
    tokenizer = AutoTokenizer.from_pretrained(settings.model)

# %% Routers on the model
# FA-SSA: each key-value head runs full attention, or attends the first 16 and the newest 64 tokens.
config = ElasticConfig(task_type="CAUSAL_LM", mode_pair="FA-SSA", sink_size=16, window_size=64)
model = get_peft_model(load_base(), config)
model.print_trainable_parameters()
print("sparsity targets:", config.t_values)

# %% One training step: language modelling plus the regulariser of each task's sparsity
args = ElasticSFTConfig(
    output_dir=str(folder / "trainer"),
    max_steps=1,
    per_device_train_batch_size=4,
    calibration_batches=2,
    warmup_steps=0,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
    bf16=False,
)
trainer = ElasticSFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
trainer.train()
log = trainer.state.log_history[0]
print({name: log[name] for name in ("lm_loss", "sparsity_loss", "msr/single_qa", "msr/summarization")})

# %% Saved, and loaded onto a fresh base model
model.save_pretrained(folder / "adapter")
model = PeftModel.from_pretrained(load_base(), folder / "adapter").eval()
print("adapter:", *sorted(path.name for path in (folder / "adapter").iterdir()))

# %% Generation: the prompt decides, and the decoded tokens follow its routing
prompt = tokenizer(dataset[1]["prompt"], return_tensors="pt", return_token_type_ids=False)
answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)
print("answer:", repr(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)))

# %% What was routed
routing = elastic_peft.last_routing(model)
assert routing is not None  # as before a first prompt
print("decisions", list(routing.decisions.shape), "of sequence, layer and key-value head; True = sparse")
print(f"MSR {routing.msr.item():.2f}, the share of sparse heads")
print(f"ESR {routing.esr.item():.2f}, the share of query-key pairs that are not computed")
print(f"keys and values take {routing.kv_bytes.item():,} bytes, {routing.kv_bytes_dense.item():,} without routing")

# %% Other decisions than the routers': every head full, every head sparse, a choice of heads
one_layer = torch.zeros_like(routing.decisions[0])
one_layer[0] = True
losses = {}
for name, decisions in {"full": "retrieval", "sparse": "sparse", "first layer sparse": one_layer}.items():
    with torch.no_grad(), elastic_peft.forced_routing(model, decisions):
        losses[name] = model(**prompt, labels=prompt["input_ids"]).loss.item()
print("loss:", losses)


# %% More or less sparsity without training
def route(inputs):
    """What the routers decide for a prompt."""
    with torch.no_grad():
        model(**inputs)
    return elastic_peft.last_routing(model)


model.peft_config["default"].sparsity_bias = 100.0
print(f"MSR {route(prompt).msr.item():.2f} at a bias that makes every head sparse")
model.peft_config["default"].sparsity_bias = 0.0
prompts = [tokenizer(row["prompt"], return_tensors="pt", return_token_type_ids=False) for row in dataset]
print("calibrated:", elastic_peft.calibrate(model, prompts[:2], target_msr=0.5, tolerance=0.05))

# %% A table, a picture and a page
by_task: dict[str, list[torch.Tensor]] = {}
for row, inputs in zip(dataset, prompts):
    by_task.setdefault(row["task"], []).append(route(inputs).decisions)
decisions_by_task = {task: torch.cat(decisions) for task, decisions in by_task.items()}
print(report.routing_table([{"task": task, "MSR": d.float().mean().item()} for task, d in decisions_by_task.items()]))
report.routing_png(decisions_by_task, folder / "adapter" / "routing.png", title="How often each head ran sparse")
(folder / "routing.html").write_text(report.routing_html(route(prompt)), encoding="utf-8")

# %% The adapter's model card, with that picture; `elastic_peft.push_to_hub` publishes both
model.save_pretrained(folder / "adapter")  # with the calibrated bias
render_card(folder / "adapter").save(folder / "adapter" / "README.md")
print("written:", *(path for path in sorted(folder.rglob("*")) if path.is_file()))
