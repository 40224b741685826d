"""Adapters on unusual bases: other dtypes, quantised weights, sharded weights, threads, a fresh interpreter."""

import subprocess
import sys
import threading

import pytest
import torch
from peft import get_peft_model
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from elastic_peft import forced_routing, last_routing


class Int8Linear(nn.Linear):
    """Stands in for a quantised layer: an integer weight that is scaled back in the forward pass."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False, dtype=linear.weight.dtype)
        self.scale = linear.weight.abs().amax() / 127
        self.weight = nn.Parameter((linear.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, input):
        return nn.functional.linear(input, self.weight.to(input.dtype) * self.scale)


@pytest.fixture
def quantized_base(make_base):
    model = make_base().to(torch.bfloat16)
    for name, module in list(model.model.named_modules()):
        if isinstance(module, nn.Linear):
            model.model.set_submodule(name, Int8Linear(module))
    return model


def test_quantized_base_keeps_its_weights(quantized_base, make_routed, logits):
    before = {name: (p.dtype, p.data_ptr()) for name, p in quantized_base.named_parameters()}
    expected = logits(quantized_base)
    model = make_routed(quantized_base)
    after = {name: (p.dtype, p.data_ptr()) for name, p in quantized_base.named_parameters() if "elastic_" not in name}
    assert after == before
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)


def test_quantized_base_is_routed_and_trained(quantized_base, make_routed, inputs, logits):
    model = make_routed(quantized_base)
    with forced_routing(model, "retrieval"):
        dense = logits(model)
    assert not torch.equal(logits(model), dense)
    model.train()
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast-adapter", "as-the-base"])
def test_routers_are_float32_on_a_bfloat16_base(make_base, make_config, autocast):
    base = make_base().to(torch.bfloat16)
    model = get_peft_model(base, make_config(), autocast_adapter_dtype=autocast)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if "elastic_" in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if "elastic_" not in name} == {torch.bfloat16}


@pytest.mark.parametrize("layer", [0, 1])
def test_tensor_parallel_weights_are_refused(make_base, make_config, one_process_mesh, layer):
    base = make_base()
    projection = base.model.layers[layer].self_attn.q_proj
    projection.weight = nn.Parameter(distribute_tensor(projection.weight.data, one_process_mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=rf"`tp_plan` must not shard a routed model, got .*layers\.{layer}\."):
        get_peft_model(base, make_config())
    assert not [name for name, _ in base.named_modules() if "router" in name], "no layer may stay half routed"


def test_threads_do_not_see_each_others_routing(make_routed, inputs):
    model = make_routed()
    logits_before = model(**inputs).logits
    barrier = threading.Barrier(2)
    seen = {}

    def run(mode, rows):
        with forced_routing(model, mode):
            for _ in range(5):
                barrier.wait()
                model(input_ids=inputs["input_ids"][:rows])
                barrier.wait()
                seen.setdefault(mode, []).append(last_routing(model).msr.tolist())

    threads = [threading.Thread(target=run, args=case) for case in (("sparse", 1), ("retrieval", 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"sparse": [[1.0]] * 5, "retrieval": [[0.0, 0.0]] * 5}
    assert last_routing(model).lengths.tolist() == [40, 35], "this thread's record is of its own forward pass"
    assert torch.equal(model(**inputs).logits, logits_before), "another thread's forced routing must not stay"


def test_models_do_not_see_each_others_routing(make_routed, inputs):
    first, second = make_routed(), make_routed()
    second(**inputs)
    record = last_routing(second)
    with forced_routing(first, "sparse"):
        first(**inputs)
        assert last_routing(second) is record
        second(**inputs)
    assert last_routing(first).msr.tolist() == [1.0, 1.0]
    assert torch.equal(last_routing(second).decisions, record.decisions)


@torch.no_grad()
def test_a_compiled_forward_leaves_its_record_whatever_other_models_existed(make_routed, inputs):
    for seed in range(3):
        make_routed(seed=seed)
    model = make_routed()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(input_ids=inputs["input_ids"][:1, :30], use_cache=False)
    assert last_routing(model).lengths.tolist() == [30]


def test_import_is_quick_and_leaves_heavy_packages_alone():
    program = """
import sys, time
import peft, transformers, transformers.modeling_utils, transformers.cache_utils
before = set(sys.modules)
start = time.process_time()
import elastic_peft
seconds = time.process_time() - start
heavy = {"trl", "datasets", "triton", "matplotlib"} & {name.split(".")[0] for name in set(sys.modules) - before}
assert not heavy, f"import elastic_peft must not import {sorted(heavy)}"
assert seconds < 1, f"import elastic_peft took {seconds:.2f} s on top of peft and transformers"
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr.strip().splitlines()[-1]
