"""What a base model is for, as its folder says: generating, classifying or embedding."""

from enum import StrEnum

import msgspec

from configs.wire.sampling import Pooling


class TaskKind(StrEnum):
    """What a model's own head is made for; the values are vLLM's."""

    GENERATE = "generate"
    CLASSIFY = "classify"
    EMBED = "embed"


class ScoreActivation(StrEnum):
    """What turns logits into scores."""

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


class ModelTask(msgspec.Struct, frozen=True):
    """A base model's task, and what its results mean.

    labels: of its classification head, in the order of the logits.
    problem_type: transformers' setting of that name; it selects the activation of labels.
    pair_activation: of the one logit of a pair; None: a sigmoid.
    pad_token_id: the token that a decoder's classification head passes over; None: it reads the
    last one.
    pooling, normalize: how an embedding model makes its embeddings; Pooling.NONE: it does not say.
    """

    task: TaskKind = TaskKind.GENERATE
    labels: tuple[str, ...] = ()
    problem_type: str | None = None
    pair_activation: ScoreActivation | None = None
    pad_token_id: int | None = None
    pooling: Pooling = Pooling.NONE
    normalize: bool = False

    def activation(self, num_labels: int) -> ScoreActivation:
        """The activation of so many logits, by the rule of transformers' pipeline."""
        if self.problem_type == "regression":
            return ScoreActivation.NONE
        if self.problem_type == "multi_label_classification" or num_labels == 1:
            return ScoreActivation.SIGMOID
        return ScoreActivation.SOFTMAX

    def label(self, index: int, num_labels: int) -> str:
        """The name of a label; an adapter's head with labels of another number has no names."""
        return self.labels[index] if len(self.labels) == num_labels else f"LABEL_{index}"
