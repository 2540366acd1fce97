"""Every causal class of the installed transformers as it is served, beside transformers + PEFT.

    python -m tests.modeling.models.sweep [--padded] [--variant plain|longrope|dynamic] [KIND ...]
    python -m tests.modeling.models.sweep --gpu [--variant ...] [KIND ...]
    python -m tests.modeling.models.sweep --page

The base model and two adapters on all linear maps share batches of unequal rows, some preempted;
paged classes also cut prompts into chunks, meet the prefix cache, and run on two ranks. The truth
is `generate` of one request at a time. An outcome is exact, refused with its sentence, or wrong;
the command fails when anything is wrong. --page writes docs/models.md. --gpu serves on one GPU,
paged classes launched and captured, in float32 and in bfloat16, which must come near.
"""

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from modeling.adapters.projection import ProjectionKind
from sharding.checkpoint import CheckpointError
from tests.modeling.models.sweep_serving import (
    ON_CPU,
    ROUNDED,
    PaddedServer,
    PagedServer,
    server,
)
from tests.modeling.models.sweep_truth import (
    NoTruthError,
    Oracle,
    Told,
    linears,
    prompts,
    write_random_adapter,
)
from tests.modeling.models.tiny_causal import VARIANTS, kinds, write_tiny
from tests.modeling.stepping import Answer
from tests.models_page import PAGE, Row, models_page

TOLERANCE = 2e-3
"""On logprobs in float32, against sums taken in another order."""

ROUNDING = 0.1
"""In bfloat16 on half of the rows of logprobs, root mean square, beyond twice what a CPU's have.

One request may be farther off.
"""


@dataclass(frozen=True)
class Outcome:
    """How a kind fared, and what to say of it.

    word: "exact", "refused", "wrong", "no truth" or "not built".
    served: "paged" or "padded"; "" where nothing is. targets: what adapters may change.
    """

    word: str
    why: str = ""
    served: str = ""
    targets: tuple[str, ...] = ()


def sweep(
    root: Path, kind: str, variant: str = "plain", *, padded: bool = False, gpu: bool = False
) -> Outcome:
    """Judge one kind; writes its model and adapters below `root`.

    padded: whether to judge the padded runner for classes that are paged too. gpu: whether to serve
    on one.
    """
    try:
        model = write_tiny(root / "model", kind, variant)
    except Exception as error:
        return Outcome("not built", _short(error))
    try:
        Oracle(model, exact=False).told(None, prompts()[0][1])
    except Exception as error:
        return Outcome("no truth", _short(error))
    try:
        served = server(model, padded=padded, gpu=gpu)
    except (ValueError, CheckpointError) as error:
        return Outcome("refused", _short(error))
    except Exception as error:
        return Outcome("wrong", f"the start ends: {_short(error)}")
    return _judge(root, model, served)


def _judge(root: Path, model: Path, served: PagedServer | PaddedServer) -> Outcome:
    word = "padded" if isinstance(served, PaddedServer) else "paged"
    # Experts and routers are parameters: parity/test_experts.py has them.
    routers = _names(served, lambda kind: kind is ProjectionKind.ROUTER)
    maps = [name for name in linears(model) if name not in routers]
    inside = _names(served, lambda kind: not kind.of_vocabulary)
    paths = [name for name in inside if name in maps]
    targets = tuple(dict.fromkeys(path.rsplit(".", 1)[-1] for path in paths))
    left_out = sorted(set(maps) - set(paths))
    folders = [] if not paths else [
        write_random_adapter(root / name, model, paths, seed)
        for seed, name in enumerate(("one", "two"))
    ]  # fmt: skip
    note = f"; takes no adapters: {', '.join(left_out[:4])}" if left_out else ""
    try:
        found = _errors(Oracle(model, exact=served.exact), served, folders)
    except NoTruthError as error:
        return Outcome("no truth", str(error), word, targets)
    wrong = any(not error <= _bound(way, found) for way, error in found.items())
    text = ", ".join(f"{way} {error:.2g}" for way, error in found.items())
    return Outcome("wrong" if wrong else "exact", f"{text}{note}", word, targets)


