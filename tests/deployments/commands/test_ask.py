"""A chat on the terminal, and what Ctrl-C ends."""

from collections.abc import Generator
from typing import Any

import pytest

from deployments.commands.ask import ChatSession
from deployments.commands.server import Json, Server


class Talker(Server):
    """A server whose answers are given; None in an answer is the user's Ctrl-C."""

    def __init__(self, *answers: list[str | None]) -> None:
        super().__init__("http://nowhere", None)
        self._answers = list(answers)
        self.bodies: list[Any] = []
        self.num_closed = 0

    def stream(self, path: str, body: Json) -> Generator[Json, None, None]:
        self.bodies.append(body)
        try:
            for piece in self._answers.pop(0):
                if piece is None:
                    raise KeyboardInterrupt
                yield {"choices": [{"delta": {"content": piece}}]}
            yield {"choices": []}
        finally:
            self.num_closed += 1


def reader(*lines: str | type[BaseException]) -> Any:
    """An `input` that types these lines; then the user presses Ctrl-D."""
    waiting = list(lines)

    def read(prompt: str) -> str:
        line = waiting.pop(0) if waiting else EOFError
        if isinstance(line, str):
            return line
        raise line

    return read


def test_each_message_is_sent_with_the_conversation() -> None:
    server = Talker(["Par", "is."], ["Rome."])
    chat = ChatSession(server, {"model": "pirate"}, "Be brief.")
    chat.run(reader("France?", "", "Italy?"))
    assert server.bodies[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "Italy?"},
    ]


def test_ctrl_c_ends_an_answer_and_not_the_chat(capsys: pytest.CaptureFixture[str]) -> None:
    server = Talker(["Once upon ", None, "never said"], ["Yes."])
    chat = ChatSession(server, {"model": ""})
    chat.run(reader("A story!", "Still there?"))
    assert server.num_closed == 2
    assert chat.messages[1] == {"role": "assistant", "content": "Once upon "}
    assert chat.messages[3]["content"] == "Yes."
    assert "never said" not in capsys.readouterr().out


def test_ctrl_c_at_the_prompt_ends_the_chat() -> None:
    server = Talker(["Never bodies."])
    ChatSession(server, {"model": ""}).run(reader(KeyboardInterrupt, "Hello?"))
    assert server.bodies == []


def test_clear_forgets_all_but_the_opening() -> None:
    server = Talker(["One."], ["Two."])
    chat = ChatSession(server, {"model": ""}, "Count.")
    chat.run(reader("Go", "/clear", "/adapter red", "Again"))
    assert [m["role"] for m in server.bodies[1]["messages"]] == ["system", "user"]
    assert server.bodies[1]["model"] == "red"
