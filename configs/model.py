"""The base model: its files, how they are read, and the type that it computes in."""

from enum import StrEnum

from pydantic import Field, PositiveInt, model_validator

from configs.base import Config
from configs.s3 import S3ServiceConfig
from configs.sampling_defaults import SamplingDefaults


class DType(StrEnum):
    """The type of weights and activations; AUTO takes the checkpoint's own."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class LoadFormat(StrEnum):
    """SAFETENSORS reads the checkpoint; DUMMY makes seeded random weights of its shape."""

    SAFETENSORS = "safetensors"
    DUMMY = "dummy"


class Quantize(StrEnum):
    """Round the weights to 8 or 4 bits at load; the values are LoRAX's.

    FP8: e4m3, with a scale for each output; activations have one for each token. The others are
    those of bitsandbytes: in 8 bits a padded model's answer depends on its batch, as which columns
    of the inputs are not rounded depends on all rows together.
    """

    NONE = "none"
    FP8 = "fp8"
    BITSANDBYTES = "bitsandbytes"
    BITSANDBYTES_NF4 = "bitsandbytes-nf4"


class ToolParser(StrEnum):
    """The format in which the model writes tool calls; AUTO finds it in the chat template."""

    AUTO = "auto"
    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    GRANITE = "granite"
    QWEN3_CODER = "qwen3_coder"
    SEED = "seed"
    MINIMAX = "minimax"
    GLM = "glm"
    DEEPSEEK = "deepseek"
    DEEPSEEK_V32 = "deepseek_v32"
    KIMI = "kimi"
    GEMMA = "gemma"
    FUNCTION_GEMMA = "function_gemma"
    PYTHONIC = "pythonic"
    LFM2 = "lfm2"
    HARMONY = "harmony"


class ReasoningParser(StrEnum):
    """How the model marks its reasoning; AUTO finds it in the chat template, NONE splits nothing.

    THINK: <think>, as Qwen3, DeepSeek, GLM, Kimi and Hermes write. HARMONY: gpt-oss's channels.
    MISTRAL: [THINK]. GEMMA, SEED, COMMAND, GRANITE: of the models of that name.
    """

    AUTO = "auto"
    NONE = "none"
    THINK = "think"
    HARMONY = "harmony"
    MISTRAL = "mistral"
    GEMMA = "gemma"
    SEED = "seed"
    COMMAND = "command"
    GRANITE = "granite"


class ModelConfig(Config):
    """The base model.

    id: a folder, a hub id, or "s3://bucket/prefix". `configs/...` paths are looked up beside the
    installed package too, so the demo is found from any working directory.
    revision: branch, tag or commit of a hub id; None: the hub's `main`.
    dtype: the type of weights and activations.
    allow_pickle: read the tensors of pytorch_model.bin where there are no safetensors; nothing
    else in it is unpickled.
    trust_remote_code: run the Python files of the model's repository, for architectures that
    transformers does not have.
    quantize: a checkpoint that is quantised says so itself.
    dequantised_fraction: the part of the memory behind weights and adapter pools in which weights
    of integers are kept as numbers of `dtype` too, layer by layer, for steps of many tokens, on
    CUDA. They make such steps faster, and change results by rounding at most.
    dynamic_rope_length: with dynamic rope, every sequence is computed as transformers computes one
    of this length; None: of the model's own length, and longer sequences are refused.
    sampling_defaults: what requests by OpenAI's and Anthropic's rules sample by where they leave it
    out.
    tool_parser: how tool calls are found in answers.
    reasoning_parser: how the reasoning of answers is found, and kept out of their text.
    s3: the service of an S3 address.
    cache_dir: the folder of downloads from S3; nothing in it is deleted.
    """

    id: str
    revision: str | None = None
    name: str | None = Field(
        default=None, description="what clients call it; default: the id's last part"
    )
    dtype: DType = DType.AUTO
    load_format: LoadFormat = LoadFormat.SAFETENSORS
    allow_pickle: bool = False
    trust_remote_code: bool = False
    quantize: Quantize = Quantize.NONE
    dequantised_fraction: float = Field(default=0.15, ge=0, lt=1)
    dynamic_rope_length: PositiveInt | None = None
    sampling_defaults: SamplingDefaults = SamplingDefaults.OPENAI
    tool_parser: ToolParser = ToolParser.AUTO
    reasoning_parser: ReasoningParser = ReasoningParser.AUTO
    s3: S3ServiceConfig = S3ServiceConfig()
    cache_dir: str = "~/.cache/loray/models"

    @model_validator(mode="after")
    def _revisions_are_the_hubs(self) -> "ModelConfig":
        if self.revision is not None and self.id.startswith("s3://"):
            raise ValueError(
                f"model.revision ({self.revision}) is for hub ids: a prefix of a bucket is a "
                "version; name another prefix"
            )
        return self

    @property
    def served_name(self) -> str:
        """The base model's name for clients."""
        return self.name or self.id.rstrip("/").rsplit("/", 1)[-1]
