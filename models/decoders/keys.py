"""What the keys of a Hugging Face config.json mean to a dense causal decoder."""

import re
from collections.abc import Mapping

# Keys that change the computation unless they have one of these values.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "add_cross_attention": (None, False),
    "attention_bias": (None, False),
    "attention_dropout": (None, 0),
    "cross_attention_hidden_size": (None,),
    "hidden_act": ("silu", "swish"),
    "is_encoder_decoder": (None, False),
    "is_llama_config": (None, True),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "rope_interleaved": (None, False),
    "tie_encoder_decoder": (None, False),
    "use_mrope": (None, False),
}

REASONS: Mapping[str, str] = {
    "attention_bias": "it adds a bias to the output projection as well",
    "attention_dropout": "attention has no dropout here",
    "auto_map": "code of the model's own may compute otherwise",
    "hidden_act": "only silu is implemented",
}

# Labels, generation and bookkeeping: no effect on loss or gradients.
HARMLESS_KEYS = frozenset({
    "attn_implementation", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "cache_implementation", "chunk_size_feed_forward", "cls_token_id", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "eos_token_id", "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "gradient_checkpointing", "id2label", "initializer_range", "is_decoder",
    "label2id", "length_penalty", "mask_token_id", "max_length", "max_new_tokens",
    "max_position_embeddings", "max_seq_len", "max_sequence_length", "max_window_layers",
    "min_length", "model_max_length", "model_type", "name_or_path", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_labels", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_scores", "pad_token_id", "prefix", "pretraining_tp",
    "problem_type", "remove_invalid_values", "repetition_penalty", "return_dict",
    "return_dict_in_generate", "sep_token_id", "seq_length", "suppress_tokens",
    "task_specific_params", "temperature", "tokenizer_class", "top_k", "top_p", "torchscript",
    "transformers.js_config", "transformers_version", "typical_p", "unk_token_id", "unsloth_fixed",
    "unsloth_version", "use_bfloat16", "use_cache", "_attn_implementation",
    "_attn_implementation_autoset", "_commit_hash", "_model_name_or_path", "_name_or_path",
})  # fmt: skip
_BOOKKEEPING = re.compile(
    r"_.*|.*_token_ids?|.*_version|.*name_or_path|(tokenizer|transformers\.js|unsloth)_.*"
)


def says_nothing(key: str, value: object) -> bool:
    """Whether an entry that is unknown here cannot change what is computed: by its name, which is
    of bookkeeping, or because it is empty."""
    return value in (None, {}, []) or bool(_BOOKKEEPING.fullmatch(key))
