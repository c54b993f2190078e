"""`jaxspec-generate`: text in, text out, and one line where it refuses."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples.tiny_checkpoint import SENTENCE
from jaxspec import cli
from jaxspec.errors import CheckpointError
from jaxspec.text import Tokenizer


@pytest.fixture
def generate(demo_checkpoint, capsys):
    """Runs the command in this process; returns what it printed to stdout and to stderr."""

    def run(*arguments, status=0, checkpoint=demo_checkpoint):
        options = ["--checkpoint", str(checkpoint), "--dtype", "float32", "--max-new-tokens", "40"]
        assert cli.main([*options, *map(str, arguments)]) == status
        return capsys.readouterr()

    return run


def test_the_text_continues_the_prompt_and_acceptance_is_shown(generate):
    out, err = generate("--prompt", "Say it:", "--num-draft-tokens", 3)
    assert out.startswith(f"Say it: {SENTENCE} A small draft")
    match = re.search(r"40 tokens in (\d+) target steps, (\d+) of (\d+) drafted tokens", err)
    assert match, err
    steps, accepted, proposed = map(int, match.groups())
    # A step adds a token of the target's own, the last one only if the budget has room for it.
    assert accepted + steps in (39, 40)
    assert steps < 20 and accepted < proposed


@pytest.mark.parametrize("plain", [("--draft", "none"), ("--num-draft-tokens", 0)])
def test_without_the_draft_the_text_is_the_same(generate, plain):
    drafted = generate("--prompt", "Say it:", "--num-draft-tokens", 3)
    out, err = generate("--prompt", "Say it:", *plain)
    assert out == drafted.out
    assert "40 tokens in 39 target steps, nothing drafted" in err


def test_prompts_are_one_batch_on_a_mesh(generate):
    prompts = ["--prompt", "One", "--prompt", "A small draft", "--prompt", "Three, longer than two"]
    alone = [generate(*prompts[i : i + 2], "--page-size", 16).out for i in (0, 2, 4)]
    together = generate(*prompts, "--mesh", "2,2", "--page-size", 16)
    assert together.out == "".join(alone)
    assert together.err.count("40 tokens") == 3


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--mesh", "4,4"), r"mesh: 4,4 needs 16 devices; 8 present"),
        (("--mesh", "1,3"), r"mesh: axis 'model' of size 3 does not divide"),
        (("--max-new-tokens", -1), r"-1"),
        (("--num-draft-tokens", -2), r"-2"),
        (("--page-size", 0), r"page_size=0"),
        (("--prompt", "x" * 5000), r"5001"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(generate, arguments, message):
    out, err = generate("--prompt", "Hello", *arguments, status=1)
    assert not out
    assert re.fullmatch(rf"jaxspec-generate: .*{message}.*\n", err), err


def test_what_is_no_checkpoint_is_refused_in_one_line(generate, demo_checkpoint, tmp_path):
    source = demo_checkpoint.parent / "hf"
    missing = generate("--prompt", "Hello", status=1, checkpoint=tmp_path / "missing")
    assert re.fullmatch(r"jaxspec-generate: .*/missing: no such folder\n", missing.err)
    unconverted = generate("--prompt", "Hello", status=1, checkpoint=source)
    assert re.fullmatch(r"jaxspec-generate: .*jaxspec-convert convert.*\n", unconverted.err)


def test_a_checkpoint_without_a_tokenizer_is_refused(generate, demo_checkpoint, tmp_path):
    copy = shutil.copytree(demo_checkpoint, tmp_path / "copy")
    (copy / "hf" / "tokenizer.json").unlink()
    err = generate("--prompt", "Hello", status=1, checkpoint=copy).err
    assert re.fullmatch(r"jaxspec-generate: .*no hf/tokenizer.json.*\n", err)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--prompt", "Hello", "--mesh", "8"),
        ("--prompt", "Hello", "--mesh", "0,8"),
        ("--prompt", "Hello", "--draft", "medusa"),
        ("--prompt", "Hello", "--dtype", "int8"),
        ("--prompt", "Hello", "--max-new-tokens", "many"),
    ],
)
def test_wrong_usage_exits_with_2(generate, arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        generate(*arguments)
    assert exit_info.value.code == 2
    assert "usage: jaxspec-generate" in capsys.readouterr().err


def test_the_process_exits_with_1_and_one_line(tmp_path):
    command = [sys.executable, "-m", "jaxspec.cli", "--checkpoint", tmp_path, "--prompt", "Hello"]
    root = str(Path(cli.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("jaxspec-generate: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "config, added",
    [
        ({"add_bos_token": True, "bos_token": "<|begin|>"}, True),
        ({"add_bos_token": True, "bos_token": {"content": "<|begin|>"}}, True),
        ({"add_bos_token": False, "bos_token": "<|begin|>"}, False),
        (None, False),
    ],
)
def test_the_begin_token_is_added_once_where_the_checkpoint_says_so(
    demo_checkpoint, tmp_path, config, added
):
    hf = tmp_path / "hf"
    hf.mkdir()
    shutil.copy(demo_checkpoint / "hf" / "tokenizer.json", hf)
    if config is not None:
        (hf / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_checkpoint(tmp_path)
    ids = tokenizer.encode("A small draft")
    assert (ids[0] == 0) == added
    assert tokenizer.encode("<|begin|>A small draft")[:2] == [0, ids[added]]
    assert tokenizer.decode(ids) == "A small draft"


def test_tokenizer_files_that_make_no_sense_are_refused(demo_checkpoint, tmp_path):
    hf = tmp_path / "hf"
    hf.mkdir()
    shutil.copy(demo_checkpoint / "hf" / "tokenizer.json", hf)
    (hf / "tokenizer_config.json").write_text('{"add_bos_token": true, "bos_token": "<s>"}')
    with pytest.raises(CheckpointError, match="bos_token '<s>' is not in tokenizer.json"):
        Tokenizer.from_checkpoint(tmp_path)
    (hf / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        Tokenizer.from_checkpoint(tmp_path)
