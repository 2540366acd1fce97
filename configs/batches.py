"""Files and batches: where they are kept, and their bounds."""

from pydantic import PositiveInt, field_validator, model_validator

from configs.base import Config


class BatchesConfig(Config):
    """`/v1/files` and `/v1/batches`; without `storage` both are off.

    storage: an absolute folder that all nodes share, or s3://bucket/prefix, with the credentials of
    the environment; `?endpoint_override=host:port&scheme=http` names another service.
    max_file_bytes: of one uploaded file.
    max_lines: requests of one batch.
    max_files, max_stored_bytes: of one API key, or of all callers without one together.
    max_open: batches of one API key that have not ended.
    max_running: requests of batches that run at once.
    keep_days: after which files and batches are deleted.
    """

    storage: str | None = None
    max_file_bytes: PositiveInt = 100 * 2**20
    max_lines: PositiveInt = 50_000
    max_files: PositiveInt = 1000
    max_stored_bytes: PositiveInt = 10 * 2**30
    max_open: PositiveInt = 16
    max_running: PositiveInt = 64
    keep_days: PositiveInt = 30

    @field_validator("storage")
    @classmethod
    def _is_a_place(cls, given: str | None) -> str | None:
        if given is not None and not given.startswith(("/", "s3://")):
            raise ValueError(f"`{given}` is no absolute folder and no s3://bucket/prefix")
        return given

    @model_validator(mode="after")
    def _bounds_have_a_storage(self) -> "BatchesConfig":
        if self.storage is None and self.model_fields_set - {"storage"}:
            raise ValueError("without `storage` there are no files and batches: set it")
        return self
