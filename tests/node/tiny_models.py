"""Tiny random models in transformers' format, and a character tokenizer, for the engines' tests."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

CHARACTERS = "0123456789s=abcdefghijklmnopqrtuvwxyz+-*/,. ?:;|()<>#!"
BOS, EOS = 1, 2
VOCAB = 64

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_CONFIGS = {
    "qwen2": ("qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen2-grouped": ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    "qwen2-wide": ("qwen2", {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    "qwen2-tied": ("qwen2", {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama": ("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("llama", {"num_key_value_heads": 2, "rope_parameters": _LLAMA3, "head_dim": 32}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 24, "attention_bias": True}),
}
ARCHITECTURES = tuple(_CONFIGS)


def build_model(name="qwen2", *, seed=0, scale=4.0):
    """A random model whose every weight matters: biases are not zero, logits are spread over a few nats."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, extra = _CONFIGS[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **_SHAPE | extra)).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.mul_(scale)
    return model


def write_model(model, path: Path) -> Path:
    """Write config.json, model.safetensors and tokenizer.json."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    save_file({name: p.detach() for name, p in model.named_parameters()}, str(path / "model.safetensors"))
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> None:
    vocabulary = {token: number for number, token in enumerate(("<pad>", "<bos>", "<eos>", "<unk>", *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<pad>", "<bos>", "<eos>", "<unk>")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))
