#!/usr/bin/env bash
# Is the interpreter new enough, and can it make a virtual environment?
set -euo pipefail
python=$1
if ! command -v "$python" >/dev/null; then
  echo "error: no $python here. Install Python 3.11 or newer, or name yours: make setup PYTHON=/path/to/python3.12" >&2
  exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "error: $("$python" --version) is too old: nearfar needs 3.11 or newer. Name another: make setup PYTHON=python3.12" >&2
  exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  echo "error: $python cannot make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv" >&2
  exit 1
fi
