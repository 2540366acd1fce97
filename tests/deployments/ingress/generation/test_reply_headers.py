from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.ingress.generation.reply_headers import safe


@settings(deadline=None)
@given(value=st.text(st.characters(), max_size=30))
def test_any_string_is_a_header_value(value: str) -> None:
    assert all(0x21 <= ord(char) <= 0x7E for char in safe(value))


def test_ordinary_names_stay_readable() -> None:
    assert safe("org/my-adapter@v1.0") == "org/my-adapter@v1.0"
    assert safe("50% ü\r\nx-evil: 1") == "50%25%20%C3%BC%0D%0Ax-evil:%201"
