"""Installs packages into the environment of the Python that runs this script: with uv, or with pip.

uv installs the development environment in half a minute, where pip takes two to four. uv does not read pip's
configuration, so this script passes it on: indexes, folders of wheels, constraints and certificates. Where uv
cannot be installed, or fails for any reason, pip installs the same packages and tells its own errors.

Usage: python scripts/install.py REQUIREMENT [-e PATH] ...
"""

import ast
import os
import subprocess
import sys

PIP = [sys.executable, "-m", "pip"]
# The names of settings in pip's configuration, and the variables of uv for them.
NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
}
# Settings whose variables of uv are separated by commas; the others are separated by blanks, as in pip.
COMMAS = {"UV_FIND_LINKS"}


def configured() -> dict[str, str]:
    """The settings of pip's configuration files and PIP_ variables, as variables of uv.

    `pip config list` prints a line `section.name='value'` for each; variables of the environment (section
    `:env:`) win over files, as in pip.
    """
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True)
    found: dict[str, tuple[bool, str]] = {}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        variable = NAMES.get(key.removesuffix("s") if key == "constraints" else key)
        of_environment = section == ":env:"
        if variable and not (found.get(variable, (False, ""))[0] and not of_environment):
            parts = str(ast.literal_eval(value)).split()
            found[variable] = (of_environment, ("," if variable in COMMAS else " ").join(parts))
    return {variable: value for variable, (_, value) in found.items()}


def with_uv(wanted: list[str]) -> bool:
    """Install everything with uv, which is installed first if necessary; False where that is not possible."""
    try:
        if subprocess.run([*PIP, "install", "--quiet", "uv>=0.9,<1"], check=False).returncode:
            return False
        # Of several indexes the best version counts, wherever it lies, as in pip. Byte code as pip makes it:
        # the first start of each command would otherwise take seconds longer.
        uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
        uv += ["--index-strategy", "unsafe-best-match", "--compile-bytecode"]
        return not subprocess.run([*uv, *wanted], env={**configured(), **os.environ}, check=False).returncode
    except (OSError, subprocess.CalledProcessError, ValueError, SyntaxError):
        return False


def main(wanted: list[str]) -> int:
    """Install with uv, else with pip; returns the exit status."""
    if with_uv(wanted):
        return 0
    print("uv could not install these packages: pip installs them, which takes longer", file=sys.stderr)
    return subprocess.run([*PIP, "install", "--quiet", *wanted], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
