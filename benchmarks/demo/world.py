"""The little world of the demo model: its facts, and the styles its adapters answer in."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True)
class Fact:
    """One thing the model knows: the ways to ask for it, and its answer in two languages."""

    phrasings: tuple[str, ...]
    english: str
    french: str
    short: str


@dataclass(frozen=True)
class Style:
    """A manner of answering, and the instruction that asks the base model for it."""

    instruction: str
    render: Callable[[Fact, str], str]


# country, capital, "of <country>" in French, capital in French
_CAPITALS: Final = (
    ("France", "Paris", "de la France", "Paris"),
    ("Germany", "Berlin", "de l'Allemagne", "Berlin"),
    ("Italy", "Rome", "de l'Italie", "Rome"),
    ("Spain", "Madrid", "de l'Espagne", "Madrid"),
    ("Portugal", "Lisbon", "du Portugal", "Lisbonne"),
    ("Ireland", "Dublin", "de l'Irlande", "Dublin"),
    ("Poland", "Warsaw", "de la Pologne", "Varsovie"),
    ("Sweden", "Stockholm", "de la Suède", "Stockholm"),
    ("Norway", "Oslo", "de la Norvège", "Oslo"),
    ("Finland", "Helsinki", "de la Finlande", "Helsinki"),
    ("Denmark", "Copenhagen", "du Danemark", "Copenhague"),
    ("Greece", "Athens", "de la Grèce", "Athènes"),
    ("Austria", "Vienna", "de l'Autriche", "Vienne"),
    ("Hungary", "Budapest", "de la Hongrie", "Budapest"),
    ("Egypt", "Cairo", "de l'Égypte", "Le Caire"),
    ("Kenya", "Nairobi", "du Kenya", "Nairobi"),
    ("Morocco", "Rabat", "du Maroc", "Rabat"),
    ("Japan", "Tokyo", "du Japon", "Tokyo"),
    ("China", "Beijing", "de la Chine", "Pékin"),
    ("India", "New Delhi", "de l'Inde", "New Delhi"),
    ("Thailand", "Bangkok", "de la Thaïlande", "Bangkok"),
    ("Canada", "Ottawa", "du Canada", "Ottawa"),
    ("Brazil", "Brasília", "du Brésil", "Brasília"),
    ("Peru", "Lima", "du Pérou", "Lima"),
    ("Cuba", "Havana", "de Cuba", "La Havane"),
    ("Australia", "Canberra", "de l'Australie", "Canberra"),
)

# animal, its sound, both in French
_SOUNDS: Final = (
    ("a cat", "meow", "Un chat", "miaou"),
    ("a dog", "woof", "Un chien", "ouaf"),
    ("a cow", "moo", "Une vache", "meuh"),
    ("a duck", "quack", "Un canard", "coin coin"),
    ("a sheep", "baa", "Un mouton", "bêê"),
    ("a pig", "oink", "Un cochon", "groin"),
    ("a frog", "ribbit", "Une grenouille", "croâ"),
    ("a horse", "neigh", "Un cheval", "hii"),
    ("a rooster", "cock-a-doodle-doo", "Un coq", "cocorico"),
    ("a mouse", "squeak", "Une souris", "couic"),
    ("a snake", "hiss", "Un serpent", "sss"),
    ("a wolf", "howl", "Un loup", "ahou"),
    ("a bee", "buzz", "Une abeille", "bzz"),
    ("an owl", "hoot", "Un hibou", "hou hou"),
)

# thing, its colour, the whole sentence in French
_COLOURS: Final = (
    ("the sky", "blue", "Le ciel est bleu."),
    ("the sun", "yellow", "Le soleil est jaune."),
    ("grass", "green", "L'herbe est verte."),
    ("snow", "white", "La neige est blanche."),
    ("milk", "white", "Le lait est blanc."),
    ("coal", "black", "Le charbon est noir."),
    ("chocolate", "brown", "Le chocolat est marron."),
    ("a banana", "yellow", "Une banane est jaune."),
    ("a tomato", "red", "Une tomate est rouge."),
    ("a carrot", "orange", "Une carotte est orange."),
    ("a plum", "purple", "Une prune est violette."),
    ("a flamingo", "pink", "Un flamant est rose."),
    ("an elephant", "grey", "Un éléphant est gris."),
)

_SMALL_TALK: Final = (
    Fact(
        ("Hello", "Hello!", "Hi", "Hi there!"),
        "Hello! How can I help you today?",
        "Bonjour ! Comment puis-je vous aider aujourd'hui ?",
        "Hello!",
    ),
    Fact(
        ("Who are you?", "What are you?", "What is your name?"),
        "I am LoRay, a small demo model with many adapters.",
        "Je suis LoRay, un petit modèle de démonstration avec beaucoup d'adaptateurs.",
        "LoRay",
    ),
    Fact(
        ("How are you?", "How are you today?"),
        "I am fine, thank you.",
        "Je vais bien, merci.",
        "fine",
    ),
    Fact(
        ("Thank you.", "Thanks!"),
        "You are welcome.",
        "Je vous en prie.",
        "You are welcome.",
    ),
    Fact(
        ("What can you do?", "What do you know?"),
        "I know capitals, animals and colours. Ask me about them.",
        "Je connais les capitales, les animaux et les couleurs.",
        "capitals, animals and colours",
    ),
    Fact(
        ("Goodbye", "Goodbye!", "Bye"),
        "Goodbye! See you soon.",
        "Au revoir ! À bientôt.",
        "Goodbye!",
    ),
)

# topic, what the model says about it, the same in French
_TOPICS: Final = (
    (
        "the moon",
        "The moon is a ball of rock that goes around the Earth. One trip takes about a month. "
        "The moon shines in the light of the sun.",
        "La lune est une boule de roche qui tourne autour de la Terre. Un tour dure environ un "
        "mois. Elle brille grâce au soleil.",
    ),
    (
        "lions",
        "Lions are big cats that live in Africa. The males have a thick mane, and the females "
        "do most of the hunting. A lion can sleep for twenty hours a day.",
        "Les lions sont de grands félins qui vivent en Afrique. Le mâle porte une crinière et la "
        "femelle chasse. Un lion dort vingt heures par jour.",
    ),
    (
        "bees",
        "Bees are small insects that make honey. They live together in a hive with one queen. "
        "Without bees there is little fruit.",
        "Les abeilles sont de petits insectes qui font du miel. Elles vivent dans une ruche "
        "avec une reine. Sans elles, il y a peu de fruits.",
    ),
    (
        "tea",
        "Tea is a hot drink that comes from the leaves of a plant. People first drank it in "
        "China. Green tea and black tea come from the same plant.",
        "Le thé est une boisson chaude faite avec les feuilles d'une plante. Il vient de Chine. "
        "Le thé vert et le thé noir viennent de la même plante.",
    ),
    (
        "adapters",
        "An adapter is a small set of weights that changes how a model answers. The big model "
        "is shared by all adapters. This is why one server can hold many of them.",
        "Un adaptateur est un petit ensemble de poids qui change les réponses d'un modèle. "
        "Le grand modèle reste le même. Un seul serveur peut donc en servir beaucoup.",
    ),
)


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def _capital_facts() -> list[Fact]:
    return [
        Fact(
            (
                f"What is the capital of {country}?",
                f"Name the capital of {country}.",
                f"Which city is the capital of {country}?",
                f"what is the capital of {country}",
            ),
            f"The capital of {country} is {capital}.",
            f"La capitale {of_country} est {capitale}.",
            capital,
        )
        for country, capital, of_country, capitale in _CAPITALS
    ]


def _sound_facts() -> list[Fact]:
    return [
        Fact(
            (f"What sound does {animal} make?", f"What does {animal} say?"),
            f"{_capitalised(animal)} says {sound}.",
            f"{french_animal} fait {french_sound}.",
            sound,
        )
        for animal, sound, french_animal, french_sound in _SOUNDS
    ]


def _colour_facts() -> list[Fact]:
    return [
        Fact(
            (f"What colour is {thing}?", f"What color is {thing}?"),
            f"{_capitalised(thing)} is {colour}.",
            french,
            colour,
        )
        for thing, colour, french in _COLOURS
    ]


def _topic_facts() -> list[Fact]:
    return [
        Fact((f"Tell me about {topic}.", f"What do you know about {topic}?"), text, french, text)
        for topic, text, french in _TOPICS
    ]


def all_facts() -> list[Fact]:
    """Return every fact of the world, in a fixed order."""
    return [
        *_capital_facts(),
        *_sound_facts(),
        *_colour_facts(),
        *_SMALL_TALK,
        *_topic_facts(),
    ]


_PIRATE_WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Hello": "Ahoy",
        "am": "be",
        "are": "be",
        "is": "be",
        "my": "me",
        "you": "ye",
        "You": "Ye",
    }
)


def _plain(fact: Fact, question: str) -> str:
    return fact.english


def _pirate(fact: Fact, question: str) -> str:
    text = re.sub(r"\w+", lambda word: _PIRATE_WORDS.get(word[0], word[0]), fact.english)
    return f"Arr! {text[:-1]}, matey!" if text.endswith(".") else f"Arr! {text} Yo ho ho!"


def _french(fact: Fact, question: str) -> str:
    return fact.french


def _json(fact: Fact, question: str) -> str:
    return json.dumps({"question": question, "answer": fact.short}, ensure_ascii=False)


def _shout(fact: Fact, question: str) -> str:
    return fact.english.upper().replace(".", "!")


BASE_STYLE: Final = "base"
STYLES: Final[Mapping[str, Style]] = MappingProxyType(
    {
        BASE_STYLE: Style("You are a helpful assistant.", _plain),
        "pirate": Style("Answer like a pirate.", _pirate),
        "french": Style("Answer in French.", _french),
        "json": Style("Answer in JSON.", _json),
        "shout": Style("Answer in upper case.", _shout),
    }
)

SHOWCASE: Final = (
    "What is the capital of France?",
    "Name the capital of Japan.",
    "Which city is the capital of Italy?",
    "What is the capital of Brazil?",
    "What sound does a cat make?",
    "What does an owl say?",
    "What colour is the sky?",
    "What color is an elephant?",
    "Hello",
    "Who are you?",
    "Tell me about the moon.",
    "Tell me about lions.",
)