def _names(
    served: PagedServer | PaddedServer, wanted: Callable[[ProjectionKind], bool]
) -> list[str]:
    """The modules of projections of the kinds that are wanted, which PEFT finds."""
    return [name for each in served.projections if wanted(each.kind) and not each.is_lost
            for layer in range(each.num_layers) for name in each.modules(layer)]  # fmt: skip


def _errors(
    oracle: Oracle, served: PagedServer | PaddedServer, folders: Sequence[Path]
) -> dict[str, float]:
    """The largest error of all requests for each way in which they were served."""
    named = {folder.name: folder for folder in folders}
    found: dict[str, float] = {}
    for way, asked, answers in served.serve(folders):
        told = [oracle.told(named.get(name), prompt) for name, prompt in asked]
        pairs = zip(answers, told, strict=True)
        # Where rounding chooses another expert for a prompt's token, all rows behind it move: of
        # rounded answers the second worst counts.
        which, errors = (-2, _median) if way.startswith(ROUNDED) else (-1, error_of)
        worst = sorted(errors(answer, truth) for answer, truth in pairs)[which]
        found[way] = max(worst, found.get(way, 0.0))
    return found


def _bound(way: str, found: dict[str, float]) -> float:
    if way == ON_CPU:
        return float("inf")
    return ROUNDING + 2 * found[ON_CPU] if way.startswith(ROUNDED) else TOLERANCE


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]


def error_of(answer: Answer, told: Told) -> float:
    """The largest difference of logprobs, up to where the tokens part; NaN is infinite."""
    return max(float(row.abs().nan_to_num(nan=float("inf")).max()) for row in _rows(answer, told))


def _median(answer: Answer, told: Told) -> float:
    """The median over rows of the root mean square: another expert moves only some rows."""
    rows = [row.square().mean().sqrt().nan_to_num(nan=float("inf")) for row in _rows(answer, told)]
    return float(torch.stack(rows).median())


def _rows(answer: Answer, told: Told) -> Iterator[Tensor]:
    """The differences of logprobs, [vocab] for each token up to where the tokens part."""
    for step, token in enumerate(told.tokens):
        own = answer.logprobs[step]
        assert own is not None
        yield torch.tensor(own.top_logprobs) - told.logprobs[step][own.top_ids]
        if answer.tokens[step] != token:
            break


def quiet() -> None:
    """Leave a command's output to itself."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    bars: Any = transformers.utils.logging
    bars.disable_progress_bar()
    torch.set_num_threads(1)


def main(arguments: Sequence[str], say: Callable[[str], None] = print) -> int:
    """Sweep what the arguments name; the number of wrong ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--variant", choices=VARIANTS, default="plain")
    parser.add_argument("--padded", action="store_true", help="padded, where it is paged too")
    parser.add_argument("--gpu", action="store_true", help="on one GPU instead of CPU ranks")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE}, of all kinds")
    options = parser.parse_args(arguments)
    is_part = options.kinds or options.padded or options.gpu or options.variant != "plain"
    if options.page and is_part:
        parser.error("--page: the page is about all kinds as they are served")
    rows = []
    for kind in options.kinds or kinds():
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = sweep(
                    Path(folder), kind, options.variant, padded=options.padded, gpu=options.gpu
                )
            except Exception as error:
                outcome = Outcome("wrong", f"it ends: {_short(error)}")
        say(f"{outcome.word:9} {outcome.served:6} {kind:24} {outcome.why}")
        rows.append(Row(kind, outcome.word, outcome.served, outcome.why, outcome.targets))
    if options.page:
        PAGE.write_text(models_page(rows), encoding="utf-8")
        say(f"written: {PAGE}")
    return sum(row.word == "wrong" for row in rows)


if __name__ == "__main__":
    quiet()
    sys.exit(min(main(sys.argv[1:]), 1))
