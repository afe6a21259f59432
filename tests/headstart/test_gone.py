"""What earlier versions had is refused in one line that says what takes its place; of other unknown names the likely one is offered."""

import pytest
from small_run import status_of

from headstart.serving.engines import nearest as unknown_format
from headstart.support.errors import did_you_mean

RECIPE = "recipes/quickstart/eagle3.yaml"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", RECIPE, "drafter.lora.rank=4"], "unknown key drafter.lora; it is gone: heads are trained whole, from drafter.init"),
        (["cache", RECIPE, "cache.dir=x", "cache.teacher=topk"], "cache.teacher; it is gone: a cache holds the final hidden states"),
        (["tune", "--heads", "heads"], "; it is gone: decoding times this machine in its first steps"),
        (
            ["export", "--heads", "heads", "--to", "vllm", "--out", "out", "--quantize", "int8"],
            "; it is gone: engines' own tools quantise heads",
        ),
        (["verify", "served", "--features", "cache"], "; it is gone: the folder's drafts are compared with those that its export stored"),
        (["bench", "--prompts", "p.jsonl", "--draft-sink=3"], "arguments: --draft-sink=3; it is gone: say --num-sink-tokens"),
    ],
)
def test_one_line_says_what_to_use(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = status_of(words)
    error = capsys.readouterr().err
    assert status == 2 and said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["generate", "--backbone", "embedded", "--propose", "sufix"], "did you mean 'suffix'? choose from suffix, recycling"),
        (["trian", "recipe.yaml"], "did you mean 'train'? choose from train, new-recipe"),
        (["generate", "--backbone", "embedded", "--propose", "grammar"], "invalid choice: 'grammar' (choose from 'suffix'"),
    ],
)
def test_choices_of_the_command_line(words: list[str], offered: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(words) == 2 and offered in capsys.readouterr().err


def test_a_name_that_is_not_alike_is_not_offered() -> None:
    formats = ["vllm", "sglang", "transformers"]
    assert "did you mean 'vllm'" in str(unknown_format("vlm", formats)) and "did you mean" not in str(unknown_format("ollama", formats))
    assert did_you_mean("medsua", ["medusa", "mlp"]) == "did you mean 'medusa'? " and did_you_mean("mpt2", ["mtp", "mlp"]) == ""
