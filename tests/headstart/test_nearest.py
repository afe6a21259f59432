"""What is offered in place of a name that is not known: the one that was probably meant, or none."""

from __future__ import annotations

import pytest

from headstart.cli.main import main
from headstart.serving.engines import nearest as unknown_format
from headstart.support.errors import did_you_mean


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["generate", "--backbone", "embedded", "--propose", "sufix"], "did you mean 'suffix'? choose from suffix, recycling"),
        (["trian", "recipe.yaml"], "did you mean 'train'? choose from train, new-recipe"),
        (["generate", "--backbone", "embedded", "--propose", "grammar"], "invalid choice: 'grammar' (choose from 'suffix'"),
    ],
)
def test_choices_of_the_command_line(words: list[str], offered: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and offered in capsys.readouterr().err


def test_a_name_that_is_not_alike_is_not_offered() -> None:
    formats = ["vllm", "sglang", "transformers"]
    assert "did you mean 'vllm'" in str(unknown_format("vlm", formats)) and "did you mean" not in str(unknown_format("ollama", formats))
    assert did_you_mean("medsua", ["medusa", "mlp"]) == "did you mean 'medusa'? " and did_you_mean("mpt2", ["mtp", "mlp"]) == ""
