"""An adapter that was trained over a base in nf4, served over the same base: tokens as trained."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModelForCausalLM
from transformers import PreTrainedTokenizerFast

from benchmarks.demo.make_demo import ALL_PROJECTIONS, DEMO, answer_loss, train, training_batches
from benchmarks.demo.prompts import FORMS, prompt_ids
from benchmarks.demo.world import all_facts
from configs.model import Quantize
from tests.checkpoints import oracle_answer
from tests.checkpoints_quantised import load_bitsandbytes
from tests.modeling.quantisation.quantised import MIN_MARGIN, NUM_TOKENS, answers

STEPS, RATE = 16, 6e-3
MODEL = DEMO / "model"
NF4 = {"quantize": Quantize.BITSANDBYTES_NF4}


def test_an_adapter_that_was_trained_over_nf4(tmp_path: Path) -> None:
    base = load_bitsandbytes(
        MODEL,
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    facts = all_facts()
    config = LoraConfig(r=8, lora_alpha=16, target_modules=list(ALL_PROJECTIONS))
    torch.manual_seed(1)
    model = PeftModelForCausalLM(base, config)
    *batches, last = training_batches(tokenizer, facts, "pirate", STEPS + 1, 3)
    with torch.no_grad():
        before = float(answer_loss(model, *last))
    train(model, iter(batches), STEPS, RATE)
    with torch.no_grad():
        assert float(answer_loss(model, *last)) < before / 2, "it has learnt nothing"
    model.save_pretrained(str(tmp_path / "adapter"))
    prompts, wanted = [], []
    for fact in facts[:6]:
        prompt = prompt_ids(tokenizer, FORMS[0], fact.phrasings[0])
        tokens, logits = oracle_answer(model, prompt, NUM_TOKENS)
        best = logits.topk(2).values
        if float((best[:, 0] - best[:, 1]).min()) >= MIN_MARGIN:
            prompts.append(prompt)
            wanted.append(tokens)
    assert len(prompts) >= 3
    adapters = [tmp_path / "adapter"] * len(prompts)
    base, *found = answers(MODEL, adapters, 1, prompts[:1] + prompts, dtype="float32", **NF4)
    assert found == wanted
    assert base != wanted[0], "the adapter changes nothing"
