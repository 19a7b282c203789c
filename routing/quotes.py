"""Recognizes a quotation of a text anywhere, by comparing windows of its letters.

Winnowing (Schleimer, Wilkerson, Aiken 2003): of each run of windows the one with the least hash is picked, in
the text and in a possible quotation, so both pick the same. TypeScript picks the same windows (quotes.ts).
"""

from __future__ import annotations

import re
import unicodedata

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint32]

WINDOW = 32
"""Bytes of a window: nothing shorter counts as a quotation."""
RUN = 8
"""Number of consecutive windows of which one is picked."""
FOUND = WINDOW + RUN - 1
"""Bytes from which a quotation is always found."""

_ESCAPES = re.compile(r"\\+(?:u([0-9a-fA-F]{4})|[nrtbf])?|&(?:amp|lt|gt|quot|apos|nbsp|#0*39|#[xX]0*27);")
_OTHER = re.compile(r"[\W_]+")
_FACTOR = 0x9E3779B1


def letters(text: str) -> bytes:
    """Return the letters and digits of a text as UTF-8. Blanks, line breaks, quote and Markdown signs, and
    escapes of JSON and HTML are removed, and ASCII capitals lowered.
    """
    if "\\" in text or "&" in text:
        text = _ESCAPES.sub(lambda found: chr(int(found[1], 16)) if found[1] else " ", text)
    # Two JSON escapes may form one letter together; an unpaired half is dropped.
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "ignore")
    return _OTHER.sub("", unicodedata.normalize("NFKC", text)).encode().lower()


def windows(data: bytes) -> set[bytes]:
    """Return the picked windows of the bytes from `letters`; none where they are shorter than a window."""
    count = len(data) - WINDOW + 1
    if count < 1:
        return set()
    values = _mixed(_window_hashes(np.frombuffer(data, np.uint8).astype(np.uint32)))
    least, size = values, 1
    while size < min(RUN, count):
        span = min(size, min(RUN, count) - size)
        least = np.minimum(least[:-span], least[span:])
        size += span
    picked = np.flatnonzero(np.isin(values, np.unique(least)))
    return {data[at : at + WINDOW] for at in picked.tolist()}


def _window_hashes(values: Hashes) -> Hashes:
    """Return each window's polynomial hash, modulo 2^32."""
    factor, size = _FACTOR, 1
    while size < WINDOW:
        values = values[:-size] * np.uint32(factor) + values[size:]
        factor, size = factor * factor & 0xFFFFFFFF, size * 2
    return values


def _mixed(values: Hashes) -> Hashes:
    """Mix the bits of each hash (MurmurHash3's finalizer), so that any window may have the least."""
    values = (values ^ (values >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    values = (values ^ (values >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return values ^ (values >> np.uint32(16))
