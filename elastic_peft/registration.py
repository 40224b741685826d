"""Makes ELASTIC a PEFT method. The only file that extends `PeftType`."""

from __future__ import annotations

from peft.utils import PeftType, register_peft_method


def add_peft_type(name: str) -> None:
    """Adds the member `name` to `PeftType`, once; PEFT offers no entry point for methods outside its own tree."""
    if name in PeftType.__members__:
        return
    member = str.__new__(PeftType, name)
    member._name_ = name
    member._value_ = name
    member._sort_order_ = len(PeftType.__members__)
    PeftType._member_names_.append(name)
    PeftType._member_map_[name] = member
    PeftType._value2member_map_[name] = member
    type.__setattr__(PeftType, name, member)


def register() -> None:
    """Registers the ELASTIC method with PEFT and its attention function with transformers; idempotent."""
    add_peft_type("ELASTIC")

    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    from .attention import register_attention
    from .config import ElasticConfig
    from .model import ElasticModel

    if PeftType.ELASTIC not in PEFT_TYPE_TO_CONFIG_MAPPING:
        register_peft_method(name="elastic", config_cls=ElasticConfig, model_cls=ElasticModel, prefix="elastic_")
    register_attention()
