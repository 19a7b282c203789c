"""How a model of the Hugging Face hub is named: `owner/name`; one of GGUF files `owner/name:Q4_K_M`."""

from __future__ import annotations

import re

HUB_ID = re.compile(r"(?P<repository>\w[\w.-]*/[\w.-]+)(:(?P<wanted>[\w./ -]+))?")
