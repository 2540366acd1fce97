"""Writes deploy/constraints.txt: the versions that pip would install today.

pip install --dry-run --ignore-installed --report REPORT ".[gpu,padded,s3,batches,otlp]"
python -m tests.deploy.lock REPORT
"""

import json
import sys
from pathlib import Path

from packaging.utils import canonicalize_name

FILE = Path(__file__).resolve().parents[2] / "deploy/constraints.txt"
HEAD = "# What the images are made of: `make lock` writes it, deploy/Containerfile reads it.\n"


def write(report: Path) -> None:
    """Write every package of pip's report but LoRay, without the local part of versions."""
    packages = [each["metadata"] for each in json.loads(report.read_text("utf-8"))["install"]]
    lines = [
        f"{canonicalize_name(each['name'])}=={each['version'].partition('+')[0]}\n"
        for each in packages
        if each["name"] != "loray"
    ]
    FILE.write_text(HEAD + "".join(sorted(lines)), "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
