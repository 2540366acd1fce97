"""Bodies of /classify, /pooling, /score and /rerank: vLLM's, Jina's and Cohere's; LoRAX's too."""

from typing import Annotated, Literal

from pydantic import AliasChoices, ConfigDict, Discriminator, Field, Tag, field_validator

from deployments.ingress.http.body_lists import Items
from deployments.ingress.http.body_values import Natural, Typed
from deployments.ingress.http.unicode import Unicode
from deployments.ingress.lorax.schema import GenerateParameters, GenerateRequestBody
from deployments.ingress.prompts import PromptBody
from deployments.ingress.requests.schema import PromptInput, prompts_of

Texts = Unicode | Items[Unicode]


class _Scored(PromptBody):
    """use_activation, or its older name: whether scores are probabilities, not raw logits."""

    use_activation: bool | None = Field(
        None, validation_alias=AliasChoices("use_activation", "activation")
    )

    @property
    def activates(self) -> bool:
        """Whether logits go through the model's activation."""
        return self.use_activation is not False


class ClassifyBody(_Scored):
    """POST /v1/classify, and vLLM's form of /classify."""

    input: list[str | list[int]]

    @field_validator("input", mode="plain", json_schema_input_type=PromptInput)
    @classmethod
    def _inputs(cls, given: object) -> list[str | list[int]]:
        return prompts_of(given)


def _form(given: object) -> str:
    """Which server's form of /classify a body has."""
    return "lorax" if isinstance(given, dict) and "inputs" in given else "vllm"


EitherClassifyBody = Annotated[
    Annotated[GenerateRequestBody, Tag("lorax")] | Annotated[ClassifyBody, Tag("vllm")],
    Discriminator(_form),
]
"""POST /classify: LoRAX's form has `inputs`, and of its parameters those of adapters matter."""


class ClassifyBatchBody(Typed):
    """POST /classify_batch."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    inputs: Items[Unicode]
    parameters: GenerateParameters | None = None


class PoolingBody(ClassifyBody):
    """POST /pooling; task: of the result, what the model is for if it is absent."""

    task: Literal["classify", "embed"] | None = None
    encoding_format: Literal["float"] | None = None
    normalize: bool | None = None


class ScoreBody(_Scored):
    """POST /score: pairs of texts, one with each or one with all."""

    text_1: Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: Texts = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))


class Document(Typed):
    """A document in a field of its own."""

    model_config = ConfigDict(frozen=True)

    text: Unicode


class RerankBody(_Scored):
    """POST /rerank: documents in the order of their scores with a query.

    top_n: how many of the best are in the reply; 0: all.
    """

    query: Unicode
    documents: Items[Unicode | Document]
    top_n: Natural = 0
    return_documents: bool = True

    @field_validator("top_n", mode="before")
    @classmethod
    def _all(cls, given: object) -> object:
        return 0 if given is None else given

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return [each if isinstance(each, str) else each.text for each in self.documents]
