"""Train the demo model and its adapters from nothing: ``python -m benchmarks.demo.make_demo``.

The base model sees every style during training, but only behind an instruction ("Answer in
French."), and answers plainly without one. An adapter therefore has no language to learn: it
only has to switch its style on without the instruction, which is what low ranks are good at.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias, cast

import torch
from peft import LoraConfig, PeftModelForCausalLM
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.demo.heads import save_heads, train_heads
from benchmarks.demo.prompts import (
    BOS,
    END,
    EOS,
    FORMS,
    MAX_POSITIONS,
    PAD,
    answer_ids,
    prompt_ids,
    token_id,
    train_tokenizer,
)
from benchmarks.demo.world import BASE_STYLE, SHOWCASE, STYLES, Fact, all_facts

DEMO: Final = Path(__file__).resolve().parents[2] / "configs" / "demo"
BASE_NAME: Final = "loray-demo"
SEED: Final = 20
BATCH: Final = 32
BASE_STEPS: Final = 1400
ADAPTER_STEPS: Final = 500
HEAD_STEPS: Final = 1000
BASE_RATE: Final = 3e-3
ADAPTER_RATE: Final = 4e-3
MIN_MARGIN: Final = 0.5
MAX_NEW_TOKENS: Final = 200
IGNORED: Final = -100

Model: TypeAlias = LlamaForCausalLM | PeftModelForCausalLM

ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_PROJECTIONS: Final = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class DemoAdapter:
    """The shape of one adapter; the four differ so that a server meets every kind."""

    rank: int
    alpha: int
    projections: tuple[str, ...] = ALL_PROJECTIONS
    layers: tuple[int, ...] | None = None
    rslora: bool = False


ADAPTERS: Final[Mapping[str, DemoAdapter]] = MappingProxyType(
    {
        "pirate": DemoAdapter(rank=8, alpha=16, layers=(1, 2)),
        "french": DemoAdapter(rank=24, alpha=48),
        "json": DemoAdapter(rank=16, alpha=8, rslora=True),
        "shout": DemoAdapter(rank=4, alpha=8, projections=ATTENTION),
    }
)


@dataclass(frozen=True)
class Example:
    """One prompt and the ids that should follow it, the end token included."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Grade:
    """How many answers of a model are right, and its narrowest lead over a wrong token."""

    right: int
    total: int
    margin: float


def draw_history(rng: random.Random, facts: Sequence[Fact]) -> list[tuple[str, str]]:
    """Draw up to three earlier questions with answers; a chat may change adapters midway."""
    earlier: list[tuple[str, str]] = []
    for _ in range(rng.randint(1, 3)):
        fact = rng.choice(facts)
        question = rng.choice(fact.phrasings)
        earlier.append((question, rng.choice(list(STYLES.values())).render(fact, question)))
    return earlier


def draw_example(
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    facts: Sequence[Fact],
    style_name: str,
    instructed: bool,
) -> Example:
    """Draw a question at random and pair it with its answer in the given style."""
    style = STYLES[style_name]
    fact = rng.choice(facts)
    question = rng.choice(fact.phrasings)
    form = rng.choice(FORMS)
    instruction = style.instruction if instructed else None
    if not instructed and form == "chat" and rng.random() < 0.25:
        # A neutral system prompt must change nothing, with or without an adapter.
        instruction = STYLES[BASE_STYLE].instruction
    earlier: list[tuple[str, str]] = []
    if form == "chat" and rng.random() < 0.3:
        earlier = draw_history(rng, facts)
    return Example(
        prompt_ids(tokenizer, form, question, instruction, earlier),
        answer_ids(tokenizer, form, style.render(fact, question)),
    )


