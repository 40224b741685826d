"""Training arguments of `ElasticSFTTrainer`."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import SchedulerType
from trl import SFTConfig

from .checks import check_integer, check_number
from .counterfactual import check_fraction
from .gating import TEMPERATURE_SCHEDULES
from .sparsity import SPARSITY_CONSTRAINTS


_TEMPERATURE_END = {"exponential": 0.3, "cosine": 1.0}


@dataclass
class ElasticSFTConfig(SFTConfig):
    """TRL's `SFTConfig` with what training routers adds, and the paper's optimizer settings as defaults.

    Defaults that differ from `SFTConfig`: AdamW betas 0.9 and 0.95, `weight_decay` 0.1, a cosine schedule with 20% of
    the steps as warm-up, `max_grad_norm` 5.0.

    Args:
        router_learning_rate: peak learning rate of the routers.
        learning_rate: transformers' name of the same number: left out, it becomes `router_learning_rate`; given, it
            must agree with it.
        multiplier_learning_rate: peak learning rate of the multipliers' ascent; follows the routers' schedule.
        sparsity_constraint: linear term of the regulariser: `"absolute"` for `|MSR - t|`, `"signed"` for `MSR - t`.
        temperature_start: Gumbel-softmax temperature at the start, positive.
        temperature_end: final temperature, positive and at most `temperature_start`; left out, 0.3 for the exponential
            schedule and 1.0 for the cosine one.
        temperature_schedule: `"exponential"` or `"cosine"`, see `elastic_peft.gating.temperature`.
        counterfactual_fraction: share of queries for which a head's other mode, which only the decisions' gradients
            need, is computed; these are then unbiased estimates. 1 over an integer; see
            `elastic_kernels.routed_attention`.
        calibration_batches: training batches of each process on which the standardisation of the routers' input is
            calibrated before the first step.

    Raises:
        ValueError: a field is outside its range, or asks for what routers cannot be trained with: reentrant
            checkpointing (which TRL forces under DeepSpeed stage 3), packing that cuts sequences, packed evaluation
            in padded batches, label smoothing, a dataset that TRL does not prepare.

    Source: Elastic Attention, arXiv 2601.17367.
    """

    router_learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate of the routers."})
    learning_rate: float = field(  # type: ignore[assignment]  # filled in below
        default=None,
        metadata={
            "help": "Another name of `router_learning_rate`; left out, it takes its value; given, it must agree."
        },
    )
    multiplier_learning_rate: float = field(
        default=1e-2, metadata={"help": "Peak learning rate of the multipliers; follows the routers' schedule."}
    )
    sparsity_constraint: str = field(
        default="absolute",
        metadata={
            "help": "Linear term of the regulariser: 'absolute' for |MSR - t|, 'signed' for MSR - t.",
            "choices": list(SPARSITY_CONSTRAINTS),
        },
    )
    temperature_start: float = field(default=1.5, metadata={"help": "Gumbel-softmax temperature at the start."})
    temperature_end: float = field(  # type: ignore[assignment]  # filled in below
        default=None,
        metadata={"help": "Final temperature; left out, 0.3 for the exponential schedule and 1.0 for the cosine one."},
    )
    temperature_schedule: str = field(
        default="exponential",
        metadata={"help": "How the temperature falls.", "choices": list(TEMPERATURE_SCHEDULES)},
    )
    counterfactual_fraction: float = field(
        default=1.0,
        metadata={
            "help": "Share of queries for which a head's other mode is computed for the decisions' gradients: 1 over "
            "an integer."
        },
    )
    calibration_batches: int = field(
        default=8,
        metadata={"help": "Training batches of each process that calibrate the routers' input before the first step."},
    )

    # Defaults that differ from SFTConfig: the paper's.
    adam_beta2: float = field(default=0.95, metadata={"help": "AdamW's second beta."})
    weight_decay: float = field(default=0.1, metadata={"help": "Weight decay of the routers."})
    lr_scheduler_type: SchedulerType | str = field(default="cosine", metadata={"help": "Learning rate schedule."})
    warmup_steps: float = field(default=0.2, metadata={"help": "Warm-up in steps; below 1, a share of all steps."})
    max_grad_norm: float = field(default=5.0, metadata={"help": "Largest norm of the routers' gradient."})

    def __post_init__(self):
        if self.learning_rate is not None and self.learning_rate != self.router_learning_rate:
            raise ValueError(
                f"`learning_rate` must equal `router_learning_rate` ({self.router_learning_rate}) or be left out, got "
                f"{self.learning_rate}."
            )
        self.router_learning_rate = check_number("router_learning_rate", self.router_learning_rate)
        self.learning_rate = self.router_learning_rate
        super().__post_init__()
        self._validate_routing()
        self._validate_inherited()
        self._require_non_reentrant_checkpointing()

    def _validate_routing(self):
        for name, choices in (
            ("sparsity_constraint", SPARSITY_CONSTRAINTS),
            ("temperature_schedule", TEMPERATURE_SCHEDULES),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"`{name}` must be one of {', '.join(map(repr, choices))}, got {getattr(self, name)!r}."
                )
        if self.temperature_end is None:
            self.temperature_end = _TEMPERATURE_END[self.temperature_schedule]
        for name in ("multiplier_learning_rate", "temperature_start", "temperature_end"):
            setattr(self, name, check_number(name, getattr(self, name)))
        if not self.router_learning_rate > 0:
            raise ValueError(f"`router_learning_rate` must be positive, got {self.router_learning_rate}.")
        if not self.multiplier_learning_rate >= 0:
            raise ValueError(f"`multiplier_learning_rate` must not be negative, got {self.multiplier_learning_rate}.")
        if not 0 < self.temperature_end <= self.temperature_start:
            raise ValueError(
                f"`temperature_end` must be positive and at most `temperature_start` ({self.temperature_start}), got "
                f"{self.temperature_end}."
            )
        self.counterfactual_fraction = check_fraction(self.counterfactual_fraction)
        self.calibration_batches = check_integer("calibration_batches", self.calibration_batches, 1)

    def _validate_inherited(self):
        if self.packing and self.packing_strategy != "bfd":
            raise ValueError(
                "`packing_strategy` must be 'bfd', the one that keeps sequences whole, as each is routed by its own "
                f"prompt; got {self.packing_strategy!r}."
            )
        if self.packing and self.max_length is None:
            raise ValueError("`max_length` must be set for packing, got None.")
        if self.eval_packing and not self.packing:
            raise ValueError(
                "`eval_packing` must go with `packing`: padded batches hold no packed rows; got it alone."
            )
        if self.label_smoothing_factor:
            raise ValueError(
                "`label_smoothing_factor` must be 0: TRL runs the model twice for it, got "
                f"{self.label_smoothing_factor}."
            )
        if isinstance(self.dataset_kwargs, dict) and self.dataset_kwargs.get("skip_prepare_dataset"):
            raise ValueError(
                "`dataset_kwargs` must not set `skip_prepare_dataset`: preparation is where each example's task and "
                f"index are kept; tokenized datasets are recognised without it; got {self.dataset_kwargs}."
            )

    def _require_non_reentrant_checkpointing(self):
        plugin = self.deepspeed_plugin
        if plugin is not None and plugin.zero_stage == 3 and self.gradient_checkpointing:
            raise ValueError(
                "`gradient_checkpointing` must be False under DeepSpeed stage 3, where TRL makes it reentrant: the "
                "routers' decisions would get no gradient; got True."
            )
        # transformers 5.24 renamed the argument and keeps the older name as a mirror.
        for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
            kwargs = getattr(self, name, None)
            if not kwargs:
                continue
            if not isinstance(kwargs, dict):
                raise ValueError(f"`{name}` must map names to values, got {kwargs!r}.")
            if kwargs.get("use_reentrant"):
                raise ValueError(
                    f"`{name}` must not set `use_reentrant` to True: reentrant checkpointing runs the forward pass "
                    f"without gradients, so the routers' decisions would get none; got {kwargs}."
                )
            setattr(self, name, {**kwargs, "use_reentrant": False})
