# SPDX-License-Identifier: Apache-2.0
"""`--load-format kimi_k3_seeded`: a slice's configuration alone, filled with the weights of `weights.py`.

Whole tensors go one by one through the model's own `load_weights`, so that a tensor-parallel shard is cut by the same
code that cuts a real checkpoint, and every rank cuts it from the same tensor.
"""

from typing import Any

FORMAT = "kimi_k3_seeded"


class UnknownParameterError(RuntimeError):
    """The model holds parameters that no tensor of ours fills: answers would follow from chance memory."""


def fill(model: Any, config: Any) -> None:
    """Load every tensor of `config` into `model`.

    Raises:
        UnknownParameterError: naming the first parameters that stayed empty.
        ValueError: an unknown architecture.
    """
    from kimi_k3_serve.tensors import tensors
    from kimi_k3_serve.weights import routed_experts, values

    device, experts = next(model.parameters()).device, routed_experts(config)
    loaded = model.load_weights(
        (name, values(name, shape, device, experts=experts)) for name, shape in tensors(config)
    )
    empty = sorted({name for name, _ in model.named_parameters()} - set(loaded))
    if empty:
        raise UnknownParameterError(
            f"{len(empty)} parameters of {type(model).__name__} got no value: {', '.join(empty[:5])}"
        )


def install() -> None:
    """Register the load format in vLLM. Idempotent."""
    from vllm.model_executor import model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    if FORMAT in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        return

    class SeededModelLoader(BaseModelLoader):  # type: ignore[misc]
        def download_model(self, model_config: Any) -> None:
            """Nothing to download."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            fill(model, model_config.hf_text_config)

    model_loader.register_model_loader(FORMAT)(SeededModelLoader)
