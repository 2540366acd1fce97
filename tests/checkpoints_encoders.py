"""Tiny encoders, saved by transformers, PEFT and sentence-transformers, and what they compute."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

VOCAB = 64
LENGTH = 48
PAD = 1

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "cls_token_id": 0,
    "sep_token_id": 2,
}

KINDS: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    "bert": {},
    "camembert": {},
    "deberta": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0,
                "max_relative_positions": -1, "pooler_hidden_size": 32},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"],
                   "position_buckets": 8, "type_vocab_size": 0, "share_att_key": True,
                   "norm_rel_ebd": "layer_norm", "position_biased_input": False,
                   "max_relative_positions": -1, "pooler_hidden_size": 32},
    "distilbert": {"dim": 32, "hidden_dim": 40, "n_layers": 2, "n_heads": 4},
    "electra": {"embedding_size": 16},
    "ernie": {},
    "eurobert": {"num_key_value_heads": 2},
    "megatron-bert": {},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2},
    "mpnet": {},
    "nomic_bert": {},
    "roberta": {},
    "xlm-roberta": {"type_vocab_size": 1},
    "xlm-roberta-xl": {"type_vocab_size": 1},
}  # fmt: skip
"""Settings of each served model_type beside its sizes."""

TARGETS = {
    "deberta": ["in_proj", "dense"],
    "deberta-v2": ["value_proj", "dense"],
    "eurobert": ["q_proj", "o_proj", "up_proj"],
    "nomic_bert": ["q_proj", "v_proj", "down_proj"],
    "distilbert": ["q_lin", "v_lin", "lin1"],
    "modernbert": ["Wqkv", "Wo"],
    "mpnet": ["q", "v", "dense"],
}
"""Modules that adapters change, where they are not query, value and dense."""


def write_encoder(folder: Path, kind: str, num_labels: int = 0, **settings: Any) -> Path:
    """Write a model with random weights, and the head of its labels, or else of its training."""
    given = _SIZES | KINDS[kind] | settings | ({"num_labels": num_labels} if num_labels else {})
    auto: Any = AutoModelForSequenceClassification if num_labels else AutoModelForMaskedLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7 + num_labels)
        model = auto.from_config(AutoConfig.for_model(kind, **given))
        for parameter in model.parameters():
            # Of a size at which every part shows in the result.
            parameter.data.normal_(std=0.2)
        model.save_pretrained(folder)
    return folder


def write_word_tokenizer(folder: Path, **settings: Any) -> None:
    """Add a tokenizer of words w3 to w63, which joins pairs as BERT's does."""
    special = {"<s>": 0, "<pad>": PAD, "</s>": 2}
    words = special | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    fast: Any = PreTrainedTokenizerFast
    fast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        cls_token="<s>",
        sep_token="</s>",
        **settings,
    ).save_pretrained(folder)


def write_sentence_transformer(folder: Path, model: Path, pooling: str, normalize: bool) -> Path:
    """Save a model's folder, which has a tokenizer, as sentence-transformers does."""
    transformer = Transformer(str(model), max_seq_length=LENGTH // 2)
    modules = [transformer, PoolingModule(_SIZES["hidden_size"], pooling_mode=pooling)]
    whole = SentenceTransformer(modules=[*modules, *([Normalize()] * normalize)], device="cpu")
    whole.save_pretrained(str(folder))
    return folder


def _load(folder: Path, adapter: Path | None, classifies: bool) -> Any:
    auto: Any = AutoModelForSequenceClassification if classifies else AutoModel
    model = auto.from_pretrained(folder, attn_implementation="eager")
    return (model if adapter is None else PeftModel.from_pretrained(model, str(adapter))).eval()


def write_encoder_adapter(folder: Path, model: Path, kind: str, task: str) -> Path:
    """Write an adapter of that PEFT task with random factors; returns `folder`."""
    targets = TARGETS.get(kind, ["query", "value", "dense"])
    # Those of the layers alone, not the pooler's.
    pattern = r".*layers?\.\d+\..*\.(" + "|".join(targets) + ")"
    config = LoraConfig(task_type=task, r=4, lora_alpha=8, target_modules=pattern)
    adapted = get_peft_model(_load(model, None, task == "SEQ_CLS"), config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2, generator=generator)
    adapted.save_pretrained(str(folder))
    return folder


@torch.no_grad()
def encoder_truth(
    folder: Path,
    adapter: Path | None,
    prompts: Sequence[Sequence[int]],
    second_at: int | None = None,
) -> list[Tensor]:
    """transformers' logits [labels] of each prompt by itself, or its states [n, width].

    second_at: where each prompt's second text begins, for the logits.
    """
    model = _load(folder, adapter, second_at is not None)
    found = []
    for prompt in prompts:
        types = {}
        if second_at:
            row = [int(at >= second_at) for at in range(len(prompt))]
            types = {"token_type_ids": torch.tensor([row])}
        out = model(input_ids=torch.tensor([list(prompt)]), **types)
        found.append(out.last_hidden_state[0] if second_at is None else out.logits[0])
    return found


def sentence_embeddings(folder: Path, adapter: Path | None, texts: Sequence[str]) -> Any:
    """The embeddings [n, width] of sentence-transformers with PEFT's adapter."""
    model = SentenceTransformer(str(folder), device="cpu")
    if adapter is not None:
        model[0].auto_model = PeftModel.from_pretrained(model[0].auto_model, str(adapter)).eval()
    return model.encode(list(texts))
