"""The operators that `sweep.py` measures.

The module of the same name holds an operator's `CONDITIONS`, what its rows have in common, and `rows(lengths)`, which
yields them as soon as they are measured.
"""

from dataclasses import dataclass


K = 1024


@dataclass(frozen=True)
class Operator:
    """One operator.

    Args:
        tests: test files; their GPU tier must pass before anything is timed.
        lengths: tokens that it is measured at.
        gpus: GPUs that it needs.
    """

    tests: tuple[str, ...]
    lengths: tuple[int, ...]
    gpus: int = 1


PREFILL_TESTS = ("tests/ops/test_prefill_kernels.py",)
TRAINING_TESTS = ("tests/ops/test_training_kernels.py", "tests/ops/test_counterfactual.py")

OPERATORS = {
    "prefill": Operator(PREFILL_TESTS, tuple(n * K for n in (2, 4, 8, 16, 32, 64, 128, 256))),
    "selection": Operator(("tests/ops/test_selection_kernel.py",), (128 * K,)),
    "router": Operator(("tests/ops/test_router_kernel.py",), (512, 128 * K, 1024 * K)),
    "decode": Operator(("tests/ops/test_decode_kernel.py",), (128 * K,)),
    "train": Operator(TRAINING_TESTS, (64 * K,)),
    "train_step": Operator(TRAINING_TESTS, (64 * K,)),
    "model_prefill": Operator(PREFILL_TESTS, tuple(n * K for n in (32, 128, 256))),
    "generate": Operator(("tests/generation/test_device.py",), (128 * K, 32 * K)),
    "scaling": Operator(("tests/generation/test_two_devices.py",), (64 * K,), gpus=2),
}
