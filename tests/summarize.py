"""A table of finished runs: python tests/summarize.py DIR … , with DIR = NAME-SEED; mean ± standard error over seeds.

Greedy held-out accuracy before and after; the rest over the last ten steps, but seconds and sampled tokens over all.
"""
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

COLUMNS = {"entropy": "entropy", "completion_length": "length", "wrong_length": "of wrong ones",
           "truncated_fraction": "truncated", "kept_fraction": "groups kept"}


def summary(directory: Path) -> dict[str, float]:
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [m for m in metrics if "seconds" in m]
    evaluations = [m["eval_accuracy"] for m in metrics if "eval_accuracy" in m]
    row = {"before": evaluations[0], "after": evaluations[-1], "sampled": np.mean([m["accuracy"] for m in steps[-10:]])}
    row |= {title: np.mean([m[key] for m in steps[-10:]]) for key, title in COLUMNS.items() if key in steps[-1]}
    row["seconds"] = sum(m["seconds"] for m in steps)
    row["1,000 tokens"] = sum(m.get("sampled_tokens", m["seconds"] * m["tokens_per_second"]) for m in steps) / 1000
    return row


def main() -> None:
    runs = defaultdict(list)
    for argument in sys.argv[1:]:
        runs[Path(argument).name.rpartition("-")[0]].append(summary(Path(argument)))
    titles = list(dict.fromkeys(title for rows in runs.values() for row in rows for title in row))
    print("| run | seeds | " + " | ".join(titles) + " |\n" + "|---" * (len(titles) + 2) + "|")
    for name, rows in runs.items():
        cells = []
        for title in titles:
            values = np.array([row[title] for row in rows if title in row])
            error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
            digits = 0 if title in ("seconds", "1,000 tokens") else 1 if "length" in title or "wrong" in title else 3
            cells.append(f"{values.mean():.{digits}f} ± {error:.{digits}f}" if len(values) else "")
        print(f"| {name} | {len(rows)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
