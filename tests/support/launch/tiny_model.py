"""Tiny language models with random weights, in folders as transformers writes them, and a tokenizer of characters.

Each token is one character, so that texts are equal exactly if tokens are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: The last two tokens are special.
VOCABULARY = 260
END, START = 258, 259
CHARACTERS = [chr(32 + number) if number < 95 else chr(0x400 + number) for number in range(END)]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": START,
    "eos_token_id": END,
    "pad_token_id": END,
}


def write_model(
    folder: Path, kind: str = "llama", *, shards: bool = False, template: bool = True, **config: Any
) -> Any:
    """Write a model and its tokenizer, and return the model."""
    import torch
    import transformers

    torch.manual_seed(7)
    made = transformers.CONFIG_MAPPING[kind](**_SIZES | config)
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Large enough that answers differ from prompt to prompt.
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder, max_shard_size="20KB" if shards else "5GB")
    _build_tokenizer(template=template).save_pretrained(folder)
    return model


def generate(model: Any, prompt: list[int], number: int) -> list[int]:
    """Return the most probable tokens after a prompt up to the end token, by transformers alone in one process."""
    import torch

    with torch.inference_mode():
        tokens = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=number,
            do_sample=False, pad_token_id=END,
        )  # fmt: skip
    answer = tokens[0, len(prompt) :].tolist()
    return answer[: answer.index(END)] if END in answer else answer


def write_text(tokens: list[int]) -> str:
    """Return the text of tokens."""
    return "".join(CHARACTERS[token] for token in tokens if token < END)


def read_tokens(text: str) -> list[int]:
    """Return the tokens of a text."""
    return [CHARACTERS.index(character) for character in text]


def _build_tokenizer(*, template: bool) -> Any:
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({text: number for number, text in enumerate(CHARACTERS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|start|>")
    if template:
        fast.chat_template = TEMPLATE
    return fast
