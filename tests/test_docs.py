"""The pages of the repository: their links lead somewhere, and what they name exists."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = [
    f"/{path.relative_to(ROOT)}"
    for suffix in ("py", "yaml")
    for path in ROOT.rglob(f"*.{suffix}")
    if ".venv" not in path.parts
]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def _prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """What a link to a part of the page may name, by GitHub's rule."""
    headings = re.findall(r"^#+ (.+)$", _prose(page), flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def _links(page: Path) -> Iterator[str]:
    return (link for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page)) if "://" not in link)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for link in _links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            lost.append(link)
    assert lost == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"`([a-z0-9_/]+\.(?:py|yaml))\b", _prose(page)))
    assert [path for path in sorted(named) if not any(f.endswith(f"/{path}") for f in FILES)] == []


def test_the_architecture_is_short() -> None:
    assert len((ROOT / "docs/architecture.md").read_text("utf-8").split()) < 2500


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_wrapped(page: Path) -> None:
    lines = [line for line in _prose(page).splitlines() if not line.startswith(("|", "#", "!["))]
    assert [line for line in lines if len(line) > 100 and " " in line.strip()] == []
