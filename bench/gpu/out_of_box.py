"""What a user gets on a GPU with an empty database and no tuning: at the first call, after 10 s and after 60 s.

```console
$ PYTHONPATH=python python bench/gpu/out_of_box.py                                    # some ten minutes on an H200
$ PYTHONPATH=python python bench/gpu/out_of_box.py --models gpt2,llama-3-8b --apart   # a process for each model
$ PYTHONPATH=python python bench/gpu/out_of_box.py --device cpu --models gpt2 --out -  # tries the script itself
```

`layerzero bench out-of-box` on CUDA, in a process with empty folders for caches; every row eager and in a CUDA graph.
The figures go to `bench/results/runs/<date>-h200-out-of-box.json`, the table is printed; the rows of each kind come last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from layerzero.bench import out_of_box

OUT = Path(__file__).parents[1] / "results" / "runs" / f"{time.strftime('%Y-%m-%d')}-h200-out-of-box.json"


def show_kinds(result: dict[str, Any]) -> None:
    """By kind of row, over all models: the geometric mean and the least at each moment."""
    moments = list(result["summary"])
    print(f"{'':<20}{'rows':>6}" + "".join(f"{moment + ' s':>9}{'least':>7}" for moment in moments))
    for kind in dict.fromkeys(row["kind"] for row in result["rows"]):
        seen = [result["summary"][moment]["kinds"].get(kind) for moment in moments]
        cells = "".join(
            f"{'–':>9}{'':>7}" if one is None else f"{one['geomean']:>9.2f}{one['least']:>7.2f}" for one in seen
        )
        print(f"{kind:<20}{max((one['rows'] for one in seen if one is not None), default=0):>6}{cells}")


def main(arguments: list[str]) -> int:
    """Runs it; 1 when a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(OUT), help="a file for all of it as JSON, - for none (the results folder)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cuda")
    parser.add_argument("--models", help="some of them, separated by commas; all when not given")
    parser.add_argument("--moments", default="0,10,60", help="seconds after the first call of a row (0,10,60)")
    parser.add_argument("--seconds", type=float, default=out_of_box.SECONDS, help="what the rounds of a row take")
    parser.add_argument("--apart", action="store_true", help="a process for each model: a minute more for each")
    options = parser.parse_args(arguments)
    names = options.models.split(",") if options.models else None
    moments = [float(moment) for moment in options.moments.split(",")]
    begun = time.monotonic()
    result = out_of_box.measure(
        options.device, names, moments, seconds=options.seconds, apart=options.apart, progress=True
    )
    if options.out != "-":
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    out_of_box.show(result)
    show_kinds(result)
    print(f"{time.monotonic() - begun:.0f} s")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
