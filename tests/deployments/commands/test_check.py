"""What `loray check-adapter` prints for folders of several kinds."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from peft import IA3Config, LoHaConfig, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from deployments.commands.check import check
from modeling.models.generic import experts
from tests.checkpoints import write_llama
from tests.checkpoints_generic import write_generic
from tests.modeling.adapters.test_adapters_page import KINDS

MLX = Path(__file__).parents[2] / "sources" / "mlx_lora"
TARGETS = ["q_proj", "down_proj"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"))


def printed(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str], served: bool = True
) -> str:
    if served:
        check(folder, str(model), {})
    else:
        with pytest.raises(typer.Exit) as ended:
            check(folder, str(model), {})
        assert ended.value.exit_code == 1
    return capsys.readouterr().out


def save(folder: Path, model: Path, config: Any) -> Path:
    """An adapter as PEFT saves it."""
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    adapted.save_pretrained(str(folder))
    return folder


def test_what_is_served_has_its_kind_and_its_cost(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = LoraConfig(r=12, target_modules=TARGETS, use_rslora=True)
    folder = save(tmp_path / "rs", model, config)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "epochs": 3}))
    said = printed(folder, model, capsys)
    assert "served exactly (rsLoRA, 4 modules, rank 12)" in said
    # Two pages of 8 rank rows in each of two projections, [2 layers, 8, in + out] in 16 bits.
    num_bytes = 2 * 2 * 8 * 2 * ((32 + 32) + (48 + 32))
    assert f"4 pages, {num_bytes / 2**20:.1f} MiB" in said
    assert "not read, as by PEFT: epochs" in said
    tokens = LoraConfig(
        r=4, target_modules=TARGETS, alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM"
    )
    said = printed(save(tmp_path / "alora", model, tokens), model, capsys)
    assert "aLoRA, activated from the tokens [5, 6] on, 4 modules" in said


def test_an_adapter_of_mlx_is_judged_as_the_server_converts_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(MLX, tmp_path / "mlx")
    said = printed(tmp_path / "mlx", model, capsys)
    assert re.search(r"mlx: served exactly \(LoRA, 3 modules, rank 4\)", said)
    config = tmp_path / "mlx" / "adapter_config.json"
    config.write_text("{}")
    assert "must name the rank" in printed(tmp_path / "mlx", model, capsys, served=False)


@pytest.mark.parametrize(
    ("config", "kind", "advice"),
    [
        (IA3Config(target_modules=TARGETS, feedforward_modules=[]), "IA3", "merge_and_unload"),
        (LoHaConfig(r=2, target_modules=TARGETS), "LOHA", "peft.save_as_lora"),
        (
            LoraConfig(r=4, target_modules=TARGETS, init_lora_weights="pissa"),
            "LoRA, begun as pissa",
            "path_initial_model_for_weight_conversion",
        ),
    ],
)
def test_what_is_refused_has_its_kind_and_what_to_do(
    config: Any,
    kind: str,
    advice: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = printed(save(tmp_path / "other", model, config), model, capsys, served=False)
    assert f"refused ({kind})" in said
    assert advice in said


SETTINGS: dict[str, dict[str, object]] = {
    "whole linear maps": {"whole_linears": {"up_proj": 1}},
    "LoRA on embedding and head": {"vocabulary": True},
    "whole embedding or head": {"vocabulary": True, "vocabulary_copies": 1},
}
SAID = {
    "trained tokens": "with trained tokens, 2 modules, rank 8, sets 1 rows of tokens",
    "bare parameters": "on bare parameters, 4 modules",
    "a bias of B": "with biases of B",
    "DoRA": "(DoRA, 2 modules",
    "whole embedding or head": "with whole modules",
}


@pytest.mark.filterwarnings("ignore")  # PEFT's, of configs that no one would train
def test_every_kind_of_the_page_is_judged_as_it_says(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, config, served, *_ in KINDS:
        fields = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
        fields |= json.loads(config.strip("`"))
        if fields["task_type"] == "SEQ_CLS":  # Another model's, which its own tests judge.
            continue
        folder = save(tmp_path / name, model, LoraConfig(**fields))
        try:
            check(folder, str(model), SETTINGS.get(name, {}))
        except typer.Exit:
            assert served != "yes", capsys.readouterr().out
        else:
            assert served == "yes", name
        assert SAID.get(name, "") in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_what_gpus_do_not_adapt_is_refused_where_the_config_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "ON_GPUS", frozenset())
    model = write_generic(tmp_path / "model", "dots1")
    config = LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.down_proj"])
    folder = save(tmp_path / "adapter", model, config)
    said = printed(folder, model, capsys)
    assert "served exactly" in said
    assert re.search(r"on experts: \d+\.\d MiB of it.* adapters\.expert_pages of 1\n", said)
    yaml = tmp_path / "serve.yaml"
    engine = json.dumps({"model": {"id": str(model)}, "device": "cuda"})
    app = f"{{import_path: 'deployments.app:build', args: {{engine: {engine}}}}}"
    yaml.write_text(f"applications: [{app}]")
    said = printed(folder, yaml, capsys, served=False)
    assert "adapts neither a linear module's weight nor experts that are known here" in said


def test_a_checkpoint_of_nemo_is_known(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lora.nemo").write_bytes(b"")
    assert "export_lora" in printed(tmp_path, model, capsys, served=False)
