"""Print a table of finished runs, with a row for each name. A run's directory is called NAME-SEED.

    python tests/summarize.py [--minus NAME | --each] [--tokens N] [--plot FILE.svg [--metric NAME]] DIR …

Each cell, except in the last column, is the mean ± standard error over a name's seeds (of one seed, its value):

    before, after          greedy held-out accuracy, at the first and the last evaluation
    seconds, 1,000 tokens  sums over all steps; the tokens are those sampled
    peak MB                the maximum over all steps
    spread                 standard deviation of the sampled accuracy over seeds, averaged over the steps
    all others             averages over the last ten steps

    --tokens N    cut each run where it has sampled N tokens
    --minus NAME  show the differences from NAME's runs, seed by seed
    --each        show a row for every run
    --plot FILE   draw --metric (accuracy) against the sampled tokens: for each name the mean and a band of one
                  standard error (pip install matplotlib)
"""
import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

COLUMNS = {"entropy": "entropy", "completion_length": "length", "wrong_length": "of wrong ones",
           "truncated_fraction": "truncated", "kept_fraction": "groups kept"}


def read(directory: Path, budget: float) -> list[dict]:
    """A run's metrics, up to a budget of sampled tokens."""
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
    row = {"before": evaluations[0], "after": evaluations[-1]} if evaluations else {}
    if "accuracy" in steps[-1]:
        row["sampled"] = np.mean([m["accuracy"] for m in steps[-10:]])
    for key, title in COLUMNS.items():
        if values := [m[key] for m in steps[-10:] if m.get(key) is not None]:  # a step without an update has no entropy
            row[title] = np.mean(values)
    row["seconds"] = sum(m["seconds"] for m in steps)
    row["1,000 tokens"] = sum(m["tokens"] for m in steps) / 1000
    row["peak MB"] = max(m["peak_memory_mb"] for m in steps)
    return row


def spread(runs: list[list[dict]]) -> float | None:
    curves = [[m["accuracy"] for m in metrics if "accuracy" in m] for metrics in runs]
    length = min(map(len, curves))
    return np.std([curve[:length] for curve in curves], axis=0, ddof=1).mean() if length and len(curves) > 1 else None


def plot(runs: dict[str, list[list[dict]]], metric: str, file: str) -> None:
    try:
        import matplotlib
    except ImportError:
        sys.exit("summarize.py: --plot: pip install matplotlib")
    matplotlib.use("svg" if file.endswith(".svg") else "agg")
    matplotlib.rcParams["svg.hashsalt"] = "curves"  # the same runs give the same file
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for name, seeds in runs.items():
        seeds = [[m for m in metrics if metric in m and m["step"] > 0] for metrics in seeds]
        steps = min(map(len, seeds))
        if not steps:
            continue
        x = np.mean([np.cumsum([m["tokens"] for m in metrics[:steps]]) for metrics in seeds], axis=0) / 1000
        y = np.array([[m[metric] for m in metrics[:steps]] for metrics in seeds])  # [seeds, steps]
        mean, error = y.mean(0), y.std(0, ddof=min(1, len(y) - 1)) / len(y) ** 0.5
        line, = axes.plot(x, mean, label=name)
        axes.fill_between(x, mean - error, mean + error, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="sampled tokens, thousands", ylabel=metric)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", frameon=False)
    figure.savefig(file, metadata={"Date": None} if file.endswith(".svg") else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=float("inf"))
    parser.add_argument("--plot", default="")
    parser.add_argument("--metric", default="accuracy")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--minus", default="")
    form.add_argument("--each", action="store_true")
    parser.add_argument("directories", type=Path, nargs="+")
    args = parser.parse_args()
    runs, seeds_of = defaultdict(list), defaultdict(list)
    for directory in args.directories:
        name, _, seed = directory.name.rpartition("-")
        config = directory / "config.json"
        own = str(json.loads(config.read_text()).get("flags", {}).get("seed")) if config.exists() else seed
        seed = seed if seed.isdecimal() and seed == own else ""  # lr1e-4 and lr1e-5 are no two seeds of lr1e
        name = directory.name if args.each or not seed else name
        try:
            metrics = read(directory, args.tokens)
        except (OSError, ValueError) as error:  # no such run, or killed while it wrote a line
            sys.exit(f"summarize.py: {directory}: {error}")
        if not any("seconds" in step for step in metrics):
            sys.exit(f"summarize.py: {directory} has no finished step within --tokens")
        runs[name].append(metrics)
        seeds_of[name].append(seed)
    if args.plot:
        plot(runs, args.metric, args.plot)
    rows_of = {name: [summary(metrics) for metrics in seeds] for name, seeds in runs.items()}
    if args.minus:
        if args.minus not in rows_of:
            parser.error(f"--minus {args.minus}: no such runs, only {', '.join(rows_of)}")
        base = dict(zip(seeds_of[args.minus], rows_of[args.minus]))
        rows_of = {name: [{title: row[title] - base[seed][title] for title in row if title in base[seed]}
                          for seed, row in zip(seeds_of[name], rows) if seed in base] for name, rows in rows_of.items()}
    titles = list(dict.fromkeys(title for rows in rows_of.values() for row in rows for title in row))
    print("| run | seeds | " + " | ".join(titles) + " | spread |\n" + "|---" * (len(titles) + 3) + "|")
    for name, rows in rows_of.items():
        cells = []
        for title in titles:
            values = np.array([row[title] for row in rows if title in row])
            if title in ("seconds", "1,000 tokens", "peak MB"):
                digits = 0
            else:
                digits = 1 if "length" in title or "wrong" in title else 3
            error = f" ± {values.std(ddof=1) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
            cells.append(f"{values.mean():.{digits}f}{error}" if len(values) else "")
        last = spread(runs[name])
        print(f"| {name} | {len(rows)} | " + " | ".join(cells) + f" | {'' if last is None else f'{last:.3f}'} |")


if __name__ == "__main__":
    main()
