# SPDX-License-Identifier: Apache-2.0
"""vLLM's own Triton slot-mapping kernels, run by the Triton interpreter on the CPU.

vLLM's CPU build hides Triton behind placeholders, so a kernel's source text is taken as it stands and
compiled here against the real Triton. Run as a script (it needs TRITON_INTERPRET=1 before any import):
reads cases as JSON lines, writes one JSON line of slots a case and runner.
"""

import ast
import inspect
import json
import os
import sys
import tempfile
import textwrap
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import vllm.v1.worker.block_table as v1
import vllm.v1.worker.gpu.block_table as v2
import vllm.v1.worker.gpu.buffer_utils as v2_buffers

HEADER = "import triton\nimport triton.language as tl\n\n\n"


def text_of(module: ModuleType, name: str) -> str:
    """Source of a function of that name in a module, nested in a class or not, with its Triton decorators."""
    source = inspect.getsource(module)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            decorators = [f"@{ast.unparse(d)}" for d in node.decorator_list if "triton" in ast.unparse(d)]
            body = textwrap.dedent("\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno]))
            return "\n".join([*decorators, body, ""])
    raise LookupError(name)


def load(name: str, *texts: str) -> Any:
    folder = tempfile.mkdtemp()
    path = Path(folder) / f"{name}.py"
    path.write_text(HEADER + "\n\n".join(texts))
    return SourceFileLoader(name, str(path)).load_module()


def v1_slots(case: dict[str, Any], kernel: Any) -> list[int]:
    table = torch.tensor(case["block_table"], dtype=torch.int32)
    positions = torch.tensor(case["positions"])
    slots = torch.full((len(positions) + 3,), 12345)
    requests = len(case["query_start_loc"]) - 1
    kernel[(requests + 1,)](
        len(positions),
        len(slots),
        torch.tensor(case["query_start_loc"], dtype=torch.int32),
        positions,
        table,
        table.stride(0),
        slots,
        KV_CACHE_BLOCK_SIZE=case["block_size"],
        TOTAL_CP_WORLD_SIZE=case["world_size"],
        TOTAL_CP_RANK=case["rank"],
        CP_KV_CACHE_INTERLEAVE_SIZE=case["interleave"],
        PAD_ID=-1,
        BLOCK_SIZE=16,
    )
    return slots.tolist()


def v2_slots(case: dict[str, Any], kernel: Any) -> list[int]:
    table = torch.tensor(case["block_table"], dtype=torch.int32)
    positions = torch.tensor(case["positions"])
    slots = torch.full((1, len(positions) + 3), 12345)
    requests = len(case["query_start_loc"]) - 1
    kernel[(1, requests + 1)](
        slots.shape[1],
        torch.arange(requests, dtype=torch.int32),
        torch.tensor(case["query_start_loc"], dtype=torch.int32),
        positions,
        torch.tensor([table.data_ptr()], dtype=torch.uint64),
        torch.tensor([table.stride(0)]),
        torch.tensor([case["block_size"]], dtype=torch.int32),
        torch.tensor([True]),
        torch.tensor([True]),
        slots,
        slots.stride(0),
        case["rank"],
        CP_SIZE=case["world_size"],
        CP_INTERLEAVE=case["interleave"],
        PAD_ID=-1,
        TRITON_BLOCK_SIZE=16,
    )
    return slots[0].tolist()


if __name__ == "__main__":
    runner1 = load("upstream_v1", text_of(v1, "kernel"))
    # The interpreter inverts an int1 into int8 data, which it then refuses as a mask: say the same with `where`.
    v2_text = text_of(v2, "_compute_slot_mappings_kernel")
    assert "is_local = ~sharded | is_local" in v2_text
    v2_text = v2_text.replace("~sharded | is_local", "tl.where(sharded, is_local, True)")
    runner2 = load("upstream_v2", text_of(v2_buffers, "_load_ptr"), v2_text)
    for line in sys.stdin:
        case = json.loads(line)
        answers = [v1_slots(case, runner1.kernel), v2_slots(case, runner2._compute_slot_mappings_kernel)]
        print(json.dumps(answers))
