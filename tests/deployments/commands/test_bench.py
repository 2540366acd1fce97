"""What `loray bench` asks about."""

from deployments.commands.bench import _names

BASE = {"id": "tiny", "parent": None}


def adapter(name: str) -> dict[str, str]:
    return {"id": name, "parent": "tiny"}


def test_names_come_from_the_server() -> None:
    assert _names([BASE, adapter("red")], []) == ["--base", "tiny", "--names", "red"]
    assert _names([BASE, adapter("red")], ["--names", "blue"]) == ["--base", "tiny"]
    assert _names([BASE, adapter("red")], ["--base", "x", "--adapters", "3"]) == []
    many = _names([BASE, *(adapter(f"a{i}") for i in range(99))], [])
    assert len(many) == 3 + 32


def test_without_adapters_only_the_base_is_measured() -> None:
    alone = _names([BASE], [])
    assert alone[:2] == ["--base", "tiny"]
    assert all(case.startswith("base-") for case in alone[3:])
    assert _names([BASE], ["--cases", "base-c1"]) == ["--base", "tiny"]
