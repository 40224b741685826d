"""Foreign formats become adapters: the paper authors' checkpoints, and DuoAttention's head patterns."""

import json

import pytest
import torch
import torch.nn.functional as F
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file

from elastic_kernels.router import LinearWeights, RouterWeights, router
from elastic_peft import ElasticConfig, last_routing
from elastic_peft.card import render_card
from elastic_peft.convert import convert_duo, convert_paper
from elastic_peft.static_router import static_router


LAYERS, HEADS, HEAD_DIM = 2, 2, 16
# As the authors' configuration class saves them.
PAPER_FIELDS = {
    "enable_ada_sparsity": True,
    "pooling_mode": "ctx_q",
    "retrieval_mode": "full",
    "toggle_type": "streaming",
    "use_softmax": True,
    "sink_size": 2,
    "local_window_size": 6,
    "topk_k": 2048,
    "suggested_threshold": 0.5,
}
PAPER_SHAPES = {
    "cls_feat_extractor.0.weight": (4 * HEAD_DIM, HEAD_DIM),
    "cls_feat_extractor.0.bias": (4 * HEAD_DIM,),
    "cls_feat_extractor.2.weight": (HEAD_DIM, 4 * HEAD_DIM),
    "cls_feat_extractor.2.bias": (HEAD_DIM,),
    "cls_router_head_agnostic.0.weight": (4 * HEAD_DIM, HEAD_DIM),
    "cls_router_head_agnostic.0.bias": (4 * HEAD_DIM,),
    "cls_router_head_agnostic.2.weight": (HEAD_DIM, 4 * HEAD_DIM),
    "cls_router_head_agnostic.2.bias": (HEAD_DIM,),
    "cls_router_head_agnostic.4.weight": (2, HEAD_DIM),
    "cls_router_head_agnostic.4.bias": (2,),
}
GATES = [[0.75, 0.25], [0.0625, 0.5]]


