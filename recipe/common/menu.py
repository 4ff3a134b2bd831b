"""The parts that a run is made of, what each needs, and which recipe is made of what.

    python -m recipe.common.menu           everything
    python -m recipe.common.menu latr      one recipe's configs
    python -m recipe.common.menu tree=latr what a choice sets, and its keys

Trees, samplers, credits and losses are those that are registered (verl.utils.parts); the other parts are the YAML files
in recipe/common/config/<part>, and the recipes those in recipe/*/config.
"""

import argparse
import inspect
import re
import textwrap
from dataclasses import asdict
from pathlib import Path

from omegaconf import OmegaConf

from verl.utils.parts import PACKAGES, parts

CONFIG = Path(__file__).parent / "config"
RECIPES = Path(__file__).parent.parent
PARTS = {
    "tree": "which tokens are generated?",
    "environment": "what answers the model?",
    "sampler": "how is a token drawn?",
    "credit": "which token gets which advantage?",
    "loss": "how far may the policy move?",
    "update": "what is computed?",
    "schedule": "who waits for whom?",
}


def choices(part: str) -> dict[str, tuple[str, str]]:
    """Return for each choice a sentence about it, and what it needs: from the registry, or from its YAML's comments."""
    if part in PACKAGES:
        return {name: (each.about, each.requires) for name, each in parts(part).items() if not each.alias}
    return {file.stem: _about(file) for file in sorted(CONFIG.joinpath(part).glob("*.yaml"))}


def _about(file: Path) -> tuple[str, str]:
    lines = [line[1:].strip() for line in file.read_text().splitlines() if line.startswith("#")]
    needs = next((line.removeprefix("Needs: ") for line in lines if line.startswith("Needs: ")), "")
    text = " ".join(line for line in lines if not line.startswith(("@", "Needs: ")))
    return re.split(r"(?<=[.;])\s", text)[0].rstrip(".;"), needs.rstrip(".")


def recipe_parts(config: Path) -> dict[str, str]:
    """Of one of a recipe's configs, part -> choice, as its list of defaults says."""
    defaults = OmegaConf.load(config).get("defaults", [])
    named = {name: choice for entry in defaults if OmegaConf.is_dict(entry) for name, choice in entry.items()}
    return {part: named[part] for part in PARTS if part in named}


def recipes() -> dict[str, dict[str, str]]:
    """recipe/config -> its parts."""
    files = sorted(RECIPES.glob("*/config/*_trainer.yaml"))
    return {f"{file.parts[-3]}/{file.stem}": recipe_parts(file) for file in files}


def menu() -> str:
    lines = []
    for part, question in PARTS.items():
        lines += ["", f"{part}: {question}"]
        for choice, (about, needs) in choices(part).items():
            lines.append(f"  {part}={choice:<16} {about}")
            if needs:
                lines.append(f"  {'':<{len(part) + 17}} needs {needs}")
    lines += ["", "Recipes, and the parts that they are made of (none: upstream's alone):"]
    lines += [f"  {name:<28} {_in_words(chosen)}" for name, chosen in recipes().items()]
    lines += ["", "What a choice sets, and what its keys mean: python -m recipe.common.menu tree=latr"]
    lines += ["Any combination: DRY_RUN=1 bash recipe/common/run_explore.sh tree=… environment=… credit=… loss=…"]
    return "\n".join(lines[1:])


def _in_words(chosen: dict[str, str]) -> str:
    return " ".join(f"{part}={choice}" for part, choice in chosen.items())


def about_choice(part: str, choice: str) -> str:
    """Return the config values that a choice sets, and the documentation of its keys.

    Raises:
        ValueError: there is no such part or choice.
    """
    if part not in PARTS:
        raise ValueError(f"{part}: expected one of {', '.join(PARTS)}")
    if choice not in choices(part) and choice not in (parts(part) if part in PACKAGES else ()):
        raise ValueError(f"{part}={choice}: expected one of {', '.join(choices(part))}")
    if part not in PACKAGES:
        return (CONFIG / part / f"{choice}.yaml").read_text()
    chosen = parts(part)[choice]
    text = f"# {chosen.about}\n{OmegaConf.to_yaml(chosen.node())}"
    if (keys := getattr(chosen, "keys", None)) is None:
        return text
    defaults = OmegaConf.to_yaml(OmegaConf.create(asdict(keys())))
    return f"{text}\n{inspect.getdoc(keys)}\n\nDefaults:\n{textwrap.indent(defaults, '    ')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="a recipe, or a choice such as tree=latr")
    name = parser.parse_args().name
    if name is None:
        print(menu())
    elif "=" in name:
        try:
            print(about_choice(*name.split("=", 1)))
        except ValueError as error:
            raise SystemExit(f"error: {error}") from None
    else:
        of_recipe = {each: chosen for each, chosen in recipes().items() if each.split("/")[0] == name}
        if not of_recipe:
            names = sorted({each.split("/")[0] for each in recipes()})
            raise SystemExit(f"no recipe {name}; known: {', '.join(names)}")
        for each, chosen in of_recipe.items():
            print(each, _in_words(chosen))


if __name__ == "__main__":
    main()
