"""The adapter's configuration: every choice that a saved adapter carries."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import RemoteEntryNotFoundError
from peft.config import PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME, PeftType

from .checks import check_integer, check_number, check_ratio, is_integer, is_number, plain


FORMAT_VERSION = 1
MISSING_WEIGHTS = (
    f"`{SAFETENSORS_WEIGHTS_NAME}` must be beside the adapter's configuration, got none in {{}}; "
    "weights in another format are not loaded."
)
MODE_PAIRS = ("FA-SSA", "FA-XA", "XA-SSA")
DECODE_MODES = ("routed", "full")
TASK_TYPES = (None, "CAUSAL_LM", "FEATURE_EXTRACTION")
DEFAULT_T_VALUES = {
    "single_qa": 0.7,
    "multihop_qa": 0.7,
    "summarization": 1.0,
    "code": 1.0,
    "in_context_learning": 1.0,
}


@dataclass
class ElasticConfig(PeftConfig):
    """Configuration of an ELASTIC adapter: one attention router in every routed layer of a frozen decoder.

    Args:
        mode_pair: `{retrieval mode}-{sparse mode}`: `"FA-SSA"`, `"FA-XA"` or `"XA-SSA"`.
        target_sparsity: target model sparsity ratio of an example without a task, in [0, 1].
        t_values: task name to its target model sparsity ratio, each in [0, 1].
        sink_size: leading tokens that a streaming head always attends, in tokens.
        window_size: most recent tokens, the query's own included, that a streaming head attends, in tokens.
        xattn_block_size: side of an XAttention block, in tokens; a multiple of `xattn_stride`.
        xattn_stride: tokens in one XAttention score group.
        xattn_threshold: share of a query block's score mass that the kept blocks must reach, in (0, 1].
        pool_size: tokens pooled at each end of the prompt; `None` pools the whole prompt.
        router_expansion: hidden width of the router's MLPs, in multiples of the head dimension.
        standardize_input: subtract a calibrated mean from the pooled keys and divide by a calibrated deviation.
        format_version: version of the saved adapter's format.
        decode: `"routed"`: a decoded token of a streaming head attends its sink and window;
            `"full"`: every decoded token attends everything.
        sparsity_bias: added to the sparse logit at inference; raises sparsity when positive.
        layers_to_transform: layer indices to route, or one of them; `None` routes every layer that can be routed.
        head_dim: filled in when the adapter is made: head dimension of the base model.
        num_key_value_heads: filled in when the adapter is made: key-value heads of each routed layer, by layer index.

    Raises:
        ValueError: a field is outside its range, or the adapter was saved in a newer format.

    Source: Elastic Attention, arXiv 2601.17367; XAttention, arXiv 2503.16428.
    """

    mode_pair: str = field(
        default="FA-SSA",
        metadata={"help": "Attention of retrieval and of sparse heads: 'FA-SSA', 'FA-XA' or 'XA-SSA'."},
    )
    target_sparsity: float = field(
        default=0.7, metadata={"help": "Target model sparsity ratio of an example without a task, in [0, 1]."}
    )
    t_values: dict[str, float] = field(
        default_factory=lambda: dict(DEFAULT_T_VALUES),
        metadata={"help": "Task name to its target model sparsity ratio, each in [0, 1]."},
    )
    sink_size: int = field(default=128, metadata={"help": "Leading tokens a streaming head always attends."})
    window_size: int = field(
        default=2048, metadata={"help": "Most recent tokens, the query's own included, a streaming head attends."}
    )
    xattn_block_size: int = field(default=128, metadata={"help": "Side of an XAttention block, in tokens."})
    xattn_stride: int = field(default=16, metadata={"help": "Tokens in one XAttention score group."})
    xattn_threshold: float = field(
        default=0.9, metadata={"help": "Share of the score mass that the kept blocks must reach, in (0, 1]."}
    )
    pool_size: int | None = field(
        default=100, metadata={"help": "Tokens pooled at each end of the prompt; None pools the whole prompt."}
    )
    router_expansion: int = field(
        default=4, metadata={"help": "Hidden width of the router's MLPs, in multiples of the head dimension."}
    )
    standardize_input: bool = field(
        default=True, metadata={"help": "Standardise the pooled keys with a calibrated mean and deviation."}
    )
    format_version: int = field(
        default=FORMAT_VERSION, metadata={"help": "Version of the saved adapter's format; set by the library."}
    )
    decode: str = field(
        default="routed",
        metadata={"help": "'routed': decoded tokens follow the prompt's routing; 'full': they attend everything."},
    )
    sparsity_bias: float = field(
        default=0.0, metadata={"help": "Added to the sparse logit at inference: more sparsity when positive."}
    )
    layers_to_transform: list[int] | None = field(
        default=None, metadata={"help": "Layer indices to route; None routes every layer that can be routed."}
    )
    head_dim: int | None = field(
        default=None, metadata={"help": "Head dimension of the base model; filled in when the adapter is made."}
    )
    num_key_value_heads: dict[int, int] | None = field(
        default=None,
        metadata={"help": "Layer index to key-value heads, for the routed layers; filled in with `head_dim`."},
    )

    # PEFT reads this attribute of every config; which modules are routed follows from the model, so it is not saved.
    target_modules = None

    def __post_init__(self):
        super().__post_init__()
        self.peft_type = PeftType.ELASTIC
        self.num_key_value_heads = _heads_by_layer(self.num_key_value_heads)
        self.layers_to_transform = _layer_indices(self.layers_to_transform)
        self._validate()

    @property
    def retrieval_mode(self) -> str:
        """Mode of heads routed to 0: `"FA"` or `"XA"`."""
        return self.mode_pair.split("-")[0]

    @property
    def sparse_mode(self) -> str:
        """Mode of heads routed to 1: `"SSA"` or `"XA"`."""
        return self.mode_pair.split("-")[1]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, subfolder=None, **kwargs):
        """Reads a saved configuration, see `PeftConfig.from_pretrained`.

        Raises:
            ValueError: as the class; or the weights beside the configuration are missing, no readable safetensors
                file, or not the file that the Hub names.
        """
        folder = Path(pretrained_model_name_or_path, subfolder or "")
        weights = folder / SAFETENSORS_WEIGHTS_NAME
        _check_readable(weights)
        config = super().from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        if config.head_dim is None:
            return config
        # A bound configuration was saved with weights.
        if not folder.is_dir():
            options, *_ = cls._split_kwargs(kwargs)
            weights = _download_weights(pretrained_model_name_or_path, subfolder, options)
            _check_digest(weights)
            _check_readable(weights)
        elif not weights.is_file():
            raise ValueError(MISSING_WEIGHTS.format(folder))
        return config

    def bind(self, head_dim: int, num_key_value_heads: dict[int, int]) -> None:
        """Ties the configuration to a base model, or checks that a saved one belongs to it.

        Args:
            head_dim: head dimension of the base model's routed layers.
            num_key_value_heads: layer index to key-value heads, for the routed layers.

        Raises:
            ValueError: the adapter was saved for another base model.
        """
        if self.is_saved:
            if self.head_dim != head_dim:
                raise ValueError(f"`head_dim` must be that of the base model, {head_dim}, got {self.head_dim}.")
            saved = self.num_key_value_heads or {}
            if len(saved) != len(num_key_value_heads):
                raise ValueError(
                    f"`num_key_value_heads` must cover {len(num_key_value_heads)} layers, the routed ones of the base "
                    f"model, got {len(saved)}."
                )
            if saved != num_key_value_heads:
                raise ValueError(
                    f"`num_key_value_heads` must be those of the base model's routed layers, {num_key_value_heads}, "
                    f"got {self.num_key_value_heads}."
                )
            return
        self.head_dim, self.num_key_value_heads = head_dim, num_key_value_heads
        self._bound_here = True

    @property
    def is_saved(self) -> bool:
        """Whether the configuration came from a saved adapter, whose weights belong to one base model."""
        return self.head_dim is not None and not self._bound_here

    # Tells a configuration that was bound to its model from one that was read from a saved adapter.
    _bound_here = False

    def _validate(self):
        self.format_version = check_integer("format_version", self.format_version, 1)
        if self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"`format_version` must be at most {FORMAT_VERSION} for this version of elastic_peft, got "
                f"{self.format_version}: upgrade elastic_peft to load this adapter."
            )
        if self.task_type not in TASK_TYPES:
            raise ValueError(
                "`task_type` must be CAUSAL_LM, FEATURE_EXTRACTION or None, a head that needs training is not part of "
                f"an ELASTIC adapter, got {self.task_type!r}."
            )
        _check_choice("mode_pair", self.mode_pair, MODE_PAIRS)
        _check_choice("decode", self.decode, DECODE_MODES)
        self.target_sparsity = check_ratio("target_sparsity", self.target_sparsity)
        if not isinstance(self.t_values, dict) or not self.t_values:
            raise ValueError(f"`t_values` must map at least one task name to its target, got {self.t_values!r}.")
        self.t_values = {task: check_ratio(f"t_values[{task!r}]", value) for task, value in self.t_values.items()}
        self.sink_size = check_integer("sink_size", self.sink_size, 0)
        for name in ("window_size", "xattn_block_size", "xattn_stride", "router_expansion"):
            setattr(self, name, check_integer(name, getattr(self, name), 1))
        if self.xattn_block_size % self.xattn_stride:
            raise ValueError(
                f"`xattn_block_size` must be a multiple of `xattn_stride` ({self.xattn_stride}), "
                f"got {self.xattn_block_size}."
            )
        if not is_number(self.xattn_threshold) or not 0 < self.xattn_threshold <= 1:
            raise ValueError(f"`xattn_threshold` must be in (0, 1], got {self.xattn_threshold!r}.")
        self.xattn_threshold = plain(self.xattn_threshold)
        for name in ("pool_size", "head_dim"):
            if getattr(self, name) is not None:
                setattr(self, name, check_integer(name, getattr(self, name), 1))
        if not isinstance(self.standardize_input, bool):
            raise ValueError(f"`standardize_input` must be True or False, got {self.standardize_input!r}.")
        self.sparsity_bias = check_number("sparsity_bias", self.sparsity_bias, finite=False)


def _layer_indices(value) -> list[int] | None:
    """`layers_to_transform` as a list, also of a single index."""
    if value is None:
        return None
    indices = [value] if is_integer(value) else value
    if (
        not isinstance(indices, list | tuple)
        or not indices
        or any(not is_integer(index) or index < 0 for index in indices)
    ):
        raise ValueError(f"`layers_to_transform` must be None or layer indices from 0, got {value!r}.")
    return [int(index) for index in indices]


def _heads_by_layer(value) -> dict[int, int] | None:
    """`num_key_value_heads` with the layer indices that JSON turned into strings."""
    if value is None:
        return None
    if not isinstance(value, dict) or not all(str(index).isdecimal() for index in value):
        raise ValueError(f"`num_key_value_heads` must map layer indices from 0 to numbers of heads, got {value!r}.")
    return {int(index): check_integer(f"num_key_value_heads[{index}]", heads, 1) for index, heads in value.items()}


def _check_choice(name, value, choices):
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def _download_weights(repo_id: str, subfolder: str | None, options: dict) -> Path:
    try:
        return Path(hf_hub_download(repo_id, SAFETENSORS_WEIGHTS_NAME, subfolder=subfolder, **options))
    except RemoteEntryNotFoundError as error:
        raise ValueError(MISSING_WEIGHTS.format(repo_id)) from error


def _check_digest(weights: Path):
    """Compares a downloaded file with the sha256 that its cache entry is named by; huggingface_hub compares sizes."""
    expected = weights.resolve().name
    if not re.fullmatch("[0-9a-f]{64}", expected):
        return  # a small file outside LFS, or a cache without links: there is no sha256 to compare with
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise ValueError(
            f"`{weights.name}` must have the sha256 {expected}, got {digest}: load it once with `force_download=True`."
        )


def _check_readable(weights: Path):
    from safetensors import SafetensorError, safe_open

    if not weights.is_file():
        return
    try:
        with safe_open(weights, framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"`{weights.name}` must be a complete safetensors file, got {error} ({weights}).") from error