@pytest.fixture
def prompt():
    """Three rows of 240 tokens, more than the two ends that are pooled."""
    return torch.randint(3, 96, (3, 240), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def checkpoint(make_base, tmp_path):
    """A whole model with routers, in two shards, of the names and shapes that the authors' code saves."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    base = make_base()
    generator = torch.Generator().manual_seed(11)
    tensors = {key: tensor.contiguous() for key, tensor in base.state_dict().items()}
    for layer in range(LAYERS):
        attention = f"model.layers.{layer}.self_attn"
        tensors[f"{attention}.attn_mask_log_alphas"] = torch.full((HEADS,), 4.5)
        tensors[f"{attention}.mask_allocator.log_temp"] = torch.zeros(())
        for name, shape in PAPER_SHAPES.items():
            # Small biases leave the decision to the keys.
            scale = 0.01 if name.endswith("bias") else 2.0
            tensors[f"{attention}.mask_allocator.{name}"] = (
                scale * torch.randn(shape, generator=generator)
            ).bfloat16()
    names = sorted(tensors)
    for shard, part in enumerate((names[::2], names[1::2]), start=1):
        save_file({name: tensors[name] for name in part}, folder / f"model-0000{shard}-of-00002.safetensors")
    settings = base.config.to_dict() | PAPER_FIELDS | {"architectures": ["PawLlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def all_tensors(folder):
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


def edit_shards(folder, edit):
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({new: edited for key in tensors for new, edited in edit(key, tensors[key])}, file)


def edit_settings(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def decide_as_the_authors(tensors, keys, layer):
    """Their router restated for one layer: keys `[B, S, H, d']` to bool `[B, H]`, True = full."""

    def linear(name, x):
        prefix = f"model.layers.{layer}.self_attn.mask_allocator.{name}"
        return F.linear(x, tensors[f"{prefix}.weight"].float(), tensors[f"{prefix}.bias"].float())

    pooled = torch.cat([keys[:, :100], keys[:, -100:]], dim=1).mean(dim=1)
    task = linear("cls_feat_extractor.2", F.silu(linear("cls_feat_extractor.0", pooled)))
    hidden = linear("cls_router_head_agnostic.2", F.silu(linear("cls_router_head_agnostic.0", task)))
    return linear("cls_router_head_agnostic.4", F.silu(hidden)).argmax(dim=-1) == 1


def test_a_converted_checkpoint_decides_as_the_authors_routers(checkpoint, make_base, prompt, tmp_path):
    convert_paper(checkpoint, tmp_path / "adapter")
    model = PeftModel.from_pretrained(make_base(), tmp_path / "adapter").eval()
    keys = {}
    for index, layer in enumerate(model.base_model.model.model.layers):
        projection = layer.self_attn.k_proj
        # The router projects the pooled tokens alone; the pass itself projects all of them, and comes last.
        projection.register_forward_hook(lambda module, args, output, index=index: keys.update({index: output}))
    with torch.no_grad():
        model(prompt)
    tensors = all_tensors(checkpoint)
    full = torch.stack(
        [decide_as_the_authors(tensors, keys[i].unflatten(-1, (HEADS, HEAD_DIM)), i) for i in range(LAYERS)], dim=1
    )
    assert full.any(), "the generated routers must choose both modes"
    assert not full.all(), "the generated routers must choose both modes"
    assert torch.equal(last_routing(model).decisions, ~full)


@pytest.mark.parametrize(
    ("retrieval", "toggle", "mode_pair"),
    [("full", "streaming", "FA-SSA"), ("full", "xattn", "FA-XA"), ("xattn", "streaming", "XA-SSA")],
)
def test_modes_become_a_mode_pair(checkpoint, tmp_path, retrieval, toggle, mode_pair):
    edit_settings(checkpoint, retrieval_mode=retrieval, toggle_type=toggle)
    convert_paper(checkpoint, tmp_path / "adapter")
    assert ElasticConfig.from_pretrained(tmp_path / "adapter").mode_pair == mode_pair


def test_the_adapter_keeps_what_the_checkpoint_was_trained_with(checkpoint, tmp_path):
    convert_paper(checkpoint, tmp_path / "adapter", base_model="user/base")
    config = ElasticConfig.from_pretrained(tmp_path / "adapter")
    assert (config.sink_size, config.window_size, config.pool_size) == (2, 6, 100)
    assert (config.standardize_input, config.decode) == (False, "full")
    assert (config.base_model_name_or_path, config.task_type) == ("user/base", "CAUSAL_LM")


def test_other_weights_of_the_checkpoint_are_not_read(checkpoint, tmp_path, monkeypatch):
    import elastic_peft.convert

    read, safe_open = [], elastic_peft.convert.safe_open

    class Shard:
        def __init__(self, *args, **kwargs):
            self.file = safe_open(*args, **kwargs)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def keys(self):
            return self.file.keys()

        def get_tensor(self, name):
            read.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(elastic_peft.convert, "safe_open", Shard)
    convert_paper(checkpoint, tmp_path / "adapter")
    assert len(read) == LAYERS * len(PAPER_SHAPES)
    assert all(".mask_allocator.cls_" in name for name in read)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("enable_ada_sparsity", False, r"^`enable_ada_sparsity` must be true in config.json, .*, got False\.$"),
        ("pooling_mode", "first_token", r"^`pooling_mode` must be 'ctx_q' in config.json, got 'first_token'\.$"),
        ("toggle_type", "triangle", r"^`retrieval_mode` and `toggle_type` must .* got 'full' and 'triangle'\.$"),
        ("retrieval_mode", "xattn+", r"^`retrieval_mode` and `toggle_type` must .* got 'xattn\+' and 'streaming'\.$"),
        ("num_hidden_layers", None, r"^`num_hidden_layers` must be an integer of at least 1 in .*, got None\.$"),
        ("num_hidden_layers", 3, r"^`checkpoint` must hold a router in each of 3 layers, got none in layer 2\.$"),
        ("num_hidden_layers", 1, r"^`checkpoint` must hold a router in each of 1 layers, got one in layer 1\.$"),
        (
            "num_hidden_layers",
            10**12,
            r"^`checkpoint` must hold a router in each of 10+ layers, got none in layer 2\.$",
        ),
        ("toggle_type", ["streaming"], r"^`retrieval_mode` and `toggle_type` must .* and \['streaming'\]\.$"),
        ("retrieval_mode", {}, r"^`retrieval_mode` and `toggle_type` must .* got {} and 'streaming'\.$"),
        ("num_key_value_heads", "2", r"^`num_key_value_heads` must be an integer of at least 1 in .*, got '2'\.$"),
        ("head_dim", 10**12, r"^`cls_feat_extractor\.0\.weight` of layer 0 must have `head_dim` columns, 10+, got"),
        ("sink_size", [2], r"^`sink_size` must be an integer of at least 0, got \[2\]\.$"),
        ("local_window_size", 0, r"^`window_size` must be an integer of at least 1, got 0\.$"),
    ],
)
def test_a_configuration_that_cannot_be_converted_is_refused(checkpoint, tmp_path, field, value, message):
    edit_settings(checkpoint, **{field: value})
    with pytest.raises(ValueError, match=message):
        convert_paper(checkpoint, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("width", [3, 33], ids=["less-than-the-heads", "no-multiple"])
def test_a_width_that_the_heads_do_not_divide_is_refused(checkpoint, tmp_path, width):
    edit_settings(checkpoint, head_dim=None, hidden_size=width)
    with pytest.raises(ValueError, match=r"^`hidden_size` must be a multiple of `num_attention_heads` \(4\)"):
        convert_paper(checkpoint, tmp_path / "adapter")


def test_targets_that_the_checkpoint_does_not_tell_are_not_claimed(checkpoint, tmp_path):
    convert_paper(checkpoint, tmp_path / "adapter")
    targets = ElasticConfig.from_pretrained(tmp_path / "adapter").t_values
    assert targets == {"summarization": 1.0, "code": 1.0, "in_context_learning": 1.0}


def without_first_bias(key, tensor):
    return [] if key.endswith("0.self_attn.mask_allocator.cls_feat_extractor.0.bias") else [(key, tensor)]


def one_output(key, tensor):
    return [(key, tensor[:1] if "cls_router_head_agnostic.4" in key else tensor)]


def other_layer(key, tensor):
    return [(key.replace("cls_router_head_agnostic.4.weight", "cls_router_head_agnostic.6.weight"), tensor)]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without_first_bias, r"^`cls_feat_extractor.0.bias` of layer 0 must have shape \(64,\), got none\.$"),
        (one_output, r"^`cls_router_head_agnostic.4.weight` of layer 0 must have shape \(2, 16\), got \(1, 16\)\.$"),
        (other_layer, r"^`checkpoint` must hold routers of the paper's layers, got .*agnostic.6.weight besides\.$"),
    ],
)
def test_other_routers_are_refused(checkpoint, tmp_path, edit, message):
    edit_shards(checkpoint, edit)
    with pytest.raises(ValueError, match=message):
        convert_paper(checkpoint, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_a_shard_cut_short_is_refused(checkpoint, tmp_path):
    shard = checkpoint / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"^`model-00001-of-00002.safetensors` must be a complete safetensors file"):
        convert_paper(checkpoint, tmp_path / "adapter")


@pytest.fixture
def base_folder(make_base, tmp_path):
    make_base().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.fixture
def pattern(tmp_path):
    """A pattern file with its configuration beside it, as DuoAttention's training saves them."""
    folder = tmp_path / "pattern"
    folder.mkdir()
    file = folder / "full_attention_heads.tsv"
    file.write_text("".join("\t".join(f"{gate:.18e}" for gate in row) + "\n" for row in GATES))
    (folder / "config.json").write_text(json.dumps({"sink_size": 3, "recent_size": 7, "threshold": 0.5}))
    return file


def decisions(adapter, inputs):
    """Of each row, on the adapter's own base model."""
    model = AutoPeftModelForCausalLM.from_pretrained(adapter).eval()
    with torch.no_grad():
        model(**inputs)
    return last_routing(model).decisions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_pattern_decides_by_its_gates(pattern, base_folder, make_base, inputs, tmp_path, dtype):
    convert_duo(pattern, tmp_path / "adapter", base_model=base_folder)
    model = PeftModel.from_pretrained(make_base(), tmp_path / "adapter").eval().to(dtype)
    with torch.no_grad():
        model(**inputs)
    expected = torch.tensor([[False, True], [True, False]])  # a gate of 0.5 is full
    assert torch.equal(last_routing(model).decisions, expected.expand(2, -1, -1))


def test_a_pattern_decides_whatever_the_keys(pattern, base_folder, inputs, tmp_path):
    convert_duo(pattern, tmp_path / "adapter", base_model=base_folder)
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    logits = []
    for size in (0.0, 1.0, 1e4):
        with torch.no_grad():
            for layer in model.base_model.model.model.layers:
                layer.self_attn.k_proj.weight.normal_(std=max(size, 1e-6))
            model(**inputs)
        logits.append(last_routing(model).logits)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_the_bias_moves_the_threshold(pattern, base_folder, inputs, tmp_path):
    config = convert_duo(pattern, tmp_path / "adapter", base_model=base_folder)
    config.sparsity_bias = 0.125
    config.save_pretrained(tmp_path / "adapter")
    expected = torch.tensor([[False, True], [True, True]])
    assert torch.equal(decisions(tmp_path / "adapter", inputs), expected.expand(2, -1, -1))


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_a_static_router_decides_by_its_margins_alone(implementation):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    margins = torch.tensor([1e-9, -1e-9, 0.25, -0.25, 0.0])
    tensors = {name: tensor.to(device) for name, tensor in static_router(margins, HEAD_DIM).items()}
    layers = {n: LinearWeights(tensors[f"{n}.weight"], tensors[f"{n}.bias"]) for n in RouterWeights._fields}
    keys = 1e4 * torch.randn(3, 7, len(margins), HEAD_DIM, generator=torch.Generator().manual_seed(0))
    output = router(
        keys.to(device),
        torch.ones(3, 7, dtype=torch.bool, device=device),
        RouterWeights(**layers),
        mean=tensors["standardizer.mean"],
        deviation=tensors["standardizer.deviation"],
        implementation=implementation,
    )
    assert output.gate.tolist() == [[False, True, False, True, False]] * 3


@pytest.mark.parametrize(
    ("sparsity", "sparse"),
    [
        (0.0, [[False, False], [False, False]]),
        (0.25, [[False, False], [True, False]]),
        (0.5, [[False, True], [True, False]]),
        (1.0, [[True, True], [True, True]]),
    ],
)
def test_sparsity_takes_the_lowest_gates(pattern, base_folder, inputs, tmp_path, sparsity, sparse):
    convert_duo(pattern, tmp_path / "adapter", base_model=base_folder, sparsity=sparsity)
    assert torch.equal(decisions(tmp_path / "adapter", inputs), torch.tensor(sparse).expand(2, -1, -1))


def test_sizes_come_from_beside_the_pattern(pattern, base_folder, tmp_path):
    config = convert_duo(pattern, tmp_path / "adapter", base_model=base_folder)
    assert (config.sink_size, config.window_size) == (3, 7)


def test_given_sizes_need_no_file(pattern, base_folder, tmp_path):
    pattern.with_name("config.json").unlink()
    config = convert_duo(pattern, tmp_path / "adapter", base_model=base_folder, sink_size=0, window_size=9)
    assert (config.sink_size, config.window_size) == (0, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\t0\n", r"^`pattern` must have 2 rows of 2 gates, .*, got 1 rows of 2\.$"),
        ("1\n0\n", r"^`pattern` must have 2 rows of 2 gates, .*, got 2 rows of 1\.$"),
        ("1\t0\n1\n", r"^`pattern` must be a file with as many numbers in each row"),
        ("full\t0\n1\t0\n", r"^`pattern` must be a file with as many numbers in each row"),
        ("nan\t0\n1\t0\n", r"^`pattern` must hold finite gates"),
        ("", r"^`pattern` must hold finite gates, got an empty file"),
    ],
    ids=["rows", "columns", "ragged", "words", "nan", "empty"],
)
def test_another_pattern_is_refused(pattern, base_folder, tmp_path, text, message):
    pattern.write_text(text)
    with pytest.raises(ValueError, match=message):
        convert_duo(pattern, tmp_path / "adapter", base_model=base_folder)
    assert not (tmp_path / "adapter").exists()


