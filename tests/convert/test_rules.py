"""The table: every parameter has its tensors, every tensor its place, in both directions."""

import pytest

from convert.rules import Part, Table, copy, skip, split, stack
from convert.table_v3 import rules, table
from jaxspec.config import DeepseekV3Config
from jaxspec.model import parameter_specs
from tests import fixtures


@pytest.fixture
def config() -> DeepseekV3Config:
    return DeepseekV3Config.from_hf(fixtures.v3_config())


@pytest.mark.parametrize("q_lora_rank", [64, None])
def test_every_parameter_can_be_found_from_its_tensors_and_back(q_lora_rank):
    config = DeepseekV3Config.from_hf(fixtures.v3_config(q_lora_rank=q_lora_rank))
    names = table(config)
    for path in parameter_specs(config, "nextn"):
        ways = list(names.sources(path))
        assert ways, path
        for way in ways:
            for match in way:
                found = names.find(match.tensor)
                assert found is not None
                assert (found.rule, found.tensor) == (match.rule, match.tensor)
                assert path in {part.path for part in match.parts}


def test_the_published_names_are_found(config):
    names, specs = table(config), parameter_specs(config, "nextn")
    for name in fixtures.v3().tensors:
        found = names.find(name)
        assert found is not None and all(part.path in specs for part in found.parts)


def test_every_rule_says_why_it_skips():
    for rule in rules():
        assert (rule.transform == "skip") == (not rule.paths)
        assert rule.transform != "skip" or rule.detail


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.5.input_layernorm.weight",  # behind the draft
        "model.layers.04.input_layernorm.weight",
        "model.layers.-1.input_layernorm.weight",
        "model.layers.x.input_layernorm.weight",
        "model.layers.3.enorm.weight",  # the draft's, in a layer of the target
        "model.layers.1.mlp.experts.8.up_proj.weight",
        "model.layers.1.self_attn.q_proj.bias",
        "layers.0.attn.wq_a.weight",
        "",
    ],
)
def test_other_names_are_not(name, config):
    assert table(config).find(name) is None


def test_transforms_say_where_a_tensor_lies():
    names = Table(
        [
            copy("a.{i}", "x/{i}"),
            stack("s.{i}.{j}", "y/{i}", "j"),
            split("f.{i}", "u/{i}", "v/{i}"),
            skip("n", "not needed"),
        ],
        {"i": range(2), "j": range(3)},
    )

    def parts(name: str) -> list[Part]:
        found = names.find(name)
        assert found is not None
        return found.parts

    assert parts("a.1") == [Part("a.1", "x/1")]
    assert parts("s.1.2") == [Part("s.1.2", "y/1", index=2)]
    assert parts("f.0") == [Part("f.0", "u/0", part=(0, 2)), Part("f.0", "v/0", part=(1, 2))]
    assert parts("n") == []
    assert [match.tensor for match in next(names.sources("y/1"))] == ["s.1.0", "s.1.1", "s.1.2"]
    assert parts("s.0.0")[0].tensor_shape((3, 5, 7)) == (5, 7)
    assert parts("f.0")[0].tensor_shape((3, 5, 7)) == (3, 10, 7)