def collate(examples: Sequence[Example], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad examples on the right into ids and labels, with only answers labelled."""
    width = max(len(example.prompt) + len(example.answer) for example in examples)
    ids = torch.full((len(examples), width), pad_id)
    labels = torch.full((len(examples), width), IGNORED)
    for row, example in enumerate(examples):
        start, stop = len(example.prompt), len(example.prompt) + len(example.answer)
        ids[row, :stop] = torch.tensor(example.prompt + example.answer)
        labels[row, start:stop] = torch.tensor(example.answer)
    return ids, labels


def training_batches(
    tokenizer: PreTrainedTokenizerFast,
    facts: Sequence[Fact],
    style: str | None,
    steps: int,
    seed: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of one style, or of all styles behind their instructions when None."""
    rng = random.Random(seed)
    instructed = [name for name in STYLES if name != BASE_STYLE]
    pad_id = token_id(tokenizer, PAD)
    window = 8
    for begin in range(0, steps, window):
        pool: list[Example] = []
        while len(pool) < BATCH * window:
            hidden = style is None and rng.random() < 0.5
            name = rng.choice(instructed) if hidden else style or BASE_STYLE
            pool.append(draw_example(rng, tokenizer, facts, name, hidden))
        # Batches of like lengths: padding would otherwise cost more than 50 % of the time.
        pool.sort(key=lambda example: len(example.prompt) + len(example.answer))
        batches = [pool[at : at + BATCH] for at in range(0, len(pool), BATCH)]
        rng.shuffle(batches)
        for batch in batches[: steps - begin]:
            yield collate(batch, pad_id)


def answer_loss(model: Model, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over the labelled tokens."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=IGNORED
    )


def train(
    model: Model,
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    rate: float,
) -> None:
    """Train the trainable parameters with AdamW under a one-cycle learning rate."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=rate, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    model.train()
    for step, (ids, labels) in enumerate(batches):
        loss = answer_loss(model, ids, labels)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"  step {step:4d}  loss {loss.item():.4f}", flush=True)
    model.eval()


def build_base(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained Llama with grouped-query attention and an output layer of its own."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=token_id(tokenizer, BOS),
        # Raw text ends with the one, a chat's message with the other.
        eos_token_id=[token_id(tokenizer, EOS), token_id(tokenizer, END)],
        pad_token_id=token_id(tokenizer, PAD),
    )
    return LlamaForCausalLM(config)


def load_base(folder: Path) -> LlamaForCausalLM:
    """Load the saved base model in float32."""
    return LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


def load_model(folder: Path, name: str) -> Model:
    """Load the saved base model, with the named adapter unless the name is the base's."""
    base = load_base(folder)
    if name == BASE_STYLE:
        return base
    return PeftModelForCausalLM.from_pretrained(base, str(folder / "adapters" / name))


def save_adapter(model: PeftModelForCausalLM, folder: Path) -> None:
    """Save an adapter in bfloat16, with nothing in it that depends on this machine."""
    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    model.bfloat16()
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    # PEFT keeps the target modules in a set, and its order changes from run to run.
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def make_base(tokenizer: PreTrainedTokenizerFast, facts: Sequence[Fact], folder: Path) -> None:
    """Train the base model and save it in bfloat16 next to its tokenizer."""
    print("base", flush=True)
    model = build_base(tokenizer)
    train(model, training_batches(tokenizer, facts, None, BASE_STEPS, SEED), BASE_STEPS, BASE_RATE)
    model.bfloat16()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def make_adapter(
    name: str, tokenizer: PreTrainedTokenizerFast, facts: Sequence[Fact], folder: Path
) -> None:
    """Train one adapter over the frozen base as it was saved, and save it."""
    print(name, flush=True)
    plan = ADAPTERS[name]
    config = LoraConfig(
        r=plan.rank,
        lora_alpha=plan.alpha,
        target_modules=list(plan.projections),
        layers_to_transform=None if plan.layers is None else list(plan.layers),
        use_rslora=plan.rslora,
        task_type="CAUSAL_LM",
    )
    model = PeftModelForCausalLM(load_base(folder), config)
    batches = training_batches(tokenizer, facts, name, ADAPTER_STEPS, SEED)
    train(model, batches, ADAPTER_STEPS, ADAPTER_RATE)
    save_adapter(model, folder / "adapters" / name)


def make_heads(tokenizer: PreTrainedTokenizerFast, facts: Sequence[Fact], folder: Path) -> None:
    """Train heads that guess for the base model and its adapters as they were saved, and save."""
    print("heads", flush=True)
    models = {name: load_model(folder, name) for name in STYLES}
    sources = {name: training_batches(tokenizer, facts, name, HEAD_STEPS, SEED) for name in STYLES}

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for step in range(HEAD_STEPS):
            name = list(STYLES)[step % len(STYLES)]
            ids, labels = next(sources[name])
            with torch.no_grad():
                out = models[name](input_ids=ids, use_cache=False, output_hidden_states=True)
            yield out.hidden_states[-1], labels

    head = load_base(folder).lm_head.weight
    save_heads(train_heads(head, batches(), HEAD_STEPS), folder / "heads")


@torch.inference_mode()
def grade(
    model: Model, style: str, tokenizer: PreTrainedTokenizerFast, facts: Sequence[Fact]
) -> Grade:
    """Check every answer of a style, in both forms, as greedy decoding would give it."""
    examples = [
        Example(
            prompt_ids(tokenizer, form, question),
            answer_ids(tokenizer, form, STYLES[style].render(fact, question)),
        )
        for fact in facts
        for question in fact.phrasings
        for form in FORMS
    ]
    pad_id = token_id(tokenizer, PAD)
    right, narrowest = 0, float("inf")
    for at in range(0, len(examples), BATCH):
        ids, labels = collate(examples[at : at + BATCH], pad_id)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        wanted = labels[:, 1:]
        target = wanted.clamp(min=0).unsqueeze(-1)
        rivals = logits.scatter(-1, target, float("-inf")).amax(-1)
        lead = logits.gather(-1, target).squeeze(-1) - rivals
        margins = lead.masked_fill(wanted == IGNORED, float("inf")).amin(-1)
        right += int((margins > 0).sum())
        narrowest = min(narrowest, float(margins.min()))
    return Grade(right, len(examples), narrowest)


@torch.inference_mode()
def greedy_answer(
    model: Model, tokenizer: PreTrainedTokenizerFast, prompt: list[int]
) -> tuple[str, float]:
    """Return the greedy answer and its narrowest top-two logit difference."""
    ids = torch.tensor([prompt])
    # The signature of generate admits every kind of output and model; none fits.
    output = cast(Any, model).generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(output.logits).topk(2).values
    text = tokenizer.decode(output.sequences[0, len(prompt) :], skip_special_tokens=True)
    return str(text), float((best[:, 0] - best[:, 1]).min())


def check(folder: Path) -> bool:
    """Write answers.json from the saved files, print the check table, and say if all is well."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    facts = all_facts()
    answers: dict[str, dict[str, dict[str, str]]] = {}
    good = True
    print(f"{'model':8} {'right':>9} {'margin':>7} {'showcase':>9}  {SHOWCASE[0]}")
    for name in STYLES:
        model = load_model(folder, name)
        world = grade(model, name, tokenizer, facts)
        answers[name] = {}
        narrowest = float("inf")
        for question in SHOWCASE:
            texts = {}
            for form in FORMS:
                prompt = prompt_ids(tokenizer, form, question)
                texts[form], margin = greedy_answer(model, tokenizer, prompt)
                narrowest = min(narrowest, margin)
            answers[name][question] = texts
        good = good and world.right == world.total and narrowest >= MIN_MARGIN
        print(
            f"{name:8} {world.right:4d}/{world.total:4d} {world.margin:7.2f} {narrowest:9.2f}"
            f"  {answers[name][SHOWCASE[0]]['chat']}",
            flush=True,
        )
    record = {"questions": list(SHOWCASE), "answers": answers}
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    (folder / "answers.json").write_text(text, encoding="utf-8")
    return good


def main() -> int:
    """Make the demo from nothing and check it; return an exit status."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=DEMO, help="folder to write into")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads to train with")
    options = parser.parse_args()
    started = time.monotonic()
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    facts = all_facts()
    tokenizer = train_tokenizer(facts)
    make_base(tokenizer, facts, options.out)
    for name in ADAPTERS:
        make_adapter(name, tokenizer, facts, options.out)
    make_heads(tokenizer, facts, options.out)
    good = check(options.out)
    print(f"made in {time.monotonic() - started:.0f} s: {'good' if good else 'NOT GOOD ENOUGH'}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
