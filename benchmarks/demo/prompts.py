"""The demo model's tokenizer, and its two forms of prompt: raw text and chat."""

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.demo.world import STYLES, Fact

FORMS: Final = ("raw", "chat")
MAX_POSITIONS: Final = 1024
VOCABULARY: Final = 512

BOS, EOS, PAD, END = "<s>", "</s>", "<pad>", "<|end|>"
SPECIAL_TOKENS: Final = (BOS, EOS, PAD, "<|user|>", "<|assistant|>", "<|system|>", END)
CHAT_TEMPLATE: Final = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('unknown role: ' + message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def train_tokenizer(facts: Sequence[Fact]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on every question and answer of the world."""
    texts = [
        f"{question} {style.render(fact, question)}"
        for fact in facts
        for question in fact.phrasings
        for style in STYLES.values()
    ]
    texts += [style.instruction for style in STYLES.values()]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, bpe.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>", END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
    )


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """Return the id of one token of the vocabulary."""
    return int(tokenizer.get_vocab()[token])


def prompt_ids(
    tokenizer: PreTrainedTokenizerFast,
    form: str,
    question: str,
    instruction: str | None = None,
    earlier: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """Return the ids of a prompt in one of the two forms, as a server would build them."""
    if form == "raw":
        text = question if instruction is None else f"{instruction} {question}"
        return [int(token) for token in tokenizer(text)["input_ids"]]
    messages = [] if instruction is None else [{"role": "system", "content": instruction}]
    for question, answer in earlier:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": question})
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def answer_ids(tokenizer: PreTrainedTokenizerFast, form: str, answer: str) -> list[int]:
    """Return the ids of an answer; after raw text it starts with a space, as prose would."""
    text = f" {answer}{EOS}" if form == "raw" else f"{answer}{END}"
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
