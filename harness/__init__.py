# SPDX-License-Identifier: Apache-2.0
"""Open-loop measurement of OpenAI-compatible servers: frozen traces, TTFT from the due time, paired arms."""

__version__ = "0.1.0"
