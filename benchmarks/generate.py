"""Tokens per second with and without the draft, side by side in one run.

    python benchmarks/generate.py CHECKPOINT [--batch 4] [--num-draft-tokens 3] [--gb-per-s 4800]

The two ways alternate, so that a busy machine disturbs both alike; each gives its median and range.
Compilation is not counted. The floor is what a target pass must read from memory.
"""

import argparse
import dataclasses
import platform
import statistics
import time

import jax
import numpy as np
from floor import pass_bytes
from rich.console import Console
from rich.table import Table

import jaxspec


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One way of decoding, run several times.

    Attributes:
        seconds: of each run, prefill included.
        num_tokens: emitted by all rows.
        target_steps: verification passes of the row that took the most.
        steps_per_token: target passes a token, over all rows; the prefill's token is left out.
        acceptance: share of the drafted tokens that were accepted, None without a draft.
        tokens: what was generated, `[b, max_new_tokens]`.
    """

    seconds: tuple[float, ...]
    num_tokens: int
    target_steps: int
    steps_per_token: float
    acceptance: float | None
    tokens: np.ndarray

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each run, ascending."""
        return sorted(self.num_tokens / seconds for seconds in self.seconds)


def main() -> None:
    arguments = parser().parse_args()
    model = jaxspec.load(arguments.checkpoint, dtype=arguments.dtype)
    rng = np.random.default_rng(arguments.seed)
    shape = (arguments.batch, arguments.prompt_tokens)
    prompts = rng.integers(0, model.config.vocab_size, shape, dtype=np.int32)
    widths = (0, arguments.num_draft_tokens)
    plain, drafted = measure(model, prompts, widths, arguments.max_new_tokens, arguments.repeats)
    console = Console()
    console.print(
        f"{jax.devices()[0].device_kind}, {platform.machine()}, jax {jax.__version__}, "
        f"{model.execution.dtype}: {arguments.batch} prompts of {arguments.prompt_tokens} tokens, "
        f"{arguments.max_new_tokens} new ones, {arguments.repeats} runs each",
        highlight=False,
    )
    context = arguments.prompt_tokens + arguments.max_new_tokens / 2
    floors = [
        pass_bytes(model, num_rows=arguments.batch, tokens_per_row=g + 1, context=context)
        for g in widths
    ]
    console.print(table(plain, drafted, floors, widths, arguments.gb_per_s))
    same = (plain.tokens == drafted.tokens).all(axis=1)
    console.print(f"{int(same.sum())} of {len(same)} rows are equal token for token.")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description="Tokens per second with and without the draft, side by side in one run."
    )
    add = result.add_argument
    add("checkpoint")
    add("--batch", type=int, default=1)
    add("--prompt-tokens", type=int, default=64)
    add("--max-new-tokens", type=int, default=256)
    add("--num-draft-tokens", type=int, default=3)
    add("--dtype", help="compute dtype; default: the checkpoint's")
    add("--repeats", type=int, default=5)
    add("--seed", type=int, default=0, help="of the random prompts")
    add("--gb-per-s", type=float, help="memory bandwidth, to turn the floor into a time")
    return result


def measure(
    model: jaxspec.SpeculativeModel,
    prompts: np.ndarray,
    widths: tuple[int, int],
    max_new_tokens: int,
    repeats: int,
) -> list[Measurement]:
    """Times `generate` at each number of drafted tokens, in turn."""

    def run(num_draft_tokens: int):
        result = jaxspec.generate(
            model,
            prompts,
            max_new_tokens=max_new_tokens,
            num_draft_tokens=num_draft_tokens,
            eos_token_ids=(),
        )
        return jax.block_until_ready(result)

    results = [run(g) for g in widths]
    seconds: dict[int, list[float]] = {g: [] for g in widths}
    for _ in range(repeats):
        for g in widths:
            start = time.perf_counter()
            run(g)
            seconds[g].append(time.perf_counter() - start)
    return [summarize(result, seconds[g]) for g, result in zip(widths, results, strict=True)]


def summarize(result, seconds: list[float]) -> Measurement:
    stats, num_tokens = result.stats, int(result.lengths.sum())
    proposed = int(stats.proposed.sum())
    verified = num_tokens - len(result.lengths)
    return Measurement(
        seconds=tuple(seconds),
        num_tokens=num_tokens,
        target_steps=int(stats.target_steps.max()),
        steps_per_token=int(stats.target_steps.sum()) / max(verified, 1),
        acceptance=int(stats.accepted.sum()) / proposed if proposed else None,
        tokens=np.asarray(result.tokens),
    )


def table(plain, drafted, floors, widths, gb_per_s: float | None) -> Table:
    result = Table()
    result.add_column("")
    for g in widths:
        result.add_column(f"{g} tokens drafted" if g else "plain", justify="right")
    runs = (plain, drafted)

    def row(name, cells):
        result.add_row(name, *cells)

    row(
        "tokens per second",
        [
            f"{statistics.median(run.rates):.1f} ({run.rates[0]:.1f} to {run.rates[-1]:.1f})"
            for run in runs
        ],
    )
    base = statistics.median(plain.rates)
    row("relative to plain", [f"{statistics.median(run.rates) / base:.2f}" for run in runs])
    row("target steps per token", [f"{run.steps_per_token:.3f}" for run in runs])
    row("drafted tokens accepted", ["-", f"{drafted.acceptance:.1%}"])
    times = [statistics.median(run.seconds) / run.target_steps for run in runs]
    row("time per target step", [f"{1e3 * seconds:.2f} ms" for seconds in times])
    for part in ("dense", "experts", "cache", "total"):
        row(f"floor bytes: {part}", [f"{getattr(f, part) / 1e6:.2f} MB" for f in floors])
    row(
        "floor bytes per second",
        [f"{f.total / seconds / 1e9:.2f} GB/s" for f, seconds in zip(floors, times, strict=True)],
    )
    if gb_per_s:
        ideal = [f.total / gb_per_s / 1e9 for f in floors]
        row("floor as a time", [f"{1e3 * seconds:.3f} ms" for seconds in ideal])
        shares = [i / seconds for i, seconds in zip(ideal, times, strict=True)]
        row("share of it reached", [f"{share:.1%}" for share in shares])
    return result


if __name__ == "__main__":
    main()
