"""A table of finished runs: python tests/summarize.py [--tokens N] DIR …, with DIR = NAME-SEED; mean ± standard error.

Greedy held-out accuracy before and after; the rest over the last ten steps, but seconds and sampled tokens over all.
"spread": the standard deviation over seeds of the sampled accuracy, averaged over the steps. --tokens N cuts each run
where it has sampled N tokens.
"""
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

COLUMNS = {"entropy": "entropy", "completion_length": "length", "wrong_length": "of wrong ones",
           "truncated_fraction": "truncated", "kept_fraction": "groups kept"}


def read(directory: Path, budget: float) -> list[dict]:
    """The metrics of a run, up to its budget of sampled tokens."""
    metrics, spent = [], 0
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        sampled = step["seconds"] * step["tokens_per_second"] if "completion_length" in step else 0
        step["tokens"] = step.get("sampled_tokens", sampled)
        spent += step["tokens"]
        if spent > budget:
            break
        metrics.append(step)
    return metrics


def summary(metrics: list[dict]) -> dict[str, float]:
    steps = [m for m in metrics if "seconds" in m]
    evaluations = [m["eval_accuracy"] for m in metrics if "eval_accuracy" in m]
    row = {"before": evaluations[0], "after": evaluations[-1]}
    if "accuracy" in steps[-1]:
        row["sampled"] = np.mean([m["accuracy"] for m in steps[-10:]])
    row |= {title: np.mean([m[key] for m in steps[-10:]]) for key, title in COLUMNS.items() if key in steps[-1]}
    row["seconds"] = sum(m["seconds"] for m in steps)
    row["1,000 tokens"] = sum(m["tokens"] for m in steps) / 1000
    row["peak MB"] = max(m["peak_memory_mb"] for m in steps)
    return row


def spread(runs: list[list[dict]]) -> float | None:
    curves = [[m["accuracy"] for m in metrics if "accuracy" in m] for metrics in runs]
    length = min(map(len, curves))
    return np.std([curve[:length] for curve in curves], axis=0, ddof=1).mean() if length and len(curves) > 1 else None


def main() -> None:
    arguments, budget, runs = sys.argv[1:], float("inf"), defaultdict(list)
    if arguments[0] == "--tokens":
        budget, arguments = float(arguments[1]), arguments[2:]
    for argument in arguments:
        runs[Path(argument).name.rpartition("-")[0]].append(read(Path(argument), budget))
    rows_of = {name: [summary(metrics) for metrics in seeds] for name, seeds in runs.items()}
    titles = list(dict.fromkeys(title for rows in rows_of.values() for row in rows for title in row))
    print("| run | seeds | " + " | ".join(titles) + " | spread |\n" + "|---" * (len(titles) + 3) + "|")
    for name, rows in rows_of.items():
        cells = []
        for title in titles:
            values = np.array([row[title] for row in rows if title in row])
            error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
            digits = 0 if title in ("seconds", "1,000 tokens", "peak MB") else 1 if "length" in title or "wrong" in title else 3
            cells.append(f"{values.mean():.{digits}f} ± {error:.{digits}f}" if len(values) else "")
        last = spread(runs[name])
        print(f"| {name} | {len(rows)} | " + " | ".join(cells) + f" | {'' if last is None else f'{last:.3f}'} |")


if __name__ == "__main__":
    main()
