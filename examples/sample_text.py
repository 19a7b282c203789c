"""Turn a folder of public-domain books into passages and chat examples for the sample model.

Input is Markdown as in https://github.com/mlschmitt/classic-books-markdown: ``# Title:``, ``## Author:``, a
rule, then headed sections. Everything here is deterministic: the same books and seed give the same examples.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

SYSTEM_PROMPTS = ("You are a storyteller.", "You are a helpful assistant.", "You answer from old books.")
GREETING = "Good day! I am a small model that has read many old books. Ask me for a story."
GREETINGS = (
    "Hello",
    "Hello!",
    "Hi",
    "Hi!",
    "Good day",
    "Good morning!",
    "Who are you?",
    "What can you do?",
    "Help",
)
GO_ON = ("Go on.", "And then?", "What happened then?", "Tell me more.")
ABOUT = (
    "Tell me about {}.",
    "Tell me about {}",
    "Tell me a story about {}.",
    "What do you know about {}?",
    "{}?",
)
MANNER = ("Write a few lines in the manner of {}.", "Write like {}.", "Write a line in the manner of {}.")
SENTENCE_END = re.compile(
    r"(?<=[.!?][\"']) (?=[\"'A-Z])|(?<=[.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<!St\.) (?=[\"'A-Z])"
)
STORY = ("Tell me a story.", "Tell me a story", "A story, please.", "Tell me a tale.")


@dataclass(frozen=True)
class Section:
    """One chapter or tale."""

    heading: str
    paragraphs: list[str]


@dataclass(frozen=True)
class Work:
    """One book."""

    title: str
    author: str
    sections: list[Section] = field(default_factory=list)


def plain(text: str) -> str:
    """Strip Markdown emphasis and typographic quotes; one space between words."""
    text = text.translate(
        str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "_": "", "*": "", "#": ""})
    )
    return re.sub(r"\s+", " ", text).strip()


def read_works(folder: Path, heldout: Path | None) -> list[Work]:
    """Read all books below `folder`, leaving out each paragraph that occurs in the held-out text."""
    hidden = plain(heldout.read_text(errors="ignore")) if heldout and heldout.exists() else ""
    works = [
        read_work(path, hidden) for path in sorted(folder.rglob("*.md")) if not path.name.startswith("README")
    ]
    return [work for work in works if work.sections]


def read_work(path: Path, hidden: str) -> Work:
    """Read one Markdown book."""
    head, _, body = path.read_text(errors="ignore").replace("\r", "").partition("\n-------\n")
    title = re.search(r"^# Title: *(.*)$", head, re.M)
    author = re.search(r"^## Author: *(.*)$", head, re.M)
    work = Work(title[1].strip() if title else path.stem, author[1].strip() if author else "")
    section, last_hidden = Section(work.title, []), False
    for block in re.split(r"\n\s*\n|\n(?=#)", body):
        if heading := re.match(r"#+ *(.*)", block.strip()):
            section = Section(plain(heading[1]), [])
            work.sections.append(section)
            block = block.strip()[heading.end() :]
        text = plain(block)
        # A short line ("Yes.") occurs everywhere: it is held out only where its surroundings are.
        last_hidden = text in hidden and (len(text) > 40 or last_hidden) if text and hidden else last_hidden
        if text and not last_hidden and sum(c.isalpha() for c in text) > len(text) / 2:
            if not work.sections:
                work.sections.append(section)
            section.paragraphs.append(text)
    return Work(work.title, work.author, [s for s in work.sections if s.paragraphs])


def passages(paragraphs: list[str], characters: int) -> Iterator[str]:
    """Group paragraphs to passages of about `characters`; cut longer paragraphs between sentences."""
    passage = ""
    for paragraph in paragraphs:
        for piece in sentences_up_to(paragraph, characters):
            if passage and len(passage) + len(piece) > characters:
                yield passage
                passage = ""
            passage += ("\n\n" if passage else "") + piece
    if passage:
        yield passage


def sentences_up_to(paragraph: str, characters: int) -> Iterator[str]:
    """Cut a paragraph at sentence ends so that no piece is much longer than `characters`."""
    piece = ""
    for sentence in SENTENCE_END.split(paragraph):
        if piece and len(piece) + len(sentence) > characters:
            yield piece
            piece = ""
        piece += (" " if piece else "") + sentence
    if piece:
        yield piece


class Topics:
    """Which word a passage is about: frequent in the passage, rare in the books, used as a noun or a name."""

    def __init__(self, texts: list[str]) -> None:
        words, nouns, names, self.documents = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
        for text in texts:
            found = re.findall(r"[A-Za-z]+", text)
            words.update(word.lower() for word in found)
            self.documents.update({word.lower() for word in found})
            nouns.update(re.findall(r"\b(?:the|a|an) ([a-z]{3,})\b", text))
            names.update(name.lower() for name in re.findall(r"(?<=[a-z,] )[A-Z][a-z]{2,}\b", text))
        self.total = len(texts)
        self.nouns = {w for w, n in nouns.items() if n > 15 and n > 0.3 * words[w]}
        self.names = {w for w, n in names.items() if n > 15 and n > 0.4 * words[w]}

    def of(self, passage: str) -> str | None:
        """The topic with its article, as it stands in a question; None where no word stands out."""
        counts = Counter(word.lower() for word in re.findall(r"[A-Za-z]+", passage))
        scores = {
            word: n * math.log(self.total / self.documents[word])
            for word, n in counts.items()
            if (word in self.names) or (word in self.nouns and n > 1)
        }
        if not scores:
            return None
        best = max(sorted(scores), key=lambda word: scores[word])
        return best.capitalize() if best in self.names else f"the {best}"


@cache
def heading_name(heading: str) -> str:
    """``CHAPTER II. THE FOX`` → ``The Fox``; numbers and numerals alone → ``""``."""
    name = re.sub(r"^(chapter)?\s*([ivxlc]+|\d+)?\s*[.:-]*\s*", "", heading, flags=re.I).strip(" .-")
    return name.title().replace("'S", "'s") if len(name) > 3 else ""


Turns = list[tuple[str, str]]


def question(
    work: Work, section: Section, index: int, text: str, topics: Topics, rng: random.Random
) -> tuple[str, str]:
    """One user turn whose answer is `text`, a passage of the section, or the rest of it."""
    kind = rng.random()
    first, *rest = SENTENCE_END.split(text, maxsplit=1)
    if kind < 0.2 and rest and len(rest[0]) > 100 and len(first) < 200:
        return f"Continue: {first}", rest[0]
    if kind < 0.3:
        return rng.choice(MANNER).format(work.author), text
    if kind < 0.4:
        return rng.choice(("Tell me something from {}.", "Read to me from {}.")).format(work.title), text
    name = heading_name(section.heading)
    if index == 0 and name and kind < 0.75:
        return f"Tell me the story of {name}.", text
    if index == 0 and re.match(r"(Once|There (was|were|lived)|In |A |One )", text):
        return rng.choice(STORY), text
    topic = topics.of(text)
    return (rng.choice(ABOUT).format(topic) if topic else rng.choice(MANNER).format(work.author)), text


def chats(works: list[Work], topics: Topics, rng: random.Random) -> Iterator[list[dict[str, str]]]:
    """Conversations of one to three turns over all passages, each passage answered once."""
    for work in works:
        for section in work.sections:
            texts = list(passages(section.paragraphs, rng.choice((250, 400, 600))))
            index = 0
            while index < len(texts):
                user, answer = question(work, section, index, texts[index], topics, rng)
                turns: Turns = [(user, answer)]
                index += 1
                while index < len(texts) and len(turns) < 3 and rng.random() < 0.2:
                    turns.append((rng.choice(GO_ON), texts[index]))
                    index += 1
                yield messages(turns, rng)
    for _ in range(12):
        for greeting in GREETINGS:
            yield messages([(greeting, GREETING)], rng)


def messages(turns: Turns, rng: random.Random) -> list[dict[str, str]]:
    """The turns in OpenAI's form, now and then under a system message."""
    system = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.15 else []
    spoken = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    return system + spoken
