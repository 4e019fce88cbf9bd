# SPDX-License-Identifier: Apache-2.0
"""A float32 run of a Kimi-Linear slice with the weights of `weights.py`: what vLLM's answers are held against.

    python -m kimi_k3_serve.slice_reference --model SLICE_FOLDER --prompts FILE --out FILE [--device cuda]

Files as those of `kimi-k3 reference`; a prompt may name the continuation that it is teacher-forced on. Written from the
model's definition, without vLLM: plain attention over per-head keys and values, no absorption, no sharding, no cache
of latents; KDA layers are in `slice_kda.py`. Weights are rounded to the model's dtype first, as vLLM holds them.
Attention residuals and SiTU are not in it; it refuses a configuration that has them.
"""

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear, silu

from kimi_k3_serve import slice_kda, tensors
from kimi_k3_serve.weights import routed_experts, values

QUERIES = 512  # attended at a time: 96 heads x 512 x 8,192 keys are 1.6 GB of scores
FLOAT32 = ("e_score_correction_bias", "dt_bias", "A_log", "conv1d.weight")  # whatever the model's dtype

Cache = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""By layer: keys and values of an MLA layer, the last inputs of the convolutions and the state of a KDA layer."""


class SliceReference:
    """The whole slice on one device."""

    def __init__(self, config: Any, device: torch.device | str = "cpu") -> None:
        """Raises ValueError: the configuration has a part that this reference does not."""
        for found, part in [
            (config.model_type != "kimi_linear", f"model_type {config.model_type!r}"),
            (config.attn_res_block_size is not None, "attention residuals"),
            (config.hidden_act != "silu", f"activation {config.hidden_act!r}"),
            (config.q_lora_rank is None, "queries without q-LoRA"),
            (config.moe_router_activation_func != "sigmoid", "a router that is not sigmoid"),
            (not config.mla_use_nope, "RoPE"),
        ]:
            if found:
                raise ValueError(f"the reference has no {part}")
        self.config, self.device = config, torch.device(device)
        self.weights: dict[str, torch.Tensor] = {}
        experts = routed_experts(config)
        for name, shape in tensors.tensors(config):
            tensor = values(name, shape, device, experts=experts)
            self.weights[name] = tensor if name.endswith(FLOAT32) else tensor.to(config.dtype).float()

    @torch.inference_mode()
    def logits(self, tokens: list[int], cache: Cache) -> torch.Tensor:
        """[vocabulary] after the last of `tokens`, which follow what `cache` holds; the cache grows."""
        weights = self.weights
        x = weights["model.embed_tokens.weight"][torch.tensor(tokens, device=self.device)]
        for index in range(self.config.num_hidden_layers):
            prefix = f"model.layers.{index}"
            attend = self.kda if self.config.is_kda_layer(index) else self.attention
            x = x + attend(f"{prefix}.self_attn", self.norm(x, f"{prefix}.input_layernorm"), cache, index)
            normed = self.norm(x, f"{prefix}.post_attention_layernorm")
            routed = f"{prefix}.block_sparse_moe.gate.weight" in weights
            x = x + (
                self.moe(f"{prefix}.block_sparse_moe", normed)
                if routed
                else self.mlp(f"{prefix}.mlp", normed)
            )
        return linear(self.norm(x[-1:], "model.norm"), weights["lm_head.weight"])[0]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return x * scale * self.weights[f"{name}.weight"]

    def project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weights[f"{name}.weight"])

    def attention(self, prefix: str, x: torch.Tensor, cache: Cache, index: int) -> torch.Tensor:
        """Causal MLA of the tokens in x [T, hidden] over themselves and what the cache holds."""
        c, count = self.config, len(x)
        latent_query = self.norm(self.project(f"{prefix}.q_a_proj", x), f"{prefix}.q_a_layernorm")
        query = self.project(f"{prefix}.q_b_proj", latent_query).view(count, c.num_attention_heads, -1)
        rows = self.project(f"{prefix}.kv_a_proj_with_mqa", x)
        latent, shared = rows[:, : c.kv_lora_rank], rows[:, c.kv_lora_rank :]
        pair = self.project(f"{prefix}.kv_b_proj", self.norm(latent, f"{prefix}.kv_a_layernorm"))
        pair = pair.view(count, c.num_attention_heads, -1)
        nope, value = pair[..., : c.qk_nope_head_dim], pair[..., c.qk_nope_head_dim :]
        key = torch.cat([nope, shared.unsqueeze(1).expand(-1, c.num_attention_heads, -1)], -1)
        if index in cache:
            key, value = torch.cat([cache[index][0], key]), torch.cat([cache[index][1], value])
        cache[index] = key, value

        output = self.attend(query, key, value, len(key) - count).flatten(1)
        if c.mla_use_output_gate:
            output = output * self.project(f"{prefix}.g_proj", x).sigmoid()
        return self.project(f"{prefix}.o_proj", output)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, past: int) -> torch.Tensor:
        """[T, H, D] of T queries behind `past` tokens over keys and values of all `past` + T of them."""
        positions = torch.arange(len(key), device=self.device)
        outputs = []
        for start in range(0, len(query), QUERIES):
            part = query[start : start + QUERIES]
            scores = torch.einsum("qhd,khd->hqk", part, key) * query.shape[-1] ** -0.5
            last = past + start + torch.arange(len(part), device=self.device)
            scores.masked_fill_(positions > last.unsqueeze(1), -torch.inf)
            outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))
        return torch.cat(outputs)

    def kda(self, prefix: str, x: torch.Tensor, cache: Cache, index: int) -> torch.Tensor:
        return slice_kda.attend(self, prefix, x, cache, index)

    def mlp(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        inner = silu(self.project(f"{prefix}.gate_proj", x)) * self.project(f"{prefix}.up_proj", x)
        return self.project(f"{prefix}.down_proj", inner)

    def moe(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        """Sigmoid router, corrected for the choice only; routed experts in the latent, shared ones beside."""
        c = self.config
        scores = self.project(f"{prefix}.gate", x).sigmoid()
        biased = scores + self.weights[f"{prefix}.gate.e_score_correction_bias"]
        chosen = biased.topk(c.num_experts_per_token, -1).indices
        share = scores.gather(-1, chosen)
        if c.moe_renormalize:
            share = share / share.sum(-1, keepdim=True)
        share = share * c.routed_scaling_factor

        latent = (
            x if c.routed_expert_hidden_size is None else self.project(f"{prefix}.routed_expert_down_proj", x)
        )
        routed = torch.zeros_like(latent)
        for expert in sorted(set(chosen.flatten().tolist())):
            name = f"{prefix}.experts.{expert}"
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            inner = silu(self.project(f"{name}.w1", latent[token])) * self.project(
                f"{name}.w3", latent[token]
            )
            routed.index_add_(0, token, self.project(f"{name}.w2", inner) * share[token, slot].unsqueeze(-1))
        if c.routed_expert_hidden_size is not None:
            if c.latent_moe_use_norm:
                routed = self.norm(routed, f"{prefix}.routed_expert_norm")
            routed = self.project(f"{prefix}.routed_expert_up_proj", routed)
        return routed + self.mlp(f"{prefix}.shared_experts", x) if c.num_shared_experts else routed


def read_config(folder: Path) -> Any:
    """config.json; `dtype` as a torch dtype."""
    config = tensors.read_config(folder)
    config.dtype = getattr(torch, config.torch_dtype)
    return config


def answer(
    model: SliceReference, prompts: Iterable[Mapping[str, Any]], top_k: int = 20
) -> list[dict[str, Any]]:
    """Greedy tokens and top logprobs at every position, in the form of `reference.greedy`.

    A prompt with a "continuation" (`output_tokens` ids) is teacher-forced on it, else on its own greedy tokens.
    """
    answers = []
    for prompt in prompts:
        cache: Cache = {}
        tokens: list[int] = []
        top_logprobs: list[dict[str, float]] = []
        forced = prompt.get("continuation", tokens)
        step = list(prompt["prompt"])
        for position in range(prompt["output_tokens"]):
            best, ids = torch.log_softmax(model.logits(step, cache), -1).topk(top_k)
            top_logprobs.append({str(i): v for i, v in zip(ids.tolist(), best.tolist(), strict=True)})
            tokens.append(int(ids[0]))
            step = [forced[position]]
        answers.append({"id": prompt["id"], "tokens": tokens, "top_logprobs": top_logprobs})
    return answers


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--model", type=Path, required=True)
    options.add_argument("--prompts", type=Path, required=True)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--device", default="cpu")
    args = options.parse_args()
    model = SliceReference(read_config(args.model), args.device)
    args.out.write_text(json.dumps(answer(model, json.loads(args.prompts.read_text()))))


if __name__ == "__main__":
    main()
