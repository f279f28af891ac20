"""Tiny tokenizers and random models, made in a test: one token a byte, so that positions can be counted by hand."""

from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

START, END, BOS = "<|im_start|>", "<|im_end|>", "<s>"

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ '[' + m['role'] + ']' + m['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
FORGETS_THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_TOOLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + (c.function.arguments | tojson) }}{% endfor %}{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_BOS = "{{ '<s>' }}" + CHATML


def tiny_tokenizer(template: str | None = CHATML, *, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: ids 0 to 255 are single bytes, then three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([START, END, BOS])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END, bos_token=BOS)
    tokenizer.chat_template = template
    return tokenizer


def tiny_model(config: Any = None, *, seed: int = 0) -> Any:
    """A random causal language model; a seven-layer Llama over the tiny tokenizer's ids by default."""
    torch.manual_seed(seed)
    config = config or LlamaConfig(**tiny_sizes(vocab_size=259))
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:  # larger than the library's initial weights, so that layers differ clearly
            parameter.data.normal_(0, 0.2)
    return model


def tiny_sizes(**changes: Any) -> dict[str, Any]:
    """Sizes of a seven-layer model, as most configurations name them."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return sizes | changes


HEAD_DIM = {"head_dim": 8}
LAYOUTS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**tiny_sizes()),
    "qwen2": lambda: hf.Qwen2Config(**tiny_sizes()),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **tiny_sizes(), **HEAD_DIM, num_experts=7, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "mistral": lambda: hf.MistralConfig(**tiny_sizes(), sliding_window=4),
    "gemma2": lambda: hf.Gemma2Config(**tiny_sizes(), **HEAD_DIM, sliding_window=4, final_logit_softcapping=2.0),
    "phi": lambda: hf.PhiConfig(**tiny_sizes(num_key_value_heads=4)),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=7, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2
    ),
    "cohere": lambda: hf.CohereConfig(**tiny_sizes(), logit_scale=0.25),
    "granite": lambda: hf.GraniteConfig(**tiny_sizes(), logits_scaling=3.0),
}
"""Configurations of many kinds of targets, by name."""


class Louder(hf.LlamaForCausalLM):
    """Does more to its logits than a configuration says."""

    def forward(self, *args: Any, **options: Any) -> Any:
        result = super().forward(*args, **options)
        result.logits = result.logits * 1.5
        return result


def turns(*contents: str, first: str = "user") -> list[dict[str, Any]]:
    """Alternating user and assistant turns."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
