"""The examples and the decoding benchmark run, as a user would start them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import jaxspec
from benchmarks.floor import pass_bytes
from examples.tiny_checkpoint import SENTENCE

ROOT = Path(__file__).parent.parent


def run(script: str, *arguments) -> str:
    command = [sys.executable, ROOT / script, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate(demo_checkpoint):
    out = run("examples/generate.py", demo_checkpoint, "Say it:", "Once more, please:")
    assert out.count(SENTENCE) == 2
    assert min(map(float, re.findall(r"tokens per target step: (\S+)", out))) > 2


def test_nested_jit(demo_checkpoint):
    out = run("examples/nested_jit.py", demo_checkpoint)
    scores = [float(score) for score in re.findall(r"mean log-probability (\S+):", out)]
    # The model is certain of its text, so any other than its own would score far below.
    assert len(scores) == 2 and all(-0.1 < score <= 0 for score in scores)


def test_gradient(demo_checkpoint):
    out = run("examples/gradient.py", demo_checkpoint)
    norms = {name: float(norm) for norm, name in re.findall(r"gradient norm (\S+)  (\S+)", out)}
    assert "target/layers/1/self_attn/o_proj/weight" in norms
    assert all(np.isfinite(norm) and norm > 0 for norm in norms.values())


def test_benchmark(demo_checkpoint):
    options = ("--max-new-tokens", 24, "--prompt-tokens", 8, "--repeats", 1, "--dtype", "float32")
    out = run("benchmarks/generate.py", demo_checkpoint, *options, "--gb-per-s", 100)
    assert "1 of 1 rows are equal token for token." in out
    [(plain, drafted)] = re.findall(r"target steps per token\D+(\S+)\D+(\S+)", out)
    assert float(plain) == 1 and float(drafted) < 0.7


@pytest.mark.parametrize("num_rows, tokens_per_row", [(1, 1), (3, 4), (1000, 10)])
def test_the_byte_floor_counts_what_a_pass_reads(demo_checkpoint, num_rows, tokens_per_row):
    model = jaxspec.load(demo_checkpoint, dtype="bfloat16")
    got = pass_bytes(model, num_rows=num_rows, tokens_per_row=tokens_per_row, context=10)
    num_tokens = num_rows * tokens_per_row
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model.target, nnx.Param)))
    embedding = 512 * 512 * 2
    experts = 4 * 3 * 512 * 64 * 2  # one MoE layer, bfloat16
    assert got.dense == stored - embedding - experts + num_tokens * 512 * 2
    # With 2 of 4 experts a token, half of those not yet touched are touched by the next one.
    assert got.experts == pytest.approx(experts * (1 - 0.5**num_tokens))
    assert got.cache == num_rows * 10 * (128 + 32) * 2 * 2
