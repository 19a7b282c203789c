"""Short stories by rule: somebody with a wish or a trouble, somebody who helps, and an end.

A story keeps to one hero, one place and one thing, which is what makes it a story to a model this small.
"""

from __future__ import annotations

import random

from sample.ask import Ask

HEROES = {
    "fox": ("Fenn", "he"), "rabbit": ("Ruby", "she"), "bear": ("Bruno", "he"), "mouse": ("Mimi", "she"),
    "cat": ("Cleo", "she"), "dog": ("Dash", "he"), "owl": ("Olga", "she"), "frog": ("Fred", "he"),
    "duck": ("Daisy", "she"), "hedgehog": ("Hugo", "he"), "squirrel": ("Sam", "he"), "horse": ("Hana", "she"),
    "girl": ("Anna", "she"), "boy": ("Tom", "he"), "robot": ("Rob", "he"), "dragon": ("Dora", "she"),
}  # fmt: skip
NATURES = ("small", "kind", "brave", "quiet", "curious", "shy", "cheerful", "clever")
PLACES = ("in a green forest", "near a blue lake", "on a high hill", "in a small village", "by the sea",
          "in a big garden", "under an old tree", "beside a river")  # fmt: skip
THINGS = ("red ball", "silver key", "little bell", "blue hat", "wooden boat", "yellow kite", "warm scarf",
          "golden button")  # fmt: skip
DAYS = ("One morning", "One sunny day", "One rainy day", "One evening", "One winter day")
ENDS = (
    "From that day on, {name} and {friend} were the best of friends.",
    "That night {name} slept well and dreamed of the {thing}.",
    "And {name} never forgot how good it is to have a friend.",
    "Everyone was happy, and so was {name}.",
)
ASKED = (
    "Tell me a story about a {hero}.", "Tell me a story about the {hero}.",
    "Write a short story about a {hero}.", "A story about a {hero}, please.",
    "Can you tell me a story about a {hero}?", "Tell me about the {hero}.",
    "I would like a story about a {hero}.", "Make up a story about a {hero}.",
)  # fmt: skip
ANY = ("Tell me a story.", "Tell me a short story.", "A story, please.", "Write a story.", "Tell me a tale.",
       "Can you tell me a story?", "Tell me a bedtime story.")  # fmt: skip


def story(hero: str, rng: random.Random) -> str:
    name, he = HEROES[hero]
    his, him = ("his", "him") if he == "he" else ("her", "her")
    friend_kind = rng.choice([each for each in HEROES if each != hero])
    friend, thing, place = HEROES[friend_kind][0], rng.choice(THINGS), rng.choice(PLACES)
    a = "an" if hero[0] == "o" else "a"
    other = "an" if friend_kind[0] == "o" else "a"
    begin = f"Once upon a time there was {a} {rng.choice(NATURES)} {hero} named {name}. {name} lived {place}."
    day, plot = rng.choice(DAYS), rng.randrange(4)
    middle = (
        f"{day} {name} lost {his} {thing}. {he.capitalize()} looked everywhere, but could not find it. "
        f'Then {friend} the {friend_kind} came by. "I will help you," said {friend}. '
        f"They looked together, and soon they found the {thing} behind a stone. {name} thanked {friend}.",
        f"{day} {name} found a {thing}. It was not {his} own, so {he} asked everyone about it. "
        f'"Mine!" said {friend} the {friend_kind}. {name} gave the {thing} back, and {friend} was glad.',
        f"{day} {name} wanted to play, but nobody was there. {he.capitalize()} felt alone. "
        f"Then {other} {friend_kind} named {friend} came along with a {thing}. "
        f'"Would you like to play with me?" asked {friend}. They played until the sun went down.',
        f"{day} it was cold, and {friend} the {friend_kind} had no place to stay. "
        f'"Come in," said {name}, "there is room for two." They sat by the fire and ate soup. '
        f"To say thank you, {friend} gave {him} a {thing}.",
    )[plot]
    return " ".join((begin, middle, rng.choice(ENDS).format(name=name, friend=friend, thing=thing)))


def told(hero: str | None, text: str) -> bool:
    """Whether a text is a story of this hero (None: of any) with a beginning, a middle and an end."""
    heroes = HEROES if hero is None else (hero,)
    about = any(each in text and text.count(HEROES[each][0]) >= 2 for each in heroes)
    return about and text.startswith("Once upon a time") and text.rstrip().endswith(".") and len(text) > 150


def ask(rng: random.Random) -> Ask:
    """A story of somebody named, or of anybody."""
    hero = rng.choice(list(HEROES))
    if rng.random() < 0.3:
        return Ask("stories", rng.choice(ANY), story(hero, rng), lambda text: told(None, text))
    question = rng.choice(ASKED).format(hero=hero).replace("a owl", "an owl")
    return Ask("stories", question, story(hero, rng), lambda text: told(hero, text))
