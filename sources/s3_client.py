"""The client of an S3 service, and what its errors mean."""

import importlib
from dataclasses import dataclass
from typing import Any

from configs.s3 import S3ServiceConfig

_UNANSWERED = ("NoCredentialsError", "PartialCredentialsError", "NoRegionError")


@dataclass(frozen=True)
class S3Client:
    """boto3's client and its module of errors; boto3 itself repeats requests."""

    api: Any
    errors: Any

    def is_transient(self, error: Exception) -> bool:
        """Return whether it is a transient status, or a broken connection."""
        if isinstance(error, self.errors.ClientError):
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return status >= 500 or status in (408, 429)
        if type(error).__name__ in _UNANSWERED:
            return False
        return isinstance(error, self.errors.BotoCoreError)


def connect(
    config: S3ServiceConfig,
    setting: str,
    connect_timeout_s: float,
    read_timeout_s: float,
    attempts: int,
) -> S3Client:
    """Return a client; nothing is sent yet.

    setting: what needs it. ImportError names the package to install if boto3 is missing.
    """
    try:
        boto3 = importlib.import_module("boto3")
        botocore = importlib.import_module("botocore.config")
        errors = importlib.import_module("botocore.exceptions")
    except ImportError as error:
        raise ImportError(
            f"{setting} needs boto3, which is not installed: pip install loray[s3]"
        ) from error
    api = boto3.session.Session().client(
        "s3",
        endpoint_url=config.endpoint_url,
        region_name=config.region,
        config=botocore.Config(
            connect_timeout=connect_timeout_s,
            read_timeout=read_timeout_s,
            retries={"total_max_attempts": attempts, "mode": "standard"},
            # Services other than AWS seldom have a host name for each bucket.
            s3={"addressing_style": "path" if config.endpoint_url else "auto"},
        ),
    )
    return S3Client(api, errors)


def error_code(error: Any) -> str:
    """Return the service's name of an error."""
    return str(error.response.get("Error", {}).get("Code", "no answer"))
