"""A tiny base model on disk, as the recipes load one."""

from transformers import LlamaConfig, LlamaForCausalLM, set_seed


def save_tiny_llama(tokenizer, folder):
    """Saves a random model for `tokenizer`, and the tokenizer beside it."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.2,  # large, so that both modes give visibly different outputs
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
