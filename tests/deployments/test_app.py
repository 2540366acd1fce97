"""What `build` finds out before Serve takes any replica down."""

from types import SimpleNamespace
from typing import Any

import pytest

from configs.model import ModelConfig
from deployments import app
from sources.model import ModelNotFound

FAR, FARTHER = "a" * 56, "b" * 56
ABSENT = ModelConfig(id="/no/such/model")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Other nodes of a cluster, and whether each has the model."""
    others: dict[str, bool] = {}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def options(scheduling_strategy: Any) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda model: others[scheduling_strategy.node_id])

    ray = SimpleNamespace(
        nodes=lambda: [{"NodeID": node, "Alive": True} for node in ("here", *others)],
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "here"),
        remote=lambda **_: lambda _: SimpleNamespace(options=options),
        get=lambda answers: answers,
    )
    monkeypatch.setattr(app, "ray", ray)
    return others


def test_a_model_that_no_node_has_is_refused(sent: dict[str, bool]) -> None:
    with pytest.raises(ModelNotFound, match="/no/such/model"):
        app._require_model(ABSENT)
    sent[FAR] = False
    with pytest.raises(ModelNotFound):
        app._require_model(ABSENT)


def test_a_model_may_be_on_other_nodes_alone(sent: dict[str, bool]) -> None:
    sent |= {FAR: False, FARTHER: True}
    app._require_model(ABSENT)


def test_a_model_on_this_node_needs_no_other_node(sent: dict[str, bool]) -> None:
    app._require_model(ModelConfig(id="configs/demo/model"))
