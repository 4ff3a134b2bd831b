"""The menu names every part that there is, and recipes are made of parts that exist."""

import pytest
from omegaconf import OmegaConf

from recipe.common.menu import CONFIG, PARTS, about_choice, choices, main, menu, recipe_parts
from tests.recipe.common.explore import explore
from verl.utils.parts import parts


def test_every_choice_is_there_and_described():
    text = menu()
    for part in PARTS:
        for choice, (about, _) in choices(part).items():
            assert len(about.split()) > 1 and f"{part}={choice} " in text and about in text
    assert "needs loss_agg_mode" not in text and "needs actor.loss_agg_mode=token-mean" in text


def test_a_run_put_together_has_every_part_with_a_default_that_exists():
    of_part = defaults()
    assert set(PARTS) <= set(of_part) and of_part.pop("recipe") is None
    assert all(of_part[part] in choices(part) for part in PARTS if part != "recipe")


def defaults() -> dict[str, str]:
    """Return each group's default choice."""
    entries = OmegaConf.to_container(OmegaConf.load(CONFIG / "parts.yaml").defaults)
    return {name: choice for entry in entries if isinstance(entry, dict) for name, choice in entry.items()}


def test_the_hapo_and_aepo_recipes_choose_the_papers_parts():
    assert recipe_parts("hapo") == {"sampler": "tempered", "credit": "hapo", "loss": "hapo"}
    assert recipe_parts("hapo_math") == recipe_parts("hapo") | {"task": "math"}
    aepo = {"environment": "tools", "task": "reasoning", "tree": "aepo", "loss": "aepo"}
    assert recipe_parts("aepo") == aepo
    assert "environment=tools task=reasoning tree=aepo loss=aepo" in menu()


@pytest.mark.parametrize("recipe", choices("recipe"))
def test_a_recipes_parts_are_those_that_hydra_chooses(recipe):
    composed = explore(f"recipe={recipe}", return_hydra_config=True).hydra.runtime.choices
    expected = defaults() | recipe_parts(recipe) | {"recipe": recipe}
    for part in PARTS:
        assert composed[part] == expected[part]
        assert composed[part] in choices(part) or composed[part] == "kt"


def test_a_choice_tells_what_it_sets_and_what_its_keys_mean():
    text = about_choice("tree", "tree_grpo")
    assert (
        "n: 12" in text.replace("'", "") and "step_delimiter: the text that ends a step, if there are no tools." in text
    )
    assert "loss_mode: hapo" in about_choice("loss", "hapo")
    assert "trainer_mode: explore" in about_choice("schedule", "sync")
    assert "override /loss: hapo" in about_choice("recipe", "hapo")
    for part, choice in (("tree", "oak"), ("forest", "latr")):
        with pytest.raises(ValueError, match="expected one of"):
            about_choice(part, choice)


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ([], ["tree: which tokens are generated?"]),
        (["tree=latr"], ["Defaults:"]),
        (["evaluation=gaia"], ["evaluation=gaia: ", parts("evaluation")["gaia"].get, "scored by judge: "]),
        (["evaluation"], [f"evaluation={name}: {each.title}" for name, each in parts("evaluation").items()]),
    ],
)
def test_the_command(monkeypatch, capsys, arguments, texts):
    monkeypatch.setattr("sys.argv", ["menu", *arguments])
    main()
    printed = capsys.readouterr().out
    assert all(text in printed for text in texts)


@pytest.mark.parametrize(
    ("argument", "message"), [("latr", "latr: expected"), ("evaluation=gaya", "no benchmark 'gaya'")]
)
def test_an_unknown_choice_is_named(monkeypatch, argument, message):
    monkeypatch.setattr("sys.argv", ["menu", argument])
    with pytest.raises(SystemExit, match=f"error: {message}"):
        main()
