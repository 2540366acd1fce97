"""What users install: the wheel, and the steps of the image."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from configs.env import THROUGHPUT_ENVIRONMENT
from configs.version import VERSION
from tests.deploy.containerfile import environment, stages, steps
from tests.deploy.lock import FILE as CONSTRAINTS
from tests.house import PACKAGES, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SHIPPED = (*PACKAGES, "benchmarks")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the built wheel alone in it; what it needs is this Python's."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in SHIPPED:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "serve_config.yaml"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps", "--no-compile"]
    command = [*pip, "--no-build-isolation", "--target", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return target


def loray(installed: Path, folder: Path, *arguments: str) -> str:
    """What the installed command prints in a folder that has no part of the repository."""
    env = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, str(installed / "bin" / "loray"), *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_every_file_of_the_packages(installed: Path) -> None:
    kinds = {
        ".py",
        *(Path(kind).suffix for kind in PROJECT["tool"]["setuptools"]["package-data"]["*"]),
    }
    for name in SHIPPED:
        paths = (path for path in (ROOT / name).rglob("*") if path.suffix in kinds)
        lost = [path for path in paths if not (installed / path.relative_to(ROOT)).is_file()]
        assert lost == []


def test_the_wheel_serves_the_demo_and_the_presets(installed: Path, tmp_path: Path) -> None:
    assert loray(installed, tmp_path, "--version").strip() == VERSION
    # No faults: the demo's model and adapters were found beside the package.
    assert "no faults" in loray(installed, tmp_path, "check-config", "serve_config.yaml")
    options = ("--host", "0.0.0.0", "--port", "80", "--print-config")
    printed = yaml.safe_load(loray(installed, tmp_path, "serve", *options))
    demo = yaml.safe_load((ROOT / "serve_config.yaml").read_text("utf-8"))
    assert printed == {**demo, "http_options": {"host": "0.0.0.0", "port": 80}}
    preset = loray(installed, tmp_path, "serve", "configs/presets/two_gpus.yaml", "--print-config")
    assert preset == (ROOT / "configs/presets/two_gpus.yaml").read_text("utf-8")


def test_the_version_follows_the_changelog() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    released = [Version(each) for each in headings if each != "Unreleased"]
    assert released == sorted(released, reverse=True)
    if headings[0] == "Unreleased":
        assert Version(VERSION) > released[0]
    else:
        assert Version(VERSION) == released[0]
    assert f"loray:{VERSION} " in (ROOT / "deploy/Containerfile").read_text("utf-8")


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_the_images_install_locked_versions_of_all_that_is_needed(target: str) -> None:
    lines = CONSTRAINTS.read_text("utf-8").splitlines()[1:]
    pins = dict(line.split("==") for line in lines)
    project = PROJECT["project"]
    extras = environment(target)["EXTRAS"].split(",")
    wanted = [
        *project["dependencies"],
        *(n for e in extras for n in project["optional-dependencies"][e]),
    ]
    for requirement in map(Requirement, wanted):
        pin = pins.get(canonicalize_name(requirement.name), "0")
        assert pin in requirement.specifier, f"{requirement}: `make lock`"


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_the_image_sets_the_environment_that_a_cluster_needs(target: str) -> None:
    env = environment(target)
    [user] = [rest for word, rest in steps(target) if word == "USER"]
    own = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5"}
    for name, value in {**THROUGHPUT_ENVIRONMENT, **own}.items():
        assert env[name] == value.replace(f"-serve-{os.getuid()}", f"-serve-{user}"), name
    assert env["RAY_SERVE_HAPROXY_BINARY_PATH"].startswith("/opt/loray/bin/")
    scripts = {Path(env["RAY_SERVE_HAPROXY_BINARY_PATH"]).name, "loray"}
    assert scripts == PROJECT["project"]["scripts"].keys()


def test_the_image_is_made_of_what_the_repository_has() -> None:
    copied = [rest.split()[:-1] for word, rest in steps("cpu") if word == "COPY"]
    # Kernels are optional: a pattern may match nothing.
    names = {name for each in copied for name in each if name != "kernel[s]"}
    assert [name for name in names if not (ROOT / name).exists()] == []
    assert set(SHIPPED) <= names
    assert stages("gpu")[""].base == "gpu-root"
