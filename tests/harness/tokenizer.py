# SPDX-License-Identifier: Apache-2.0
"""A model folder with a small tokenizer, made here: a word for each id."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast


def make_tokenizer(folder: Path) -> Path:
    """Every text gets a `<s>` in front, as with Llama; the chat template adds two words."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{index}": index for index in range(3, 98)}
    tokenizer = Tokenizer(WordLevel(words | {"user": 98, "assistant": 99}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %} assistant"
    fast.save_pretrained(folder)
    return folder
