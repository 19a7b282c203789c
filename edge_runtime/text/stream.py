"""Text that is decoded token by token, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from nearfar.edge_runtime.text.codec import TextCodec, overlap


class Detokenizer:
    """Decodes a growing list of tokens. Returned text never changes, and never ends in half a character.

    Each token costs the decoding of at most MOST tokens. `context` are tokens before the first: a tokenizer
    may decode a word differently at the start of a text.
    """

    KEEP = 6
    """Tokens that are decoded again for context: more than the bytes of a character."""
    MOST = 8 * KEEP

    def __init__(self, codec: TextCodec, context: Seq[int] = ()) -> None:
        self._codec = codec
        self._window = [token for token in context[-4 * self.KEEP :] if token not in codec.silent][
            -self.KEEP :
        ]
        self._before: str | None = codec.decode(self._window)
        self._given = len(self._before)
        self._open = (
            0  # tokens since the last that made a character: the last three may be the beginning of one
        )

    def push(self, token: int) -> str:
        """The text that became certain with this token."""
        if token in self._codec.silent:
            return ""
        self._window.append(token)
        text = self._codec.decode(self._window)
        if self._before is not None:
            # The earlier text may decode differently with this token after it.
            pairs = zip(self._before, text, strict=False)
            self._given = next(
                (at for at, (old, new) in enumerate(pairs) if old != new), min(len(self._before), len(text))
            )
            self._before = None
        # Bytes that do not make a character (yet) decode to U+FFFD: wait for the rest of them, at most three.
        certain = len(text.rstrip("\ufffd"))
        self._open = 0 if certain == len(text) else 1 if certain > self._given else self._open + 1
        if self._open > 3:
            certain = max(certain, len(self._codec.decode(self._window[:-3])))
        certain -= self._codec.undecided(text[:certain])
        new = text[self._given : certain]
        self._given = max(self._given, certain)
        if len(self._window) > 4 * self.KEEP:
            self._shorten(text)
        return new

    def finish(self) -> str:
        """The text that was held back."""
        return self._codec.decode(self._window)[self._given :]

    def _shorten(self, text: str) -> None:
        """Forget tokens whose text was returned if the others decode to the same text without them; at last
        even if not.
        """
        held = text[self._given :]
        for size in range(self.KEEP, self.KEEP + 4):  # the window must not begin inside a character
            tail = self._codec.decode(self._window[-size:])
            before = len(tail) - len(held)
            if before > 0 and tail.endswith(held) and "\ufffd" not in tail[:before]:
                self._window, self._given = self._window[-size:], before
                return
        if len(self._window) >= self.MOST:  # a character has fewer bytes
            self._window = self._window[-self.KEEP :]
            sure = self._window[:-3] if self._open > 3 else self._window
            self._given = max(len(self._codec.decode(sure)) - (len(held) if self._open <= 3 else 0), 0)


class StopMatcher:
    """Passes text through up to the first stop string; holds back text that may be the beginning of one."""

    def __init__(self, stops: Seq[str]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that certainly precedes any stop string."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.matched = min(found, key=lambda match: match[0])
            out, self._held = self._held[:at], ""
            return out
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def finish(self) -> str:
        """The text that was held back; the text ends here."""
        out, self._held = self._held, ""
        return out


class TextStream:
    """Turns tokens into text, up to a stop string."""

    def __init__(self, codec: TextCodec, stops: Seq[str], context: Seq[int] = ()) -> None:
        self._detokenizer = Detokenizer(codec, context)
        self._matcher = StopMatcher(stops)
        self.length = 0
        """Characters that the tokens so far have made certain, including held-back ones."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._matcher.matched is not None

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found; None if none was."""
        return self._matcher.matched

    def push(self, token: int) -> str:
        """The text that this token makes certain."""
        text = self._detokenizer.push(token)
        self.length += len(text)
        return self._matcher.push(text)

    def finish(self) -> str:
        """The rest of the text."""
        out = self._matcher.push(self._detokenizer.finish())
        return out + self._matcher.finish()
