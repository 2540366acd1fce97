"""A folder's tokenizer as transformers' AutoTokenizer makes it, for the `tokenizers` library.

What a folder's files mean depends on the tokenizer class, on four files beside tokenizer.json and
on the model's type. transformers knows these rules. It runs once, in a process of its own: so
neither transformers nor torch is imported into the ingress, and a repository's own code, if the
operator trusts it, runs there too.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from configs.reading import has_tokenizer

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
_START = (
    f"import sys; sys.path.insert(0, {_PACKAGE_ROOT!r}); "
    "from deployments.ingress.text.conversion import export; export(*sys.argv[1:])"
)
# Vocabularies of a million tokens take a minute on a busy machine.
_LONGEST_S = 600.0
_SAVE = "save one with AutoTokenizer.from_pretrained(model).save_pretrained(folder)"
_IN_PYTHON = ("__call__", "_encode_plus", "_decode", "decode", "clean_up_tokenization")
_SAME_IN_EFFECT = {"CodeGenTokenizer": ("decode",)}
"""Overridden methods that differ only for arguments that this server never passes."""


class Converted(msgspec.Struct, frozen=True):
    """A tokenizer as data.

    description: the content of a tokenizer.json.
    special_tokens: by their names in chat templates, e.g. "bos_token".
    splits_special: special tokens in a text are encoded as plain text.
    cleans_up: decoding removes spaces before punctuation.
    refused_strings: texts with one of these are not served; the class encodes them by other rules.
    refusal: why the tokenizer is not served, "" if it is.
    """

    description: str = ""
    special_tokens: dict[str, str] = {}
    splits_special: bool = False
    cleans_up: bool = False
    refused_strings: tuple[str, ...] = ()
    refusal: str = ""

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer."""
        tokenizer: Tokenizer = Tokenizer.from_str(self.description)
        tokenizer.encode_special_tokens = self.splits_special
        return tokenizer


def convert(folder: Path, trust_remote_code: bool = False) -> Converted:
    """The folder's tokenizer, read in another process.

    FileNotFoundError if there is none; ValueError with the reason if it cannot be served.
    """
    if not has_tokenizer(folder):
        raise FileNotFoundError(
            f"{folder} has no tokenizer.json: a fast tokenizer is required; {_SAVE}"
        )
    command = [sys.executable, "-c", _START, str(folder), "trust" if trust_remote_code else ""]
    done = run(command)
    if done.returncode:
        reason = " ".join(done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:])
        if not (folder / "tokenizer.json").is_file():
            reason += f" (a folder without tokenizer.json needs the sentencepiece package; {_SAVE})"
        raise ValueError(f"the tokenizer in {folder} cannot be read: {reason}")
    found = msgspec.msgpack.decode(done.stdout, type=Converted)
    if found.refusal:
        raise ValueError(f"the tokenizer in {folder} is not served: {found.refusal}")
    return found


def run(command: Sequence[str]) -> "subprocess.CompletedProcess[bytes]":
    """Run a command that calls `export`, to its end."""
    return subprocess.run(command, capture_output=True, timeout=_LONGEST_S, check=False)


def export(folder: str, trust: str) -> None:
    """Write the folder's tokenizer to stdout; `convert` starts a process for this call."""
    # Libraries print; only the result may go to stdout.
    sink, sys.stdout = sys.stdout.buffer, sys.stderr
    if not trust:
        # Importing torch takes transformers seconds, and tokenizers do not need it.
        sys.modules["torch"] = None  # type: ignore[assignment]
    sink.write(msgspec.msgpack.encode(converted(folder, bool(trust))))


def converted(folder: str, trust_remote_code: bool) -> Converted:
    """Read the folder's tokenizer with transformers."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=trust_remote_code
    )
    kind = type(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return Converted(refusal=f"{kind.__name__} works in Python; a fast tokenizer is required")
    changed = _changed(kind)
    refused = [tokenizer.fill_token] if kind.__name__ == "CodeLlamaTokenizer" else []
    if changed and not refused:
        fault = f"{kind.__name__} has a {changed[0]} of its own, in Python"
        return Converted(refusal=f"{fault}: what it changes would be lost")
    backend.no_truncation()
    backend.no_padding()
    converted = Converted(
        description=backend.to_str(),
        special_tokens=tokenizer.special_tokens_map,
        splits_special=tokenizer.split_special_tokens,
        cleans_up=_cleans_up(tokenizer),
        refused_strings=tuple(each for each in refused if each),
    )
    if not _same(converted.tokenizer(), backend):
        return Converted(refusal="its added tokens have other ids when it is saved and read again")
    return converted


def _changed(kind: type[Any]) -> Sequence[str]:
    """The methods in which a tokenizer class differs from all fast tokenizers."""
    from transformers import PreTrainedTokenizerFast

    excused = _SAME_IN_EFFECT.get(kind.__name__, ())
    return [
        name
        for name in _IN_PYTHON
        if getattr(kind, name) is not getattr(PreTrainedTokenizerFast, name) and name not in excused
    ]


def _cleans_up(tokenizer: Any) -> bool:
    """Whether decoding removes spaces; the rule of `TokenizersBackend._decode`."""
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return not is_bpe or bool(getattr(tokenizer, forced, False))


def _same(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers have the same tokens with the same ids."""
    added, others = one.get_added_tokens_decoder(), other.get_added_tokens_decoder()
    same_added = {id: repr(token) for id, token in added.items()} == {
        id: repr(token) for id, token in others.items()
    }
    return same_added and one.get_vocab() == other.get_vocab()
