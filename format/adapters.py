"""Which class of GPU programs suits an adapter, by what it says of itself: one table for all runtimes.

An adapter is told apart by `vendor` (WebGPU's word for it), `kind` (of device, where the driver says) and its
*words*: vendor, architecture, name and driver, in lower case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

DeviceClass = Literal["software", "mobile", "integrated", "discrete"]
DEVICE_CLASSES: tuple[DeviceClass, ...] = get_args(DeviceClass)
"""Kinds of GPUs that programs are shaped for; `software` is a processor that plays one."""
Kind = Literal["discrete", "integrated", "virtual", "cpu", "mobile", "other"]
"""What a driver calls its device, or a browser the machine that it runs on ("mobile")."""


@dataclass(frozen=True)
class Adapter:
    """What an adapter says of itself; empty where it does not."""

    vendor: str
    architecture: str
    name: str
    driver: str
    kind: Kind

    @property
    def words(self) -> str:
        """All of it that is words, to look for names in."""
        return " ".join((self.vendor, self.architecture, self.name, self.driver)).lower()


@dataclass(frozen=True)
class Rule:
    """A class for adapters of one of these kinds, or vendors, or with one of these words.

    Where a rule has several of the three, an adapter must meet each of them.
    """

    device_class: DeviceClass
    kinds: tuple[Kind, ...] = ()
    vendors: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


RULES: tuple[Rule, ...] = (
    Rule("software", kinds=("cpu",)),
    Rule("software", words=("swiftshader", "llvmpipe", "lavapipe")),
    Rule("software", words=("softpipe", "basic render")),
    Rule("mobile", kinds=("mobile",)),
    Rule("mobile", vendors=("qualcomm", "arm", "img-tec", "samsung")),
    Rule("mobile", words=("adreno", "mali", "immortalis", "apple a")),
    Rule("mobile", words=("powervr", "xclipse", "videocore")),
    Rule("integrated", kinds=("integrated",)),
    Rule("integrated", vendors=("intel", "apple")),
    Rule("discrete", kinds=("discrete",)),
    Rule("integrated", words=("radeon graphics", "radeon(tm) graphics")),
    Rule("integrated", words=("intel", "apple m")),
    Rule("discrete", vendors=("nvidia", "amd")),
    Rule("discrete", words=("nvidia", "geforce", "radeon")),
    Rule("integrated"),
)
"""The first that an adapter meets counts; the last one takes whoever is unknown."""

NEARNESS: Mapping[DeviceClass, tuple[DeviceClass, ...]] = {
    "software": ("software", "mobile", "integrated", "discrete"),
    "mobile": ("mobile", "integrated", "discrete", "software"),
    "integrated": ("integrated", "discrete", "mobile", "software"),
    "discrete": ("discrete", "integrated", "mobile", "software"),
}
"""Whose programs suit a device of a class, the best first: its own, its neighbour's, the others'."""

VENDORS: Mapping[int, str] = {
    0x1002: "amd", 0x1010: "img-tec", 0x106B: "apple", 0x10DE: "nvidia", 0x13B5: "arm", 0x144D: "samsung",
    0x14E4: "broadcom", 0x1AE0: "google", 0x5143: "qualcomm", 0x8086: "intel", 0x10005: "mesa",
}  # fmt: skip
"""WebGPU's words for the numbers by which Vulkan names vendors (PCI's, or Khronos' own)."""


def suited(device_class: DeviceClass) -> tuple[DeviceClass, ...]:
    """The classes whose programs a device of a class may take, where there are programs of all: its own, and
    its neighbour's, which a trial on the device tells apart. A processor that plays a GPU tries none.
    """
    return NEARNESS[device_class][: 1 if device_class == "software" else 2]


def class_of(adapter: Adapter) -> DeviceClass:
    """The class of an adapter, by RULES."""
    return next(rule.device_class for rule in RULES if _meets(adapter, rule))


def _meets(adapter: Adapter, rule: Rule) -> bool:
    words = adapter.words
    return (
        (not rule.kinds or adapter.kind in rule.kinds)
        and (not rule.vendors or adapter.vendor.lower() in rule.vendors)
        and (not rule.words or any(word in words for word in rule.words))
    )