def test_a_pattern_without_sizes_is_refused(pattern, base_folder, tmp_path):
    pattern.with_name("config.json").unlink()
    with pytest.raises(ValueError, match=r"^`config.json` must be a readable JSON file"):
        convert_duo(pattern, tmp_path / "adapter", base_model=base_folder)


def test_sparsity_is_a_share(pattern, base_folder, tmp_path):
    with pytest.raises(ValueError, match=r"^`sparsity` must be in \[0, 1\], got 1.5\.$"):
        convert_duo(pattern, tmp_path / "adapter", base_model=base_folder, sparsity=1.5)


def test_another_adapters_folder_is_left_alone(pattern, base_folder, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "results.json").write_text("{}")
    with pytest.raises(ValueError, match="`output` must be a new or an empty folder, got"):
        convert_duo(pattern, tmp_path / "adapter", base_model=base_folder)
    assert [file.name for file in (tmp_path / "adapter").iterdir()] == ["results.json"]


@pytest.mark.parametrize(
    ("threshold", "message"),
    [(float("nan"), "`threshold` must be finite, got nan"), (1e300, "weights must be finite in float32")],
    ids=["nan", "beyond-float32"],
)
def test_weights_that_are_not_finite_are_never_written(pattern, base_folder, tmp_path, threshold, message):
    with pytest.raises(ValueError, match=message):
        convert_duo(pattern, tmp_path / "adapter", base_model=base_folder, threshold=threshold)
    assert not (tmp_path / "adapter").exists()


def test_the_card_of_a_pattern_says_that_decisions_are_fixed(pattern, base_folder, tmp_path):
    convert_duo(pattern, tmp_path / "adapter", base_model=base_folder)
    text = render_card(tmp_path / "adapter").text
    assert "The decisions are fixed" in text
    assert "depends on the" not in text
    assert "training with it" not in text
