# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
from builders import manifest, small_trace

from harness.provenance import code_sha256, cpu_model


@pytest.mark.parametrize(
    ("text", "model"),
    [
        (
            "processor\t: 0\nmodel name\t: A CPU @ 2: fast\nprocessor\t: 1\nmodel name\t: B\n",
            "A CPU @ 2: fast",
        ),
        ("processor\t: 0\nBogoMIPS\t: 50\n", None),
    ],
)
def test_the_model_of_a_cpu(tmp_path: Path, text: str, model: str | None) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_model(tmp_path / "cpuinfo") == model
    assert cpu_model(tmp_path / "none") is None


def test_a_run_names_its_cpu_and_the_code_that_measured_it() -> None:
    found = manifest(small_trace())
    assert found["host"]["cpu"] == cpu_model() and found["code_sha256"] == code_sha256()
