"""The text part of a model that takes images, video or sound, too: it alone is built and trained.

The whole model is built for the names that its tensors have in files; what is not text is frozen.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from twinstream.executor.modules.blocks import ModuleRefusal

# Whole models whose text part is no class of its own with a head: that is a linear layer on it.
_WITH_OUR_HEAD = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
# Their attention to a text is not that of the text part alone, or they read it by other layers too.
_OTHERWISE = ("paligemma", "git", "mllama", "idefics", "emu3", "fuyu")


def text_config(config: Any) -> Any:
    """The config of what is trained: that of the text part, or all of it where there is no other.

    Raises:
        ModuleRefusal: the text part is no causal decoder, or not what the whole model computes.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if "text_config" not in (getattr(config, "sub_configs", None) or {}):
        return config
    text = config.get_text_config(decoder=True)
    if text is config:
        return config
    is_decoder = type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
    if config.model_type in _OTHERWISE or not (is_decoder or config.model_type in _WITH_OUR_HEAD):
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            return config
        raise ModuleRefusal(
            f"transformers builds no causal decoder of the text part of model type "
            f"'{config.model_type}': a text is not all that the model reads"
        )
    if getattr(text, "is_encoder_decoder", False):
        raise ModuleRefusal(
            f"the text part of model type '{config.model_type}' is an encoder with a decoder: "
            "only causal decoders are trained"
        )
    if (tied := getattr(config, "tie_word_embeddings", None)) is not None:
        text.tie_word_embeddings = tied
    return text


def text_module(config: Any, **chosen: Any) -> Any:
    """The decoder of a text part: its own class, or one of its layers and a head."""
    from transformers import MODEL_MAPPING, AutoModelForCausalLM

    if not has_our_head(config):
        return AutoModelForCausalLM.from_config(config, **chosen)
    build: Any = _with_head(MODEL_MAPPING[type(config)])._from_config
    return build(config, **chosen)


def has_our_head(config: Any) -> bool:
    """Whether transformers has no class of this text part with a head."""
    kind = str(config.model_type)
    return kind.endswith("_text") and kind.removesuffix("_text") in _WITH_OUR_HEAD


def _with_head(layers: Any) -> Any:
    """A class of the family: its layers, and a head as the whole model has it."""
    above = layers.__mro__[1:]
    family: Any = next(one for one in above if one.__name__.endswith("PreTrainedModel"))

    class TextDecoder(family):  # type: ignore[misc]
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = layers(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None
        ) -> torch.Tensor:
            states = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
            logits: torch.Tensor = self.lm_head(states.last_hidden_state)
            return logits

    TextDecoder.__name__ = f"{layers.__name__}WithHead"
    TextDecoder.__module__ = layers.__module__  # where transformers looks what the class can do
    return TextDecoder


def whole_class(config: Any, named: object) -> Any:
    """The class of a whole model: the one that its config names, or transformers' own choice."""
    import transformers

    for name in named if isinstance(named, list) else ():
        found = getattr(transformers, str(name), None)
        if found is not None and getattr(found, "config_class", None) is type(config):
            return found
    for kind in ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):  # older versions lack the second
        mapping = getattr(transformers, f"MODEL_FOR_{kind}_MAPPING", {})
        if type(config) in mapping:
            return mapping[type(config)]
    raise ModuleRefusal(
        f"transformers has no class of a whole model of model type '{config.model_type}', whose "
        "tensors the files of its folder have"
    )


def names_in_whole(whole: nn.Module, module: Any) -> Mapping[str, str]:
    """What a text part's tensors are called in the whole model.

    Raises:
        ModuleRefusal: the whole model has no such part, or several.
    """
    expected = {name: tensor.shape for name, tensor in whole.state_dict().items()}
    base, prefix = module.base_model, f"{module.base_model_prefix}."
    for part, inside in ((module, ""), (base, prefix)):
        paths = [name for name, one in whole.named_modules() if type(one) is type(part)]
        if len(paths) > 1:
            raise ModuleRefusal(
                f"{type(whole).__name__} has several parts {type(part).__name__} "
                f"({', '.join(paths)}): which of them is its text part is not known"
            )
        if paths:
            found = {
                name: f"{paths[0]}.{name.removeprefix(inside)}" if name.startswith(inside) else name
                for name in module.state_dict()
            }
            break
    else:
        raise ModuleRefusal(f"{type(whole).__name__} has no part {type(base).__name__}")
    for name, tensor in module.state_dict().items():
        if expected.get(found[name]) != tensor.shape:
            raise ModuleRefusal(
                f"{type(whole).__name__} has no {found[name]} of shape {list(tensor.shape)}, as "
                f"its text part {type(module).__name__} has {name}"
            )
    return found
