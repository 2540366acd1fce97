"""A folder's tokenizer as transformers' AutoTokenizer makes it, for the `tokenizers` library.

What a folder's files mean depends on their tokenizer class, on four files beside tokenizer.json and
on the model's type; transformers knows. It is asked once, in a process of its own: so neither
transformers nor tensors come into the ingress, and a repository's own code, where the operator
trusts it, runs there.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
_START = (
    f"import sys; sys.path.insert(0, {_PACKAGE_ROOT!r}); "
    "from deployments.ingress.text.conversion import export; export(*sys.argv[1:])"
)
# Vocabularies of a million tokens take a minute on a busy machine.
_LONGEST_S = 600.0
_VOCABULARIES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
)
_SAVE = "save one with AutoTokenizer.from_pretrained(model).save_pretrained(folder)"
_IN_PYTHON = ("__call__", "_encode_plus", "_decode", "decode", "clean_up_tokenization")
_SAME_IN_EFFECT = {"CodeGenTokenizer": ("decode",)}
"""Overridden for arguments that nobody gives here."""


class Converted(msgspec.Struct, frozen=True):
    """A tokenizer as data.

    description: as tokenizer.json has it. special_tokens: by the names that chat templates know
    them by. splits_special: special tokens in a text are read as text. tidies: decoding removes
    spaces before punctuation. apart: words whose presence makes the class encode in another way.
    """

    description: str = ""
    special_tokens: dict[str, str] = {}
    splits_special: bool = False
    tidies: bool = False
    apart: tuple[str, ...] = ()
    refusal: str = ""

    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        tokenizer: Tokenizer = Tokenizer.from_str(self.description)
        tokenizer.encode_special_tokens = self.splits_special
        return tokenizer


def convert(folder: Path, trust_remote_code: bool = False) -> Converted:
    """The folder's tokenizer; ValueError with a sentence for what cannot be served.

    FileNotFoundError where there is none.
    """
    if not any(path.is_file() for name in _VOCABULARIES for path in folder.glob(name)):
        raise FileNotFoundError(
            f"{folder} has no tokenizer.json: a fast tokenizer is required; {_SAVE}"
        )
    command = [sys.executable, "-c", _START, str(folder), "trust" if trust_remote_code else ""]
    done = subprocess.run(command, capture_output=True, timeout=_LONGEST_S, check=False)
    if done.returncode:
        words = " ".join(done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:])
        if not (folder / "tokenizer.json").is_file():
            words += f" (a folder without tokenizer.json needs the sentencepiece package; {_SAVE})"
        raise ValueError(f"the tokenizer in {folder} cannot be read: {words}")
    found = msgspec.msgpack.decode(done.stdout, type=Converted)
    if found.refusal:
        raise ValueError(f"the tokenizer in {folder} is not served: {found.refusal}")
    return found


def export(folder: str, trust: str) -> None:
    """Write the folder's tokenizer to stdout; the whole life of `convert`'s process."""
    sink, sys.stdout = sys.stdout.buffer, sys.stderr
    if not trust:
        # What transformers does with tensors takes it seconds to import, and texts need none of it.
        sys.modules["torch"] = None  # type: ignore[assignment]
    sink.write(msgspec.msgpack.encode(converted(folder, bool(trust))))


def converted(folder: str, trust_remote_code: bool) -> Converted:
    """What `export` writes."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=trust_remote_code
    )
    kind = type(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return Converted(refusal=f"{kind.__name__} works in Python; a fast tokenizer is required")
    changed = _changed(kind)
    apart = [tokenizer.fill_token] if kind.__name__ == "CodeLlamaTokenizer" else []
    if changed and not apart:
        words = f"{kind.__name__} has a {changed[0]} of its own, in Python"
        return Converted(refusal=f"{words}: what it changes would be lost")
    backend.no_truncation()
    backend.no_padding()
    converted = Converted(
        description=backend.to_str(),
        special_tokens=tokenizer.special_tokens_map,
        splits_special=tokenizer.split_special_tokens,
        tidies=_tidies(tokenizer),
        apart=tuple(word for word in apart if word),
    )
    if not _same(converted.tokenizer(), backend):
        return Converted(refusal="its added tokens have other ids when it is saved and read again")
    return converted


def _changed(kind: type[Any]) -> Sequence[str]:
    """Which of a class's ways between text and ids are not those of all fast tokenizers."""
    from transformers import PreTrainedTokenizerFast

    excused = _SAME_IN_EFFECT.get(kind.__name__, ())
    return [
        name
        for name in _IN_PYTHON
        if getattr(kind, name) is not getattr(PreTrainedTokenizerFast, name) and name not in excused
    ]


def _tidies(tokenizer: Any) -> bool:
    """Whether decoding cleans up, as `TokenizersBackend._decode` decides it."""
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return not is_bpe or bool(getattr(tokenizer, forced, False))


def _same(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers have the same tokens by the same ids."""
    added, others = one.get_added_tokens_decoder(), other.get_added_tokens_decoder()
    same_added = {id: repr(token) for id, token in added.items()} == {
        id: repr(token) for id, token in others.items()
    }
    return same_added and one.get_vocab() == other.get_vocab()
