# SPDX-License-Identifier: Apache-2.0
"""`kimi-k3` (or `python -m kimi_k3_serve`): start a server, check what it stands on, make what tests it."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from kimi_k3_serve import __version__, fit, image_lock, launch, models
from kimi_k3_serve.errors import UserError
from kimi_k3_serve.guard import MIDDLEWARE
from kimi_k3_serve.projection import shard
from kimi_k3_serve.topology import Topology

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="kimi-k3", description=__doc__)
    commands = root.add_subparsers(dest="command", required=True)
    add_server(commands)
    add_model(commands)
    add_lock(commands)
    return root


def add_server(commands: Commands) -> None:
    for name, text, run in (
        ("serve", "start a vLLM server in the foreground; arguments after -- go to vLLM", serve),
        ("explain", "print the command line and environment that serve would use", explain),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument("--profile", default="cpu", help=f"hardware: {', '.join(launch.profiles())}")
        command.add_argument("--topology", required=True, help="tpN, dcpN or tpN-dcpM, for example tp2, dcp2")
        command.add_argument(
            "--model", default="moonshotai/Kimi-K3", help="checkpoint folder, or name on the hub"
        )
        command.add_argument(
            "--node", type=int, default=0, help="of a profile with several nodes: which is this"
        )
        command.add_argument("--head", help="address of node 0, where a profile has several")
        command.add_argument(
            "--host", default="127.0.0.1", help="address to listen on (default: loopback only)"
        )
        command.add_argument("--port", type=int, default=8000)
        command.add_argument(
            "--kv-cache-memory-bytes",
            type=int,
            help="KV cache of one rank (default: 64 MiB on the CPU, what is free on GPUs)",
        )
        command.add_argument(
            "--proof-dir", type=Path, help="folder for each rank's proof of its active features"
        )
        command.add_argument("--backend", choices=("dcp", "stock"), default="dcp", help="CPU MLA backend")
        command.add_argument("--api-key-file", type=Path, help="clients must send the key in this file")
        command.add_argument(
            "--shutdown-timeout", type=int, default=0, help="seconds that running requests get at SIGTERM (0)"
        )
        command.add_argument("extra", nargs="*", help="further vLLM arguments, after --")

    command = commands.add_parser(
        "health", help="has this server generated a token? (the image's health check)"
    )
    command.set_defaults(run=health)
    command.add_argument("--host", default="127.0.0.1")
    command.add_argument("--port", type=int, default=int(os.environ.get("KIMI_K3_PORT", "8000")))
    command.add_argument("--api-key-file", type=Path, default=os.environ.get("KIMI_K3_API_KEY_FILE") or None)

    command = commands.add_parser("doctor", help="what would go wrong here, and what to do about it")
    command.set_defaults(run=doctor)
    command.add_argument("--profile", choices=launch.profiles())
    command.add_argument("--topology")
    command.add_argument("--model", help="checkpoint folder, or name on the hub")
    command.add_argument("--json", action="store_true")
    command.add_argument("extra", nargs="*", help="vLLM arguments that serve would get, after --")


def add_model(commands: Commands) -> None:
    command = commands.add_parser("download", help="fetch a model into HF_HOME; resumes where it stopped")
    command.set_defaults(run=download)
    command.add_argument("--model", required=True, help="name on the hub, or a folder to check")
    command.add_argument("--revision", help="commit of the model's repository")
    command.add_argument("--offline", action="store_true", help="only check that the cache holds every shard")

    command = commands.add_parser("checkpoint", help="write the small MLA checkpoint that the CPU runs use")
    command.set_defaults(run=checkpoint)
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--heads", type=int, help="of attention; ranks share them (4)")

    command = commands.add_parser(
        "reference", help="greedy tokens and top-20 logprobs from float32 transformers"
    )
    command.set_defaults(run=reference)
    command.add_argument("--model", type=Path, required=True)
    command.add_argument(
        "--prompts", type=Path, required=True, help='JSON: [{"id", "prompt", "output_tokens"}]'
    )
    command.add_argument("--out", type=Path, required=True)


def add_lock(commands: Commands) -> None:
    command = commands.add_parser("lock", help="what this software was locked to: verify, update, sum")
    actions = command.add_subparsers(dest="action", required=True)
    verify = actions.add_parser(
        "verify", help="compare vLLM's text, this image or a built image with the lock"
    )
    verify.set_defaults(run=lock_verify)
    verify.add_argument("--image", help="a built image on this host's Docker engine")
    verify.add_argument("--deep", action="store_true", help="in an image: hash every installed file")
    update = actions.add_parser("update", help="rewrite the digests of upstream functions after a review")
    update.set_defaults(run=lock_update)
    update.add_argument(
        "--base", action="store_true", help="rewrite images.toml from the pulled images instead"
    )
    total = actions.add_parser("sum", help="digest over a target's lock files, the image's label")
    total.set_defaults(run=lambda args: print(image_lock.lock_sum(args.target)))
    total.add_argument("--target", required=True, choices=image_lock.TARGETS)
    base = actions.add_parser("base", help="the image that every target is built on, by digest")
    base.set_defaults(run=lambda _: print(image_lock.base_image()))
    command = commands.add_parser("version", help="of this package")
    command.set_defaults(run=lambda _: print(__version__))

    command = commands.add_parser("sbom", help="used while an image is built: its SBOM and SHA256SUMS")
    command.set_defaults(run=sbom)
    command.add_argument("--target", required=True, choices=image_lock.TARGETS)
    command.add_argument("--report", type=Path, required=True, help="pip's installation report")
    command.add_argument("--out", type=Path, required=True)


def planned(args: argparse.Namespace, model: Path | str) -> launch.Launch:
    drain = ["--shutdown-timeout", str(args.shutdown_timeout)] if args.shutdown_timeout else []
    guard = ["--middleware", MIDDLEWARE] if args.api_key_file else []
    return launch.plan(
        profile=args.profile,
        topology=args.topology,
        model=model,
        host=args.host,
        port=args.port,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        proof_dir=args.proof_dir,
        backend=args.backend,
        node=args.node,
        head=args.head,
        extra=[*drain, *guard, *args.extra],
    )


def serve(args: argparse.Namespace) -> None:
    from kimi_k3_serve.health import read_key

    if args.proof_dir is not None:
        args.proof_dir.mkdir(parents=True, exist_ok=True)
    launched = planned(args, models.locate(args.model))
    environment = {**os.environ, **launched.environment}
    # Neither an argument nor an image's variable: both would show in process lists and `docker inspect`.
    if key := read_key(args.api_key_file):
        environment["VLLM_API_KEY"] = key
    os.execvpe(launched.argv[0], launched.argv, environment)


def named(model: str) -> Path | str:
    """A folder, or a name on the hub that need not be here."""
    return Path(model) if models.is_path(model) else model


def explain(args: argparse.Namespace) -> None:
    model = named(args.model)
    launched = planned(args, model)
    profile = launch.load_for(args.profile, model)
    print(f"# {profile}")
    if profile.machine:
        needed, room = fit.weights_gb(profile, Topology.parse(args.topology)), fit.room_gb(profile)
        print(
            f"# weights {needed:.1f} GB of {room:.1f} GB a GPU; {room - needed:.1f} GB are left for the KV cache"
        )
    if profile.machine and not profile.layers and launched.environment.get(shard.SWITCH) == "1":
        saved = shard.saved_gib(Topology.parse(args.topology).tp)
        print(f"# latent projections in column shards: {saved:.3f} GiB a GPU less than replicated")
    for name, value in launched.environment.items():
        print(f"{name}={shlex.quote(value)}")
    if args.api_key_file:
        print(f"VLLM_API_KEY='<read from {args.api_key_file}>'")
    print(shlex.join(launched.argv))


def health(args: argparse.Namespace) -> None:
    from kimi_k3_serve.health import check, read_key

    print(check(args.host, args.port, read_key(args.api_key_file and Path(args.api_key_file))))


def doctor(args: argparse.Namespace) -> int:
    from kimi_k3_serve import doctor
    from kimi_k3_serve.doctor_host import Host

    host = Host()
    case = doctor.Case(
        host,
        host.gpus(),
        launch.load_for(args.profile, args.model and named(args.model)) if args.profile else None,
        Topology.parse(args.topology) if args.topology else None,
        args.model,
        tuple(args.extra),
    )
    findings = doctor.examine(case)
    print(doctor.as_json(findings) if args.json else doctor.as_text(findings))
    return int(doctor.failed(findings))


def download(args: argparse.Namespace) -> None:
    print(models.download(args.model, args.revision, offline=args.offline))


def checkpoint(args: argparse.Namespace) -> None:
    from kimi_k3_serve.checkpoint import HEADS, write_checkpoint

    write_checkpoint(args.out, args.seed, args.heads or HEADS)
    print(args.out)


def reference(args: argparse.Namespace) -> None:
    from kimi_k3_serve.reference import greedy

    answers = greedy(args.model, json.loads(args.prompts.read_text()))
    args.out.write_text(json.dumps(answers))


def lock_verify(args: argparse.Namespace) -> None:
    from kimi_k3_serve import source_lock

    if args.image:
        print(image_lock.verify_image(args.image))
        return
    target = os.environ.get("KIMI_K3_TARGET")
    if target:
        print(image_lock.verify_installed(target, deep=args.deep))
    if target != "bench":  # which has no vLLM
        print(source_lock.verify())


def lock_update(args: argparse.Namespace) -> None:
    from kimi_k3_serve import source_lock

    changed = image_lock.update_images() if args.base else source_lock.update()
    print("\n".join(changed) or "nothing has changed")


def sbom(args: argparse.Namespace) -> None:
    from kimi_k3_serve import sbom

    sbom.write(args.target, args.report, image_lock.folder() / f"{args.target}.txt", args.out)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
