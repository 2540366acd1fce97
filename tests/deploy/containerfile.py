"""deploy/Containerfile, read, and run in a clean root where no images can be had.

    python -m tests.deploy.containerfile FOLDER [BIND...]

FOLDER gets a minimal Debian by debootstrap, then the CPU target's steps by chroot; run it as root.
BIND: folders of this machine that the steps may read, such as those of pip's settings.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy/Containerfile"

_PATH = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PASSED_ON = re.compile(r"(PIP_\w+|\w+_proxy)", re.IGNORECASE)


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
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", str(root)], check=True)
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    given = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}
    with ExitStack() as mounts:
        for path in [*binds, Path("/proc"), Path("/dev")]:
            _mount(path, root / path.relative_to("/"), mounts)
        _run_steps(root, given)
        _try_it(root)


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
    last = {word: rest for word, rest in steps("cpu")}
    [program], command = json.loads(last["ENTRYPOINT"]), json.loads(last["CMD"])
    for arguments in (["--version"], ["check-config", command[1]], [*command, "--print-config"]):
        words = shlex.join(["cd", last["WORKDIR"]]) + " && " + shlex.join([program, *arguments])
        chroot = ["chroot", f"--userspec={last['USER']}", str(root), "/bin/sh", "-c", words]
        subprocess.run(
            chroot, env={"PATH": _PATH, "HOME": last["WORKDIR"], **environment("cpu")}, check=True
        )


def _copy(folder: Path, *names: str) -> None:
    *sources, into = names
    for name in sources:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / into, symlinks=True, dirs_exist_ok=True)
        else:
            (folder / into).mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / into / source.name)


def _mount(path: Path, at: Path, mounts: ExitStack) -> None:
    at.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "--bind", str(path), str(at)], check=True)
    mounts.callback(subprocess.run, ["umount", "--lazy", str(at)], check=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]])
