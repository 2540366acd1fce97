"""What `loray bench` asks about."""

from deployments.commands.bench import _names, _sizes

BASE = {"id": "tiny", "parent": None}


def adapter(name: str) -> dict[str, str]:
    return {"id": name, "parent": "tiny"}


def test_names_come_from_the_server() -> None:
    assert _names([BASE, adapter("red")], []) == ["--base", "tiny", "--names", "red"]
    assert _names([BASE, adapter("red")], ["--names", "blue"]) == ["--base", "tiny"]
    assert _names([BASE, adapter("red")], ["--base", "x", "--adapters", "3"]) == []
    many = _names([BASE, *(adapter(f"a{i}") for i in range(99))], [])
    assert len(many) == 3 + 32


def test_cases_have_a_time_and_fit_the_server() -> None:
    gpu = {"model_device_type": "cuda", "max_total_tokens": 8192}
    short = ["--input-length", "32", "--output-length", "32"]
    assert _sizes(gpu, []) == ["--seconds", "20"]
    assert _sizes(gpu, ["--requests", "5"]) == []
    assert _sizes({**gpu, "model_device_type": "cpu"}, ["--seconds", "5"]) == short
    assert _sizes({**gpu, "max_total_tokens": 512}, ["--input-length", "8"])[2:] == short[2:]


def test_without_adapters_only_the_base_is_measured() -> None:
    alone = _names([BASE], [])
    assert alone[:2] == ["--base", "tiny"]
    assert all(case.startswith("base-") for case in alone[3:])
    assert _names([BASE], ["--cases", "base-c1"]) == ["--base", "tiny"]
