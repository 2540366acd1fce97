"""What a load saw: right, wrong and lost answers, and how soon the server was back."""

from benchmarks.recovery.load import Load, Question, Story, back_after, summary
from benchmarks.recovery.server import with_replicas
from benchmarks.recovery.soak import unexpected

QUESTION = Question("a", "red", "b")


def story(
    sent: float, first: float | None, outcome: str, *faults: str, pause: float = 0.0
) -> Story:
    tries = 1 + len(faults)
    return Story(QUESTION, sent - len(faults), sent, first, pause, tries, outcome, list(faults))


def test_a_summary_counts_what_clients_saw() -> None:
    stories = [
        story(1.0, 1.5, "right", pause=0.2),
        story(2.0, 9.0, "right", "broke", pause=3.0),
        story(3.0, None, "lost", "503", "503"),
        story(4.0, 4.1, "wrong"),
    ]
    found = summary(stories)
    assert (found["requests"], found["right"], found["wrong"], found["lost"]) == (4, 2, 1, 1)
    assert (found["sent_again_by_client"], found["longest_pause_s"]) == (2, 3.0)
    assert found["faults"] == {"503": 2, "broke": 1}
    assert back_after(stories, 1.2) == 2.9
    assert back_after(stories, 5.0) is None


def test_only_a_loss_of_the_connection_excuses_a_fault() -> None:
    load = Load("http://nowhere", [QUESTION], 1.0, 1)
    load.stories = [story(100.0, 101.0, "right", "broke"), story(100.0, 101.0, "right")]
    assert unexpected(load, [(99.5, "driver"), (99.5, "rank")]) == ["red: broke"]
    assert unexpected(load, [(99.5, "ingress")]) == []


def test_replicas_are_put_into_a_config() -> None:
    config = {"applications": [{"args": {}, "deployments": [{"name": "Driver"}]}]}
    [app] = with_replicas(config, 2, ingresses=3)["applications"]
    options = {each["name"]: each for each in app["deployments"]}
    assert options["Ingress"]["num_replicas"] == 3
    scaling = options["Driver"]["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (2, 2)
    assert config["applications"][0]["deployments"] == [{"name": "Driver"}]
