"""Fills in the launches of the scenarios: python -m tests.vectors.schedule.record.

Read the diff before committing.
"""

from __future__ import annotations

import json

from tests.support.schedule_vectors import FILE, Replay


def main() -> None:
    """Replay every scenario and write the file again, one line an entry of a script."""
    written = []
    for scenario in json.loads(FILE.read_text()):
        replay = Replay(scenario["config"])
        script = ",\n".join(f"      {json.dumps(replay.run(entry))}" for entry in scenario["script"])
        head = "".join(
            f'    "{key}": {json.dumps(scenario[key], ensure_ascii=False)},\n'
            for key in ("name", "description", "config")
        )
        written.append(f'  {{\n{head}    "script": [\n{script}\n    ]\n  }}')
    FILE.write_text("[\n" + ",\n".join(written) + "\n]\n")


if __name__ == "__main__":
    main()
