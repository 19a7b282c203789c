"""The class of GPU programs that suits an adapter, from what the adapter reports: one table for all runtimes.

An adapter has a `vendor` (WebGPU's word for it), a `kind` of device (if the driver reports one) and *words*:
vendor, architecture, name and driver, in lower case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

DeviceClass = Literal["software", "mobile", "integrated", "discrete"]
DEVICE_CLASSES: tuple[DeviceClass, ...] = get_args(DeviceClass)
"""Kinds of GPUs that programs are shaped for; `software` is a software GPU."""
AdapterKind = Literal["discrete", "integrated", "virtual", "cpu", "mobile", "other"]
"""Kinds of devices as drivers report them; a browser reports "mobile" for the machine that it runs on."""


@dataclass(frozen=True)
class Adapter:
    """The facts that an adapter reports; a string is empty if the adapter reports nothing."""

    vendor: str
    architecture: str
    name: str
    driver: str
    kind: AdapterKind

    @property
    def words(self) -> str:
        """Vendor, architecture, name and driver in lower case, to search for names."""
        return " ".join((self.vendor, self.architecture, self.name, self.driver)).lower()


@dataclass(frozen=True)
class Rule:
    """A class for adapters with one of these kinds, vendors or words.

    An adapter must match each of the three that is not empty.
    """

    device_class: DeviceClass
    kinds: tuple[AdapterKind, ...] = ()
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
"""The first rule that an adapter matches counts; the last rule matches every adapter."""

NEARNESS: Mapping[DeviceClass, tuple[DeviceClass, ...]] = {
    "software": ("software", "mobile", "integrated", "discrete"),
    "mobile": ("mobile", "integrated", "discrete", "software"),
    "integrated": ("integrated", "discrete", "mobile", "software"),
    "discrete": ("discrete", "integrated", "mobile", "software"),
}
"""For a device's class, the classes in the order in which their programs suit it: its own, its neighbour's,
the others.
"""

VENDORS: Mapping[int, str] = {
    0x1002: "amd", 0x1010: "img-tec", 0x106B: "apple", 0x10DE: "nvidia", 0x13B5: "arm", 0x144D: "samsung",
    0x14E4: "broadcom", 0x1AE0: "google", 0x5143: "qualcomm", 0x8086: "intel", 0x10005: "mesa",
}  # fmt: skip
"""WebGPU's names of vendors, by the numbers that Vulkan has for them (PCI's, or Khronos' own)."""


def suited(device_class: DeviceClass) -> tuple[DeviceClass, ...]:
    """The classes whose programs a device of a class may run, the first choice first.

    They are its own class and the neighbour's; a trial on the device chooses between them. A software GPU has
    its own only and makes no trial.
    """
    return NEARNESS[device_class][: 1 if device_class == "software" else 2]


def class_of(adapter: Adapter) -> DeviceClass:
    """The class that the first matching rule in RULES gives to an adapter."""
    return next(rule.device_class for rule in RULES if _meets(adapter, rule))


def _meets(adapter: Adapter, rule: Rule) -> bool:
    words = adapter.words
    return (
        (not rule.kinds or adapter.kind in rule.kinds)
        and (not rule.vendors or adapter.vendor.lower() in rule.vendors)
        and (not rule.words or any(word in words for word in rule.words))
    )
