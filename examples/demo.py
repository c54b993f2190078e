"""From a Hugging Face folder to text, with and without the draft: what `make demo` runs."""

import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import tiny_checkpoint
import tokenizers
from rich.console import Console
from rich.table import Table

import jaxspec

FOLDER = Path(__file__).parent.parent / "build" / "demo"
PROMPT = "How does it work?"
MAX_NEW_TOKENS = 200
NUM_DRAFT_TOKENS = 5
REPEATS = 3


def main() -> int:
    console = Console()
    shutil.rmtree(FOLDER, ignore_errors=True)
    source, checkpoint = FOLDER / "hf", FOLDER / "jaxspec"

    console.rule("1. a small DeepSeek-V3 checkpoint")
    tiny_checkpoint.write(source)
    for file in sorted(source.iterdir()):
        console.print(f"  {file.stat().st_size:>12,}  {file.name}", highlight=False)

    console.rule("2. jaxspec-convert")
    command = Path(sysconfig.get_path("scripts")) / "jaxspec-convert"
    if subprocess.run([command, "convert", source, checkpoint]).returncode:
        return 1

    console.rule("3. generate, without and with the NextN draft")
    model = jaxspec.load(checkpoint, dtype="float32")
    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    prompt = [0, *tokenizer.encode(PROMPT).ids]
    with console.status("compiling both programs"):
        plain = generate(model, prompt, 0)
        drafted = generate(model, prompt, NUM_DRAFT_TOKENS)
    seconds = {g: float("inf") for g in (0, NUM_DRAFT_TOKENS)}
    for _ in range(REPEATS):  # alternating, so that a busy machine disturbs both alike
        for g in seconds:
            seconds[g] = min(seconds[g], time_of(lambda g=g: generate(model, prompt, g)))

    equal = np.array_equal(plain.tokens, drafted.tokens)
    text = tokenizer.decode(np.asarray(drafted.tokens)[0].tolist())
    console.print(f"[bold]{PROMPT}[/bold]{text}", highlight=False)
    console.print(table(plain, drafted, *seconds.values()))
    console.print("Both texts are equal, token for token." if equal else "The texts differ!")
    console.print(
        f"Try it: {command.parent}/jaxspec-generate --checkpoint {checkpoint} --dtype float32"
        " --prompt 'Say more:'",
        highlight=False,
        soft_wrap=True,
    )
    return 0 if equal else 1


def generate(model: jaxspec.SpeculativeModel, prompt: list[int], num_draft_tokens: int):
    """One greedy call, finished when it returns."""
    result = jaxspec.generate(
        model, [prompt], max_new_tokens=MAX_NEW_TOKENS, num_draft_tokens=num_draft_tokens
    )
    result.tokens.block_until_ready()
    return result


def time_of(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def table(plain, drafted, plain_seconds: float, drafted_seconds: float) -> Table:
    """The two ways side by side."""
    result = Table()
    for title in ("", "without draft", f"with draft, {NUM_DRAFT_TOKENS} tokens a step"):
        result.add_column(title, justify="left" if not title else "right")
    runs = [(plain, plain_seconds), (drafted, drafted_seconds)]
    count = [int(run.lengths[0]) for run, _ in runs]
    steps = [int(run.stats.target_steps[0]) for run, _ in runs]
    accepted, proposed = int(drafted.stats.accepted[0]), int(drafted.stats.proposed[0])
    rates = [n / seconds for n, (_, seconds) in zip(count, runs, strict=True)]
    result.add_row("tokens", *map(str, count))
    result.add_row("target steps", *map(str, steps))
    result.add_row(
        "drafted tokens accepted", "-", f"{accepted} of {proposed} ({accepted / proposed:.0%})"
    )
    result.add_row("tokens per second", *(f"{rate:.0f}" for rate in rates))
    result.add_row("speed-up", "1.00", f"{rates[1] / rates[0]:.2f}")
    return result


if __name__ == "__main__":
    sys.exit(main())
