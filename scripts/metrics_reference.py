"""Write docs/metrics.md from observe/metrics.toml.

.venv/bin/python scripts/metrics_reference.py            # write the page
.venv/bin/python scripts/metrics_reference.py --check    # exit 1 if it is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from cosmos_rl_core.observe.metrics import Metric, all_metrics

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
INTRO = """\
# Metrics

<!-- Written by scripts/metrics_reference.py from observe/metrics.toml of cosmos-rl-core. -->

`metrics.jsonl` in the [run directory](run_directory.md) has one object for each step, `eval.jsonl` one for each
evaluation. The [dashboard](dashboard.md) shows both as curves, with these meanings; `[logging] sinks` sends the steps
to other services. The [monitor](monitor.md) watches some of them.

- A *term* is the unit of a rollout that has a log-probability: a token (llm), an action or a chunk of actions (vla), a
  denoising step (wfm).
- A step of several updates (`policy.epochs`, `policy.minibatches`) has the mean over its updates.
- Limits in the column "healthy" are those of the dashboard or of the monitor where they say so; the others are bounds
  by definition or rules of thumb. Compare a curve with its own past first.
- `*` stands for a name of yours, such as that of a reward. Units are in brackets.
"""
COLUMNS = ("metric", "meaning", "healthy", "runs")


def render() -> str:
    """Return the page."""
    parts = [INTRO]
    for section, members in groupby(all_metrics(), key=lambda metric: metric.section):
        lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *map(_row, members)]
        parts.append(f"## {section}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _row(metric: Metric) -> str:
    return "| " + " | ".join(_cells(metric)) + " |"


def _cells(metric: Metric) -> Iterator[str]:
    yield f"`{metric.name}`"
    yield f"{metric.meaning} [{metric.unit}]" if metric.unit else metric.meaning
    yield "; otherwise: ".join(filter(None, (metric.healthy, metric.act)))
    yield metric.where or "all"


def main() -> None:
    page = render()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == page else "docs/metrics.md is out of date: run this script")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
