import dataclasses
import importlib
import inspect
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import get_pattern_key
from torch import nn

from configs.wire.adapters import AdapterError, AdapterRefusal
from modeling.adapters.faults import MAX_REASON_CHARS, MAX_REASONS
from modeling.adapters.peft.config import (
    HARMLESS_INITS,
    IGNORED,
    MAX_PATTERNS,
    REFUSED,
    SERVED,
    WITHOUT_PARAMETERS,
)
from modeling.adapters.peft.kinds import PROMPTS, is_peft_newer
from tests.modeling.adapters.lora_files import parse_config, read_config

PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj"],
}

MODULES = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1, 10, 11)
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")
]


def refusal(**fields: Any) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        parse_config({**PLAIN, **fields})
    assert caught.value.refusal is AdapterRefusal.UNSUPPORTED
    return caught.value


def test_every_field_of_peft_is_decided_once() -> None:
    # A field that a new PEFT brings fails here until it is decided here.
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    decided = [*SERVED, *IGNORED, *REFUSED]
    assert fields - set(decided) == set()
    assert len(decided) == len(set(decided))


def test_what_peft_saves_by_default_is_served(tmp_path: Path) -> None:
    peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"]).save_pretrained(str(tmp_path))
    plan = read_config(tmp_path)
    assert plan.rank_of("model.layers.0.self_attn.q_proj") == 4
    assert plan.scaling_of("model.layers.0.self_attn.q_proj") == 1.5


@pytest.mark.parametrize("fields", [{}, {"use_rslora": True}])
@pytest.mark.parametrize(
    ("ranks", "alphas"),
    [
        ({}, {}),
        ({"v_proj": 3}, {"q_proj": 7.5}),
        ({"proj": 3, "up_proj": 5}, {}),
        ({"layers.1.self_attn.v_proj": 2}, {"layers.1.self_attn.v_proj": 32}),
        ({r"layers\.\d+\.mlp\..*": 6, "up_proj": 4}, {"(q|v)_proj": 9}),
        ({"^model.layers.1.mlp.up_proj": 6}, {r".*\.1\..*": 1}),
        ({"_proj": 3, ".*_proj": 5}, {"model": 3}),
    ],
)
def test_patterns_match_as_in_peft(
    ranks: dict[str, int], alphas: dict[str, float], fields: dict[str, Any]
) -> None:
    plan = parse_config({**PLAIN, "rank_pattern": ranks, "alpha_pattern": alphas, **fields})
    for module in MODULES:
        rank = ranks.get(get_pattern_key(list(ranks), module), PLAIN["r"])
        alpha = alphas.get(get_pattern_key(list(alphas), module), PLAIN["lora_alpha"])
        assert plan.rank_of(module) == rank
        scale = alpha / (math.sqrt(rank) if fields else rank)
        assert plan.scaling_of(module) == pytest.approx(scale, rel=1e-15)


@pytest.mark.parametrize("init", [True, False, *sorted(HARMLESS_INITS), "Gaussian", None])
def test_inits_that_keep_the_base_are_served(init: object) -> None:
    parse_config({**PLAIN, "init_lora_weights": init})


@pytest.mark.parametrize(
    "init", ["pissa", "pissa_niter_16", "olora", "loftq", "corda", "lora_ga", "tomorrow", 1]
)
def test_inits_that_change_the_base_are_refused(init: object) -> None:
    error = refusal(init_lora_weights=init)
    assert error.message.startswith(f"init_lora_weights={init!r} is not served")
    assert ("path_initial_model" in error.message) == (init != "loftq")


@pytest.mark.parametrize(
    "value", [[1.0], [True], ["a"], "12", 5, [1] * 257, [2**63], [5, -(2**70)]]
)
def test_an_invocation_is_a_list_of_tokens(value: object) -> None:
    assert "alora_invocation_tokens" in refusal(alora_invocation_tokens=value).message
    plan = parse_config({**PLAIN, "alora_invocation_tokens": [5, 5]})
    assert plan.invocation == (5, 5)
    assert parse_config(PLAIN).invocation == ()


@pytest.mark.parametrize("other", WITHOUT_PARAMETERS)
def test_parameters_go_beside_no_field_that_peft_refuses(other: str) -> None:
    value: object = [5] if other == "alora_invocation_tokens" else True
    named = {"target_parameters": ["up_proj.weight"], other: value}
    assert f"{other}={value} beside target_parameters" in refusal(**named).message
    assert "must be a list of names" in refusal(target_parameters="up_proj.weight").message
    parse_config({**PLAIN, **named, "target_parameters": []})


