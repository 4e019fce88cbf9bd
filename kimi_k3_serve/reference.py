# SPDX-License-Identifier: Apache-2.0
"""An independent float32 run of a checkpoint with `transformers`: two engine arms can be wrong alike."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch


@torch.inference_mode()
def greedy(model_dir: Path, prompts: Iterable[Mapping[str, Any]], top_k: int = 20) -> list[dict[str, Any]]:
    """Greedy continuation of each prompt, one at a time.

    Args:
        prompts: mappings with `id`, `prompt` (token ids) and `output_tokens`.

    Returns:
        For each prompt `id`, `tokens` [output_tokens], and `top_logprobs`: a position's `top_k` largest
        log-probabilities (natural logarithm) by token id.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    answers = []
    for prompt in prompts:
        tokens: list[int] = []
        top_logprobs: list[dict[str, float]] = []
        step, cache = torch.tensor([prompt["prompt"]]), None
        for _ in range(prompt["output_tokens"]):
            result = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logprobs = torch.log_softmax(result.logits[0, -1].float(), dim=-1)
            values, ids = logprobs.topk(top_k)
            top_logprobs.append({str(i): v for i, v in zip(ids.tolist(), values.tolist(), strict=True)})
            tokens.append(int(ids[0]))
            step, cache = ids[:1].unsqueeze(0), result.past_key_values
        answers.append({"id": prompt["id"], "tokens": tokens, "top_logprobs": top_logprobs})
    return answers
