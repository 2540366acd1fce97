"""Imports transformers without torch, as the process that reads a server's tokenizer does."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]

from transformers import AutoTokenizer as AutoTokenizer  # noqa: E402
from transformers import PreTrainedTokenizerFast as PreTrainedTokenizerFast  # noqa: E402