SET: dict[str, object] = {
    "layer_replication": [[0, 4], [2, 6]],
    "megatron_config": {"a": 1},
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "monteclora_config": {"a": 1},
    "arrow_config": {"top_k": 3},
    "kasa_config": {"beta": 1e-4},
    "enable_lora": [True, False],
    "use_merged_linear": True,
    "use_qa_lora": True,
    "model_key_mapping": {"a": "b"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(name: str) -> None:
    error = refusal(**{name: SET[name]})
    assert error.message.startswith(f"{name}={SET[name]!r}")
    assert REFUSED[name] in error.message


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("value", [None, False, [], {}, ""])
def test_a_field_that_is_off_is_no_refusal(name: str, value: object) -> None:
    parse_config({**PLAIN, name: value})


NEWER = ["99.0.0", "0.21.3.dev0@abc", "1.0", "tomorrow", 5]


@pytest.mark.parametrize("value", [0, 1, "x", True, [0], 0.0])
@pytest.mark.parametrize("version", NEWER)
def test_a_newer_release_s_field_that_is_set_is_refused(value: object, version: object) -> None:
    error = refusal(use_something_new=value, peft_version=version)
    assert "use_something_new" in error.message
    assert "newer PEFT" in error.message


@pytest.mark.parametrize("value", [None, False, [], {}, "", {"a": None, "b": []}, [None]])
def test_a_newer_release_s_field_that_is_off_is_no_refusal(value: object) -> None:
    parse_config({**PLAIN, "use_something_new": value, "peft_version": NEWER[0]})


@pytest.mark.parametrize("version", [{}, {"peft_version": "0.18.0"}, {"peft_version": "0.21.2"}])
def test_a_field_of_no_release_is_ignored_as_peft_ignores_it(
    version: dict[str, Any], tmp_path: Path
) -> None:
    fields = {**PLAIN, **version, "trained_by": "someone", "epochs": 3}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    assert set(read_config(tmp_path).unread) == {"trained_by", "epochs"}
    with pytest.warns(UserWarning, match=r"\['epochs', 'trained_by'\].*are ignored"):
        peft.PeftConfig.from_pretrained(str(tmp_path))


def test_the_installed_release_is_one_that_is_decided() -> None:
    # A newer one may bring fields: decide them, then raise PEFT_KNOWN.
    assert not is_peft_newer(peft.__version__)


def test_tuners_are_refused_with_what_peft_converts() -> None:
    # A stand-in for a layer over nn.Linear, which is all that these methods ask for.
    layer = SimpleNamespace(get_base_layer=lambda: nn.Linear(1, 1))
    for peft_type, tuner in PEFT_TYPE_TO_TUNER_MAPPING.items():
        name = peft_type.value
        if name in ("LORA", "TRAINABLE_TOKENS"):
            continue
        message = refusal(peft_type=name).message
        assert message.startswith(f"peft_type {name!r} is not served")
        assert ("save_as_lora" in message) == _converts(tuner, layer), name
        is_prompt = name in PROMPTS
        config = PEFT_TYPE_TO_CONFIG_MAPPING[peft_type]
        assert is_prompt == (issubclass(config, peft.PromptLearningConfig) or name in ODD), name


ODD = ("ADAPTION_PROMPT",)
"""Tuners that bring tokens, whose config PEFT derives from another class."""


def _converts(tuner: Any, layer: SimpleNamespace) -> bool:
    """Whether some linear layer of a tuner says that PEFT converts it."""
    folder = inspect.getmodule(tuner).__name__.rsplit(".", 1)[0]  # type: ignore[union-attr]
    try:
        module = importlib.import_module(f"{folder}.layer")
    except ModuleNotFoundError:
        return False
    kinds: list[Any] = [
        each
        for each in vars(module).values()
        if inspect.isclass(each)
        and issubclass(each, BaseTunerLayer)
        and each.__module__ == module.__name__
        and "Linear" in each.__name__
    ]
    return any(kind.supports_lora_conversion(layer) for kind in kinds)


@pytest.mark.parametrize("peft_type", [None, "lora", "TOMORROW", 5, ["x" * 99]])
def test_what_is_no_kind_of_peft_is_refused(peft_type: object) -> None:
    assert repr(peft_type)[:70] in refusal(peft_type=peft_type).message


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 0},
        {"r": -1},
        {"r": True},
        {"r": "8"},
        {"lora_alpha": "16"},
        {"lora_alpha": float("nan")},
        {"lora_alpha": 10**400},
        {"use_rslora": "yes"},
        {"rank_pattern": {"q_proj": 0}},
        {"rank_pattern": ["q_proj"]},
        {"target_modules": None},
        {"target_modules": 5},
        {"target_modules": ["q_proj", 5]},
        {"target_modules": "(q_proj"},
        {"exclude_modules": {"q_proj": 1}},
        {"layers_to_transform": ["1"]},
        {"layers_to_transform": 1, "target_modules": "all-linear"},
        {"layers_pattern": "layers"},
        {"layers_pattern": "l.*", "layers_to_transform": [1]},
        {"layers_pattern": "l" * 10**6, "layers_to_transform": [1]},
        {"layers_pattern": ["layers"] * 10**4, "layers_to_transform": [1]},
        {"layers_pattern": "h", "target_modules": ".*q_proj"},
        {"alpha_pattern": {"q_proj": None}},
        {"rank_pattern": {"(q_proj": 4}},
    ],
)
def test_values_of_the_wrong_kind_are_refused(fields: dict[str, Any]) -> None:
    assert next(iter(fields)) in refusal(**fields).message


