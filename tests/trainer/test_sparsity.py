import pytest
import torch

from elastic_peft.sparsity import (
    Multipliers,
    model_sparsity,
    regularizer,
    regularizer_of_sums,
    streaming_sparsity,
    task_counts,
    task_sums,
    task_weights,
)


TARGETS = torch.tensor([0.7, 1.0, 0.5])
LAMBDA1 = torch.tensor([0.3, 0.1, 0.4])
LAMBDA2 = torch.tensor([0.2, 0.5, 0.05])
MSR = torch.tensor([0.9, 0.25, 0.5, 1.0, 0.1])
TASK_ID = torch.tensor([0, 1, 0, 1, 1])


@pytest.mark.parametrize("window", [1, 4, 64])
@pytest.mark.parametrize("sink", [0, 1, 5])
def test_streaming_sparsity_equals_counting_pairs(sink, window):
    lengths = torch.tensor([0, 1, 2, 7, 33, 129])
    expected = []
    for length in lengths.tolist():
        query, key = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
        causal = key <= query
        computed = causal & ((key < sink) | (query - key < window))
        expected.append(1 - computed.sum().item() / max(causal.sum().item(), 1) if length else 0.0)
    torch.testing.assert_close(streaming_sparsity(lengths, sink, window), torch.tensor(expected))


