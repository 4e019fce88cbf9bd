# SPDX-License-Identifier: Apache-2.0
"""What runs inside the engine: a vLLM plugin that adds decode context parallelism, and the launcher that starts it."""

__version__ = "0.1.0"