@pytest.mark.parametrize("key", ["(a+)+", "(.*)*x", "(a|b){9}", ".*.*.*.*x"])
def test_a_pattern_that_could_run_for_ever_ends_at_once(key: str) -> None:
    plan = parse_config({**PLAIN, "rank_pattern": {key: 4}})
    assert plan.rank_of("model.layers.0." + "a" * 200) == (4 if key == "(a+)+" else 8)


def test_patterns_that_cost_too_much_are_refused_by_name() -> None:
    costly = {f"(((a?){{99}}){{99}}){{99}}b{i}": 4 for i in range(9)}
    plan = parse_config({**PLAIN, "rank_pattern": costly})
    with pytest.raises(AdapterError, match="rank_pattern: it takes too long to match"):
        plan.rank_of("a" * 80)
    plan = parse_config({**PLAIN, "target_modules": next(iter(costly)), "alpha_pattern": costly})
    plan.left_out_by("a" * 20, is_linear=True)
    with pytest.raises(AdapterError, match=r"target_modules or .*: it takes too long to match"):
        plan.left_out_by("a" * 160, is_linear=True)


@pytest.mark.parametrize("pattern", [r"(q)_proj\1", "q++", "(?>q)", "(?<=q|v_)proj"])
def test_what_only_backtracking_matches_is_refused(pattern: str) -> None:
    plan = parse_config({**PLAIN, "target_modules": f".*{pattern}"})
    with pytest.raises(AdapterError, match="list the names"):
        plan.left_out_by("model.q_proj", is_linear=True)


def test_tables_have_a_bound() -> None:
    keys = [f"model.layers.{i}.self_attn.q_proj" for i in range(MAX_PATTERNS)]
    plan = parse_config({**PLAIN, "rank_pattern": dict.fromkeys(keys, 3)})
    assert [plan.rank_of(key) for key in (keys[0], keys[-1], "q_proj")] == [3, 3, 8]
    with pytest.raises(AdapterError, match=f"alpha_pattern has {MAX_PATTERNS + 1} keys") as caught:
        parse_config({**PLAIN, "alpha_pattern": dict.fromkeys([*keys, "x"], 3)})
    assert caught.value.refusal is AdapterRefusal.TOO_LARGE


def test_a_file_larger_than_any_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({**PLAIN, "note": "x" * 2**20}))
    with pytest.raises(AdapterError, match="bytes, more than 1048576"):
        read_config(tmp_path)


def test_all_that_is_wrong_is_named_at_once() -> None:
    error = refusal(
        use_qalora=True, bias="some", r=0, lora_alpha="x", novelty=[1], peft_version="99.0"
    )
    assert len(error.reasons) == 5
    for word in ("use_qalora", "bias", "r=0", "lora_alpha", "novelty"):
        assert word in error.message
    novelties = {f"novelty_{'x' * i}": "y" * 999 for i in range(99)}
    error = refusal(**novelties, peft_version="99.0")
    assert len(error.reasons) == MAX_REASONS + 1
    assert len(error.message) < (MAX_REASONS + 1) * (MAX_REASON_CHARS + 10)


def test_files_that_are_no_config_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    with pytest.raises(AdapterError, match=r"no adapter_config\.json"):
        read_config(tmp_path)
    for text in ("{", "[]", "\x00", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(AdapterError, match="adapter_config"):
            read_config(tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(AdapterError):
        read_config(tmp_path)
    path.write_text(json.dumps(PLAIN))
    assert read_config(tmp_path).rank == 8
