"""The version of LoRay; pyproject.toml reads it too."""

VERSION = "0.2.0"
