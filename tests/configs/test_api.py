import hashlib

import pytest
from pydantic import ValidationError

from configs.api import ApiConfig, KeyConfig, SecretConfig

DIGEST = hashlib.sha256(b"k").hexdigest()


def test_a_secret_has_one_source_and_is_no_plain_text() -> None:
    assert SecretConfig(sha256=DIGEST.upper()).sha256 == DIGEST
    assert SecretConfig(env="LORAY_KEY").env == "LORAY_KEY"
    with pytest.raises(ValidationError, match="exactly one"):
        SecretConfig()
    with pytest.raises(ValidationError, match="exactly one"):
        SecretConfig(sha256=DIGEST, env="X")
    for plain in ("sk-secret", DIGEST[:-1], "g" * 64):
        with pytest.raises(ValidationError, match="sha256sum"):
            SecretConfig(sha256=plain)


def test_names_of_keys_differ() -> None:
    key = KeyConfig(name="a", sha256=DIGEST)
    with pytest.raises(ValidationError, match="same name"):
        ApiConfig(keys=(key, key))


def test_patterns_name_no_revisions() -> None:
    KeyConfig(name="a", sha256=DIGEST, adapters=("hub:acme/*", "poet", "*:p?et", "s3://b/*"))
    with pytest.raises(ValidationError, match="leave `@v2` out"):
        KeyConfig(name="a", sha256=DIGEST, adapters=("hub:acme/sql@v2",))
    with pytest.raises(ValidationError, match="names no adapter"):
        KeyConfig(name="a", sha256=DIGEST, adapters=("",))


def test_no_site_may_act_for_all_others() -> None:
    assert ApiConfig().cors_allow_origin == ()
    ApiConfig(cors_allow_origin=("https://a.example",), cors_allow_credentials=True)
    with pytest.raises(ValidationError, match="name the origins"):
        ApiConfig(cors_allow_origin=("*",), cors_allow_credentials=True)
