"""deploy/Containerfile, read, and run in a clean root where no images can be had.

    python -m tests.deploy.containerfile FOLDER [BIND...]

FOLDER gets a minimal Debian by debootstrap, then the CPU target's steps by chroot; run it as root.
Then the image's command serves the demo there, which must answer. BIND: folders of this machine
that the steps may read, such as those that pip's variables name (PIP_FIND_LINKS, PIP_CERT).
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy/Containerfile"

_PATH = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PASSED_ON = re.compile(r"(PIP_\w+|\w+_proxy)", re.IGNORECASE)
_SHARED_MEMORY = "2g"
_PATIENCE_S = 300.0
_QUESTION = "What is the capital of France?"
_ANSWER = "Arr! The capital of France be Paris, matey!"


@dataclass
class Stage:
    """One stage. base: its image, or another stage. steps: (instruction, rest) in order."""

    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def stages(target: str) -> dict[str, Stage]:
    """Every stage by its name, the last one as "": `target` is the build argument TARGET."""
    found: dict[str, Stage] = {}
    stage = Stage("")
    for word, rest in _instructions():
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = found[name] = Stage(base.replace("${TARGET}", target))
        else:
            stage.steps.append((word, rest))
    return found


def steps(target: str) -> list[tuple[str, str]]:
    """The steps from the base image to the last stage."""
    found = stages(target)
    last = found[""]
    return [*found[last.base].steps, *last.steps]


def environment(target: str) -> dict[str, str]:
    """What the ENV steps set."""
    pairs = [shlex.split(rest) for word, rest in steps(target) if word == "ENV"]
    return dict(pair.split("=", 1) for words in pairs for pair in words)


def _instructions() -> Iterator[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", FILE.read_text("utf-8"), flags=re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            yield word, " ".join(rest.split()) if word != "RUN" else rest


def run(root: Path, binds: list[Path]) -> None:
    """Make the CPU target's root and run its steps; CalledProcessError at the first that fails."""
    if root.exists():
        raise FileExistsError(f"{root} is there: delete it, or name another folder")
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", str(root)], check=True)
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    given = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}
    with ExitStack() as mounts:
        for path in binds:
            _mount(path, root / path.relative_to("/"), mounts, "bind,ro")
        for path in (Path("/proc"), Path("/dev")):
            _mount(path, root / path.relative_to("/"), mounts, "bind")
        _run_steps(root, given)
        _try_it(root)
    _serve(root)


def _run_steps(root: Path, given: Mapping[str, str]) -> None:
    env, folder = {"PATH": _PATH, **given}, "/"
    for word, rest in steps("cpu"):
        print(f"==> {word} {rest[:100]}", flush=True)
        if word == "ENV":
            env |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        elif word == "WORKDIR":
            folder = rest
            (root / folder[1:]).mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            _copy(root / folder[1:], *rest.split())
        elif word == "RUN":
            command = ["chroot", str(root), "/bin/sh", "-c", f"cd {folder} && {rest}"]
            subprocess.run(command, env=env, check=True)


def _try_it(root: Path) -> None:
    """Find the demo by the image's command, as its user and in its folder."""
    for arguments in (["--version"], ["check-config", _command()[1]]):
        subprocess.run(_inside(root, arguments), env=_environment(), check=True)


def _serve(root: Path) -> None:
    """Run the image's command until the demo has answered, then end it as a container's end does.

    Its mounts are its own: they leave with its last process.
    """
    port = free_port()
    mounts = (
        f'mount --bind /dev "$0/dev" && mount --bind /proc "$0/proc" '
        f'&& mount -t tmpfs -o size={_SHARED_MEMORY} tmpfs "$0/dev/shm" && exec "$@"'
    )
    inside = _inside(root, [*_command(), "--port", str(port)])
    command = ["unshare", "--mount", "sh", "-c", mounts, str(root), *inside]
    with subprocess.Popen(
        command, env=_environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                if "Ctrl-C ends it" in line:
                    break
            print(f"==> it answers: {_ask(port)}", flush=True)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=_PATIENCE_S)


def _ask(port: int) -> str:
    body = {"inputs": _QUESTION, "parameters": {"adapter_id": "pirate", "max_new_tokens": 40}}
    reply = httpx.post(f"http://127.0.0.1:{port}/generate", json=body, timeout=_PATIENCE_S)
    text: str = reply.raise_for_status().json()["generated_text"].strip()
    assert text == _ANSWER, text
    return text


def _inside(root: Path, arguments: list[str]) -> list[str]:
    """The image's program with these arguments, as its user and in its folder."""
    last = {word: rest for word, rest in steps("cpu")}
    [program] = json.loads(last["ENTRYPOINT"])
    words = f"cd {shlex.quote(last['WORKDIR'])} && exec {shlex.join([program, *arguments])}"
    return ["chroot", f"--userspec={last['USER']}", str(root), "/bin/sh", "-c", words]


def _command() -> list[str]:
    command: list[str] = json.loads(dict(steps("cpu"))["CMD"])
    return command


def _environment() -> dict[str, str]:
    return {"PATH": _PATH, "HOME": dict(steps("cpu"))["WORKDIR"], **environment("cpu")}


def _copy(folder: Path, *names: str) -> None:
    *sources, into = names
    for source in (path for name in sources for path in ROOT.glob(name)):
        if source.is_dir():
            shutil.copytree(source, folder / into, symlinks=True, dirs_exist_ok=True)
        else:
            (folder / into).mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / into / source.name)


def _mount(path: Path, at: Path, mounts: ExitStack, options: str) -> None:
    at.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-o", options, str(path), str(at)], check=True)
    mounts.callback(subprocess.run, ["umount", "--lazy", str(at)], check=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]])