def test_streaming_sparsity_is_exact_at_a_million_tokens():
    length, sink, window = 1_000_000, 128, 2048
    computed = sum(min(m, window) + min(sink, max(m - window, 0)) for m in range(1, length + 1))
    expected = 1 - computed / (length * (length + 1) // 2)
    assert streaming_sparsity(torch.tensor([length]), sink, window).item() == pytest.approx(expected, rel=1e-6)


def test_model_sparsity_weights_every_head_alike():
    gates = [torch.tensor([[True, False], [True, True]]), torch.tensor([[0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])]
    torch.testing.assert_close(model_sparsity(gates), torch.tensor([2 / 6, 1.0]))


def test_model_sparsity_is_differentiable():
    gate = torch.tensor([[1.0, 0.0, 0.0]], requires_grad=True)
    model_sparsity([gate, torch.zeros(1, 1)]).sum().backward()
    torch.testing.assert_close(gate.grad, torch.full((1, 3), 0.25))


@pytest.mark.parametrize("constraint", ["absolute", "signed"])
def test_regularizer_is_the_mean_over_present_tasks_of_their_means(constraint):
    expected = []
    for task in (0, 1):
        difference = MSR[TASK_ID.eq(task)] - TARGETS[task]
        linear = difference.abs() if constraint == "absolute" else difference
        expected.append((LAMBDA1[task] * linear + LAMBDA2[task] * difference**2).mean())
    weights = task_weights(TASK_ID, task_counts(TASK_ID, 3))
    value = regularizer(MSR, TASK_ID, TARGETS, LAMBDA1, LAMBDA2, constraint, weights)
    torch.testing.assert_close(value, torch.stack(expected).mean())


def test_regularizer_ignores_sequences_of_padding():
    weights = task_weights(TASK_ID, task_counts(TASK_ID, 3))
    expected = regularizer(MSR, TASK_ID, TARGETS, LAMBDA1, LAMBDA2, "absolute", weights)
    task_id = torch.cat([TASK_ID, torch.tensor([-1, -1])])
    weights = task_weights(task_id, task_counts(task_id, 3))
    msr = torch.cat([MSR, torch.ones(2)])
    torch.testing.assert_close(regularizer(msr, task_id, TARGETS, LAMBDA1, LAMBDA2, "absolute", weights), expected)


def test_regularizer_adds_over_micro_batches():
    counts = task_counts(TASK_ID, 3)
    parts = [
        regularizer(MSR[i], TASK_ID[i], TARGETS, LAMBDA1, LAMBDA2, "absolute", task_weights(TASK_ID[i], counts))
        for i in (slice(0, 1), slice(1, 4), slice(4, 5))
    ]
    whole = regularizer(MSR, TASK_ID, TARGETS, LAMBDA1, LAMBDA2, "absolute", task_weights(TASK_ID, counts))
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("constraint", ["absolute", "signed"])
def test_regularizer_of_sums_equals_regularizer(constraint):
    weights = task_weights(TASK_ID, task_counts(TASK_ID, 3))
    expected = regularizer(MSR, TASK_ID, TARGETS, LAMBDA1, LAMBDA2, constraint, weights)
    sums = task_sums(MSR, TASK_ID, TARGETS, constraint)
    torch.testing.assert_close(regularizer_of_sums(sums, LAMBDA1, LAMBDA2), expected)


def test_task_sums_leave_padding_out():
    sums = task_sums(torch.tensor([0.5, 1.0]), torch.tensor([2, -1]), TARGETS, "signed")
    torch.testing.assert_close(sums, torch.tensor([[0.0] * 4, [0.0] * 4, [1.0, 0.5, 0.0, 0.0]]))


@pytest.mark.parametrize("constraint", ["absolute", "signed"])
def test_multipliers_ascend_the_loss_gradient(constraint):
    """One AdamW step from the closed forms equals one from autograd, up to the common factor that Adam cancels."""
    multipliers = Multipliers(["qa", "code", "idle"], learning_rate=0.01, seed=3)
    lambda1, lambda2 = (value.clone().requires_grad_() for value in (multipliers.lambda1, multipliers.lambda2))
    weights = task_weights(TASK_ID, task_counts(TASK_ID, 3))
    regularizer(MSR, TASK_ID, TARGETS, lambda1, lambda2, constraint, weights).backward()
    optimizer = torch.optim.AdamW([lambda1, lambda2], lr=0.005, betas=(0.9, 0.95), weight_decay=0.0, maximize=True)
    optimizer.step()
    multipliers.step(task_sums(MSR, TASK_ID, TARGETS, constraint), lr_factor=0.5)
    torch.testing.assert_close(multipliers.lambda1, lambda1.detach(), atol=1e-6, rtol=0)
    torch.testing.assert_close(multipliers.lambda2, lambda2.detach(), atol=1e-6, rtol=0)


def test_multipliers_start_in_the_papers_range_from_the_seed_alone():
    values = torch.stack([Multipliers(["a"] * 100, learning_rate=0.1, seed=7).lambda1 for _ in range(2)])
    assert torch.equal(values[0], values[1])
    assert 0 <= values.min() < 0.05
    assert 0.45 < values.max() < 0.5


def test_multipliers_of_an_absent_task_do_not_drift_on_momentum():
    multipliers = Multipliers(["qa", "code"], learning_rate=0.1, seed=0)
    both = torch.tensor([[1.0, 0.5, 0.2, 0.04], [1.0, 0.5, 0.5, 0.25]])
    multipliers.step(both, lr_factor=1.0)
    before = multipliers.lambda1
    multipliers.step(torch.tensor([[1.0, 0.5, 0.2, 0.04], [0.0] * 4]), lr_factor=1.0)
    assert multipliers.lambda1[0] > before[0]
    assert multipliers.lambda1[1] == before[1]


def test_multipliers_refuse_nan_and_keep_their_values():
    multipliers = Multipliers(["qa", "code"], learning_rate=0.1, seed=0)
    before = multipliers.state_dict()
    sums = torch.tensor([[1.0, 0.5, 0.2, 0.04], [1.0, float("nan"), float("nan"), float("nan")]])
    with pytest.raises(ValueError, match="`msr` must be finite, got nan for task 'code'"):
        multipliers.step(sums, lr_factor=1.0)
    torch.testing.assert_close(multipliers.state_dict(), before, rtol=0, atol=0)


def test_multipliers_continue_bitwise_after_save_and_load(tmp_path):
    sums = torch.tensor([[2.0, 1.0, 0.3, 0.1], [1.0, 0.9, 0.1, 0.01], [0.0] * 4])
    straight = Multipliers(["qa", "code", "idle"], learning_rate=0.1, seed=0)
    straight.step(sums, lr_factor=1.0)
    straight.save(tmp_path / "multipliers.safetensors")
    resumed = Multipliers(["qa", "code", "idle"], learning_rate=0.1, seed=1)
    resumed.load(tmp_path / "multipliers.safetensors")
    for multipliers in (straight, resumed):
        multipliers.step(sums.flip(0), lr_factor=0.7)
    torch.testing.assert_close(resumed.state_dict(), straight.state_dict(), rtol=0, atol=0)


def test_multipliers_of_other_tasks_are_refused():
    state = Multipliers(["qa"], learning_rate=0.1, seed=0).state_dict()
    with pytest.raises(ValueError, match="tasks qa, code, got those of qa"):
        Multipliers(["qa", "code"], learning_rate=0.1, seed=0).load_state_dict(state)


@pytest.mark.parametrize("content", [None, b"", b"not safetensors"], ids=["missing", "empty", "foreign"])
def test_unreadable_multipliers_file_is_a_clear_error(tmp_path, content):
    path = tmp_path / "multipliers.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="complete safetensors file of multipliers"):
        Multipliers(["qa"], learning_rate=0.1, seed=0).load(path)
