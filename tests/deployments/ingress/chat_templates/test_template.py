import pytest
from jinja2 import TemplateSyntaxError

from deployments.contract import ErrorKind
from deployments.ingress.chat_templates.template import ChatTemplate, Conversation
from deployments.ingress.http.errors import RequestError

MESSAGES = [{"role": "user", "content": "<b> & 'q' ü"}]


def _rendered(source: str, **variables: object) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(Conversation(MESSAGES, variables))


def test_blocks_leave_no_white_space() -> None:
    source = (
        "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}"
    )
    assert _rendered(source) == "user\n"


def test_json_is_what_models_were_trained_on() -> None:
    assert _rendered("{{ messages[0].content | tojson }}") == "\"<b> & 'q' ü\""
    assert _rendered("{{ {'a': 1} | tojson(indent=1) }}") == '{\n "a": 1\n}'


def test_the_prompt_for_an_answer_can_be_left_out() -> None:
    source = "{% if add_generation_prompt %}go{% endif %}"
    assert _rendered(source) == "go"
    assert _rendered(source, add_generation_prompt=False) == ""


def test_variables_reach_the_template_but_messages_stay() -> None:
    assert _rendered("{{ think }}{{ bos_token }}{{ messages[0].role }}", think=1, messages=[]) == (
        "1<s>user"
    )


def test_loop_controls_and_generation_marks_are_known() -> None:
    source = "{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}"
    assert _rendered(source) == "1"
    assert _rendered("{% generation %}kept{% endgeneration %}") == "kept"


def test_the_year_is_known() -> None:
    assert _rendered("{{ strftime_now('%Y') }}").isdigit()


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_what_goes_wrong_in_a_template_is_the_messages_fault(source: str) -> None:
    with pytest.raises(RequestError, match="chat template refused") as caught:
        _rendered(source)
    assert caught.value.kind is ErrorKind.VALIDATION


def test_a_broken_template_is_found_at_once() -> None:
    with pytest.raises(TemplateSyntaxError):
        ChatTemplate("{% if %}", {})
