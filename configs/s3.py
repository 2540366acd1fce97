"""A service with S3's interface."""

from pydantic import Field

from configs.base import URL, Config


class S3ServiceConfig(Config):
    """Where the service is; credentials come by boto3's usual chain.

    endpoint_url: of another service with S3's interface; None is AWS.
    region: None: as boto3 finds it.
    """

    endpoint_url: str | None = Field(default=None, pattern=URL)
    region: str | None = None
